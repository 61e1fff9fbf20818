"""Write the records of a run: JSONL for every record, TensorBoard for scalars."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    EvalRecord,
    MembersRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    RolloutSampleRecord,
    SampleRecord,
    StepRecord,
    position,
)
from areal_lora.obs.metrics.samples import SampleFiles, cut_middle
from areal_lora.obs.metrics.tensorboard import TensorBoardSink
from areal_lora.run_folder.jsonl import JsonlSink
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase

T = TypeVar("T", RolloutSampleRecord, SampleRecord, EvalRecord)
PHASES = tuple(AdapterPhase)


class MetricsWriter:
    """Appends records as JSONL and scalars for TensorBoard. At most one writer per run folder."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._encoder = msgspec.json.Encoder()
        self._jsonl = JsonlSink(run_folder.metrics)
        self._samples = SampleFiles(run_folder)
        self._tensorboard = TensorBoardSink(run_folder.tensorboard)

    def write(self, record: Record) -> None:
        """Append one record; its file holds the record on return. Long texts of samples are cut in the middle."""
        match record:
            case RolloutSampleRecord():
                self._samples.write(self._encoder.encode(_shortened(record)))
            case EvalRecord():
                self._jsonl.write(self._encoder.encode(_shortened(record)))
            case ResumeRecord():
                self._samples.drop(record.adapter, record.version)
                self._jsonl.write(self._encoder.encode(record))
            case _:
                self._jsonl.write(self._encoder.encode(record))
        prefix = f"{record.adapter}/" if record.adapter else ""
        values = {prefix + name: value for name, value in _scalars(record).items()}
        if values:
            self._tensorboard.scalars(values, position(record))

    def close(self) -> None:
        self._jsonl.close()
        self._samples.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shortened(record: T) -> T:
    if isinstance(record, EvalRecord):
        return msgspec.structs.replace(record, samples=[_shortened(sample) for sample in record.samples])
    texts = {name: getattr(record, name) for name in ("prompt", "completion", "gold")}
    return msgspec.structs.replace(record, **{name: text and cut_middle(text) for name, text in texts.items()})


def _scalars(record: Record) -> dict[str, float | None]:
    """TensorBoard scalars of a record, by tag."""
    match record:
        case StepRecord():
            values: dict[str, float | None] = {}
            for name, value in msgspec.structs.asdict(record).items():
                if isinstance(value, int | float) and name != "step":
                    is_time = name.endswith("_s") and not name.endswith("_per_s")
                    values[f"{'time' if is_time else 'train'}/{name}"] = value
            values["train/max_staleness"] = max(record.staleness, default=None)
            values["train/mean_lag"] = record.mean_lag
            values["train/trainer_idle"] = record.trainer_idle
            values |= {f"reward/{part}": mean for part, mean in record.reward_components.items()}
            values |= {f"reward_cost/{name}": value for name, value in record.reward_costs.items()}
            values |= {f"dropped/{reason}": n for reason, n in record.dropped.items()}
            values |= {f"retried/{kind}": n for kind, n in record.retried.items()}
            return values | {f"extra/{name}": value for name, value in record.extra.items()}
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
            return {"state": float(PHASES.index(record.state))}  # TensorBoard has numbers only
        case RolloutSampleRecord() | ResumeRecord():
            return {}
