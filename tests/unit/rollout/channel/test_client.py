"""Client, messages and control socket against a handler without a controller."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from areal_lora.errors import RolloutError
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.rollout.channel import channel_messages as m, client as verbs
from areal_lora.rollout.channel.channel_messages import ControlSocket
from areal_lora.rollout.channel.client import ControllerClient, Reminders
from areal_lora.run_folder.rendezvous import Endpoint
from areal_lora.types import AdapterRef
from tests.support.rollout.helpers import NAME, episode, stream

SECRET = "5" * 64
STATS = m.Stats(
    ready=0,
    running=3,
    leased=0,
    issued=3,
    consumed=0,
    dropped={"stale": 1},
    reissued=0,
    retried={},
    late=0,
    tokens_generated=0,
    idle_s=0.0,
    ahead=0,
    margin_s=0.0,
    spare_s=None,
)
Handler = Callable[[m.Request], Awaitable[m.Reply]]


def result(version: int, tag: str) -> m.EvalResult:
    found = EvalRecord(adapter=NAME, version=version, step=version, accuracy=0.5, reward_mean=0.5, n=2, wall_s=0.1)
    return m.EvalResult(adapter=NAME, version=version, tag=tag, sets=(found,))


@pytest.fixture
def connect() -> Iterator[Callable[[Handler], ControllerClient]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    clients = list[ControllerClient]()
    sockets = list[ControlSocket]()
    tasks = list[Any]()

    def make(handler: Handler) -> ControllerClient:
        async def welcoming(request: m.Request) -> m.Reply:
            return m.Welcome(session="1") if isinstance(request, m.Hello) else await handler(request)

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                await sockets[0].serve(welcoming, group)

        async def bind() -> ControlSocket:
            return ControlSocket("127.0.0.1", SECRET)

        sockets.append(asyncio.run_coroutine_threadsafe(bind(), loop).result(120))
        tasks.append(asyncio.run_coroutine_threadsafe(serve(), loop))
        endpoint = Endpoint(host="127.0.0.1", ports={"control": sockets[0].port}, pid=0)
        clients.append(ControllerClient(lambda: endpoint, SECRET, patience_s=120.0))
        clients[-1].hello({NAME: 0}, {})
        return clients[-1]

    async def close() -> None:
        for socket in sockets:
            socket.close()

    yield make
    for client in clients:
        client.close()
    for task in tasks:
        task.cancel()
    asyncio.run_coroutine_threadsafe(close(), loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(120)
    loop.close()


def test_a_greeting_has_the_solved_shares_of_ten_million_prompts(
    connect: Callable[[Handler], ControllerClient],
) -> None:
    client = connect(lambda request: asyncio.sleep(0, m.Ack()))
    client._session._session = ""
    client.hello({NAME: 0}, {NAME: bytes(8 * 10_000_000)})
    assert client._session._session == "1"


def test_a_batch_arrives_as_it_was_sent(connect: Callable[[Handler], ControllerClient]) -> None:
    groups = tuple(episode(stream().at(p), version=1).group for p in range(3))

    async def handler(request: m.Request) -> m.Reply:
        wanted = (AdapterRef(name=NAME, version=4),)
        assert request == m.GetBatch(wanted=wanted, timeout_s=verbs.SHORT_POLL_S, session="1")
        return m.Batch(
            adapter=NAME, step=4, groups=groups, stats=STATS, texts=(), snapshot=b"s", events=(result(3, "during"),)
        )

    client = connect(handler)
    client._session.reminders.note(m.Evaluate(adapter=NAME, version=3, tag="during"))
    batch = client.poll((AdapterRef(name=NAME, version=4),))
    assert isinstance(batch, m.Batch)
    assert batch.groups == groups
    assert batch.stats == STATS
    assert client.take_events() == (result(3, "during"),)


NOT_READY = m.NotReady(
    lacking=(
        m.Lacking(adapter=NAME, ready=40, needed=64, running=90, dropped=1, note="last fault: connection: refused"),
    )
)


def test_waiting_is_said_and_ends(
    connect: Callable[[Handler], ControllerClient], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    monkeypatch.setattr(verbs, "POLL_S", 0.0)

    async def handler(request: m.Request) -> m.Reply:
        nonlocal asked
        asked += 1
        if asked < 3:
            return NOT_READY
        return m.Batch(adapter=NAME, step=12, groups=(), stats=STATS, texts=(), events=(), snapshot=b"")

    client, lines = connect(handler), verbs.WaitingLines()
    with caplog.at_level(logging.INFO, "areal_lora"):
        while isinstance(reply := client.poll((AdapterRef(name=NAME, version=12),)), m.NotReady):
            lines.report(reply.lacking)
    assert asked == 3
    assert "waiting for rollouts since 0 s: " in caplog.text
    assert f"{NAME} 40/64 groups ready, 90 running, 1 dropped; last fault: connection: refused" in caplog.text


def test_adapters_whose_rollouts_have_failed_are_named(connect: Callable[[Handler], ControllerClient]) -> None:
    async def handler(request: m.Request) -> m.Reply:
        return m.AdapterFailed(adapter=NAME, reason="the reward is broken")

    wanted = [AdapterRef(name=NAME, version=0)]
    assert connect(handler).poll(wanted) == m.AdapterFailed(adapter=NAME, reason="the reward is broken")


def test_a_new_controller_hears_of_an_ended_adapter_and_of_nothing_else_of_it() -> None:
    reminders = Reminders("t")
    reminders.loaded({"a": 0, "b": 0}, {})
    for name in ("a", "b"):
        reminders.note(m.AnnounceVersion(adapter=name, version=3, servers={}))
        reminders.note(m.Evaluate(adapter=name, version=3, tag="e"))
    reminders.note(m.EndAdapter(adapter="a"))
    _, requests = reminders.greeting()
    assert requests[0] == m.EndAdapter(adapter="a")
    assert [request.adapter for request in requests[1:]] == ["b", "b"]  # type: ignore[union-attr]


def test_a_new_controller_hears_of_the_newest_of_an_adapter_that_joined_and_of_nothing_once_it_left() -> None:
    reminders = Reminders("t")
    reminders.loaded({}, {})
    reminders.note(m.JoinAdapter(adapter="a.1", config=b"{}", version=0))
    reminders.note(m.AnnounceVersion(adapter="a.1", version=0, servers={}))
    batch = m.Batch(adapter="a.1", step=4, groups=(), stats=STATS, texts=(), events=(), snapshot=b"newest")
    reminders.received(batch)
    reminders.note(msgspec.structs.replace(reminders.joined("a.1"), paused=True))
    hello, requests = reminders.greeting()
    assert (hello.versions, hello.snapshots) == ({}, {})
    joins = m.JoinAdapter(adapter="a.1", config=b"{}", version=5, snapshot=b"newest", paused=True)
    assert requests == [joins, m.AnnounceVersion(adapter="a.1", version=0, servers={})]
    reminders.note(m.EndAdapter(adapter="a.1"))
    assert reminders.greeting()[1] == []


def test_each_evaluation_is_given_out_once(connect: Callable[[Handler], ControllerClient]) -> None:
    replies = [(), (result(1, "during"), result(2, "after")), (result(3, "during"),)]

    async def handler(request: m.Request) -> m.Reply:
        return m.NotReady(lacking=(), events=replies.pop(0)) if isinstance(request, m.GetBatch) else m.Ack()

    client = connect(handler)
    client.request_eval(AdapterRef(name=NAME, version=2), "after")
    for version in (1, 3):
        client.request_eval(AdapterRef(name=NAME, version=version), "during")
    assert client.take_events() == ()
    client.poll(())
    client.poll(())
    assert client.take_events() == (result(1, "during"), result(2, "after"))
    client.poll(())
    assert client.take_events() == (result(3, "during"),)
    assert client.take_events() == ()


def test_a_result_whose_reply_is_lost_is_asked_for_again(
    connect: Callable[[Handler], ControllerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller has handed it out and forgotten it; without another evaluation it would be waited for for ever."""
    asked, fetched, again = list[m.Request](), 0, asyncio.Event()

    async def handler(request: m.Request) -> m.Reply:
        nonlocal fetched
        if isinstance(request, m.Evaluate):
            asked.append(request)
            return m.Ack()
        fetched += 1
        if fetched == 1:
            monkeypatch.setattr(verbs, "ANSWER_S", 120.0)  # of the next requests: this one's time is running
            await again.wait()
        again.set()
        return m.NotReady(lacking=(), events=(result(2, "after"),) if len(asked) > 1 or fetched == 1 else ())

    client = connect(handler)
    ref = AdapterRef(name=NAME, version=2)
    client.request_eval(ref, "after")
    monkeypatch.setattr(verbs, "ANSWER_S", 0.2)
    monkeypatch.setattr(verbs, "SHORT_POLL_S", 0.0)
    while not (found := client.take_events()):
        client.poll(())
    assert found == (result(2, "after"),)
    assert len(asked) == 2


def test_a_refusal_is_raised_with_its_reason(connect: Callable[[Handler], ControllerClient]) -> None:
    async def handler(request: m.Request) -> m.Reply:
        raise RolloutError("no such adapter")

    with pytest.raises(RolloutError, match="refused CommitStep: no such adapter"):
        connect(handler).commit(NAME, 0)


def test_a_silent_controller_is_an_error(
    connect: Callable[[Handler], ControllerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = asyncio.Event()

    async def handler(request: m.Request) -> m.Reply:
        if isinstance(request, m.GetBatch):
            await later.wait()
            return NOT_READY
        later.set()
        await asyncio.sleep(0.1)
        return m.Ack()

    client = connect(handler)
    monkeypatch.setattr(verbs, "ANSWER_S", 0.2)
    monkeypatch.setattr(client._session, "_patience_s", 0.3)
    with pytest.raises(RolloutError, match=r"not there for GetBatch .* did not answer within 0 s"):
        client.poll((), 0.0)
    monkeypatch.setattr(verbs, "ANSWER_S", 120.0)
    client.announce(AdapterRef(name=NAME, version=0), {})  # the late answer is not taken for this one's


def test_a_long_poll_of_one_thread_holds_up_no_other(connect: Callable[[Handler], ControllerClient]) -> None:
    released = asyncio.Event()

    async def handler(request: m.Request) -> m.Reply:
        if isinstance(request, m.AnnounceVersion):
            released.set()
            return m.Ack()
        await asyncio.wait_for(released.wait(), 120)
        return m.Batch(adapter=NAME, step=0, groups=(), stats=STATS, texts=(), events=(), snapshot=b"")

    client = connect(handler)
    timer = threading.Timer(0.2, client.announce, [AdapterRef(name=NAME, version=0), {}])
    timer.start()
    assert isinstance(client.poll((AdapterRef(name=NAME, version=0),)), m.Batch)
    timer.join()


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid value 'Pickle'"):
        m.decode_request(m.encode({"type": "Pickle"}))


def test_a_restarted_controller_gets_the_reminders_and_the_request_again() -> None:
    """It restarts on another port with another session and knows nothing; a long poll is in progress meanwhile."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    heard: list[list[m.Request]] = [[], []]
    polled = threading.Event()

    def handler(session: int) -> Handler:
        async def handle(request: m.Request) -> m.Reply:
            if isinstance(request, m.Hello):
                heard[session].append(request)
                return m.Welcome(session=str(session))
            if request.session != str(session):
                return m.StaleSession()
            heard[session].append(request)
            if isinstance(request, m.GetBatch):
                (wanted,) = request.wanted
                if session == 0 and wanted.version == 1:
                    polled.set()
                    await asyncio.sleep(60)
                return m.Batch(
                    adapter=NAME,
                    step=wanted.version,
                    groups=(),
                    stats=STATS,
                    texts=(),
                    events=(),
                    snapshot=b"after %d" % wanted.version,
                )
            return m.Ack()

        return handle

    async def start(session: int) -> tuple[ControlSocket, asyncio.Task[None]]:
        socket = ControlSocket("127.0.0.1", SECRET)

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                await socket.serve(handler(session), group)

        return socket, asyncio.create_task(serve())

    async def end(socket: ControlSocket, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait([task])
        socket.close()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    first = run(start(0))
    endpoint: Endpoint | None = Endpoint(host="127.0.0.1", ports={"control": first[0].port}, pid=0)
    client = ControllerClient(lambda: endpoint, SECRET)
    client.hello({NAME: 0}, {})
    ref = AdapterRef(name=NAME, version=0)
    client.announce(ref, {"server-0": "http://one"}, ["server-1"])
    client.request_eval(ref, "owed")
    client.poll((AdapterRef(name=NAME, version=0),))
    asking = threading.Thread(target=client.poll, args=[(AdapterRef(name=NAME, version=1),)])
    asking.start()
    assert polled.wait(120)
    endpoint = None
    run(end(*first))
    second = run(start(1))
    endpoint = Endpoint(host="127.0.0.1", ports={"control": second[0].port}, pid=1)
    client.commit(NAME, 0)
    asking.join(120)
    assert not asking.is_alive()
    hello, *reminders = heard[1]
    assert isinstance(hello, m.Hello)
    assert isinstance(heard[0][0], m.Hello)
    assert hello.trainer == heard[0][0].trainer
    assert (hello.versions, hello.snapshots) == ({NAME: 1}, {NAME: b"after 0"})
    assert reminders[:2] == [
        m.AnnounceVersion(adapter=NAME, version=0, servers={"server-0": "http://one"}, session="1"),
        m.Evaluate(adapter=NAME, version=0, tag="owed", session="1"),
    ]
    assert {type(request) for request in reminders[2:]} - {m.Evaluate} == {m.CommitStep, m.GetBatch}
    client.close()
    run(end(*second))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(120)
    loop.close()
