"""Waiting for a batch, with parts that only say what was asked of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.config.load import load_config
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.errors import AlignmentError, ArealLoraError, ParityError, PublishError
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.trace import Spans
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.trainer import loop
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.collective.next_work import catch_up, collect_audit, join_checkpoint, next_work
from areal_lora.trainer.loop import save_and_publish, start_audit
from areal_lora.trainer.work import Finish, PublishFault, RolloutFault, SetPhase, TrainOn, Work
from areal_lora.types import AdapterPhase, AdapterRef
from areal_lora.weight_sync.trainer.publish_job import PublishJob
from tests.support.checkpoint.helpers import ThreadExchange, on_ranks
from tests.support.clocks import seen
from tests.support.distributed.spawn import RanksFailed, run_ranks
from tests.support.paths import EXAMPLES
from tests.support.rollout.helpers import NAME, config, episode, stream
from tests.support.solo_exchange import SoloExchange
from tests.support.trainer.control_ranks import wait_for_rollouts

PACKED = PackedGroups.of([episode(stream().at(p), version=3).group for p in range(4)])


def state(name: str, version: int = 3, steps: int = 9) -> TrainingState:
    run = SimpleNamespace(max_staleness=1, steps=steps, weight=1.0)
    config = SimpleNamespace(is_client=False, sampling=SimpleNamespace(temperature=1.0))
    made = TrainingState(adapter=SimpleNamespace(name=name, run=run, config=config), version=version)  # type: ignore[arg-type]
    made.phase = made.due_phase
    return made


class Controller:
    """Gives the next of ``works`` unless something else is to be done first."""

    def __init__(self, log: list[str], works: list[Work]) -> None:
        self._log, self._works = log, works

    def next_work(self, wanted: Any, draining: Any, interruption: Callable[[], Work | None], wait_s: float) -> Work:
        self._log.append(
            f"want {' '.join(map(str, wanted()))}" + (f", {' '.join(draining)} drains" if draining else "")
        )
        return interruption() or self._works.pop(0)


class Publishing:
    def __init__(self, log: list[str], changes: int) -> None:
        self._log, self._changes = log, changes
        self.broken: str | None = None
        self.jobs: dict[str, PublishJob] = {}

    def pending(self, adapter: str) -> PublishJob | None:
        return self.jobs.get(adapter)

    def failed(self) -> str | None:
        return self.broken

    def changed(self) -> bool:
        return self._changes > 0

    def join(self, adapter: str) -> None:
        pass

    def catch_up(self, adapter: str) -> None:
        self._changes -= 1
        self._log.append(f"send {adapter} again")


class Trainer:
    def __init__(self, states: list[TrainingState], works: list[Work], changes: int = 0) -> None:
        self.log: list[str] = []
        self.states = {each.name: each for each in states}
        turns = FairQueue(dict.fromkeys(self.states, 1.0))
        controller = Controller(self.log, works)
        self.rank_0 = SimpleNamespace(
            controller=controller, driver=lambda adapter: controller, turns=turns, desired=None, clients=None
        )
        self.publishing: Any = Publishing(self.log, changes)
        self.control, self.spans = SoloExchange(), defaultdict(Spans)


def test_servers_that_come_or_go_while_a_batch_is_awaited_are_seen_to_before_it() -> None:
    trainer: Any = Trainer([state("math")], [TrainOn(adapter="math", batch=PACKED)], changes=2)
    work = next_work(trainer)
    assert trainer.log == ["want math@v3", "send math again"] * 2 + ["want math@v3"]
    assert isinstance(work, TrainOn)
    assert (work.adapter, work.batch) == ("math", PACKED)


def test_a_version_that_was_not_published_is_noticed_while_its_batch_is_awaited() -> None:
    """At a staleness of 0 no batch ever comes without it."""
    trainer: Any = Trainer([state("a"), state("b")], [], changes=1)
    trainer.publishing.broken = "b"
    assert next_work(trainer) == PublishFault(adapter="b")


def test_what_is_awaited_follows_from_the_phases_and_from_whose_turn_it_is() -> None:
    states = [state("a"), state("b"), state("c", version=9), state("d")]
    trainer: Any = Trainer(states, [RolloutFault(adapter="d", reason="x"), Finish(adapter="c"), Finish(adapter="c")])
    trainer.rank_0.turns.trained("a", 10)
    next_work(trainer)
    assert trainer.log.pop() == "want b@v3 d@v3 a@v3, c drains"
    states[3].phase = AdapterPhase.FAILED
    next_work(trainer)
    assert trainer.log.pop() == "want b@v3 a@v3, c drains"
    for each in states[:2]:
        each.phase = AdapterPhase.DONE
    next_work(trainer)
    assert trainer.log.pop() == "want , c drains"
    states[2].phase = AdapterPhase.DONE
    assert next_work(trainer) is None


@pytest.mark.parametrize("adapters", [1, 2, 5])
def test_the_share_of_waiting_is_that_of_the_trainer_however_many_adapters_it_has(
    monkeypatch: pytest.MonkeyPatch, adapters: int
) -> None:
    """Adapters in turn: 60 s until there is a batch, 4 s for a checkpoint, 20 s of training, 16 s for a publish."""
    names, now_s, steps = [f"a{i}" for i in range(adapters)], [0.0], list[StepRecord]()
    trainer: Any = Trainer([state(name, steps=99) for name in names], [])
    trainer.checkpointing, trainer.rank_0 = SimpleNamespace(save=lambda *_, **__: None), None
    trainer.publishing = SimpleNamespace(publish=lambda *_: None)
    trainer.spans |= {name: Spans(lambda: now_s[0]) for name in names}
    works = [TrainOn(adapter=name, batch=PACKED) for name in names * 4]

    def passes(seconds: float, value: Any = None) -> Callable[..., Any]:
        def run(*_: object, **__: object) -> Any:
            now_s[0] += seconds
            return value

        return run

    def learn(*_: object, **__: object) -> Any:
        now_s[0] += 20
        own, at = trainer.spans[names[len(steps) % adapters]], len(steps) // adapters
        steps.append(StepRecord(step=at, version=at, time_s=0.0, step_s=own.total_s, spans=dict(own.seconds)))
        return SimpleNamespace(skipped=0.0, per_sampled_token=lambda _: None)

    def next_batch(*_: object) -> Work | None:
        now_s[0] += 60
        return works.pop(0) if works else None

    own: dict[str, Any] = dict.fromkeys(("start", "end", "enter", "check_finite", "controller_state", "collect_audit"))
    own |= {"start_audit": [], "batch_of": (None, {}), "annotate": None, "learning_rate": 0.1}
    for name, value in own.items():
        monkeypatch.setattr(loop, name, passes(0, value))
    for name, function in {"keep_pace": passes(4), "join_publish": passes(16), "learn": learn}.items():
        monkeypatch.setattr(loop, name, function)
    monkeypatch.setattr(loop, "next_work", next_batch)
    monkeypatch.setattr(
        TrainingState, "tuned", SimpleNamespace(config=SimpleNamespace(optimizer=None), run=state("a").adapter.run)
    )
    monkeypatch.setattr(TrainingState, "advance", passes(0))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    trainer.run_folder, trainer.engine = (
        SimpleNamespace(profile=None),
        SimpleNamespace(spans=Spans(), memory=lambda: None),
    )
    trainer.config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"])
    loop.train(trainer)
    assert [step.trainer_idle for step in steps[adapters:]] == pytest.approx([0.8] * 3 * adapters)
    assert {step.step_s for step in steps[adapters:]} == {100.0 * adapters}


def test_an_adapter_whose_publish_waits_for_a_slot_takes_no_step_while_others_can() -> None:
    """The step would wait for the slot at its end, and all others with it."""
    trainer: Any = Trainer([state(name) for name in "abc"], [Finish(adapter="x")] * 4)
    parts: Any = dict.fromkeys(("manifest", "layout", "shard", "probe", "budget"))
    jobs = trainer.publishing.jobs = {name: PublishJob(**parts, began_s=0.0) for name in "abc"}
    seen: list[str] = []
    for full, ended in (("", ""), ("ab", ""), ("abc", ""), ("abc", "b")):
        for name in full:
            jobs[name].full_s = 1.0
        for name in ended:
            jobs[name].outcome.set_result(SimpleNamespace())
        next_work(trainer)
        seen.append(trainer.log.pop())
    assert seen == ["want a@v3 b@v3 c@v3", "want c@v3", "want a@v3 b@v3 c@v3", "want b@v3"]


def test_adapters_that_come_or_go_are_seen_to_between_steps_and_while_a_batch_is_awaited() -> None:
    trainer: Any = Trainer([state("a")], [TrainOn(adapter="a", batch=PACKED)])
    leave, pause = (SetPhase(adapter="a", phase=DesiredPhase(phase)) for phase in ("deleted", "paused"))
    rolls: list[Any] = [leave, None, pause, None, None]
    assert next_work(trainer, lambda: rolls.pop(0)) == leave
    assert trainer.log == [], "before the next batch is asked for"
    assert next_work(trainer, lambda: rolls.pop(0)) == pause
    assert trainer.log == ["want a@v3"], "while it is awaited"
    assert next_work(trainer, lambda: rolls.pop(0)) == TrainOn(adapter="a", batch=PACKED)


def test_a_service_waits_without_adapters_until_no_more_will_come() -> None:
    trainer: Any = Trainer([], [Finish(adapter="x")])
    trainer.rank_0.desired = SimpleNamespace(newest=SimpleNamespace(closed=False))
    assert next_work(trainer) == Finish(adapter="x")
    assert trainer.log == ["want "]
    trainer.rank_0.desired.newest.closed = True
    assert next_work(trainer) is None


@pytest.mark.slow
def test_ranks_wait_for_rollouts_longer_than_their_exchange_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those of a step, or of a service without requests: rank 0 renews the time-out of the others."""
    late = [RolloutFault(adapter=NAME, reason="late")] * 2

    def measure() -> list[RolloutFault]:
        with suppress(RanksFailed):  # a time-out of 3 s, which a stall exceeds
            return run_ranks(wait_for_rollouts, 2, tmp_path_factory.mktemp("ranks"), (), timeout_s=45.0)
        return []

    assert seen(measure, lambda found: found == late) == late


def test_a_paused_adapter_gets_no_turn_and_keeps_the_run() -> None:
    trainer: Any = Trainer([state("a"), state("b")], [TrainOn(adapter="b", batch=PACKED), Finish(adapter="x")])
    trainer.states["a"].phase = AdapterPhase.PAUSED
    next_work(trainer)
    trainer.states["b"].phase = AdapterPhase.DONE
    next_work(trainer)
    assert trainer.log == ["want b@v3", "want "]


def test_servers_get_the_versions_of_adapters_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state("a"), state("b"), state("c", version=9)]
    states[0].phase = AdapterPhase.FAILED
    trainer: Any = Trainer(states, [])
    catch_up(trainer)
    assert trainer.log == ["send b again", "send c again"]


def changed_for(error: ArealLoraError) -> Any:
    """A trainer whose servers change while ``a`` and ``b`` wait for batches; they refuse ``a`` with ``error``."""
    trainer: Any = Trainer([state("a"), state("b")], [TrainOn(adapter="b", batch=PACKED)], changes=1)
    send = trainer.publishing.catch_up

    def catch_up(adapter: str) -> None:
        if adapter == "a":
            raise error
        send(adapter)

    trainer.publishing.catch_up = catch_up
    trainer.config, trainer.checkpointing = SimpleNamespace(service=None), SimpleNamespace(join=lambda name: None)
    trainer.engine = SimpleNamespace(remove_adapter=lambda name: None)
    trainer.states["a"].adapter.algorithm = SimpleNamespace(critic=None, reference=None)
    trainer.publishing.drop = lambda name: trainer.log.append(f"drop {name}")
    trainer.rank_0.controller.end = lambda name, reason: trainer.log.append(f"end {name}")
    trainer.rank_0.recorder = SimpleNamespace(phase=lambda *_: None)
    return trainer


def test_an_adapter_that_servers_refuse_as_they_come_ends_alone() -> None:
    trainer = changed_for(ParityError("a serves something else"))
    assert next_work(trainer) == TrainOn(adapter="b", batch=PACKED)
    assert trainer.log == ["want a@v3 b@v3", "drop a", "end a", "send b again", "want b@v3"]
    assert [each.phase for each in trainer.states.values()] == [AdapterPhase.FAILED, AdapterPhase.ACTIVE]


def test_too_few_servers_end_all() -> None:
    with pytest.raises(PublishError):
        next_work(changed_for(PublishError("none remains")))


class Rank:
    """A trainer rank of which rank 0 joins late: its controller is away."""

    def __init__(self, exchange: ThreadExchange, log: list[str]) -> None:
        self.config, self.control, self.rank_0 = config("m", eta=1), exchange, None
        self.checkpointing: Any = self
        self.publishing: Any = self
        self.spans = {"math": Spans()}
        self._log = log

    def join(self, adapter: str) -> None:
        if self.control.rank == 0:
            time.sleep(0.3)
            self._log.append("rank 0 has joined")

    def save(self, state: Any, controller: Any, *, at_once: bool) -> None:
        pass

    def publish(self, adapter: Any, version: int) -> None:
        self._log.append("continues")


@pytest.mark.parametrize("what", [save_and_publish, join_checkpoint])
def test_no_rank_enters_other_collectives_before_rank_0_has_joined(what: Callable[..., None]) -> None:
    """Those have bounds that are shorter than what rank 0 may wait for the controller."""
    log: list[str] = []
    ranks = [Rank(exchange, log) for exchange in ThreadExchange.make(2)]

    def run(rank: int) -> None:
        what(ranks[rank], state("math"))
        log.append("continues")

    assert on_ranks(run) == [None, None]
    assert log.index("rank 0 has joined") == 0


class Auditor:
    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit

    def collect(self, name: str, *, wait: bool) -> Audit | None:
        return self._audit

    def start(self, ref: AdapterRef, batch: Any, temperature: float, *, base: bool) -> list[int]:
        assert base == (ref.version in (3, 19))
        return batch


@pytest.mark.parametrize("chosen", [[], [0, 17]])
@pytest.mark.parametrize("version", [0, 3, 4, 19])
def test_every_sixteenth_step_measures_causes_of_the_sequences_that_rank_0_audits(
    version: int, chosen: list[int]
) -> None:
    exchanges, found = ThreadExchange.make(2), dict[int, list[int]]()

    def run(rank: int) -> None:
        rank_0 = SimpleNamespace(auditor=Auditor(None)) if rank == 0 else None
        trainer: Any = SimpleNamespace(control=exchanges[rank], rank_0=rank_0)
        batch: Any = chosen
        found[rank] = start_audit(trainer, state("math", version), batch)

    assert on_ranks(run) == [None, None]
    assert found == dict.fromkeys(range(2), chosen if version in (3, 19) else [])


@pytest.mark.parametrize("error", ["", "rollout logprobs are shifted by one token"])
def test_what_a_server_says_of_a_batch_ends_all_ranks_alike(error: str) -> None:
    exchanges = ThreadExchange.make(2)
    audits: list[Audit | None] = [None, None]

    def run(rank: int) -> None:
        rank_0 = SimpleNamespace(auditor=Auditor(Audit(tokens=5, error=error))) if rank == 0 else None
        trainer: Any = SimpleNamespace(control=exchanges[rank], rank_0=rank_0)
        audits[rank] = collect_audit(trainer, state("math"))

    ends = on_ranks(run)
    if error:
        assert [type(e) for e in ends] == [AlignmentError] * 2
        assert {str(e) for e in ends} == {error}
    else:
        assert ends == [None, None]
        assert audits == [Audit(tokens=5), None]
