"""Which passes of a step follow the routes of its proximal pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_lora.trainer.learn import annotate, learn
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch


@pytest.mark.parametrize("record", [False, True])
def test_updates_of_the_policy_follow_the_routes_of_the_proximal_pass(record: bool) -> None:
    """Not those of its critic, whose values before the step are along its own routes."""
    batch = make_batch()
    engine, adapter = RecordedEngine(batch.rollout_logprobs), make_adapter(kind="ppo", minibatches=2)
    annotated = annotate(engine, adapter, batch, record=record)  # type: ignore[arg-type]
    assert annotated.routes is None, "reference and critic choose"
    report = learn(engine, adapter, annotated, version=4, base_dtype="float32", lr=0.5)  # type: ignore[arg-type]
    policy = [each for each in engine.updates if each.adapters[0] == "gsm8k"]
    critic = [each for each in engine.updates if each.adapters[0] != "gsm8k"]
    assert len(policy) == len(critic) == 2
    for each in policy:
        wanted = each.token_ids.short()[:, None, None].repeat(1, 2, 2)
        assert torch.equal(each.routes, wanted) if record else each.routes is None
    assert all(each.routes is None and each.old_routes is None for each in critic)
    assert not report.replayed, "servers have none"


def test_without_a_proximal_pass_nothing_is_recorded() -> None:
    """Of one minibatch, or with the sampling policy in the ratio."""
    batch = make_batch()
    for adapter in (make_adapter(), make_adapter(kind="cispo", minibatches=2)):
        engine = RecordedEngine(batch.rollout_logprobs)
        annotated = annotate(engine, adapter, batch, record=True)  # type: ignore[arg-type]
        assert (annotated.prox_logprobs, annotated.old_routes) == (None, None)


def test_tokens_along_the_trainers_own_routes_are_compared_with_the_record() -> None:
    """An answer's tokens of its own version are fresh, whatever older ones it has."""
    batch = make_batch()
    versions = torch.where(batch.loss_mask, 4, -1)
    versions[1] = 3
    batch, adapter = replace(batch, versions=versions), make_adapter(kind="gspo", minibatches=2)
    engine = RecordedEngine(batch.rollout_logprobs)
    annotated = annotate(engine, adapter, batch, record=True)  # type: ignore[arg-type]
    report = learn(engine, adapter, annotated, version=4, base_dtype="float32", lr=0.5)  # type: ignore[arg-type]
    assert (report.sums["fresh_tokens"], report.sums["stale_tokens"]) == (6, 1)
