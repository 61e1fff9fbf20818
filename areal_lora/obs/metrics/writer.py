"""Write the records of a run: JSONL for every record, TensorBoard for scalars."""

from typing import TYPE_CHECKING

import msgspec

from areal_lora.obs.metrics import records
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

    ``only`` is the adapter of a run that has one: its tags have no name.
    """

    def __init__(self, run_folder: RunFolder, only: str | None = None) -> None:
        self._encoder = msgspec.json.Encoder()
        self._jsonl = JsonlSink(run_folder.metrics)
        self._tensorboard: SummaryWriter | None = None
        self._tensorboard_folder = run_folder.tensorboard
        self._left_out = "" if only is None else f"{only}/"

    def write(self, record: records.Record) -> None:
        """Append one record; its file holds the record on return. Long texts of answers are cut in the middle."""
        shown = record
        if isinstance(record, records.EvalRecord):
            shown = msgspec.structs.replace(record, samples=[*map(_shortened, record.samples)])
        self._jsonl.write(self._encoder.encode(shown))
        if values := records.scalars(record):
            if self._tensorboard is None:
                from torch.utils.tensorboard import SummaryWriter  # takes about a second

                self._tensorboard = SummaryWriter(str(self._tensorboard_folder), flush_secs=10)
            for tag, value in values.items():
                self._tensorboard.add_scalar(tag.removeprefix(self._left_out), value, records.position(record))

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
