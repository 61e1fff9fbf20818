"""Versions of a server under faults: real channel and worker threads, an engine and receivers that do as told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_lora.engine.vllm_ext.worker import channel as ch
from areal_lora.errors import ManifestError, PublishError, UnknownVersionError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.manifest import Announcement, decode, encode
from areal_lora.weight_sync.messages import JoinRequest, StageResult
from tests.support.clocks import seen
from tests.support.lazy import Lazy

ADAPTERS = "areal_lora.engine.vllm_ext.server.adapters"
adapters = Lazy(ADAPTERS)

pytestmark = pytest.mark.slow  # importing vLLM

SECRET = "ab" * 32
WORKERS = 2
LONG_S = 150.0


class Worker:
    """A worker's background thread. ``answer`` decides what it says to a ``Begin``; None: nothing."""

    def __init__(self, rank: int, ports: tuple[int, ...], secret: str = SECRET) -> None:
        self.begins: list[ch.Receive] = []
        self.answer: Callable[[ch.Receive], StageResult | None] = accept
        self.busy = 0
        self.overlapped = False
        self._late: list[ch.Respond] = []
        self.deaf = False
        cores = sorted(os.sched_getaffinity(0))
        ch.CommandThread(secret=secret, ports=ports, worker=rank, cores=cores, handle=self._handle)

    def _handle(self, command: ch.Command, respond: ch.Respond) -> None:
        if self.deaf:
            self._late.append(respond)
            return
        if not isinstance(command, ch.Receive):
            respond(ch.WorkerAnswer())
            return
        self.begins.append(command)
        self.overlapped |= self.busy > 0
        self.busy += 1
        threading.Timer(0.03, self._finish, (command, respond)).start()

    def _finish(self, command: ch.Receive, respond: ch.Respond) -> None:
        self.busy -= 1
        result = self.answer(command)
        if result is not None:
            respond(ch.WorkerAnswer(staged=result))

    def speak(self) -> None:
        """Say what was held back while ``deaf``."""
        self.deaf = False
        for respond in self._late:
            respond(ch.WorkerAnswer(error="late"))


def accept(begin: ch.Receive) -> StageResult:
    if begin.slot < 0:
        return refuse("duplicate" if begin.ref in begin.active else "slot")(begin)
    return StageResult(ref=begin.ref, slot=begin.slot, ok=True, digest=f"digest of {begin.ref}")


def refuse(reason: str) -> Callable[[ch.Receive], StageResult]:
    return lambda begin: StageResult(ref=begin.ref, slot=begin.slot, ok=False, reason=reason, detail="as told")


class Engine:
    """What ``AsyncLLM`` is to ``ServedAdapters``; keeps slots and ids as a worker would, and fails when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.ids: dict[int, int] = {}
        self.fail = ""
        self.used: dict[int, int] = {}
        """By retired id: how often worker 1 still finds it in its batch."""

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        await asyncio.sleep(0.01)
        self.calls.append((method, args))
        if method == self.fail:
            self.fail = ""
            raise RuntimeError("the engine was told to fail")
        left = [lora_id for lora_id in args[-1] if self.used.get(lora_id, 0) > 0]
        for lora_id in left:
            self.used[lora_id] -= 1
        for lora_id in set(args[-1]) - set(left):
            self.ids.pop(lora_id, None)
        if method == "al_commit":
            lora_id, slot, _ = args
            assert slot not in self.ids.values(), "a slot that is in use was given to another version"
            self.ids[lora_id] = slot
        lists: list[list[int]] = [[], left]
        return [(0.001, ids) for ids in lists] if method == "al_commit" else lists

    async def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache", ()))
        return True


class Bench:
    def __init__(self, engine: Engine, workers: list[Worker], served: adapters.ServedAdapters) -> None:
        self.engine, self.workers, self.adapters = engine, workers, served
        self.timeout_s = LONG_S

    async def publish(self, version: int, name: str = "a", **session: int) -> Any:
        return await self.adapters.publish(body(version, name, self.timeout_s, **session))

    async def fails(self, version: int, match: str, timeout_s: float, kind: type[Exception] = PublishError) -> float:
        """Publish until it fails for this reason; seconds that it took. A stall may be another one."""
        for _ in range(10):
            began = time.monotonic()
            with pytest.raises((PublishError, ManifestError)) as e:
                await self.adapters.publish(body(version, timeout_s=timeout_s))
            if isinstance(e.value, kind) and re.search(match, str(e.value)):
                return time.monotonic() - began
        raise e.value

    def holds(self, *versions: int, name: str = "a") -> bool:
        return [r.version for r in sorted(self.adapters.versions.active) if r.name == name] == list(versions)


def body(version: int, name: str = "a", timeout_s: float = LONG_S, **session: int) -> bytes:
    ref = AdapterRef(name=name, version=version)
    manifest = ShardManifest(run="r", ref=ref, parent=None, base_digest="b", layout="l", **session)
    return encode(Announcement(manifest=manifest, layout=None, timeout_s=timeout_s))


@asynccontextmanager
async def bench(resident: int = 3, names: int = 1, spare: int = 0, merged: bool = False) -> AsyncIterator[Bench]:
    channel = ch.WorkerChannel(SECRET)
    workers = [Worker(rank, channel.ports) for rank in range(WORKERS)]
    await channel.connect(WORKERS)
    engine = Engine()
    served = adapters.ServedAdapters(
        engine, channel, n_workers=WORKERS, n_slots=resident * names + spare, resident=resident, merged=merged
    )
    try:
        yield Bench(engine, workers, served)
    finally:
        channel.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 280.0))


def run_in_time(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """``test`` has a deadline that a stall may miss."""

    def once() -> bool:
        with contextlib.suppress(PublishError):
            run(test())
            return True
        return False

    seen(once, bool)


def test_versions_come_and_the_oldest_go_with_the_commit() -> None:
    async def test() -> None:
        async with bench(resident=3) as b:
            for version in range(5):
                reply = await b.publish(version)
                assert reply.ref == f"a@v{version}"
                with b.adapters.lease("a") as lease:
                    assert lease.name == f"a@v{version}"
            assert b.holds(3, 4)
            assert [m for m, _ in b.engine.calls] == ["al_commit"] * 5, "one call between two steps per publish"
            assert b.engine.calls[4][1][2] == [3], "version 2 had id 3"
            assert sorted(b.engine.ids) == [4, 5]

    run(test())


def test_a_slot_is_written_only_when_no_step_can_use_what_it_held() -> None:
    """The engine computes one step ahead: a request that has ended here may be in the batch for some steps more."""

    async def test() -> None:
        async with bench(resident=3) as b:
            b.engine.used = {1: 3}
            for version in range(3):
                await b.publish(version)
            begun = [len(w.begins) for w in b.workers]
            assert b.engine.calls[-1] == ("al_commit", (3, 2, [1]))
            assert 1 in b.engine.ids, "steps in progress still find it"
            publish = asyncio.create_task(b.publish(3))
            while b.engine.used[1] > 0:
                assert [len(w.begins) for w in b.workers] == begun, "no worker writes yet"
                await asyncio.sleep(0)
            await publish
            assert [m for m, _ in b.engine.calls[3:]] == ["al_retire"] * 3 + ["al_commit"]
            assert 1 not in b.engine.ids
            assert b.holds(2, 3)

    run(test())


def test_a_version_that_never_leaves_the_batch_fails_the_publish_before_a_byte_is_written() -> None:
    async def test() -> None:
        async with bench(resident=3) as b:
            b.engine.used = {1: 10**6}
            for version in range(3):
                await b.publish(version)
            begun = [len(w.begins) for w in b.workers]
            await b.fails(3, r"retired adapter ids \[1\] are still in the engine", 0.3)
            assert [len(w.begins) for w in b.workers] == begun
            b.engine.used = {}
            await b.publish(3)
            assert b.holds(2, 3)

    run(test())


def of_first_runner(ids: dict[str, int]) -> Any:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from areal_lora.engine.vllm_ext.compat.first_runner import FirstRunner

    batch = InputBatch.__new__(InputBatch)
    batch.lora_id_to_request_ids = {lora_id: {name} for name, lora_id in ids.items()}
    return FirstRunner(SimpleNamespace(input_batch=batch))


def of_second_runner(ids: dict[str, int]) -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu.lora_utils import LoraState

    from areal_lora.engine.vllm_ext.compat.second_runner import SecondRunner

    state = LoraState(4)
    for i, (name, lora_id) in enumerate(ids.items()):
        state.add_request(name, i, LoRARequest(f"a@v{lora_id}", lora_id, "xccl://a"))
    return SecondRunner(SimpleNamespace(lora_state=state))


@pytest.mark.parametrize("runner_of", [of_first_runner, of_second_runner])
def test_a_worker_keeps_a_version_that_its_batch_uses(runner_of: Callable[[dict[str, int]], Any]) -> None:
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    from areal_lora.engine.vllm_ext.worker.extension import AdapterSlots

    class Manager(LRUCacheLoRAModelManager):
        def __init__(self) -> None:
            self.lora_index_to_id: list[int | None] = [7, 8]

        def remove_adapter(self, adapter_id: int) -> bool:
            self.lora_index_to_id[self.lora_index_to_id.index(adapter_id)] = None
            return True

    slots = AdapterSlots.__new__(AdapterSlots)
    slots._served_as = {}
    manager = Manager()
    slots._worker = SimpleNamespace(
        model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    )
    slots._runner = runner_of({"a request whose stop text was found in the server": 8})
    assert slots.retire([7, 8]) == [8]
    assert manager.lora_index_to_id == [None, 8]
    slots._runner = runner_of({})
    assert slots.retire([8]) == []
    assert manager.lora_index_to_id == [None, None]


def test_refused_by_one_worker_is_active_on_none() -> None:
    async def test() -> None:
        async with bench() as b:
            await b.publish(0)
            b.workers[1].answer = refuse("hash")
            with pytest.raises(ManifestError, match="as told"):
                await b.publish(1)
            b.workers[1].answer = accept
            assert b.holds(0)
            await b.publish(1)
            assert b.holds(0, 1)
            assert all("a@v1" not in w.begins[-1].active for w in b.workers), "workers learn that it was given up"
            for w, digest in zip(b.workers, "xy", strict=True):
                w.answer = lambda begin, digest=digest: msgspec.structs.replace(accept(begin), digest=digest)
            with pytest.raises(ManifestError, match="different numbers") as e:
                await b.publish(2)
            assert e.value.reason == "hash"
            assert b.holds(0, 1)

    run(test())


def test_a_commit_that_fails_is_undone_everywhere() -> None:
    async def test() -> None:
        async with bench() as b:
            await b.publish(0)
            b.engine.fail = "al_commit"
            with pytest.raises(PublishError, match="told to fail"):
                await b.publish(1)
            assert b.engine.calls[-1] == ("al_retire", ([2],))
            assert b.holds(0)
            with b.adapters.lease("a") as lease:
                assert lease.name == "a@v0"
            await b.publish(1)
            assert b.holds(0, 1)

    run(test())


def test_a_publish_that_is_cancelled_gives_its_slot_back() -> None:
    async def test() -> None:
        async with bench(resident=2) as b:
            for version in range(6):
                task = asyncio.create_task(b.publish(version))
                await asyncio.sleep(0.005)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0.05)
            await b.publish(6)
            assert b.holds(6)

    run(test())


def test_a_silent_worker_is_named_and_what_it_says_later_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with bench() as b:
            await b.publish(0)
            b.workers[1].answer = lambda begin: None
            await b.fails(1, r"workers \[1\]: silent", 0.5)
            assert b.holds(0)
            b.workers[1].answer = accept
            b.workers[0].deaf = True
            monkeypatch.setattr(f"{ADAPTERS}.PING_S", 0.5)
            for _ in range(10):  # a stall makes the other one silent, too
                with pytest.raises(PublishError) as e:
                    await b.adapters.ping()
                if "workers [0]: silent" in str(e.value):
                    break
            assert "workers [0]: silent" in str(e.value)
            b.workers[0].speak()
            monkeypatch.setattr(f"{ADAPTERS}.PING_S", LONG_S)
            await b.adapters.ping()
            request = JoinRequest(run="r", endpoints=[], ranks=[1, 2], timeout_s=LONG_S)
            await b.adapters.join(request)  # not the late "error"
            await b.publish(1)
            assert b.holds(0, 1)

    monkeypatch.setattr(f"{ADAPTERS}.GRACE_S", 0.3)
    run(test())


def test_what_was_given_up_while_the_server_was_busy_is_not_done_late() -> None:
    async def test() -> None:
        async with bench() as b:
            b.workers[0].answer = lambda begin: None
            busy = asyncio.create_task(b.publish(0))
            while not all(w.begins for w in b.workers):
                await asyncio.sleep(0.01)
            with pytest.raises(PublishError, match="late by now"):
                await b.adapters.join(JoinRequest(run="r", endpoints=[], ranks=[1, 2], timeout_s=0.1))
            await b.fails(1, r"a@v1 came while .* late by now", 0.1)
            assert not busy.done()
            busy.cancel()
            with pytest.raises(asyncio.CancelledError):
                await busy
            assert [len(w.begins) for w in b.workers] == [1] * WORKERS
            b.workers[0].answer = accept
            await b.adapters.join(JoinRequest(run="r", endpoints=[], ranks=[1, 2], timeout_s=LONG_S))
            await b.publish(1)
            assert b.holds(1)

    run(test())


def test_a_request_counts_from_when_it_came_and_its_workers_hear_until_when() -> None:
    async def test() -> None:
        async with bench() as b:
            with pytest.raises(PublishError, match="late by now"):
                await b.adapters.publish(body(0, timeout_s=0.5), came=time.monotonic() - 0.6)
            request = JoinRequest(run="r", endpoints=[], ranks=[1, 2], timeout_s=0.5)
            with pytest.raises(PublishError, match="late by now"):
                await b.adapters.join(request, came=time.monotonic() - 0.6)
            assert [len(w.begins) for w in b.workers] == [0] * WORKERS
            began = time.monotonic()
            await b.adapters.publish(body(0))
            assert all(began + LONG_S <= w.begins[-1].deadline < time.monotonic() + LONG_S for w in b.workers)
            for version, timeout_s in ((1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
                with pytest.raises(ManifestError, match="malformed"):
                    await b.adapters.publish(body(version, timeout_s=timeout_s))

    run(test())


def test_what_was_staged_too_late_is_not_activated_and_may_come_again() -> None:
    async def test() -> None:
        async with bench() as b:
            await b.publish(0)

            def late(begin: ch.Receive) -> StageResult:
                time.sleep(0.6)
                return accept(begin)

            b.workers[1].answer = late
            await b.fails(1, "staged too late", 0.5)
            assert b.holds(0)
            b.workers[1].answer = accept
            await b.publish(1)
            assert b.holds(0, 1)

    run(test())


def test_a_straggler_keeps_its_version_and_others_make_room() -> None:
    async def test() -> None:
        async with bench(resident=3) as b:
            await b.publish(0)
            with b.adapters.lease("a@v0") as old:
                for version in range(1, 5):
                    await b.publish(version)
                    assert 0 in [r.version for r in b.adapters.versions.active]
                assert old.lora is not None
                assert b.engine.ids[old.lora.lora_int_id] == 0, "never retired, never overwritten"
                assert b.holds(0, 3, 4), "the oldest that nothing uses went"
                with b.adapters.lease("a@v4"):
                    await b.publish(5)
                    with b.adapters.lease("a@v5"):
                        # It says what the publish waits for, half of its time.
                        assert await b.fails(6, r"slot.*a@v0 \(1 running\)", 1.0, ManifestError) > 0.4
                        assert b.workers[0].begins[-1].slot == -1, "the bytes are still taken off the wire"
                waiting = asyncio.create_task(b.publish(6))
            await waiting
            assert b.holds(5, 6)

    run(test())


def test_a_pinned_version_stays_for_the_next_request_of_its_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ADAPTERS}.PINNED_S", LONG_S)

    async def test() -> None:
        async with bench(resident=2, spare=1) as b:
            await b.publish(0)
            for version in range(1, 4):
                with b.adapters.lease("a@v0", pinned=True):
                    pass
                await b.publish(version)  # no request is running
                assert b.holds(*sorted({0, version - 1, version}))
            b.adapters._pinned_s = 0.1
            with b.adapters.lease("a@v0", pinned=True):
                pass
            await asyncio.sleep(0.2)
            await b.publish(4)
            assert b.holds(3, 4)

    run(test())


def test_an_evaluation_ends_the_pin_of_the_one_before() -> None:
    """Else two held slots, of which there is one, and a publish waited for the older pin."""

    async def test() -> None:
        async with bench(resident=2, spare=1) as b:
            await b.publish(0)
            with b.adapters.lease("a@v0", pinned=True):
                pass
            for version in range(1, 4):
                await b.publish(version)
            assert b.holds(0, 2, 3)
            began = asyncio.get_running_loop().time()
            with b.adapters.lease("a@v3", pinned=True):
                for version in range(4, 7):
                    await b.publish(version)
            assert asyncio.get_running_loop().time() - began < LONG_S / 4, "a publish waited"
            assert b.holds(3, 5, 6)

    run(test())


def test_a_publish_that_finds_no_slot_takes_one_from_a_pin_in_the_end() -> None:
    async def test() -> None:
        async with bench(resident=2) as b:
            await b.publish(0)
            with b.adapters.lease("a@v0", pinned=True):
                await b.publish(1)
            began = asyncio.get_running_loop().time()
            await b.adapters.publish(body(2, timeout_s=1.0))
            assert asyncio.get_running_loop().time() - began > 0.4, "half the deadline"
            assert b.holds(1, 2)
            with pytest.raises(UnknownVersionError):
                b.adapters.lease("a@v0").__enter__()

    run_in_time(test)


def test_a_request_for_a_version_or_newer_never_gets_an_older_one() -> None:
    async def test() -> None:
        async with bench(resident=3) as b:
            told: list[AdapterRef] = []

            async def tell(ref: AdapterRef) -> None:
                assert b.holds(*range(max(0, ref.version - 1), ref.version + 1)), "it can be requested already"
                told.append(ref)

            b.adapters.interrupt = b.adapters.switch = tell
            for version in range(5):
                await b.publish(version)
            assert [ref.version for ref in told] == [0, 1, 2, 3, 4]
            for model in ("a", "a@v0", "a@v3", "a@v4"):
                with b.adapters.lease(model, or_newer=True) as lease:
                    assert lease.name == "a@v4"
            for model in ("a@v5", "a@v", "b@v0", "b", "@v1", "a@v-1", ""):
                with pytest.raises(UnknownVersionError):
                    b.adapters.lease(model, or_newer=True).__enter__()

    run(test())


def test_the_newest_version_again_gets_the_same_reply() -> None:
    async def test() -> None:
        async with bench() as b:
            await b.publish(0)
            reply = await b.publish(1)
            assert await b.publish(1) == reply
            assert [w.begins[-1].slot for w in b.workers] == [-1, -1]
            for w in b.workers:
                w.answer = refuse("wire")  # it is in no group
            assert await b.publish(1) == reply
            b.workers[1].answer = refuse("wrong_base")
            with pytest.raises(ManifestError) as e:
                await b.publish(1)
            assert e.value.reason == "wrong_base"
            assert [m for m, _ in b.engine.calls] == ["al_commit"] * 2
            for w in b.workers:
                w.answer = refuse("stale_version")
            with pytest.raises(ManifestError) as e:
                await b.publish(0)
            assert e.value.reason == "stale_version", "only the newest is acknowledged again"

    run(test())


def test_lost_versions_end_with_their_requests_and_their_names_are_free() -> None:
    """The trainer starts again from version 1; its second session makes another version 2."""

    async def test() -> None:
        async with bench(resident=4) as b:
            told: list[tuple[int, list[str]]] = []

            async def tell(ref: AdapterRef) -> None:
                told.append((ref.version, [str(r) for r in sorted(b.adapters.versions.active)]))

            for version in range(3):
                await b.publish(version, session=1)
            b.adapters.interrupt = b.adapters.switch = tell
            with b.adapters.lease("a@v2") as old, b.adapters.lease("a@v2", pinned=True):
                reply = await b.publish(1, session=2, resumed_from=1)
                assert reply.ref == "a@v1"
                assert told == [(1, ["a@v0", "a@v1"])], "sequences on what is lost are cut before anything else"
                with pytest.raises(UnknownVersionError):
                    b.adapters.lease("a@v2", or_newer=True).__enter__()
                await b.publish(2, session=2, resumed_from=1)
                with b.adapters.lease("a@v2") as new:
                    assert (new.name, old.name) == ("a@v2", "a@v2")
                    assert new.lora.lora_int_id != old.lora.lora_int_id
                assert old.lora.lora_int_id in b.engine.ids, "a request still runs on it"
            await b.publish(3, session=2, resumed_from=1)
            assert old.lora.lora_int_id not in b.engine.ids
            with pytest.raises(ManifestError, match="session 1 of the trainer; session 2 runs now"):
                await b.publish(4, session=1)
            assert told[1:] == [(2, ["a@v0", "a@v1", "a@v2"]), (3, ["a@v1", "a@v2", "a@v3"])]
            assert b.holds(1, 2, 3)

    run(test())


def test_publishes_of_two_adapters_come_one_after_the_other() -> None:
    async def test() -> None:
        async with bench(resident=2, names=2) as b:
            await asyncio.gather(*(b.publish(v, n) for v in range(3) for n in ("a", "b")))
            for name in "ab":
                held = [r.version for r in b.adapters.versions.active if r.name == name]
                assert held in ([2], [1, 2])
            assert not any(w.overlapped for w in b.workers)
            assert len(b.workers[0].begins) == 6

    run(test())


def test_requests_always_find_a_version_while_versions_come_and_go() -> None:
    """A request that starts at any moment gets the newest version, and its slot stays its own until it ends."""

    async def test() -> None:
        async with bench(resident=3) as b:
            await b.publish(0)
            served: list[int] = []

            async def request(i: int) -> None:
                with b.adapters.lease("a") as lease:
                    assert lease.ref is not None
                    assert lease.lora is not None
                    slot = b.engine.ids[lease.lora.lora_int_id]
                    assert not served or lease.ref.version >= served[-1], "newer ones only"
                    served.append(lease.ref.version)
                    await asyncio.sleep(0.001 * (i % 90))
                    assert b.engine.ids[lease.lora.lora_int_id] == slot
                with pytest.raises(UnknownVersionError):
                    b.adapters.lease("c").__enter__()

            async def traffic() -> None:
                async with asyncio.TaskGroup() as group:
                    for i in itertools.count():
                        group.create_task(request(i))
                        await asyncio.sleep(0.002)
                        if over.is_set():
                            break

            async def publishes() -> None:
                for version in range(1, 12):
                    await b.publish(version)
                over.set()

            over = asyncio.Event()
            await asyncio.gather(traffic(), publishes())
            assert len(set(served)) > 8

    run(test())


def test_a_worker_with_another_secret_never_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        channel = ch.WorkerChannel(SECRET)
        try:
            Worker(0, channel.ports, secret="cd" * 32)
            with pytest.raises(PublishError, match=r"workers \[0\] did not connect .* another run secret"):
                await channel.connect(1)
        finally:
            channel.close()

    monkeypatch.setattr(ch, "CONNECT_S", 0.5)
    run(test())


def test_announcements_of_the_bench_are_real_ones() -> None:
    assert decode(body(3)).manifest.ref == AdapterRef(name="a", version=3)


# ------------------------------------------------------------ merged weights: one version


def one_version() -> Any:
    return bench(resident=2, merged=True)


def test_merged_weights_are_one_version_and_no_base() -> None:
    async def check() -> None:
        async with one_version() as b:
            with b.adapters.lease("base") as lease:
                assert lease.lora is None
            await b.publish(0)
            await b.publish(1)
            assert b.holds(1)
            with b.adapters.lease("a") as lease:
                assert (lease.name, lease.lora) == ("a@v1", None)
            for gone in ("a@v0", "base"):
                with pytest.raises(UnknownVersionError):
                    b.adapters.lease(gone).__enter__()
            calls = [name for name, _ in b.engine.calls]
            assert calls == ["reset_prefix_cache", "al_commit"] * 2, "no block of the version before is reused"

    asyncio.run(check())


def test_nothing_runs_while_merged_weights_change() -> None:
    async def check() -> None:
        async with one_version() as b:
            await b.publish(0)
            events: list[str] = []
            cut = asyncio.Event()

            async def interrupt(ref: AdapterRef) -> None:
                cut.set()

            async def rollout(name: str) -> None:
                await b.adapters.gate.opened()
                with b.adapters.lease("a", or_newer=True) as lease:
                    events.append(f"{name} {lease.name}")
                    await cut.wait()
                    await asyncio.sleep(0.05)
                    events.append(f"{name} ends, {len(b.engine.calls)}")

            b.adapters.interrupt = interrupt
            before = len(b.engine.calls)
            running = asyncio.create_task(rollout("first"))
            await asyncio.sleep(0)
            publish = asyncio.create_task(b.publish(1))
            await cut.wait()
            with pytest.raises(PublishError, match="being replaced"):
                b.adapters.lease("a").__enter__()
            waiting = asyncio.create_task(rollout("second"))
            await asyncio.gather(running, publish, waiting)
            assert events[:3] == ["first a@v0", f"first ends, {before}", "second a@v1"]

    asyncio.run(check())


def test_a_pinned_request_holds_up_a_merged_version_for_half_of_its_time() -> None:
    async def check() -> None:
        async with one_version() as b:
            await b.publish(0)

            async def evaluation(length_s: float) -> str:
                with b.adapters.lease("a@v0", pinned=True) as lease:
                    await asyncio.sleep(length_s)
                    return lease.name

            short, endless = (asyncio.create_task(evaluation(s)) for s in (0.1, 1000.0))
            await asyncio.sleep(0)
            began = asyncio.get_running_loop().time()
            await b.adapters.publish(body(1, timeout_s=1.0))
            assert asyncio.get_running_loop().time() - began > 0.4
            assert await short == "a@v0"
            with pytest.raises(
                UnknownVersionError, match=r"a@v1 replaced the weights: a merged server holds one version"
            ):
                await endless

    run_in_time(check)


def test_a_request_that_does_not_end_keeps_the_old_merged_version() -> None:
    async def check() -> None:
        async with one_version() as b:
            await b.publish(0)
            with b.adapters.lease("a"):
                await b.fails(1, "slot", 0.5, ManifestError)
                assert b.holds(0)
                assert b.adapters.gate.is_open
            await b.publish(1)
            assert b.holds(1)

    asyncio.run(check())


def test_merged_weights_that_were_not_written_whole_are_not_served() -> None:
    async def check() -> None:
        async with one_version() as b:
            await b.publish(0)
            b.engine.fail = "al_commit"
            with pytest.raises(PublishError, match="al_commit failed"):
                await b.publish(1)
            assert b.holds()
            for name in ("a", "a@v0", "a@v1", "base"):
                with pytest.raises(UnknownVersionError):
                    b.adapters.lease(name).__enter__()
            await b.publish(1)
            assert b.holds(1)

    asyncio.run(check())
