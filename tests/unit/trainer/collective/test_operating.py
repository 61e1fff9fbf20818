"""Operations on one rank: what becomes of weights, disk and servers, who waits for what, and what a full disk does.

Decisions, link, checkpoints and records are the trainer's; the engine is a toy, and disk and servers wait for the test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from areal_lora.checkpoint.recover import find
from areal_lora.checkpoint.state import read_files
from areal_lora.operations.protocol import (
    Datum,
    Durable,
    LoadState,
    Loss,
    OperationCompletion,
    OperationFailure,
    OptimStep,
    Pass,
    PassResult,
    Poison,
    Publish,
    PublishResult,
    SaveState,
    StateResult,
    StepResult,
    What,
)
from areal_lora.trainer.collective import next_work
from areal_lora.types import AdapterPhase
from tests.support.operations.client import datum, floats
from tests.support.operations.side import WAIT_S, HeldDisk, Side
from tests.support.operations.toy_engine import VOCABULARY

TEXT, OTHER = [5, 9, 12, 7], [8, 3, 17]
SFT = Pass(data=(datum(TEXT, [1.0, 0.5, 2.0]), datum(OTHER, [0.0, 1.0])), loss=Loss.CROSS_ENTROPY)
LOOK = Pass(data=SFT.data, loss=Loss.CROSS_ENTROPY, backward=False)
STEP = OptimStep(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
ENDLESS: Datum = datum([5, 5, 5], [3e38, 3e38])


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path, "a", "b", beside=True)
    try:
        yield made
    finally:
        made.close()


def by_hand(windows: list[list[list[tuple[int, float]]]]) -> tuple[np.ndarray, list[float]]:
    """Logits [V] after AdamW on the summed gradients, and losses of the passes: a plain float64 loop."""
    w, m, v = (np.zeros(VOCABULARY) for _ in range(3))
    losses = []
    for t, window in enumerate(windows, 1):
        g = np.zeros(VOCABULARY)
        for targets in window:
            p = np.exp(w) / np.exp(w).sum()
            losses.append(-sum(weight * np.log(p[token]) for token, weight in targets))
            for token, weight in targets:
                g += weight * p
                g[token] -= weight
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return w, losses


def test_passes_and_steps_are_those_of_a_plain_loop(side: Side) -> None:
    targets = [(9, 1.0), (12, 0.5), (7, 2.0), (17, 1.0)]
    found = side.client.do("a.1", SFT, SFT, STEP, SFT, STEP, LOOK)
    weights, losses = by_hand([[targets, targets], [targets]])
    mine = side.engine.residents["a.1"]
    np.testing.assert_allclose(mine.parts["weight"].numpy(), weights, atol=1e-5)
    assert [scored.loss for scored in found if isinstance(scored, PassResult)][:3] == pytest.approx(losses, rel=1e-5)
    assert [stepped.step for stepped in found if isinstance(stepped, StepResult)] == [1, 2]
    logits = weights - np.log(np.exp(weights).sum())
    assert floats(found[-1].logprobs[1]) == pytest.approx([logits[3], logits[17]], abs=1e-5)
    assert not side.engine.residents["b.1"].parts["weight"].any(), "the adapter beside it"


@pytest.mark.parametrize(
    ("section", "key", "value", "experts", "most"),
    [
        ("rollout", "deterministic", False, 511, 2),
        ("rollout", "deterministic", False, 512, 1),
        ("rollout", "deterministic", True, 1, 1),
        ("trainer", "moe_dispatcher", "deepep", 1, 1),
    ],
)
def test_passes_that_wait_are_computed_together(
    tmp_path: Path, section: str, key: str, value: bool | str, experts: int, most: int
) -> None:
    """One of each adapter, of one kind, in the order of each; not where the same bits are promised, where a dispatcher
    does not send adapters' numbers, or where torch refuses a product of as many groups."""
    side = Side(tmp_path, "a", "b", "c")
    try:
        for resident in side.engine.residents.values():
            resident.memory.groups = experts
        changed = getattr(side.config, section).model_copy(update={key: value})
        object.__setattr__(side.trainer, "config", side.config.model_copy(update={section: changed}))

        def all_arrive() -> None:
            while sum(len(queue.waiting) for queue in side.clients._backlog._queues.values()) < 9:
                side.clients.listen(0.1)

        side.later.append(all_arrive)
        side.wait(lambda: not side.later, "the loop waits")
        for name, whats in {"a.1": (SFT, LOOK, STEP), "b.1": (SFT, SFT, STEP), "c.1": (LOOK, SFT, STEP)}.items():
            side.client.begin(name, *whats)
        for name in ("a.1", "b.1", "c.1"):
            side.client.wait(lambda name=name: 3 in side.client.outcomes(name))
        grads = {name: side.client.outcomes(name)[3].grad_norm for name in ("a.1", "b.1", "c.1")}  # type: ignore[union-attr]
        assert grads["a.1"] == grads["c.1"] == pytest.approx(grads["b.1"] / 2)
        assert sorted(name for names in side.joined for name in names) == ["a.1"] * 2 + ["b.1"] * 2 + ["c.1"] * 2
        assert max(map(len, side.joined)) == most
        side.quiet()
        assert [side.trainer.rank_0.turns.time(name) for name in grads] == [7 + 7 + 1] * 3, "each pays for its tokens"  # type: ignore[union-attr]
        assert all(isinstance(side.client.outcomes(name)[n], PassResult) for name in grads for n in (1, 2))
    finally:
        side.close()


def test_others_train_while_a_checkpoint_is_written_and_while_servers_take_a_version(side: Side) -> None:
    side.disk.hold()  # type: ignore[attr-defined]
    side.client.begin("a.1", SFT, STEP)
    side.wait(lambda: side.state("a.1").version == 2, "the step")
    trained = side.beside_steps
    assert isinstance(side.client.do("b.1", SFT)[0], PassResult), "another client"
    side.wait(lambda: side.beside_steps > trained + 20, "steps beside it")
    side.client.wait(lambda: 2 in side.client.outcomes("a.1"))
    assert find(side.folder, "a.1").ref.version == 0, "it is answered from the log"
    assert not side.client.durable("a.1")
    side.disk.release()  # type: ignore[attr-defined]
    side.client.wait(lambda: side.client.durable("a.1") == [2])
    assert find(side.folder, "a.1").ref.version == 2

    side.servers.at_once = False
    last = side.client.begin("a.1", Publish())
    side.wait(lambda: len(side.servers.began) == 1, "the publish")
    trained = side.beside_steps
    side.wait(lambda: side.beside_steps > trained + 20, "steps beside it")
    assert last not in side.client.outcomes("a.1")
    side.servers.answer("a.1")
    side.client.wait(lambda: last in side.client.outcomes("a.1"))
    assert side.client.outcomes("a.1")[last] == PublishResult(version=2)


def test_an_answer_waits_for_no_record(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, record = threading.Event(), side.recorder.client_step
    monkeypatch.setattr(side.recorder, "client_step", lambda *step: go_on.wait(WAIT_S) and record(*step))
    side.client.begin("a.1", SFT, STEP)
    side.client.wait(lambda: 2 in side.client.outcomes("a.1"))
    assert find(side.folder, "a.1").ref.version == 0
    assert not side.records.steps
    go_on.set()
    side.client.settle("a.1")
    assert [each.step for each in side.records.steps] == [0]


@pytest.mark.parametrize("behind", [0, 2])
def test_a_client_runs_as_far_ahead_of_the_disk_as_is_allowed(tmp_path: Path, behind: int) -> None:
    side = Side(tmp_path, "a", beside=True, max_behind=behind)
    try:
        side.disk.hold()  # type: ignore[attr-defined]
        side.client.begin("a.1", *[SFT, STEP] * 4, LOOK)
        ahead = 1 + behind
        side.client.wait(lambda: 2 * ahead + 1 in side.client.outcomes("a.1"))
        trained = side.beside_steps
        side.wait(lambda: side.beside_steps > trained + 20, "steps beside it")
        assert side.engine.resident("a.1").step_count == ahead
        assert list(side.client.outcomes("a.1")) == [*range(1, 2 * ahead + 2)], "the pass of the next window is last"
        side.disk.release()  # type: ignore[attr-defined]
        side.client.wait(lambda: 9 in side.client.outcomes("a.1"))
        steps = [each.step for each in side.client.outcomes("a.1").values() if isinstance(each, StepResult)]
        assert steps == [1, 2, 3, 4]
        side.client.wait(lambda: side.client.durable("a.1")[-1:] == [8])
        weights, _ = by_hand([[[(9, 1.0), (12, 0.5), (7, 2.0), (17, 1.0)]]] * 4)
        np.testing.assert_allclose(side.engine.residents["a.1"].parts["weight"].numpy(), weights, atol=1e-5)
        assert (find(side.folder, "a.1").ref.version, len(side.records.steps)) == (8, 4)
    finally:
        side.close()


def test_no_client_waits_for_the_copy_of_a_large_state(tmp_path: Path) -> None:
    """Passes and steps of others, and its own, are between two copies; a step abandons a checkpoint, no saved state."""
    side = Side(tmp_path, "a", "b", max_behind=1)
    try:
        side.engine.copies.clear()
        side.client.do("a.1", SFT, STEP)
        assert isinstance(side.client.do("b.1", SFT, STEP)[1], StepResult)
        assert side.trainer.checkpointing.copying() == "a.1"
        assert isinstance(side.client.do("a.1", SFT, STEP)[1], StepResult)
        last = side.client.begin("a.1", SFT, STEP)
        side.client.wait(lambda: last - 1 in side.client.outcomes("a.1"))
        assert isinstance(side.client.do("b.1", SFT, STEP)[1], StepResult)
        assert last not in side.client.outcomes("a.1"), "it would be too many ahead of the disk"
        assert side.client.durable("a.1") == side.client.durable("b.1") == []
        side.engine.copies.set()
        side.client.wait(lambda: side.client.durable("a.1")[-1:] == [last])
        assert side.client.durable("a.1") == [4, 6], "the checkpoint of the first step was abandoned"
        side.client.settle("b.1")
        weights, _ = by_hand([[[(9, 1.0), (12, 0.5), (7, 2.0), (17, 1.0)]]] * 3)
        found = find(side.folder, "a.1").newest
        assert found is not None
        kept = read_files([found.path / "rank-0000.safetensors"])["weight"]["logits.weight"]
        np.testing.assert_allclose(kept, weights, atol=1e-5)

        side.quiet()
        side.engine.copies.clear()
        saved = side.client.begin("a.1", SaveState(label="x"))
        side.wait(lambda: side.trainer.checkpointing.copying() == "a.1", "the copies")
        assert isinstance(side.client.do("b.1", SFT, STEP)[1], StepResult)
        last = side.client.begin("a.1", SFT, STEP)
        side.wait(lambda: side.engine.passes == 7, "the pass before a step that waits for the copies")
        assert last not in side.client.outcomes("a.1"), "its step waits for the copies, as the answer of the save"
        side.engine.copies.set()
        side.client.wait(lambda: last in side.client.outcomes("a.1"))
        assert isinstance(side.client.outcomes("a.1")[saved], StateResult)
        loaded = side.client.do("b.1", LoadState(adapter="a.1", label="x", optimizer=True))[0]
        assert loaded.step == 3
    finally:
        side.engine.copies.set()
        side.close()


@pytest.mark.parametrize(
    "what", [SaveState(label="x"), Publish(), LoadState(adapter="a.1", label="n0", optimizer=True)]
)
def test_what_outlives_a_crash_is_answered_when_it_is_durable(tmp_path: Path, what: What) -> None:
    """A save or a publish starts on a durable version, a load completes on one; what follows is answered later."""
    side = Side(tmp_path, "a", max_behind=2, beside=True)
    try:
        side.client.do("a.1", SaveState(label="n0"))
        side.disk.hold()  # type: ignore[attr-defined]
        last = side.client.begin("a.1", SFT, STEP, SFT, what, SFT, STEP, LOOK)
        side.client.wait(lambda: 4 in side.client.outcomes("a.1"))
        trained = side.beside_steps
        side.wait(lambda: side.beside_steps > trained + 20, "steps beside it")
        assert list(side.client.outcomes("a.1")) == [1, 2, 3, 4]
        assert not side.servers.began
        side.disk.release()  # type: ignore[attr-defined]
        side.client.wait(lambda: last in side.client.outcomes("a.1"))
        found = side.client.outcomes("a.1")
        assert not [each for each in found.values() if isinstance(each, OperationFailure)]
        order = [m for m in side.client.heard if isinstance(m, OperationCompletion | Durable)]
        at = order.index(OperationCompletion(adapter="a.1", number=5, outcome=found[5]))
        assert Durable(adapter="a.1", number=3) in order[:at], "the version before it is durable"
    finally:
        side.close()


def test_a_version_is_sent_once_and_not_before_it_is_durable(side: Side) -> None:
    side.disk.hold()  # type: ignore[attr-defined]
    last = side.client.begin("a.1", SFT, STEP, Publish(), Publish())
    side.wait(lambda: side.state("a.1").version == 2, "the step")
    trained = side.beside_steps
    side.wait(lambda: side.beside_steps > trained + 20, "steps beside it")
    assert side.servers.began == []
    side.disk.release()  # type: ignore[attr-defined]
    side.client.wait(lambda: last in side.client.outcomes("a.1"))
    assert [side.client.outcomes("a.1")[n] for n in (3, 4)] == [PublishResult(version=2)] * 2
    assert [str(ref) for ref in side.servers.began] == ["a.1@v2"]


@pytest.mark.parametrize("poison", [Poison(reason="lr is -1", by_client=True, of_step=True), OptimStep(lr=-1.0)])
def test_a_step_that_cannot_be_taken_ends_its_window_alone(side: Side, poison: Poison | OptimStep) -> None:
    """Its gradients are forgotten, no weight changes, and what follows is another window."""
    bad = side.client.do("a.1", SFT, poison)[1]
    assert isinstance(bad, OperationFailure)
    assert bad.by_client
    other = side.client.do("b.1", SFT, STEP)[1]
    assert side.client.do("a.1", SFT, STEP)[1] == other
    assert side.engine.residents["a.1"].parts["weight"].equal(side.engine.residents["b.1"].parts["weight"])
    side.client.settle("a.1")
    assert side.client.durable("a.1") == [2, 4], "what fails has a checkpoint as well"


def test_a_state_without_moments_has_a_third_of_the_bytes_and_starts_another_adapter(side: Side) -> None:
    saves = SaveState(label="whole"), SaveState(label="bare", moments=False)
    whole, bare = side.client.do("a.1", SFT, STEP, *saves)[2:]
    found = read_files([side.folder.saved_state("a.1", "bare") / "rank-0000.safetensors"])
    assert (whole.step, bare.step, found["exp_avg"], found["exp_avg_sq"]) == (1, 1, {}, {})
    weights, _ = by_hand([[[(9, 1.0), (12, 0.5), (7, 2.0), (17, 1.0)]]])
    np.testing.assert_allclose(found["weight"]["logits.weight"], weights, atol=1e-5)
    assert whole.n_bytes - bare.n_bytes >= 2 * 4 * VOCABULARY
    loaded, published = side.client.do("b.1", LoadState(adapter="a.1", label="bare", optimizer=False), Publish())
    assert (loaded.step, published) == (0, PublishResult(version=1))
    first, second = (side.engine.residents[name].parts["weight"] for name in ("a.1", "b.1"))
    assert first.equal(second)


def test_a_full_disk_fails_the_state_that_is_saved_and_nothing_else(side: Side) -> None:
    """With path, reason and fix; weights, checkpoints and the state before it stay."""
    side.client.do("a.1", SFT, STEP, SaveState(label="first"))
    assert isinstance(side.disk, HeldDisk)
    side.disk.full = {"states"}
    failed, stepped, again = side.client.do("a.1", SaveState(label="first"), LOOK, SaveState(label="second"))
    assert isinstance(failed, OperationFailure)
    assert not failed.by_client
    assert f"{side.folder.path}/states/a.1/.first." in failed.reason
    assert "No space left on device (fix: free disk space" in failed.reason
    assert isinstance(stepped, PassResult)
    assert isinstance(again, OperationFailure)
    assert isinstance(side.client.do("b.1", SFT, STEP)[1], StepResult)
    side.disk.full = set()
    assert isinstance(side.client.do("a.1", SFT, STEP, SaveState(label="second"))[2], StateResult)
    loaded = side.client.do("b.1", LoadState(adapter="a.1", label="first", optimizer=True))[0]
    assert loaded.step == 1
    assert [side.state(key).phase for key in ("a.1", "b.1")] == [AdapterPhase.ACTIVE] * 2
    assert sorted(path.name for path in side.folder.saved_states.glob("*/*")) == ["first", "second"]


def test_a_checkpoint_is_tried_again_while_others_train(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_work, "RETRY_S", 3600.0)
    assert isinstance(side.disk, HeldDisk)
    side.disk.full = {"a.1"}
    side.client.begin("a.1", SFT, STEP)
    side.wait(lambda: (save := side.saver.pending("a.1")) is not None and save.failed, "a failed checkpoint")
    trained = side.beside_steps
    assert isinstance(side.client.do("b.1", SFT, STEP)[1], StepResult)
    side.wait(lambda: side.beside_steps > trained + 5, "steps beside it")
    side.disk.full = set()
    monkeypatch.setattr(next_work, "RETRY_S", 0.0)
    side.client.wait(lambda: 2 in side.client.outcomes("a.1"))
    assert side.client.outcomes("a.1")[2] == side.client.outcomes("b.1")[2]


def test_a_disk_that_takes_no_checkpoint_ends_the_adapter_alone(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_work, "RETRY_S", 0.0)
    assert isinstance(side.disk, HeldDisk)
    side.disk.full = {"a.1"}
    step, _, later = side.client.do("a.1", SFT, STEP, SFT, STEP)[1:]
    assert isinstance(step, StepResult), "the log repeats it when the adapter is tried again"
    assert isinstance(later, OperationFailure)
    assert "could not be written" in later.reason
    assert side.state("a.1").phase is AdapterPhase.FAILED
    assert not side.client.durable("a.1")
    assert isinstance(side.client.do("b.1", SFT, STEP)[1], StepResult)


def test_each_step_has_one_record_with_what_is_known(side: Side) -> None:
    huge = Pass(data=(ENDLESS,), loss=Loss.CROSS_ENTROPY)
    bad = Pass(data=(datum([1, 999], [1.0]),), loss=Loss.CROSS_ENTROPY)
    side.client.do("a.1", SFT, SFT, LOOK, STEP, SFT, bad, STEP, huge, STEP, SFT, STEP, Publish())
    side.quiet()
    first, skipped, last = side.records.steps
    scored = side.client.outcomes("a.1")[1]
    assert isinstance(scored, PassResult)
    assert (first.adapter, first.step, first.version, first.by_client) == ("a.1", 0, 0, True)
    assert (first.metrics["train/n_tokens"], first.metrics["train/n_sequences"], first.n_targets) == (14, 4, 8)
    assert first.metrics["train/loss"] == pytest.approx(2 * scored.loss / 8)
    assert (first.metrics["train/lr"], first.taken, first.reward_mean, first.staleness) == (0.1, True, None, {})
    assert first.metrics["train/grad_norm"] == pytest.approx(side.client.outcomes("a.1")[4].grad_norm)  # type: ignore[union-attr]
    assert 0 < first.spans["train"] <= first.step_s
    # The window with a bad pass made no step, and the third one's gradient was not finite.
    assert (skipped.step, skipped.version, skipped.taken) == (1, 7, False)
    assert "train/grad_norm" not in skipped.metrics
    assert (last.step, last.version, last.taken) == (1, 9, True)
    assert [record.version for record in side.records.checkpoints] == [4, 7, 9, 11]


def test_an_adapter_that_leaves_while_it_is_saved_fails_what_it_was_asked(side: Side) -> None:
    side.disk.hold()  # type: ignore[attr-defined]
    side.client.begin("a.1", SFT, STEP, SFT, SaveState(label="x"), LOOK)
    side.wait(lambda: side.engine.passes == 2, "the pass of the next window")
    side.later.append(partial(side.clients.end, "a.1", "it was deleted"))
    side.wait(lambda: not side.later, "the end of the adapter")
    side.disk.release()  # type: ignore[attr-defined]
    side.client.wait(lambda: 5 in side.client.outcomes("a.1"))
    gone = OperationFailure(reason="it was deleted", by_client=False)
    assert [side.client.outcomes("a.1")[n] for n in (4, 5)] == [gone] * 2
    side.quiet()
