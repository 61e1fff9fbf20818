"""Write the records of a run: JSONL for every record, TensorBoard for scalars."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from areal_lora.obs.metrics.records import EvalRecord, Record, ResumeRecord, RolloutSampleRecord, SampleRecord, position
from areal_lora.obs.metrics.samples import SampleFiles, cut_middle
from areal_lora.obs.metrics.scalars import scalars
from areal_lora.obs.metrics.tensorboard import TensorBoardSink, has_tag
from areal_lora.run_folder.jsonl import JsonlSink
from areal_lora.run_folder.paths import RunFolder

T = TypeVar("T", RolloutSampleRecord, SampleRecord, EvalRecord)


class MetricsWriter:
    """Appends records as JSONL and scalars for TensorBoard. At most one writer per run folder.

    ``only`` is the adapter of a run that has one: its tags have no name, unless those in the folder have.
    """

    def __init__(self, run_folder: RunFolder, only: str | None = None) -> None:
        self._encoder = msgspec.json.Encoder()
        self._jsonl = JsonlSink(run_folder.metrics)
        self._samples = SampleFiles(run_folder)
        self._tensorboard = TensorBoardSink(run_folder.tensorboard)
        named = only is None or has_tag(run_folder.tensorboard, f"{only}/")
        self._left_out = "" if named else f"{only}/"

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
        if values := scalars(record):
            tags = {tag.removeprefix(self._left_out): value for tag, value in values.items()}
            self._tensorboard.scalars(tags, position(record))

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
