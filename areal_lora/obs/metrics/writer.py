"""Write the records of a run: JSONL for every record, TensorBoard for scalars.

Rotate rollout samples over bounded files.

    <run folder>/samples/000000.jsonl       the first file: the start of the run
                         000041.jsonl ...   the newest ``NEWEST_FILES``; the last one is open for writing

A file has at most ``FILE_BYTES``, all files together at most ``TOTAL_BYTES`` (64 MiB). Files in between are deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from areal_lora.obs.metrics import records
from areal_lora.run_folder.atomic import replacing, sync_folder
from areal_lora.run_folder.events import JsonlSink, refused, whole_lines
from areal_lora.run_folder.paths import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE_BYTES = 8 << 20
NEWEST_FILES = 7
TOTAL_BYTES = (1 + NEWEST_FILES) * FILE_BYTES
TEXT_CHARS = 8000
"""A longer text keeps its first and last 4,000 characters."""
_NAME = re.compile(r"\d{6,}\.jsonl")


def cut_middle(text: str, limit: int = TEXT_CHARS) -> str:
    """Cut ``text`` to ``limit`` characters, half from each end, and insert a line with the number removed."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


def sample_files(run_folder: RunFolder) -> list[Path]:
    """Existing sample files, oldest first."""
    folder = run_folder.samples
    found = [path for path in folder.glob("*.jsonl") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.stem))


def sample_lines(run_folder: RunFolder) -> Iterator[tuple[Path, int, bytes]]:
    """Iterate over (file, line number, line) of every whole line, oldest first.

    A file that is rotated away meanwhile is skipped.
    """
    for path in sample_files(run_folder):
        try:
            for number, line in enumerate(whole_lines(path), 1):
                yield path, number, line
        except FileNotFoundError:
            continue


class SampleFiles:
    """Appends lines of at most ``FILE_BYTES``. At most one writer per run folder."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder, self._folder = run_folder, run_folder.samples
        for path in self._folder.glob(".*.tmp"):
            path.unlink()  # of a `drop` that was killed
        files = sample_files(run_folder)
        self._path = files[-1] if files else self._folder / "000000.jsonl"
        self._sink: JsonlSink | None = None

    def write(self, line: bytes) -> None:
        """Append one record, in the next file if this one is full. On RecordError nothing was appended."""
        with self._refusing():
            self._sink = self._sink or JsonlSink(self._path)
            if self._sink.nbytes and self._sink.nbytes + len(line) + 1 > FILE_BYTES:
                self._sink = self._rotate(self._sink)
        self._sink.write(line)

    def drop(self, adapter: str, step: int) -> None:
        """Remove samples of ``adapter`` from step ``step`` onwards; a resumed run repeats these steps.

        Each file is replaced atomically. Raises RecordError.
        """
        self.close()
        with self._refusing():
            for path in sample_files(self._run_folder):
                if all(_stays(line, adapter, step) for line in whole_lines(path)):
                    continue
                with replacing(path, durable=True) as file:
                    file.writelines(line for line in whole_lines(path) if _stays(line, adapter, step))

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise refused(error.filename or self._path, error) from error

    def _rotate(self, full: JsonlSink) -> JsonlSink:
        """Start the next file. Old files are deleted last: a crash leaves at most one extra file until the next one."""
        full.sync()
        self.close()
        self._path = self._folder / f"{int(self._path.stem) + 1:06d}.jsonl"
        sink = JsonlSink(self._path)
        sync_folder(self._folder)
        for path in sample_files(self._run_folder)[1:-NEWEST_FILES]:
            path.unlink()
        return sink


class _Place(msgspec.Struct, frozen=True):
    """The fields of a sample that `drop` compares."""

    adapter: str = ""
    step: int = 0


_PLACE = msgspec.json.Decoder(_Place)


def _stays(line: bytes, adapter: str, step: int) -> bool:
    """Whether `drop` keeps a line; lines that are not records are kept."""
    try:
        place = _PLACE.decode(line)
    except msgspec.DecodeError:
        return True
    return place.adapter != adapter or place.step < step


T = TypeVar("T", bound=records.RolloutSampleRecord | records.SampleRecord | records.EvalRecord)


class MetricsWriter:
    """Appends records as JSONL and scalars for TensorBoard. At most one writer per run folder.

    ``only`` is the adapter of a run that has one: its tags have no name.
    """

    def __init__(self, run_folder: RunFolder, only: str | None = None) -> None:
        self._encoder = msgspec.json.Encoder()
        self._jsonl = JsonlSink(run_folder.metrics)
        self._samples = SampleFiles(run_folder)
        self._tensorboard: SummaryWriter | None = None
        self._tensorboard_folder = run_folder.tensorboard
        self._left_out = "" if only is None else f"{only}/"

    def write(self, record: records.Record) -> None:
        """Append one record; its file holds the record on return. Long texts of samples are cut in the middle."""
        if isinstance(record, records.ResumeRecord):
            self._samples.drop(record.adapter, record.version)
        shown = _shortened(record) if isinstance(record, records.RolloutSampleRecord | records.EvalRecord) else record
        sink = self._samples if isinstance(record, records.RolloutSampleRecord) else self._jsonl
        sink.write(self._encoder.encode(shown))
        if values := records.scalars(record):
            if self._tensorboard is None:
                from torch.utils.tensorboard import SummaryWriter  # takes about a second

                self._tensorboard = SummaryWriter(str(self._tensorboard_folder), flush_secs=10)
            for tag, value in values.items():
                self._tensorboard.add_scalar(tag.removeprefix(self._left_out), value, records.position(record))

    def close(self) -> None:
        self._jsonl.close()
        self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shortened(record: T) -> T:
    if isinstance(record, records.EvalRecord):
        return msgspec.structs.replace(record, samples=[_shortened(sample) for sample in record.samples])
    texts = {name: getattr(record, name) for name in ("prompt", "completion", "gold")}
    return msgspec.structs.replace(record, **{name: text and cut_middle(text) for name, text in texts.items()})
