"""Several adapters in one controller: who is served, what one's faults are to the others. Fake servers, real tasks."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.config.models import WorkerWorkflowConfig
from areal_lora.errors import RolloutError
from areal_lora.rollout import main as rollout_main
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller import controller as controller_module, groups
from areal_lora.rollout.controller.controller import Controller
from areal_lora.rollout.controller.evaluation import EvalPlaces
from areal_lora.rollout.controller.runtime import AdapterRuntime, Capacity, Claim
from areal_lora.rollout.ledger.ledger import Ledger, LedgerError, LedgerFile
from areal_lora.rollout.ledger.reconcile import group_counts
from areal_lora.rollout.routing import Router
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef
from tests.support.clocks import in_virtual_time, wait_until
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, CharTokenizer, admit_all, episode, feed
from tests.support.rollout.patient_client import PatientClient
from tests.support.rollout.running import Running

BROKEN = """
class Broken:
    def __init__(self):
        raise RuntimeError("no environment today")
"""


def wanted(*names: str, step: int = 0) -> list[AdapterRef]:
    return [AdapterRef(name=name, version=step) for name in names]


def test_the_first_wanted_adapter_that_has_a_batch_is_served(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), twins={"twin": {}}, eta=0)
    reply = run.client.poll(wanted(NAME, "twin"))
    assert isinstance(reply, m.NotReady)
    assert [(each.adapter, each.ready, each.needed) for each in reply.lacking] == [(NAME, 0, 4), ("twin", 0, 4)]
    run.activate(0, "twin")
    while not isinstance(reply, m.Batch):
        reply = run.client.poll(wanted(NAME, "twin"))
    assert reply.adapter == "twin"
    assert {trajectory.adapter.name for group in reply.groups for trajectory in group.trajectories} == {"twin"}
    run.activate(0)
    while reply.adapter != NAME:
        reply = run.client.poll(wanted(NAME, "twin"))
        assert isinstance(reply, m.Batch)
    again = run.client.poll(wanted("twin", NAME))
    assert isinstance(again, m.Batch)
    assert again.adapter == "twin", "a step that is not committed is served again"


def test_results_of_every_adapter_come_with_any_reply(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), twins={"twin": {}}, eta=0)
    for name in (NAME, "twin"):
        run.client.request_eval(AdapterRef(name=name, version=0), "e")
        run.activate(0, name)
    got: list[str] = []
    while len(got) < 2:
        run.client.poll(())
        got += [event.adapter for event in run.client.take_events()]
    assert sorted(got) == sorted([NAME, "twin"])


def test_adapters_are_evaluated_one_after_the_other_and_a_version_that_retires_meanwhile_is_the_newest(
    controller: Callable[..., Running],
) -> None:
    """Slots of servers have room for one version that an evaluation holds, whatever the number of adapters."""
    delays = {f"{NAME}@v1": 0.2}
    server = FakeServer(delay_s=lambda k: delays.get(server.requests[k]["model"], 0.0))
    run = controller(server, twins={"twin": {}, "third": {}}, eta=0)
    for name in (NAME, "twin", "third"):
        run.activate(0, name)
        run.client.next_batch(name, 0)
        run.activate(1, name)

    def evaluated() -> list[str]:
        return [request["model"] for request in server.requests if request.get("pin_version")]

    run.client.request_eval(AdapterRef(name=NAME, version=1), "e")
    wait_until(evaluated)
    for name, version in (("twin", 1), ("third", 1), ("third", 2)):
        run.client.request_eval(AdapterRef(name=name, version=version), "e")
    for name in ("twin", "third"):
        run.client.next_batch(name, 1)
        server.models.discard(f"{name}@v1")
        run.activate(2, name)
    twin, third, again = (
        run.client.wait_eval(AdapterRef(name=name, version=version), "e")
        for name, version in (("twin", 1), ("third", 1), ("third", 2))
    )
    assert list(dict.fromkeys(evaluated())) == [f"{NAME}@v1", "twin@v1", "twin@v2", "third@v1", "third@v2"]
    assert evaluated() == sorted(evaluated(), key=list(dict.fromkeys(evaluated())).index), "never two at a time"
    assert (twin.version, [(found.version, found.step, found.n) for found in twin.sets]) == (1, [(2, 2, 40)])
    assert "version_retired" in third.failed["held-out"], "version 2 has an evaluation of its own"
    assert (again.version, [found.version for found in again.sets]) == (2, [2])


def test_a_workflow_that_breaks_ends_its_adapter_only(
    controller: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MAX_BACK_OFF_S", 0.01)
    (tmp_path / "environment.py").write_text(BROKEN)
    workflow = WorkerWorkflowConfig(kind="multi_turn", env=f"{tmp_path}/environment.py:Broken")
    run = controller(FakeServer(), twins={"broken": {"workflow": workflow}}, eta=0, steps=3)
    for name in (NAME, "broken"):
        run.activate(0, name)
    reply: object = None
    while not isinstance(reply, m.AdapterFailed):
        reply = run.client.poll(wanted("broken"))
    assert reply.adapter == "broken"
    assert "no environment today" in reply.reason
    run.client.end("broken")
    for step in range(3):
        if step:
            run.activate(step)
        assert len(run.batch(step).groups) == 4
    stats = run.stats("broken")
    assert (stats.running, stats.consumed) == (0, 0)
    other = PatientClient(lambda: run.endpoint, read_secret(RunFolder(run.folder)))
    try:
        other.hello({NAME: 3, "broken": 0}, {})
        assert isinstance(other.poll(wanted("broken")), m.NotReady), "another trainer tries it again"
    finally:
        other.close()


def test_a_version_that_is_announced_after_the_fault_starts_no_rollouts(
    controller: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer publishes in the background, and is told of the fault only when it requests a batch."""
    monkeypatch.setattr(groups, "MAX_BACK_OFF_S", 0.01)
    (tmp_path / "environment.py").write_text(BROKEN)
    workflow = WorkerWorkflowConfig(kind="multi_turn", env=f"{tmp_path}/environment.py:Broken")
    run = controller(FakeServer(), twins={"broken": {"workflow": workflow}}, eta=0, steps=3)
    run.activate(0, "broken")
    reply: object = None
    while not isinstance(reply, m.AdapterFailed):
        reply = run.client.poll(wanted("broken"))
    issued = run.stats("broken").issued
    run.announce(0, name="broken")
    stats = run.stats("broken")
    assert (stats.issued, stats.running) == (issued, 0)


def test_an_adapter_that_has_ended_gets_no_groups_and_leaves_its_places(controller: Callable[..., Running]) -> None:
    server = FakeServer(delay_s=lambda k: 0.02)
    run = controller(server, twins={"twin": {}}, eta=2)
    for name in (NAME, "twin"):
        run.activate(0, name)
    run.batch(0)
    run.client.end("twin")
    wait_until(lambda: run.stats("twin").running == 0)
    counts = list[int]()
    for step in range(1, 4):
        run.activate(step)
        run.batch(step)
        counts.append(Counter(request["model"] for request in server.requests)["twin@v0"])
    # The first batch takes longer than requests that were on their way when the adapter ended.
    assert len(set(counts)) == 1


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers get the tokenizer of these tests."""
    monkeypatch.setattr(rollout_main, "load_tokenizer", lambda *_, **__: CharTokenizer())


@pytest.mark.usefixtures("letters")
def test_an_adapter_joins_pauses_goes_on_and_leaves_beside_another(controller: Callable[..., Running]) -> None:
    server = FakeServer()
    run = controller(server, eta=0)
    run.activate(0)
    assert run.join("new.1") == ""
    assert run.join("new.1") == "", "a repeated request changes nothing"
    run.activate(0, "new.1")
    first = run.client.next_batch("new.1", 0)
    assert {t.adapter.name for group in first.groups for t in group.trajectories} == {"new.1"}
    run.client.pause("new.1", True)
    run.activate(1, "new.1")
    for step in range(2):
        if step:
            run.activate(step)
        assert len(run.batch(step).groups) == 4
    assert run.stats("new.1").ready == 0, "nothing is issued while it is paused"
    run.client.pause("new.1", False)
    run.client.next_batch("new.1", 1)
    run.client.end("new.1")
    with pytest.raises(RolloutError, match=r"'new\.1' is not in this run"):
        run.stats("new.1")
    run.client.end("new.1")
    assert run.join("new.2") == ""
    run.activate(0, "new.2")
    again = run.client.next_batch("new.2", 0)
    assert [g.uid for g in again.groups] == [g.uid for g in first.groups], "its own prompts, from the first one on"


def kept_trajectories(ledger: Path, folder: Path) -> Counter[str]:
    """By adapter; the controller has the file locked, so its files are copied, the log of writes last."""
    folder.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{ledger}{suffix}", folder)
    with closing(sqlite3.connect(folder / ledger.name)) as db:
        return Counter(name for (name,) in db.execute("SELECT adapter FROM trajectories"))


@pytest.mark.usefixtures("letters")
def test_an_adapter_that_leaves_leaves_no_trajectories_in_the_ledger_of_all(
    controller: Callable[..., Running], tmp_path: Path
) -> None:
    run = controller(FakeServer(), eta=2)
    for name in ("new.1", "new.2"):
        assert run.join(name) == ""
        run.activate(0, name)
        run.client.next_batch(name, 0)
        run.client.commit(name, 0)
        wait_until(lambda name=name: run.stats(name).ready == 8)  # all that the staleness budget allows
    ledger = RunFolder(run.folder).ledger
    assert kept_trajectories(ledger, tmp_path / "before") == {"new.1": 8, "new.2": 8}
    run.client.end("new.1")
    assert kept_trajectories(ledger, tmp_path / "after") == {"new.2": 8}
    wait_until(lambda: set(group_counts(RunFolder(run.folder), ended=False)) == {NAME, "new.2"})


@pytest.mark.usefixtures("letters")
def test_one_that_cannot_be_opened_is_named_and_nothing_of_it_remains(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), eta=0)
    reason = run.join("bad.1", workflow=WorkerWorkflowConfig(kind="multi_turn", env="no_such_module:Environment"))
    assert "no_such_module" in reason
    with pytest.raises(RolloutError, match="is not in this run"):
        run.stats("bad.1")
    run.activate(0)
    assert len(run.batch(0).groups) == 4


@pytest.mark.usefixtures("letters")
def test_another_trainer_finds_none_that_joined_and_lets_it_resume(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), eta=2)
    run.join("new.1")
    run.activate(0, "new.1")
    first = run.client.next_batch("new.1", 0)
    run.client.commit("new.1", 0)
    other = PatientClient(lambda: run.endpoint, read_secret(RunFolder(run.folder)))
    try:
        other.hello({NAME: 0}, {})
        with pytest.raises(RolloutError, match="is not in this run"):
            run.stats("new.1")
        config = run.entry.model_copy(update={"name": "new.1"}).model_dump_json().encode()
        assert other.join("new.1", config, 1, first.snapshot) == ""
        other.announce(AdapterRef(name="new.1", version=1), {"server-0": run.servers[0].url})
        run.servers[0].models.add("new.1@v1")
        following = other.next_batch("new.1", 1)
        assert not {g.uid for g in first.groups} & {g.uid for g in following.groups}, "no prompt twice"
    finally:
        other.close()


def test_a_ledger_that_cannot_be_written_is_no_fault_of_the_adapter_whose_lease_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller_module, "LEASE_CHECK_S", 0.0)

    def expire_overdue() -> None:
        raise LedgerError("ledger.sqlite: disk is full")

    runtime: Any = SimpleNamespace(
        feed=SimpleNamespace(expire_overdue=expire_overdue),
        ended=[],
        claim=Claim(sequences=1, groups=1, weight=1.0),
        fail=lambda reason: pytest.fail(reason),
    )
    unused: Any = None
    watching = Controller({NAME: runtime}, unused, tasks=unused, stop=unused, open_adapter=unused)
    with pytest.raises(LedgerError, match="disk is full"):
        asyncio.run(watching.watch_leases())


def test_adapters_that_join_and_leave_slowly_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One opens its data for ever, another's rollout cannot be cut off; a third joins, ends, and a trainer greets."""
    monkeypatch.setattr(controller_module, "CUT_OFF_S", 0.5)

    def runtime(name: str) -> Any:
        tasks: dict[int, asyncio.Task[None]] = {}
        groups = SimpleNamespace(ledger=SimpleNamespace(close=lambda: None))
        feed = SimpleNamespace(name=name, newest=-1, end=lambda **_: None, groups=groups)
        places = SimpleNamespace(trainer_waits=lambda waits: None)
        return SimpleNamespace(
            feed=feed,
            tasks=tasks,
            running=0,
            places=1,
            ended=[],
            idle=True,
            start_one=lambda: False,
            paused=False,
            failure=None,
            evaluator=SimpleNamespace(places=places),
            hello=lambda *_, **__: None,
            claim=Claim(sequences=1, groups=1, weight=1.0),
        )

    async def run() -> None:
        stuck, closed = asyncio.Event(), list[str]()

        async def open_adapter(raw: bytes) -> Any:
            name = raw.decode()
            if name == "slow":
                await stuck.wait()
            made = runtime(name)
            if name == "busy":
                made.tasks[0] = asyncio.create_task(asyncio.sleep(30))

            async def close() -> None:
                closed.append(name)

            made.close = close
            return made

        async with asyncio.TaskGroup() as tasks:
            one = Controller({}, Router(), tasks=tasks, stop=asyncio.Event(), open_adapter=open_adapter)
            session = (await one.handle(m.Hello(trainer="t", versions={}, snapshots={}))).session  # type: ignore[union-attr]

            async def join(name: str) -> m.Reply:
                return await one.handle(m.JoinAdapter(session=session, adapter=name, config=name.encode(), version=0))

            slow = asyncio.create_task(join("slow"))
            async with asyncio.timeout(0.4):
                assert await join("busy") == m.Ack()
                leaving = asyncio.create_task(one.handle(m.EndAdapter(session=session, adapter="busy")))
                await asyncio.sleep(0)
                assert await join("third") == m.Ack()
                assert await one.handle(m.EndAdapter(session=session, adapter="third")) == m.Ack()
                assert closed == ["third"]
                again = asyncio.create_task(join("busy"))
            assert await again == m.Ack()
            assert await leaving == m.Ack()
            assert closed == ["third", "busy"], "one that joins again waits until its scorers are closed"
            async with asyncio.timeout(0.4):
                await one.handle(m.Hello(trainer="another", versions={}, snapshots={}))
            stuck.set()
            assert await slow == m.StaleSession()
        assert closed == ["third", "busy", "slow", "busy"]

    in_virtual_time(run())


@pytest.mark.parametrize("texts", [False, True])
def test_dropped_groups_are_let_go_of_at_each_step_also_where_no_rollout_is_kept(texts: bool) -> None:
    made, _, _ = feed(eta=0, b=2, drop_uniform=True)
    made.announce(0)
    for unequal in (False, True):
        for ticket in admit_all(made):
            answered = episode(ticket.prompt, 0)
            rewarded = tuple(replace(t, reward=i * unequal) for i, t in enumerate(answered.group.trajectories))
            made.finish(ticket, replace(answered, group=replace(answered.group, trajectories=rewarded)))
    runtime: Any = SimpleNamespace(failure=None, feed=made, texts=texts, take_costs=dict)
    batch = controller_module._take(runtime, 0)
    assert isinstance(batch, m.Batch)
    assert (len(batch.groups), len(batch.dropped), made.take_dropped()) == (2, 2 * texts, ())


def test_episodes_start_again_only_once_a_server_holds_a_version_of_their_adapter() -> None:
    """A server has restarted; it announces another adapter's version first, this one's a minute later."""
    router, tries = Router(), list[float]()

    class Episodes:
        async def run(self, prompt: Any, ref: AdapterRef, seed: int) -> Any:
            tries.append(asyncio.get_running_loop().time())
            if not router.holds(ref):
                raise GenerationFault(FaultKind.RETIRED, f"no rollout server holds {ref}")
            await asyncio.sleep(1000)

    def runtime(name: str) -> AdapterRuntime:
        made, _, _ = feed(file=LedgerFile(":memory:", "t"), version=None, b=1, eta=0)
        made.name = name
        places: Any = SimpleNamespace(places=EvalPlaces(0))
        capacity = Capacity(sequences=8, n_samples=2)
        return AdapterRuntime(
            feed=made, tasks={}, workflow=Episodes(), evaluator=places, seed=0, capacity=capacity, weight=1.0
        )

    async def run() -> None:
        unused: Any = None
        adapters = {name: runtime(name) for name in (NAME, "other")}
        async with asyncio.TaskGroup() as tasks:
            one = Controller(adapters, router, tasks=tasks, stop=asyncio.Event(), open_adapter=unused)
            hello = m.Hello(trainer="t", versions=dict.fromkeys(adapters, 0), snapshots={})
            session = (await one.handle(hello)).session  # type: ignore[union-attr]
            adapters["other"].paused = True

            async def announce(name: str, port: int) -> None:
                servers = {"server-0": f"http://none:{port}"}
                await one.handle(m.AnnounceVersion(session=session, adapter=name, version=0, servers=servers))

            await announce("other", 1)
            router.announce(AdapterRef(name=NAME, version=0), {"server-0": "http://none:1"})
            await announce("other", 2)
            adapters[NAME].feed.announce(0)
            one._admission.admit()
            await asyncio.sleep(60)
            before = len(tries)
            await announce(NAME, 2)
            await asyncio.sleep(1)
            assert (before, len(tries)) == (1, 2)
            await one.handle(m.EndAdapter(session=session, adapter=NAME))
            for task in list(adapters[NAME].tasks.values()):
                task.cancel()

    in_virtual_time(run())


@pytest.mark.parametrize("returns", [False, True])
def test_a_rollout_that_fails_after_its_adapter_has_left_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """A user's workflow cleans up for longer than the controller waits, then fails; the adapter may have returned."""
    monkeypatch.setattr(controller_module, "CUT_OFF_S", 0.5)
    file, failed = LedgerFile(":memory:", "t"), list[str]()
    other = Ledger(file, "other", "o")

    class Slow:
        async def run(self, prompt: Any, *_: Any) -> Any:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(5)
                failed.append(prompt.uid)
                raise RuntimeError("its cleanup fails")

    async def open_adapter(_: bytes) -> AdapterRuntime:
        tasks: dict[int, asyncio.Task[None]] = {}
        made, _, _ = feed(file=file, version=None, b=1, eta=0, on_expire=lambda ticket: tasks[ticket.seq].cancel())
        places: Any = SimpleNamespace(places=EvalPlaces(0))
        capacity, workflow = Capacity(sequences=8, n_samples=2), Slow()
        runtime = AdapterRuntime(
            feed=made, tasks=tasks, workflow=workflow, evaluator=places, seed=0, capacity=capacity, weight=1.0
        )
        runtime.close = lambda: asyncio.sleep(0)
        return runtime

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            one = Controller({}, Router(), tasks=tasks, stop=asyncio.Event(), open_adapter=open_adapter)
            session = (await one.handle(m.Hello(trainer="t", versions={}, snapshots={}))).session  # type: ignore[union-attr]

            async def join_and_roll_out() -> None:
                await one.handle(m.JoinAdapter(session=session, adapter=NAME, config=b"", version=0))
                servers = {"server-0": "http://none"}
                await one.handle(m.AnnounceVersion(session=session, adapter=NAME, version=0, servers=servers))
                assert one.adapter(NAME).running == 1
                await asyncio.sleep(0.1)

            await join_and_roll_out()
            await one.handle(m.EndAdapter(session=session, adapter=NAME))
            if returns:
                await join_and_roll_out()
            await asyncio.sleep(6)
            assert len(failed) == 1
            other.issue(0, 1)
            other.flush()
            if returns:
                assert one.adapter(NAME).failure is None
                assert one.adapter(NAME).running == 1
                await one.handle(m.EndAdapter(session=session, adapter=NAME))

    in_virtual_time(run())
    file.close()
