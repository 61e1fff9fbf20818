"""One record of each kind."""

from typing import Any

from areal_lora.obs.metrics.records import EvalRecord, PublishRecord, SampleRecord, StepRecord

TYPED = set(StepRecord.__struct_fields__)


def step_record(**values: Any) -> StepRecord:
    """A step: fields by name, spans as ``train_s=0.8``, and metrics below ``train/`` as ``loss=0.1``."""
    typed = {name: values.pop(name) for name in TYPED & values.keys()}
    spans = {
        name.removesuffix("_s"): values.pop(name)
        for name in list(values)
        if name.endswith("_s") and "per_s" not in name
    }
    metrics = {f"train/{name}": value for name, value in values.items()} | typed.pop("metrics", {})
    return StepRecord(**typed, spans=spans, metrics=metrics)


STEP = step_record(
    step=3,
    version=3,
    time_s=9.5,
    adapter="toy",
    reward_mean=0.5,
    rollout_tokens_per_s=4000.0,
    train_s=0.8,
    staleness={0: 7, 2: 1},
    dropped={"stale": 2},
    metrics={"extra/capped_fraction": 0.25},
)
PUBLISH = PublishRecord(version=4, total_ms=20.0, adapter="toy", phases_ms={"pack": 1.5, "wire": 2.5, "ack": 18.0})
EVAL = EvalRecord(
    version=4,
    step=4,
    accuracy=0.75,
    n=8,
    reward_mean=0.5,
    unscored=1,
    adapter="toy",
    samples=[SampleRecord(prompt="p\n", completion="é\u2028", gold="1", reward=1.0)],
)
