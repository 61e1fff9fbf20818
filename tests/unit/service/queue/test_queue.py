"""The queue with its real file and connection, against a trainer without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import Operation, OperationFailure, OptimStep, Pass, PassResult, Poison, StepResult
from areal_lora.service.http import refusal
from areal_lora.service.queue.client_sessions import AdapterRequest, expire, open_sampler, saved, set_ttl, unload
from areal_lora.service.queue.ordering import GAP_S
from areal_lora.service.queue.placement import DEAD_S, SILENT_S
from areal_lora.service.queue.queue import FORGET_S, SHARED_S
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.service.queue.queue_store import Transaction
from areal_lora.service.queue.queue_writer import UNUSED_S
from areal_lora.service.queue.requests import ActionResult, CreateModel, Load, Lora, Pending, Save, Train
from tests.support.operations.scripted_trainer import scores
from tests.support.service.queue import LORA, QUOTA, STEP, WAIT_S, Town, accept, tokens, town, until

T = TypeVar("T")


def test_requests_arrive_in_any_order_and_are_carried_out_in_theirs(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "a run") as it:
            model = await it.model()
            order = [3, 2, 4, 1]  # the first chunk comes last
            actions = {1: tokens(1, 2, 3), 2: tokens(4, 5), 3: tokens(6, 7), 4: STEP}
            requests = [await it.queue.submit("acme", model, seq, f"print {seq}", actions[seq]) for seq in order]
            again = [await it.queue.submit("acme", model, seq, f"print {seq}", actions[seq]) for seq in order]
            assert again == requests
            answers = dict(zip(order, [await it.answer("acme", each) for each in requests], strict=True))
            for seq in (1, 2, 3):
                what = actions[seq].what
                assert isinstance(what, Pass)
                assert answers[seq] == scores(what.data, 0)
            assert answers[4] == StepResult(step=1, grad_norm=3.0, skipped=False)
            assert [operation.number for operation in it.trainer.carried_out] == [1, 2, 3, 4]
            with pytest.raises(RequestError, match="another request") as refused:
                await it.queue.submit("acme", model, 2, "other", tokens(1, 1))
            assert refused.value.status == 422

    asyncio.run(run())


def test_a_number_that_never_comes_fails_its_window_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            held = await it.queue.submit("acme", model, 2, "print", STEP)
            assert isinstance(await it.queue.outcome("acme", held, 0.0), Pending)
            it.now_s += GAP_S + 1
            answer = await it.answer("acme", held)
            assert isinstance(answer, OperationFailure)
            assert "request 1 of its window never came" in answer.reason
            assert isinstance(await it.asked(model, 3, tokens(1, 2)), PassResult)
            assert isinstance(await it.asked(model, 4, STEP), StepResult)
            with pytest.raises(RequestError, match="passed over"):
                await it.queue.submit("acme", model, 1, "print", tokens(1, 2))

    asyncio.run(run())


def test_save_load_and_begin_from_what_was_saved(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            await it.asked(model, 1, tokens(1, 2))
            await it.asked(model, 2, STEP)
            stored = await it.asked(model, 3, Save(name="one"))
            assert stored == ActionResult(path=f"tinker://{model}/weights/one")
            await it.asked(model, 4, tokens(1, 2))
            assert await it.asked(model, 5, STEP) == StepResult(step=2, grad_norm=1.0, skipped=False)
            assert await it.asked(model, 6, Load(path=stored.path, optimizer=True)) == ActionResult(
                model=model, path=stored.path
            )
            await it.asked(model, 7, tokens(1, 2))
            assert await it.asked(model, 8, STEP) == StepResult(step=2, grad_norm=1.0, skipped=False)
            other = await it.model(load=Load(path=stored.path, optimizer=False))
            await it.asked(other, 1, tokens(1, 2))
            assert await it.asked(other, 2, STEP) == StepResult(step=2, grad_norm=1.0, skipped=False)
            [state] = await it.queue.change(lambda tx: saved(tx, "acme"))
            assert (state.path, state.step, state.n_bytes) == (stored.path, 1, 1000)
            taken = await it.asked(model, 9, Save(name="one"))
            assert isinstance(taken, OperationFailure)
            assert "there is a saved state" in taken.reason
            await it.queue.change(lambda tx: expire(tx, tx.state("acme", stored.path)))
            await until(lambda: gone(it))
            with pytest.raises(RequestError, match="no saved state"):
                await it.queue.change(lambda tx: tx.state("acme", stored.path))

    async def gone(it: Town) -> bool:
        return not it.trainer.disk.states

    asyncio.run(run())


def test_sampling_sessions(tmp_path: Path) -> None:
    """Newest, in flight, and a snapshot that is not the newest: an adapter of its own serves it."""

    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            adapter = (await it.queue.change(lambda tx: tx.model("acme", model))).adapter
            session = model.partition(":")[0]
            base = await it.queue.change(lambda tx: open_sampler(tx, "acme", session, 50, None))
            assert await it.queue.serve("acme", base) == ""
            opened = await it.asked(model, 1, Save(for_sampler=True, sampler_seq=0))
            assert isinstance(opened, ActionResult)
            assert await it.queue.serve("acme", opened.sampler) == f"{adapter}@v0"
            await it.asked(model, 2, tokens(1, 2))
            await it.asked(model, 3, STEP)
            flying = await it.asked(model, 4, Save(for_sampler=True, sampler_seq=1, in_flight=True))
            assert isinstance(flying, ActionResult)
            assert await it.queue.serve("acme", flying.sampler) == adapter
            await asyncio.sleep(2 * SHARED_S)
            first = await it.queue.serve("acme", opened.sampler)
            assert isinstance(first, Pending)
            assert first.capacity

            async def served() -> bool:
                return isinstance(await it.queue.serve("acme", opened.sampler), str)

            await until(served)
            again = await it.queue.serve("acme", opened.sampler)
            assert isinstance(again, str)
            assert again is not None
            assert again.startswith("acme-snapshot-")
            loaded = [op for op in it.trainer.carried_out if op.adapter == again.partition("@")[0]]
            assert [type(op.what).__name__ for op in loaded] == ["LoadState", "Publish"]

    asyncio.run(run())


@pytest.mark.parametrize(("adapters", "capacity"), [(1, 4), (3, 1)])
def test_a_snapshot_does_not_wait_for_a_place_that_its_own_session_has(
    adapters: int, capacity: int, tmp_path: Path
) -> None:
    async def run() -> None:
        quota = Quota(adapters=adapters)
        async with town(tmp_path / "run", capacity=capacity, quota=quota) as it:
            model = await it.model()
            opened = await it.asked(model, 1, Save(for_sampler=True, sampler_seq=0))
            assert isinstance(opened, ActionResult)
            assert isinstance(await it.queue.serve("acme", opened.sampler), str)
            await it.asked(model, 2, tokens(1, 2))
            await it.asked(model, 3, STEP)
            await it.asked(model, 4, Save(for_sampler=True, sampler_seq=1))
            await asyncio.sleep(2 * SHARED_S)
            with pytest.raises(RequestError, match="the 1 models of this session have every place"):
                await it.queue.serve("acme", opened.sampler)

    asyncio.run(run())


def test_a_snapshot_leaves_for_a_model_and_is_loaded_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=2) as it:
            model = await it.model()
            session = model.partition(":")[0]
            stored = await it.asked(model, 1, Save(name="one"))
            assert isinstance(stored, ActionResult)
            sampler = await it.queue.change(lambda tx: open_sampler(tx, "acme", session, 0, stored.path))

            async def served() -> bool:
                return isinstance(await it.queue.serve("acme", sampler), str)

            await until(served)
            other = await it.queue.create_model(
                "bolt", await it.queue.open_session("bolt"), 0, "p", CreateModel(lora=LORA)
            )
            waits = await it.queue.outcome("bolt", other, 0.0)
            assert isinstance(waits, Pending)
            it.now_s += 100.0  # the snapshot is not in use
            await it.queue.heartbeat("acme", session)
            await it.queue.heartbeat("bolt", other.partition(":")[0])
            await it.answer("bolt", other)
            found = await it.queue.serve("acme", sampler)
            assert found == Pending(reason="no server has a place for the weights at present", capacity=True)
            await it.queue.unload("bolt", other.removesuffix(":create"))
            await until(served)

    asyncio.run(run())


def test_crashes_of_the_trainer_lose_no_step(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            made = []
            for step in range(6):
                seq = 3 * step
                requests = [
                    await it.queue.submit("acme", model, seq + i, f"print {seq + i}", action)
                    for i, action in ((2, tokens(1, 2)), (3, STEP), (1, tokens(3, 4)))
                ]
                await asyncio.to_thread(it.trainer.crash)
                made.append([await it.answer("acme", request) for request in requests][1])
            assert made == [StepResult(step=step + 1, grad_norm=2.0, skipped=False) for step in range(6)]

    asyncio.run(run())


def test_a_restart_of_the_service_continues(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            await it.asked(model, 1, tokens(1, 2))
            held = await it.queue.submit("acme", model, 3, "print 3", STEP)
            disk = it.trainer.disk
        async with town(tmp_path / "run", disk=disk) as it:
            assert await it.queue.submit("acme", model, 3, "print 3", STEP) == held
            assert isinstance(await it.answer("acme", f"{model}:1"), PassResult)
            assert isinstance(await it.asked(model, 2, tokens(1, 2)), PassResult)
            assert await it.answer("acme", held) == StepResult(step=1, grad_norm=2.0, skipped=False)

    asyncio.run(run())


def test_what_is_anothers_is_unknown(tmp_path: Path) -> None:
    """The same words as for what does not exist, for every call."""

    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            session = model.partition(":")[0]
            stored = await it.asked(model, 1, Save(name="one"))
            assert isinstance(stored, ActionResult)
            sampler = await it.queue.change(lambda tx: open_sampler(tx, "acme", session, 0, stored.path))
            own = await it.queue.open_session("bolt")
            mine = await it.model("bolt", own)
            queue = it.queue
            calls = {
                "session": (session, lambda name: queue.heartbeat("bolt", name)),
                "end": (session, lambda name: queue.end_session("bolt", name)),
                "create": (session, lambda name: queue.create_model("bolt", name, 1, "p", CreateModel(lora=LORA))),
                "from": (
                    stored.path,
                    lambda name: queue.create_model(
                        "bolt", own, 1, "p", CreateModel(lora=None, load=Load(path=name, optimizer=True))
                    ),
                ),
                "submit": (model, lambda name: queue.submit("bolt", name, 1, "p", STEP)),
                "model": (model, lambda name: queue.change(lambda tx: tx.model("bolt", name))),
                "unload": (model, lambda name: queue.unload("bolt", name)),
                "run": (model, lambda name: queue.change(lambda tx: tx.model("bolt", name, removed=True))),
                "look": (session, lambda name: queue.change(lambda tx: tx.session("bolt", name, ended=True))),
                "sample": (sampler, lambda name: queue.keep_sample("bolt", name, "one", "p", b"")),
                "outcome": (f"{model}:1", lambda name: queue.outcome("bolt", name, 0.0)),
                "saved": (stored.path, lambda name: queue.change(lambda tx: tx.state("bolt", name))),
                "ttl": (stored.path, lambda name: queue.change(lambda tx: set_ttl(tx, "bolt", name, 5.0))),
                "drop": (stored.path, lambda name: queue.change(lambda tx: expire(tx, tx.state("bolt", name)))),
                "open": (stored.path, lambda name: queue.change(lambda tx: open_sampler(tx, "bolt", own, 0, name))),
                "sampler": (sampler, lambda name: queue.change(lambda tx: tx.sampler("bolt", name))),
                "serve": (sampler, lambda name: queue.serve("bolt", name)),
            }
            for what, (name, call) in calls.items():
                reasons = []
                for asked in (name, odd := name.replace(session, "s" + "0" * 12)):
                    with pytest.raises(RequestError) as refused:
                        await call(asked)
                    assert refused.value.status == 404, what
                    reasons.append(refusal(refused.value).body.decode().replace(asked, "NAME"))
                assert odd != name
                assert reasons[0] == reasons[1], what
            assert await queue.change(lambda tx: saved(tx, "bolt")) == []
            assert await queue.change(lambda tx: saved(tx, "bolt", model)) == []
            assert [
                each.model
                for each in await queue.change(lambda tx: tx.models("tenant = ? AND of_state IS NULL", "bolt"))
            ] == [mine]
            reasons = []
            for seq, path in enumerate((stored.path, odd_path := stored.path.replace(session, "s" + "0" * 12)), 1):
                answer = await it.asked(mine, seq, Load(path=path, optimizer=True), "bolt")
                assert isinstance(answer, OperationFailure)
                reasons.append(answer.reason.replace(path, "NAME"))
            assert odd_path != stored.path
            assert reasons[0] == reasons[1]

    asyncio.run(run())


def test_a_silent_session_ends_and_its_states_stay(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model, other = await it.model(), await it.model()
            stored = await it.asked(model, 1, Save(name="one"))
            assert isinstance(stored, ActionResult)
            it.now_s += SILENT_S - 10
            await it.queue.heartbeat("acme", other.partition(":")[0])
            it.now_s += 20

            async def ended() -> bool:
                left = await it.queue.change(lambda tx: tx.models("tenant = ? AND of_state IS NULL", "acme"))
                return [each.removed for each in left] == [True, False]

            await until(ended)
            with pytest.raises(RequestError) as refused:
                await it.queue.heartbeat("acme", model.partition(":")[0])
            assert refused.value.status == 410
            again = await it.model(load=Load(path=stored.path, optimizer=True))
            assert isinstance(await it.asked(again, 1, tokens(1, 2)), PassResult)

    asyncio.run(run())


def test_answers_are_looked_through_once_in_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = list[set[str]]()
    monkeypatch.setattr("areal_lora.service.queue.queue_writer.forget", lambda tx, fetched: rounds.append(fetched))

    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            await it.asked(model, 1, tokens(1, 2))
            for later_s, expected in ((0, 0), (FORGET_S / 2, 0), (FORGET_S / 2, 1), (0, 1), (-FORGET_S, 2)):
                it.now_s += later_s
                await it.queue.keep()
                assert len(rounds) == expected
            assert f"{model}:1" in rounds[0]

    asyncio.run(run())


def test_a_new_session_is_not_silent_however_old_the_service_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run") as it:
            it.now_s += SILENT_S + 10
            session = await it.queue.open_session("acme")
            await it.queue.keep()
            await it.queue.heartbeat("acme", session)

    asyncio.run(run())


def test_a_silent_session_gives_its_place_to_a_client_that_waits_and_only_then(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=2) as it:
            first, second = await it.model(), await it.model(tenant="bolt")
            it.now_s += DEAD_S + 1
            await it.queue.keep()
            await it.queue.heartbeat("acme", first.partition(":")[0])
            await it.queue.heartbeat("bolt", second.partition(":")[0])  # no one waits, so both are there
            it.now_s += DEAD_S - 5
            await it.queue.heartbeat("bolt", second.partition(":")[0])
            third = await it.queue.create_model(
                "bolt", await it.queue.open_session("bolt"), 0, "p", CreateModel(lora=LORA)
            )
            name = second.replace(":train:", "-")
            reason = f"waits for a place; yours are {name} (fix: close their clients, or areal-lora adapters delete RUN"

            async def is_told() -> bool:
                waits = await it.queue.outcome("bolt", third, 0.0)
                return isinstance(waits, Pending) and waits.capacity and waits.reason == f"{reason} {name})"

            await until(is_told)
            it.now_s += 10
            await it.queue.heartbeat("bolt", second.partition(":")[0])
            await it.queue.heartbeat("bolt", third.partition(":")[0])
            await it.answer("bolt", third)
            with pytest.raises(RequestError) as refused:
                await it.queue.heartbeat("acme", first.partition(":")[0])
            assert refused.value.status == 410
            await it.queue.heartbeat("bolt", second.partition(":")[0])

    asyncio.run(run())


def test_a_full_quota_of_silent_sessions_takes_a_new_model_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=9) as it:
            models = [await it.model() for _ in range(QUOTA.adapters)]
            with pytest.raises(RequestError) as refused:
                await it.model()
            assert refused.value.status == 429
            it.now_s += DEAD_S + 1
            for model in models[1:]:
                await it.queue.heartbeat("acme", model.partition(":")[0])
            await it.model()
            with pytest.raises(RequestError):
                await it.queue.heartbeat("acme", models[0].partition(":")[0])

    asyncio.run(run())


def test_a_client_that_trains_is_not_silent_without_heartbeats(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=9) as it:
            models = [await it.model() for _ in range(QUOTA.adapters)]
            it.now_s += DEAD_S - 1
            for model in models:
                await it.asked(model, 1, tokens(1, 2))
            it.now_s += DEAD_S - 1
            with pytest.raises(RequestError) as refused:
                await it.model()
            assert refused.value.status == 429

    asyncio.run(run())


def test_a_session_does_not_wait_for_its_own_models(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=2) as it:
            session = (await it.model()).partition(":")[0]
            assert await it.queue.placement.crowded("acme") == ""
            await it.queue.open_session("acme")
            it.now_s += DEAD_S + 1
            await it.queue.heartbeat("acme", session)
            await it.model(session=session, seq=1)
            crowded = await it.queue.placement.crowded("bolt")
            assert crowded == "all 2 places of the servers are taken", "no names of other tenants"
            assert f"; yours are {session}-0, {session}-1 (fix: " in await it.queue.placement.crowded("acme")
            with pytest.raises(
                RequestError, match=f"the 2 models of this session .* delete RUN {session}-0"
            ) as refused:
                await it.model(session=session, seq=2)
            assert refused.value.status == 422
            await it.queue.unload("acme", f"{session}:train:0")
            await it.model(session=session, seq=2)

    asyncio.run(run())


def test_a_model_is_taken_out_by_upkeep_and_its_client_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=1) as it:
            model = await it.model()
            name = model.replace(":train:", "-")
            unloaded = it.queue.change(lambda tx: unload(tx, "acme", model))
            await asyncio.gather(unloaded, it.queue.keep(), it.queue.end_session("acme", model.partition(":")[0]))
            assert ("acme", name) not in it.writer.tables.adapters
            await it.model()

    asyncio.run(run())


def test_a_session_that_ends_while_its_model_is_checked_gets_none(tmp_path: Path) -> None:
    """Nothing would end that model: no session is silent that has ended."""

    async def run() -> None:
        async with town(tmp_path / "run") as it:
            session, loop = await it.queue.open_session("acme"), asyncio.get_running_loop()

            def slow(name: str, tenant: str, lora: Lora, quota: Quota) -> AdapterRequest:
                asyncio.run_coroutine_threadsafe(it.queue.end_session(tenant, session), loop).result(WAIT_S)
                return accept(name, tenant, lora, quota)

            it.queue._accept = slow
            with pytest.raises(RequestError) as refused:
                await it.queue.create_model("acme", session, 0, "p", CreateModel(lora=LORA))
            assert refused.value.status == 410
            assert not it.writer.tables.of("acme")

    asyncio.run(run())


def test_sessions_that_end_leave_nothing_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lora.service.queue.queue_writer.MAX_ENDED", 4)

    async def run() -> None:
        async with town(tmp_path / "run") as it:

            def rows(tx: Transaction) -> list[int]:
                tables = ("sessions", "models", "samplers", "samples", "saved_states", "dropped_states")
                return [tx.rows(f"SELECT COUNT(*) FROM {table}")[0][0] for table in tables]

            found = []
            for n in range(12):
                model = await it.model()
                session = model.partition(":")[0]
                opened = await it.asked(model, 1, Save(for_sampler=True, sampler_seq=0))
                assert isinstance(opened, ActionResult)
                await it.queue.serve("acme", opened.sampler)
                await it.queue.end_session("acme", session)
                if n % 4 == 3:
                    it.now_s += UNUSED_S + 1  # the state that only the sampling session had
                    await it.queue.keep()
                    memory = len(it.queue.placement.used_s), len(it.queue._heartbeats.silent(-1.0))
                    found.append([*await it.queue.change(rows), *memory])
            assert found == [[4, 4, 0, 0, 0, 0, 0, 0]] * 3

    asyncio.run(run())


def test_samples_that_wait_share_one_look_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with town(tmp_path / "run", capacity=2) as it:
            model, _ = await it.model(), await it.model("bolt")
            stored = await it.asked(model, 1, Save(name="one"))
            assert isinstance(stored, ActionResult)
            sampler = await it.queue.change(
                lambda tx: open_sampler(tx, "acme", model.partition(":")[0], 0, stored.path)
            )
            jobs, change = 0, it.writer.change

            async def counted(work: Callable[[Transaction], T], now_s: float) -> tuple[T, Transaction]:
                nonlocal jobs
                jobs += 1
                return await change(work, now_s)

            it.writer.change = counted  # type: ignore[method-assign]
            waits = await asyncio.gather(*(it.queue.serve("acme", sampler) for _ in range(256)))
            assert set(waits) == {Pending(reason="no server has a place for the weights at present", capacity=True)}
            assert jobs < 16, "of 256 samples; the queue's own work is among them"
            jobs = 0
            for _ in range(100):
                await it.queue.heartbeat("acme", model.partition(":")[0])
            assert jobs < 16, "a heartbeat is no transaction"

    asyncio.run(run())


def test_a_refused_step_ends_its_window(tmp_path: Path) -> None:
    """Its passes are forgotten, and the step after it has a window of its own."""

    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            await it.asked(model, 1, tokens(1, 2))
            refused = Train(what=Poison(reason="no such rate", by_client=True, of_step=True))
            assert await it.asked(model, 2, refused) == OperationFailure(reason="no such rate", by_client=True)
            await it.asked(model, 3, tokens(1, 2))
            assert await it.asked(model, 4, STEP) == StepResult(step=1, grad_norm=1.0, skipped=False)

    asyncio.run(run())


def test_a_failed_pass_fails_its_step(tmp_path: Path) -> None:
    def fault(operation: Operation) -> OperationFailure | None:
        bad = isinstance(operation.what, Pass) and len(operation.what.data[0].tokens) == 20
        return OperationFailure(reason="too long", by_client=True) if bad else None

    async def run() -> None:
        async with town(tmp_path / "run", fault=fault) as it:
            model = await it.model()
            assert await it.asked(model, 1, tokens(1, 2, 3, 4, 5)) == OperationFailure(
                reason="too long", by_client=True
            )
            step = await it.asked(model, 2, STEP)
            assert isinstance(step, OperationFailure)
            assert step.by_client
            refused = Train(what=Poison(reason="no such loss", by_client=True))
            assert await it.asked(model, 3, refused) == OperationFailure(reason="no such loss", by_client=True)
            assert isinstance(await it.asked(model, 4, Train(what=OptimStep(lr=1.0))), OperationFailure)
            await it.asked(model, 5, tokens(1, 2))
            assert await it.asked(model, 6, STEP) == StepResult(step=1, grad_norm=1.0, skipped=False)

    asyncio.run(run())


def test_the_default_quota_takes_a_run_of_the_cookbook(tmp_path: Path) -> None:
    """2,000 steps; its trainers save a state and one for samplers every 20, each for seven days."""

    async def run() -> None:
        async with town(tmp_path / "run", quota=Quota()) as it:
            model = await it.model()
            saves = [
                Save(name=f"{step:06d}", ttl_s=604_800.0, for_sampler=for_sampler)
                for step in range(20, 2001, 20)
                for for_sampler in (False, True)
            ]
            waits = [await it.queue.submit("acme", model, seq, "f", save) for seq, save in enumerate(saves, 1)]
            answers = [await it.answer("acme", each) for each in waits]
            assert [each for each in answers if not isinstance(each, ActionResult)] == []

    asyncio.run(run())


def test_what_is_wrong_with_a_save_fails_it_alone_and_with_a_load_its_window(tmp_path: Path) -> None:
    """It takes its place: nothing behind it waits for a number that never comes."""

    async def run() -> None:
        async with town(tmp_path / "run") as it:
            model = await it.model()
            await it.asked(model, 1, tokens(1, 2))
            for seq, action in ((2, Save(name="no/name")), (3, Save(for_sampler=True, name="a" * 101))):
                answer = await it.asked(model, seq, action)
                assert isinstance(answer, OperationFailure)
                assert answer.by_client
                assert "is no name" in answer.reason
            assert await it.asked(model, 4, STEP) == StepResult(step=1, grad_norm=1.0, skipped=False)
            answer = await it.asked(model, 5, Load(path=f"tinker://{model}/weights/never", optimizer=True))
            assert isinstance(answer, OperationFailure)
            assert answer.by_client
            assert "there is no saved state" in answer.reason
            await it.asked(model, 6, tokens(1, 2))
            assert isinstance(await it.asked(model, 7, STEP), OperationFailure), "it was meant for other weights"
            await it.asked(model, 8, tokens(1, 2))
            assert await it.asked(model, 9, STEP) == StepResult(step=2, grad_norm=1.0, skipped=False)

    asyncio.run(run())
