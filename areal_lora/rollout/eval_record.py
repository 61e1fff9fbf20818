"""The record of one set of an evaluation."""

from __future__ import annotations

from areal_lora.obs.metrics.records import EvalRecord, SampleRecord
from areal_lora.rollout.channel.channel_messages import EvalResult


def eval_record(result: EvalResult, order: int) -> EvalRecord:
    """Set number ``order`` of ``result``, which has no error, as it is recorded."""
    found = result.sets[order]
    samples = [
        SampleRecord(prompt=s.prompt, completion=s.completion, gold=s.answer, reward=s.reward, correct=s.correct)
        for s in found.samples
    ]
    return EvalRecord(
        adapter=result.adapter,
        version=result.version,
        step=result.version,
        name=found.name,
        order=order,
        accuracy=found.accuracy,
        n=found.n,
        n_samples=found.n_samples,
        temperature=found.temperature,
        reward_mean=found.reward_mean,
        unscored=found.unscored,
        left_out=found.left_out,
        left_out_first=list(found.left_out_first),
        accuracy_95=found.accuracy_95,
        reward_95=found.reward_95,
        interval=found.interval,
        pass_at=found.pass_at,
        majority=found.majority,
        answer_tokens=found.answer_tokens,
        truncated=found.truncated,
        wall_s=found.wall_s,
        measured_with=found.measured_with,
        tag=result.tag,
        samples=samples,
    )
