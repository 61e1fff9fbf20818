"""The scalars of a record: what TensorBoard and experiment trackers show, by tag."""

from __future__ import annotations

import math

from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    EvalRecord,
    MembersRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    RolloutSampleRecord,
    StepRecord,
)
from areal_lora.types import AdapterPhase

PHASES = tuple(AdapterPhase)


def tag_prefix(record: Record) -> str:
    """``NAME/`` for a record of an adapter, which its tags start with."""
    return f"{record.adapter}/" if record.adapter else ""


def scalars(record: Record) -> dict[str, float]:
    """``{tag: value}`` with the adapter's prefix; what was not measured or is not finite has no entry.

    Their x axis is `records.position`.
    """
    prefix = tag_prefix(record)
    values = _values(record).items()
    return {prefix + name: value for name, value in values if value is not None and math.isfinite(value)}


def _values(record: Record) -> dict[str, float | None]:
    match record:
        case StepRecord():
            values = {f"time/{name}_s": seconds for name, seconds in record.spans.items()} | record.metrics
            values |= {"time/time_s": record.time_s, "time/step_s": record.step_s, "train/version": record.version}
            values["train/max_staleness"] = max(record.staleness, default=None)
            values["train/mean_lag"] = record.mean_lag
            values["train/trainer_idle"] = record.trainer_idle
            values |= {"train/n_targets": record.n_targets} if record.by_client else {}
            values |= {f"dropped/{reason}": n for reason, n in record.dropped.items()}
            return values | {f"retried/{kind}": n for kind, n in record.retried.items()}
        case PublishRecord():
            totals = {"publish/total_ms": record.total_ms, "publish/probe_mean_abs": record.probe_mean_abs}
            totals["publish/probe_max_abs"] = record.probe_max_abs
            return totals | {f"publish/{name}_ms": value for name, value in record.phases_ms.items()}
        case CheckpointRecord():
            return {"checkpoint/write_s": record.write_s, "checkpoint/mib": record.nbytes / 2**20}
        case EvalRecord():
            found = record.scalars()
            main = ("accuracy", "reward_mean", "unscored") if record.order == 0 else ()
            return {f"eval/{name}": found[name] for name in main} | {
                f"eval/{record.name}/{name}": value for name, value in found.items()
            }
        case MembersRecord():
            return {"servers/members": record.servers}
        case AdapterStateRecord():
            return {"state": float(PHASES.index(record.state))}  # trackers have numbers only
        case RolloutSampleRecord() | ResumeRecord():
            return {}
