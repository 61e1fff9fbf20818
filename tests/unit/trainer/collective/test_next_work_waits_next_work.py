"""What waits for what, and when something in the background has ended. Saves and publishes say how far they are."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.checkpoint.checkpoint_store import CheckpointSave
from areal_lora.errors import PublishError
from areal_lora.operations.protocol import (
    DropState,
    LoadState,
    Loss,
    Operation,
    OptimStep,
    Pass,
    Poison,
    Publish,
    SaveState,
    What,
)
from areal_lora.trainer.collective.next_work import RETRY_S, concluded, joint, may_start
from areal_lora.trainer.work import Conclude
from areal_lora.types import AdapterPhase, AdapterRef
from tests.support.operations.client import datum

PASS = Pass(data=(), loss=Loss.CROSS_ENTROPY)
SAVES: list[What] = [LoadState(adapter="a", label="x", optimizer=True), SaveState(label="x")]


def save(
    *, ended: bool = False, failed: bool = False, label: str = "", ago_s: float = 0.0, **values: Any
) -> CheckpointSave:
    made = CheckpointSave(ref=AdapterRef(name="a", version=1), failed=failed, label=label, **values)
    made.ended_s = time.monotonic() - ago_s
    if ended:
        made.ended.set()
    return made


def trainer(
    saving: CheckpointSave | None = None,
    publishing: bool = False,
    published: bool = False,
    phase: AdapterPhase = AdapterPhase.ACTIVE,
    is_client: bool = True,
) -> Any:
    adapter = SimpleNamespace(config=SimpleNamespace(is_client=is_client), run=SimpleNamespace(checkpoint_every=1))
    publish = SimpleNamespace(outcome=SimpleNamespace(done=lambda: published))
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(max_behind=2)),
        states={"a": SimpleNamespace(name="a", adapter=adapter, phase=phase)},
        checkpointing=SimpleNamespace(pending=lambda name: saving),
        publishing=SimpleNamespace(pending=lambda name: publish if publishing or published else None),
    )


def begins(what: What, held: Any, ahead: float = 0) -> bool:
    return may_start(held, Operation(adapter="a", number=1, what=what), ahead)


@pytest.mark.parametrize("what", [PASS, Poison(reason="x")])
def test_a_pass_waits_for_nothing(what: What) -> None:
    assert begins(what, trainer(save(), publishing=True), ahead=9)


@pytest.mark.parametrize("what", [OptimStep(lr=1.0), Poison(reason="x", of_step=True)])
def test_a_step_waits_where_a_crash_would_repeat_too_many(what: What) -> None:
    assert begins(what, trainer(save(), publishing=True), ahead=2)
    assert not begins(what, trainer(save()), ahead=3)
    assert not begins(what, trainer(save()), ahead=math.inf), "no run resumes from nothing"


def test_a_state_is_dropped_beside_a_checkpoint_and_not_while_one_is_saved() -> None:
    assert begins(DropState(label="x"), trainer(save()))
    assert not begins(DropState(label="x"), trainer(save(label="x")))


@pytest.mark.parametrize("what", SAVES, ids=lambda what: type(what).__name__)
def test_what_writes_waits_for_the_save_before_it_until_it_is_joined(what: What) -> None:
    assert begins(what, trainer(publishing=True))
    assert not begins(what, trainer(save()))
    assert not begins(what, trainer(save(ended=True)))


def test_a_publish_waits_for_the_one_before_it_and_for_its_version_to_be_durable() -> None:
    assert begins(Publish(), trainer())
    assert not begins(Publish(), trainer(publishing=True))
    assert not begins(Publish(), trainer(save()))


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("phase", [AdapterPhase.ACTIVE, AdapterPhase.PAUSED])
def test_what_has_ended_is_concluded_also_of_a_paused_adapter(publish: bool, phase: AdapterPhase) -> None:
    ended = trainer(save(ended=not publish), publishing=publish, published=publish, phase=phase)
    assert concluded(ended) == Conclude(adapter="a", publish=publish)
    assert concluded(trainer(save(), publishing=True, phase=phase)) is None


@pytest.mark.parametrize("found", [{"is_client": False}, {"phase": AdapterPhase.FAILED}])
def test_only_clients_adapters_with_a_place_are_looked_at(found: dict[str, Any]) -> None:
    assert concluded(trainer(save(ended=True), published=True, **found)) is None


def test_a_checkpoint_that_failed_is_concluded_after_a_while_as_it_is_tried_again_then() -> None:
    assert concluded(trainer(save(ended=True, failed=True))) is None
    assert concluded(trainer(save(ended=True, failed=True, ago_s=RETRY_S))) is not None
    assert concluded(trainer(save(ended=True, failed=True, label="x"))) is not None, "a saved state is not"
    assert concluded(trainer(save(ended=True, failed=True, error=PublishError("a rank is lost")))) is not None


GOOD = datum([1, 2, 3], [1.0, 0.0])
LOOK = Pass(data=(GOOD,), loss=Loss.CROSS_ENTROPY, backward=False)
LEARN, LONG = (Pass(data=(GOOD,) * n, loss=Loss.CROSS_ENTROPY) for n in (1, 2))
READY = {
    "one after the other": ([("a", LEARN), ("b", LEARN), ("c", LEARN)], 9, "abc"),
    "the first has any size": ([("a", LONG), ("b", LEARN)], 3, "a"),
    "what is left is too little": ([("a", LEARN), ("b", LONG), ("c", LEARN)], 8, "a"),
    "other operations are passed over": ([("a", LEARN), ("b", OptimStep(lr=1.0)), ("c", LEARN)], 9, "ac"),
    "gradients or none": ([("a", LOOK), ("b", LEARN), ("c", LOOK)], 9, "ac"),
    "no budget": ([("a", LEARN), ("b", LEARN)], 0, "a"),
}


@pytest.mark.parametrize("name", READY)
def test_which_passes_are_computed_together(name: str) -> None:
    """GOOD has three tokens. Nothing is looked at that could not join any more."""
    ready, budget, wanted = READY[name]
    waiting = iter([Operation(adapter=adapter, number=1, what=what) for adapter, what in ready])
    assert "".join(each.adapter for each in joint(waiting, budget, lambda _: 1)) == wanted
    left = "".join(each.adapter for each in waiting)
    assert left == {"the first has any size": "b", "what is left is too little": "c", "no budget": "b"}.get(name, "")


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([1] * 4, 4),
        ([256] * 4, 3),
        ([341] * 4, 3),
        ([342] * 4, 2),
        ([1, 1, 1, 256], 3),
        ([1023] * 4, 1),
        ([1, 1023], 1),
    ],
)
def test_no_product_of_a_joint_pass_has_1024_groups(groups: list[int], wanted: int) -> None:
    """Torch refuses them on GPUs. Each adapter has a group for each expert that any of them adapts."""
    waiting = (Operation(adapter=f"{i}", number=1, what=LEARN) for i in range(len(groups)))
    assert [each.adapter for each in joint(waiting, 1000, lambda name: groups[int(name)])] == list("0123"[:wanted])
