"""Pings of all members at once, over a link that loses packets."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, wait

import msgspec
import pytest

from areal_lora.errors import ManifestError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync import messages
from areal_lora.weight_sync.admin_client import AdminClient
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.manifest import decode
from areal_lora.weight_sync.messages import (
    LORA_A,
    LORA_B,
    PUBLISH_PATH,
    RELAY_PATH,
    DropReply,
    ModulesReply,
    PingReply,
    PublishReply,
    RefusalReply,
    RelayedAnswer,
    RelayReply,
    RelayRequest,
    ServerEndpoint,
)
from areal_lora.weight_sync.trainer import fleet as fleet_module
from areal_lora.weight_sync.trainer.fleet import PINGS, Fleet, answers, errors
from tests.support.clocks import WAIT_S, wait_until
from tests.support.weight_sync.helpers import RUN, SECRET, announce, layout_of, share, values
from tests.support.weight_sync.https_server import AdminHttpsServer

SERVERS = [ServerEndpoint(name=f"server-{i}", host="h", admin_port=i, data_port=9, workers=1) for i in range(3)]


class LossyFleet(Fleet):
    """``lost`` names the pings of a server that are. The first one of a server fails only after its repetition."""

    def __init__(self, lost: dict[str, set[int]]) -> None:
        super().__init__(RUN, SECRET)
        self._lost = lost
        self.pings = {s.name: itertools.count() for s in SERVERS}
        self._repeated = {s.name: threading.Event() for s in SERVERS}

    def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        number = next(self.pings[server.name])
        if number:
            self._repeated[server.name].set()
        if number in self._lost.get(server.name, set()):
            assert self._repeated[server.name].wait(WAIT_S)
            raise PublishError("timed out")
        return PingReply()


def halves(monkeypatch: pytest.MonkeyPatch, lost: int) -> list[float]:
    """Half of the pings' time is over as soon as all but ``lost`` servers have answered. Returns these times."""
    found: list[float] = []

    def in_no_time(pings: Collection[Future[PingReply]], timeout_s: float, *how: str) -> object:
        if how:
            return wait(pings, timeout_s, *how)
        found.append(timeout_s)
        return wait_until(lambda: sum(ping.done() for ping in pings) >= len(pings) - lost)

    monkeypatch.setattr(fleet_module, "wait", in_no_time)
    return found


def test_a_ping_that_was_lost_is_repeated_within_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, waited = LossyFleet({"server-1": {0}}), halves(monkeypatch, lost=1)
    assert errors(fleet.ping_all(SERVERS, 2 * WAIT_S)) == {}
    assert waited == [WAIT_S]
    assert [next(fleet.pings[s.name]) for s in SERVERS] == [1, 2, 1], "the others are asked once"


def test_pings_return_the_answers_also_of_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(LossyFleet):
        def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
            super().ping(server, timeout_s)
            return PingReply(busy=server.name != "server-2")

    fleet, _ = Busy({"server-1": {0}}), halves(monkeypatch, lost=1)
    assert [reply.busy for reply in fleet.ping_all(SERVERS, 2 * WAIT_S).values()] == [True, True, False]


def test_a_server_that_answers_neither_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = LossyFleet({"server-1": {0, 1}, "server-2": {0}}), halves(monkeypatch, lost=2)
    [(server, error)] = errors(fleet.ping_all(SERVERS, 2 * WAIT_S)).items()
    assert server.name == "server-1"
    with pytest.raises(PublishError):
        raise error


class Meeting(Fleet):
    """A ping is answered when ``n`` servers have theirs; ``most``: pings in progress at once."""

    def __init__(self, n: int) -> None:
        super().__init__(RUN, SECRET)
        self._together, self._lock, self.running, self.most = threading.Barrier(n), threading.Lock(), 0, 0

    def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self._together.wait(WAIT_S)
        with self._lock:
            self.running -= 1
        return PingReply()


def many(n: int) -> list[ServerEndpoint]:
    return [msgspec.structs.replace(SERVERS[0], name=f"server-{i}", admin_port=i) for i in range(n)]


def test_64_servers_answer_in_the_time_of_one() -> None:
    """Each one waits for the others: one after the other, or 32 at once, none would answer."""
    fleet = Meeting(64)
    assert errors(fleet.ping_all(many(64), 120.0)) == {}
    assert fleet.most == 64


def test_more_servers_answer_in_turns_of_a_bounded_number() -> None:
    fleet = Meeting(PINGS)
    assert errors(fleet.ping_all(many(2 * PINGS), 120.0)) == {}
    assert fleet.most == PINGS
    assert errors(fleet.ping_all([], 1.0)) == {}


def test_a_refused_ping_is_not_repeated() -> None:
    class Refusing(LossyFleet):
        def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
            next(self.pings[server.name])
            raise PublishError("connection refused")

    fleet = Refusing({})
    assert len(errors(fleet.ping_all(SERVERS, 2 * WAIT_S))) == 3
    assert [next(fleet.pings[s.name]) for s in SERVERS] == [1, 1, 1]


def test_what_a_dropped_adapter_scored_is_forgotten_after_the_probe_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scores belong to the line's thread. A later adapter of the same name must not be compared with them."""
    fleet, probed, dropped = Fleet(RUN, SECRET), threading.Event(), threading.Event()
    fleet.keep(SERVERS[:1])
    line = fleet._lines[SERVERS[0]]
    monkeypatch.setattr(line.client, "drop", lambda *_: (dropped.set(), DropReply(running=0))[1])
    old, other = AdapterRef(name="math", version=3), AdapterRef(name="code", version=0)
    line.served_logprobs["probe"] = {AdapterRef(name="math", version=2): [[0.0]], other: [[0.0]]}

    def probe() -> None:
        assert probed.wait(WAIT_S)
        line.served_logprobs["probe"][old] = [[0.0]]

    in_progress = line.thread.submit(probe)
    fleet.drop(SERVERS, "math", 1.0)
    assert not dropped.is_set()
    probed.set()
    in_progress.result(WAIT_S)
    assert dropped.wait(WAIT_S)
    assert line.served_logprobs == {"probe": {other: [[0.0]]}}
    fleet.keep(())


def test_a_server_that_was_away_drops_before_its_next_version_what_was_dropped_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def drop(client: AdminClient, name: str, timeout_s: float) -> DropReply:
        asked.append((client.server.name, name))
        return DropReply(running=0)

    monkeypatch.setattr(AdminClient, "drop", drop)
    fleet = Fleet(RUN, SECRET)
    here, away, restarted = SERVERS
    fleet.keep([here, away, restarted])
    fleet.drop([here, away, restarted], "before", 1.0)
    for server in SERVERS:
        fleet._lines[server].thread.submit(lambda: None).result(WAIT_S)
    assert sorted(asked) == [(server.name, "before") for server in SERVERS]
    fleet.keep([here])
    asked.clear()
    for name in ("math", "code"):
        fleet.drop([here], name, 1.0)
    fleet.keep([here, away, again := msgspec.structs.replace(restarted, admin_port=77)])
    for server in (here, away, again):
        line = fleet._lines[server]
        line.thread.submit(line.drop, 1.0).result(WAIT_S)  # what each version begins with
    assert sorted(asked) == sorted([(n, a) for n in ("server-0", "server-1") for a in ("math", "code")])
    assert fleet._away == {}, "of neither is anything kept"
    asked.clear()
    fleet.keep([here])
    fleet.keep([here, away])
    line = fleet._lines[away]
    line.thread.submit(line.drop, 1.0).result(WAIT_S)
    assert asked == [], "what it has dropped is not asked for again"
    fleet.keep(())


def test_an_adapter_is_dropped_while_a_server_ceases_to_be_a_member() -> None:
    """Another thread drops adapters than the one that opens and closes lines."""
    fleet = Fleet(RUN, SECRET)
    fleet.keep(SERVERS[:1])
    fleet._lines[SERVERS[0]].close()  # as `keep` does, and has not come further
    fleet.drop(SERVERS, "math", 1.0)
    fleet._lines.clear()


class CountingServer(AdminHttpsServer):
    """Counts the connections that it accepts."""

    accepted = 0

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        self.accepted += 1
        return super().get_request()


def test_members_are_pinged_over_connections_that_are_kept() -> None:
    """A TLS handshake for each ping of 512 servers a second fills a core."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = CountingServer(listener, SECRET, lambda *_: (200, msgspec.msgpack.encode(PingReply())))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = listener.getsockname()[1]
    members = [
        ServerEndpoint(name=f"server-{i}", host="127.0.0.1", admin_port=port, data_port=i, workers=1) for i in range(4)
    ]
    fleet = Fleet(RUN, SECRET)
    try:
        fleet.keep(members[:3])
        for _ in range(5):
            assert errors(fleet.ping_all(members[:3], 120.0)) == {}
            assert [fleet.ping_again(member, 120.0) for member in members[:3]] == [PingReply()] * 3
        assert server.accepted == 3
        fleet.ping_again(members[3], 120.0)  # no member yet
        assert server.accepted == 4
        fleet.keep(members[1:2])
        fleet.ping_again(members[0], 120.0)
        fleet.ping_again(members[1], 120.0)
        assert server.accepted == 5
    finally:
        fleet.keep(())
        server.shutdown()
        server.server_close()


def test_equal_modules_of_many_servers_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 36,472 modules (Qwen3-235B) it takes 0.2 s of a core, and servers that wait for it longer count as dead."""
    layout = layout_of(values(0).items())
    shapes = {t.name: t.shape for shard in layout.shards for t in shard.tensors}
    modules = {
        name.removesuffix(LORA_A): (inputs, shapes[name.replace(LORA_A, LORA_B)][0])
        for name, (_, inputs) in shapes.items()
        if name.endswith(LORA_A)
    }
    fits, other = (
        msgspec.msgpack.encode(ModulesReply(modules=held, slots=2, max_rank=64))
        for held in (modules, {**modules, "model.layers.0.self_attn.o_proj": (8, 8)})
    )
    servers = [ServerEndpoint(name=f"s{i}", host="h", admin_port=i, data_port=9, workers=1) for i in range(64)]
    replies, judged = dict.fromkeys(servers, fits), list[ModulesReply]()
    check_served = messages.check_served

    def counted(layout: AdapterLayout, reply: ModulesReply) -> None:
        judged.append(reply)
        check_served(layout, reply)

    monkeypatch.setattr(AdminClient, "send", lambda self, *_: (200, replies[self.server]))
    monkeypatch.setattr(messages, "check_served", counted)
    fleet = Fleet(RUN, SECRET)
    fleet.keep(servers)
    assert errors(answers(fleet.check(servers, layout, None, WAIT_S), time.monotonic() + WAIT_S)) == {}
    assert len(judged) == 1
    assert fleet.checked(servers, layout)
    late = [ServerEndpoint(name=f"late-{i}", host="h", admin_port=i, data_port=9, workers=1) for i in range(64)]
    replies |= dict.fromkeys(late, other)
    fleet.keep([*servers, *late])
    failed = errors(answers(fleet.check([*servers, *late], layout, None, WAIT_S), time.monotonic() + WAIT_S))
    assert failed.keys() == {*late}, "others have a verdict of their own"
    assert all("differ in the size of model.layers.0.self_attn.o_proj" in str(failed[each]) for each in late)
    assert len(judged) == 2, "a refusal, too"
    fleet.keep([])


def test_a_relay_gets_the_requests_for_the_servers_below_it_in_one() -> None:
    """Its servers that refuse, or do not answer, are no errors of the others."""
    members = [msgspec.structs.replace(each, host="127.0.0.1") for each in SERVERS]
    paths, wanted = list[str](), list[RelayRequest]()

    def answer(method: str, path: str, header: str | None, body: bytes) -> tuple[int, bytes]:
        paths.append(path)
        if path == PUBLISH_PATH:
            return 200, msgspec.msgpack.encode(PublishReply(ref="a@v0", digest="own", phases={}))
        wanted.append(msgspec.msgpack.decode(body, type=RelayRequest))
        refused = msgspec.msgpack.encode(RefusalReply(reason="slot", detail="full"))
        below = [RelayedAnswer(status=409, body=refused), RelayedAnswer(status=502, body=b"no route")]
        return 200, msgspec.msgpack.encode(RelayReply(answers=below))

    listener = socket.create_server(("127.0.0.1", 0))
    server = AdminHttpsServer(listener, SECRET, answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    members[0] = msgspec.structs.replace(members[0], admin_port=listener.getsockname()[1])
    fleet, layout = Fleet(RUN, SECRET), layout_of(share(values(0))[0])
    try:
        fleet.keep(members)
        fleet.groups = [RelayGroup((members[0],)), RelayGroup((members[1], members[2]), members[0])]
        until = time.monotonic() + WAIT_S
        for _ in range(2):
            found = answers(fleet.publish(members, announce(layout).manifest, layout, until, 1.0), until)
    finally:
        fleet.keep(())
        server.shutdown()
        server.server_close()
    own, refused, missing = (found[member] for member in members)
    assert isinstance(own, PublishReply)
    assert (type(refused), type(missing)) == (ManifestError, PublishError)
    assert "server-1" in str(refused)
    assert "no route" in str(missing)
    assert sorted(paths) == [PUBLISH_PATH] * 2 + [RELAY_PATH] * 2
    first, second = (decode(each.body) for each in wanted)
    assert [(each.servers, each.path) for each in wanted] == [(members[1:], PUBLISH_PATH)] * 2
    assert (first.layout, second.layout) == (layout, None), "the layout goes with the first version alone"
    assert WAIT_S / 2 < second.timeout_s <= WAIT_S
