"""Write the records of a run: JSONL for every record, TensorBoard for scalars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from areal_lora.obs.metrics.records import EvalRecord, Record, ResumeRecord, RolloutSampleRecord, SampleRecord, position
from areal_lora.obs.metrics.sample_records import SampleFiles, cut_middle
from areal_lora.obs.metrics.scalars import scalars
from areal_lora.run_folder.jsonl import JsonlSink
from areal_lora.run_folder.paths import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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


_HEAD_BYTES = 1 << 16


def has_tag(folder: Path, prefix: str) -> bool:
    """Whether a tag that starts with ``prefix`` is among the first ones of an event file in ``folder``.

    A resumed run continues the curves of its earlier sessions. Event files hold tags as plain text, after a byte with
    their length.
    """
    for path in folder.glob("events.out.tfevents.*"):
        with path.open("rb") as file:
            if re.search(
                rb"[\x00-\x7f]" + re.escape(prefix.encode()) + rb"(train|publish|eval|checkpoint)/",
                file.read(_HEAD_BYTES),
            ):
                return True
    return False


class TensorBoardSink:
    """Writes scalars to ``folder``. The first scalar imports TensorBoard (about a second)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write ``{tag: value}`` at ``step``."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=10)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
