"""Write the records of a run: JSONL for every record, TensorBoard for scalars."""

from typing import TYPE_CHECKING

import msgspec

from areal_lora.obs.metrics import reader, records
from areal_lora.run_folder.events import JsonlSink
from areal_lora.run_folder.paths import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TEXT_CHARS = 8000
"""A longer text keeps its first and last 4,000 characters."""


def cut_middle(text: str, limit: int = TEXT_CHARS) -> str:
    """Cut ``text`` to ``limit`` characters, half from each end, and insert a line with the number removed."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


class MetricsWriter:
    """Appends records as JSONL and scalars for TensorBoard. At most one writer per run folder.

    ``only`` is the adapter of a run that has one: its tags have no name, and a resume removes its void points from
    TensorBoard, which cannot remove those of one adapter among several.
    """

    def __init__(self, run_folder: RunFolder, only: str | None = None) -> None:
        self._encoder = msgspec.json.Encoder()
        self._jsonl = JsonlSink(run_folder.metrics)
        self._tensorboard: SummaryWriter | None = None
        self._folder, self._only, self._left_out = run_folder, only, "" if only is None else f"{only}/"

    def write(self, record: records.Record) -> None:
        """Append one record; its file holds the record on return. Long texts of answers are cut in the middle."""
        shown = record
        if isinstance(record, records.EvalRecord):
            shown = msgspec.structs.replace(record, samples=[*map(_shortened, record.samples)])
        self._jsonl.write(self._encoder.encode(shown))
        points = iter((record,))
        resumed = isinstance(record, records.ResumeRecord) and record.adapter == self._only
        if self._tensorboard is None and (resumed or records.scalars(record)):
            from torch.utils.tensorboard import SummaryWriter  # takes about a second

            # Readers ignore the first purge of a folder, so a new run has one that removes nothing.
            since = records.position(record) if resumed else 0
            purge = None if self._only is None else since
            self._tensorboard = SummaryWriter(str(self._folder.tensorboard), purge_step=purge, flush_secs=10)
            if resumed:  # a purge removes valid points from there on as well
                points = (kept for kept in reader.iter_metrics(self._folder) if records.position(kept) >= since)
        if self._tensorboard is not None:
            for point in points:
                for tag, value in records.scalars(point).items():
                    self._tensorboard.add_scalar(tag.removeprefix(self._left_out), value, records.position(point))

    def close(self) -> None:
        self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shortened(sample: records.SampleRecord) -> records.SampleRecord:
    texts = {name: cut_middle(getattr(sample, name)) for name in ("prompt", "completion", "gold")}
    return msgspec.structs.replace(sample, **texts)
