"""When evaluations are requested, what their results become, and what a checkpoint keeps of both."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_lora.checkpoint.checkpoint_store import plan_deletions
from areal_lora.checkpoint.state import Evaluation
from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import EvalRecord, SampleRecord
from areal_lora.rollout.channel.channel_messages import EvalResult, NotReady
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import ControllerState
from areal_lora.trainer.controller_link import ControllerLink, evaluation_due
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.work import Finish
from areal_lora.types import AdapterRef
from tests.support.rollout.helpers import NAME, config


@pytest.mark.parametrize(
    ("version", "newest", "every_steps", "due", "unsaved"),
    [
        (0, -1, 20, True, True),
        (0, -1, 0, True, True),
        (1, 0, 20, False, False),
        (19, 0, 20, False, False),
        (20, 0, 20, True, True),
        (21, 20, 20, False, False),
        (23, 0, 20, True, False),  # 20 was passed over
        (40, 23, 20, True, True),
        (39, 23, 20, False, False),
        (7, -1, 0, False, False),
        (99, 0, 0, False, False),
        (100, 0, 0, True, True),
        (100, 100, 20, True, True),
        (97, 80, 20, False, False),
        (97, 60, 20, True, False),
    ],
)
def test_when_an_evaluation_is_due(version: int, newest: int, every_steps: int, due: bool, unsaved: bool) -> None:
    assert evaluation_due(version, newest, every_steps=every_steps, last=100, saved=True) is due
    assert evaluation_due(version, newest, every_steps=every_steps, last=100, saved=False) is unsaved


class Client:
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.moved: dict[str, tuple[int, int]] = {}

    def poll(self, *_: Any) -> NotReady:
        return NotReady(lacking=(), moved=self.moved)

    def take_events(self) -> tuple[EvalResult, ...]:
        return ()

    def request_eval(self, ref: AdapterRef, tag: str) -> None:
        self.asked.append(ref.version)

    def join(self, *_: Any) -> str:
        return ""

    def end(self, adapter: str) -> None: ...


def make(folder: Path, made: Config) -> tuple[ControllerLink, Client]:
    client = Client()
    recorder = Recorder(RunFolder(folder), [NAME], {}, time.monotonic())
    return ControllerLink(made, client, recorder, {NAME: ControllerState()}), client  # type: ignore[arg-type]


def held_out(version: int, **figures: Any) -> EvalResult:
    sample = SampleRecord(prompt="1+1=", completion="?", gold="2", reward=None, correct=None)
    measured = {"accuracy": 0.5, "reward_mean": 0.4, "n": 8, **figures}
    found = EvalRecord(
        adapter=NAME, version=version, step=version, name="held-out", wall_s=1.0, samples=[sample], **measured
    )
    return EvalResult(adapter=NAME, version=version, tag="held-out", sets=(found,))


def test_one_evaluation_at_a_time_of_the_newest_version_and_the_last_one_always(tmp_path: Path) -> None:
    made = config("m", steps=30)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"every_steps": 5})})
    link, client = make(tmp_path, made)
    for version in range(31):
        if version in (13, 29):  # slow: two more had become due meanwhile
            link.record_evals([held_out(min(link.state(NAME).pending))])
        link.evaluate_if_due(AdapterRef(name=NAME, version=version), saved=True)
    assert client.asked == [0, 13, 29, 30]
    assert link.state(NAME).pending == {29, 30}


@pytest.mark.parametrize(
    ("apart", "every", "measured"),
    [
        (10, 20, [0, 30, 60, 90, 120, 150, 180, 200]),
        (50, 20, [0, 40, 80, 120, 150, 180, 200]),  # multiples without a checkpoint are measured, too
        (1, 20, [0, 23, 46, 69, 92, 115, 138, 161, 184, 200]),
    ],
)
def test_an_evaluation_that_was_postponed_waits_for_a_version_with_a_checkpoint(
    tmp_path: Path, apart: int, every: int, measured: list[int]
) -> None:
    """One takes 23 steps, and checkpoints are ``apart``: measured by hand."""
    made = config("m", steps=200)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"every_steps": every})})
    link, client = make(tmp_path, made)
    for version in range(201):
        link.record_evals([held_out(v) for v in link.state(NAME).pending if version >= v + 23])
        link.evaluate_if_due(AdapterRef(name=NAME, version=version), saved=version % apart == 0)
    assert client.asked == measured


def test_an_evaluation_is_recorded_with_all_that_it_could_not_judge(tmp_path: Path) -> None:
    link, _ = make(tmp_path, config("m"))
    unjudged = {"accuracy": None, "unscored": 2, "left_out": 3, "left_out_first": ["s1", "s9"]}
    for version, figures in ((2, unjudged), (3, {})):
        link.request_eval(AdapterRef(name=NAME, version=version))
        link.record_evals([held_out(version, **figures)])
    first, second = read_metrics(tmp_path).evals
    assert (first.accuracy, first.reward_mean, first.unscored, first.left_out) == (None, 0.4, 2, 3)
    assert first.figures() == (
        "mean reward 0.400 over 8 problems, 2 unscored, 3 left out (prompt too long: s1, s9, ...)"
    )
    assert second.figures() == "accuracy 0.500, mean reward 0.400 over 8 problems"
    assert first.samples[0].reward is None, "an example that could not be scored can be read back"
    assert link.state(NAME).evaluations == {
        2: Evaluation(accuracy=None, reward_mean=0.4),
        3: Evaluation(accuracy=0.5, reward_mean=0.4),
    }


def test_adapters_have_evaluations_of_their_own_and_a_restored_one_keeps_its_pending(tmp_path: Path) -> None:
    kept = ControllerState(
        ledger=b"l", evaluations={0: Evaluation(accuracy=0.1, reward_mean=0.2)}, pending=frozenset({20})
    )
    client, recorder = Client(), Recorder(RunFolder(tmp_path), ["a", "b"], {"a": 21}, time.monotonic())
    made = config("m", steps=30)
    both = [made.adapters[0].model_copy(update={"name": name}) for name in ("a", "b")]
    made = made.model_copy(update={"adapters": both})
    link = ControllerLink(made, client, recorder, {"a": kept, "b": ControllerState()})  # type: ignore[arg-type]
    assert link.state("a") == kept
    for name, version in (("a", 21), ("b", 0)):
        link.evaluate_if_due(AdapterRef(name=name, version=version), saved=True)
    assert client.asked == [0], "v20 of a is pending and v21 is not due"
    link.record_evals([msgspec.structs.replace(held_out(0), adapter="b")])
    assert link.state("a") == kept
    assert link.state("b").evaluations == {0: Evaluation(accuracy=0.5, reward_mean=0.4)}


@pytest.mark.parametrize("measured", [{}, {0: Evaluation(accuracy=0.1, reward_mean=0.2)}])
def test_a_pending_evaluation_whose_version_is_retired_is_made_of_the_next_one(
    tmp_path: Path, measured: dict[int, Evaluation]
) -> None:
    """After a stop of all servers they hold the restored version alone: v53 of a run that evaluates v50."""
    made = config("m", steps=200)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"every_steps": 50})})
    client, recorder = Client(), Recorder(RunFolder(tmp_path), [NAME], {NAME: 53}, time.monotonic())
    kept = ControllerState(ledger=b"l", evaluations=measured, pending=frozenset({50}))
    link = ControllerLink(made, client, recorder, {NAME: kept})  # type: ignore[arg-type]
    link.request_eval(AdapterRef(name=NAME, version=50))
    link.evaluate_if_due(AdapterRef(name=NAME, version=53), saved=True)
    lost = EvalResult(adapter=NAME, version=50, tag="held-out", sets=(), failed={"held-out": "retired"}, retired=True)
    link.record_evals([lost])
    for version in range(54, 110):
        link.evaluate_if_due(AdapterRef(name=NAME, version=version), saved=True)
        link.record_evals([held_out(each) for each in link.state(NAME).pending])
    assert client.asked == [50, 54, 100]
    assert [*link.state(NAME).evaluations] == [*measured, 54, 100]


def test_the_version_after_one_that_was_measured_in_place_of_a_retired_one_is_not_due(tmp_path: Path) -> None:
    made = config("m", steps=200)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"every_steps": 10})})
    link, client = make(tmp_path, made)
    for version in range(10, 41):
        link.evaluate_if_due(AdapterRef(name=NAME, version=version), saved=True)
        if version == 23:  # that of version 10 waited for those of others
            link.record_evals([msgspec.structs.replace(held_out(23), version=10)])
    assert client.asked == [10, 30], "30 has no result yet"
    assert [*link.state(NAME).evaluations] == [23]


def test_the_version_that_is_measured_in_place_of_a_retired_one_keeps_its_checkpoint(tmp_path: Path) -> None:
    link, client = make(tmp_path, config("m", steps=30))
    link.request_eval(AdapterRef(name=NAME, version=10))
    present, newest = [10, 22, 23, 24, 25], [25, 24]

    def kept(moved: dict[str, tuple[int, int]]) -> set[int]:
        client.moved, other = moved, Finish(adapter="other")
        assert link.next_work(lambda: (), [NAME], lambda: other) is other, "its evaluation has no result"
        state = link.state(NAME)
        return {*present}.difference(plan_deletions(present, newest, state.evaluations, state.pending))

    assert kept({}) == {10, 24, 25}
    assert kept({NAME: (10, 23)}) == {23, 24, 25}
    assert link.state(NAME).pending == {23}, "a trainer that resumes requests one evaluation"
    assert kept({"other": (10, 23)}) == {10, 24, 25}
    assert kept({NAME: (9, 23)}) == {10, 24, 25}
    assert kept({NAME: (10, 23)}) == {23, 24, 25}
    link.record_evals([msgspec.structs.replace(held_out(23), version=10)])
    assert link.state(NAME).pending == set()
    assert [*link.state(NAME).evaluations] == [23]
    kept_again: Any = SimpleNamespace(name=NAME, config=config("m").adapters[0], run=link._runs[NAME])
    link.end(NAME)
    link.join(kept_again, 20, ControllerState(pending=frozenset({10})))
    assert link.state(NAME).pending == {10}, "what was measured before it left is over"


def test_an_evaluation_that_fails_otherwise_is_not_repeated(tmp_path: Path) -> None:
    made = config("m", steps=30)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"every_steps": 5})})
    link, client = make(tmp_path, made)
    for version in range(10):
        link.evaluate_if_due(AdapterRef(name=NAME, version=version), saved=True)
        for each in link.state(NAME).pending:
            link.record_evals([EvalResult(adapter=NAME, version=each, tag="", sets=(), failed={"held-out": "reward"})])
    assert client.asked == [0, 5]


def test_a_crash_between_the_records_of_two_sets_neither_loses_nor_doubles_one(tmp_path: Path) -> None:
    """The evaluation is still pending in the checkpoint; the resumed trainer requests and records it whole."""
    result = held_out(3)
    sampled = msgspec.structs.replace(result.sets[0], name="sampled", order=1, accuracy=0.25, pass_at={1: 0.25, 2: 0.5})
    result = msgspec.structs.replace(result, sets=(*result.sets, sampled))
    first = Recorder(RunFolder(tmp_path), [NAME], {}, time.monotonic())
    first.evaluation(result.sets[0])
    first.close()
    kept = ControllerState(ledger=b"l", pending=frozenset({3}))
    client, recorder = Client(), Recorder(RunFolder(tmp_path), [NAME], {NAME: 4}, time.monotonic())
    link = ControllerLink(config("m"), client, recorder, {NAME: kept})  # type: ignore[arg-type]
    link.record_evals([result])
    assert [(e.name, e.order, e.version, e.accuracy) for e in read_metrics(tmp_path).evals] == [
        ("held-out", 0, 3, 0.5),
        ("sampled", 1, 3, 0.25),
    ]
    assert link.state(NAME).evaluations == {3: Evaluation(accuracy=0.5, reward_mean=0.4)}, "the first set decides"
    assert link.state(NAME).pending == frozenset()


def test_a_set_that_fails_costs_no_other_its_record(tmp_path: Path) -> None:
    link, _ = make(tmp_path, config("m"))
    result = held_out(3)
    second = msgspec.structs.replace(result.sets[0], order=1)
    link.record_evals([msgspec.structs.replace(result, sets=(second,), failed={"lost": "version_retired"})])
    assert [(e.name, e.order) for e in read_metrics(tmp_path).evals] == [("held-out", 1)]
    assert link.state(NAME).evaluations == {}


def test_nothing_is_kept_of_an_adapter_that_has_left_and_its_late_evaluation_is_recorded(tmp_path: Path) -> None:
    """Ledger snapshots are as large as what is in flight, and a service has any number of adapters."""
    link, _ = make(tmp_path, config("m"))
    adapter: Any = SimpleNamespace(name="a.1", config=config("m").adapters[0], run=link._runs[NAME])
    for _ in range(2):
        assert not link.join(adapter, 0, ControllerState(ledger=b"x" * 100))
        link.request_eval(AdapterRef(name="a.1", version=0))
        assert link.state("a.1").pending == {0}
        link.end("a.1")
        assert [*link._ledgers] == [*link._evals] == [*link._runs] == [NAME]
    link.record_evals([msgspec.structs.replace(held_out(0), adapter="a.1")])
    assert len(read_metrics(tmp_path).evals) == 1
    assert link.state(NAME).evaluations == {}
    link.end(NAME)
    link.end(NAME)
