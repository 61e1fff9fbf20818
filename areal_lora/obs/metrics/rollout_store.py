"""Keep the rollouts of a run in columns: Parquet files below ``rollouts/`` of the run folder, written by a thread.

    000000000-000004096.parquet ...   the rollouts with these numbers, the second one excluded
    vocabulary.parquet                the text of each token id

A file is written whole or not at all. Small files are merged: a file replaces all whose numbers lie within its own.
Where the limit is reached, the oldest files are removed, the first one last: it has the start of the run.
"""

from __future__ import annotations

import math
import queue
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from areal_lora.obs.metrics.records import DroppedGroup, GroupText
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.types import Outcome, TokenColumns, TrajectoryGroup

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from areal_lora.errors import BackgroundFailed

ROWS = 512
"""Rollouts of a row group: what a reader of one of them reads."""
MERGED_FILES = 64
SEGMENT_BYTES = 16 << 20
SEGMENTS = 32
"""A file that is not merged further has ``SEGMENT_BYTES``, or this part of a limit that is small."""
WAITING_BYTES = 512 << 20
TOKEN_BYTES = 24
"""Of a token that waits, with its part of the texts."""
LEAST_BYTES = 3
"""Of a sampled token in a file: the mantissa of its log-probability does not compress."""
CLOSE_S = 120.0
FLOATS = ("logprobs", "trainer_logprobs", "entropies")
DICTIONARIES = ("adapter", "uid", "prompt", "messages", "gold", "finish_reason", "dropped")
_NAME = re.compile(r"(\d{9,})-(\d{9,})\.parquet")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of one training step, T tokens of N trajectories in all, in the order of the groups.

    ``trainer_logprobs`` are those of the policy before the step, ``entropies`` its own in nats; None where no pass
    computed them. ``dropped`` groups were dropped since the step before, and are numbered after those of the step.
    """

    adapter: str
    step: int
    groups: tuple[TrajectoryGroup, ...]
    texts: tuple[GroupText, ...]  # of each group
    advantages: np.ndarray  # [T] float32
    trainer_logprobs: np.ndarray | None  # [T] float32
    entropies: np.ndarray | None = None  # [T] float32
    dropped: tuple[DroppedGroup, ...] = ()

    @property
    def columns(self) -> list[TokenColumns]:
        """Of all trajectories, with those of dropped groups."""
        every = [*self.groups, *(each.group for each in self.dropped)]
        return [t.columns for group in every for t in group.trajectories]

    @property
    def waiting_bytes(self) -> int:
        return TOKEN_BYTES * sum(map(len, self.columns))


class RolloutFile(NamedTuple):
    """A file with the rollouts numbered ``first`` to ``end`` - 1, without those that a resume made void."""

    first: int
    end: int
    path: Path

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size


def segments(folder: Path) -> list[RolloutFile]:
    """The files in use, oldest first."""
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*.parquet"))
    found = (RolloutFile(int(name[1]), int(name[2]), path) for name, path in names if name)
    kept: list[RolloutFile] = []
    for segment in sorted(found, key=lambda each: (each.first, -each.end)):
        if not kept or segment.end > kept[-1].end:
            kept.append(segment)
    return kept


def parquet_file(path: Path) -> pq.ParquetFile:
    """An open file, which stays readable when it is merged or removed.

    Raises FileNotFoundError; ValueError (pyarrow.ArrowInvalid) for a damaged file.
    """
    import pyarrow.parquet as pq  # takes a moment, and much of the command line needs none

    return pq.ParquetFile(path)


def prompt_key(uid: str) -> int:
    """The same for all groups of one problem, whose uids differ in the epoch."""
    return int.from_bytes(blake2b(uid.partition(":")[2].encode(), digest_size=8).digest(), "little", signed=True)


def rollout_table(step: StepRollouts, first: int) -> pa.Table:
    """One row for each trajectory, numbered from ``first``. Means are over the tokens that were sampled.

    ``answer`` is empty where a user's workflow returned no text, ``turns`` where no agent had the conversation.
    ``solved`` is null where the task has no rule for it.
    ``stale``: a token's version is older than the step's. ``retried``: a request of the group failed, or an answer to
    its prompt came too late. ``versions`` are pairs of a version and its number of tokens, -1 for tokens that were not
    sampled. ``dropped`` is the reason of a group that is not trained on, null of every other; its advantage and what
    the trainer computes are not known, nor is the ``reward`` of an answer without a score: NaN.
    """
    import pyarrow as pa

    groups: list[tuple[TrajectoryGroup, GroupText, str | None]] = []
    groups += [(group, text, None) for group, text in zip(step.groups, step.texts, strict=True)]
    groups += [(each.group, each.text, each.reason) for each in step.dropped]
    rows = [
        (number, text, group, place, t)
        for number, (group, text, _) in enumerate(groups)
        for place, t in enumerate(group.trajectories)
    ]
    dropped = [groups[number][2] for number, *_ in rows]
    is_dropped = np.array([reason is not None for reason in dropped], bool)
    columns = step.columns
    ids = np.concatenate([np.empty(0, "<i4"), *(c.ids for c in columns)])
    logprobs = np.concatenate([np.empty(0, "<f4"), *(c.scores for c in columns)])
    runs = [c.runs for c in columns]
    offsets = _offsets([len(c) for c in columns])
    sampled = np.concatenate([np.empty(0, "<i4"), *(c.each_version for c in columns)]) >= 0

    def mean(values: np.ndarray) -> np.ndarray:
        sums, counts = (np.diff(np.cumsum(np.append(0.0, x))[offsets]) for x in (np.where(sampled, values, 0), sampled))
        means: np.ndarray = (sums / np.maximum(counts, 1)).astype(np.float32)
        return means

    def lists(values: np.ndarray, at: np.ndarray = offsets, mask: np.ndarray | None = None) -> pa.ListArray:
        missing = None if mask is None else pa.array(mask)
        return pa.ListArray.from_arrays(pa.array(at, pa.int32()), pa.array(np.ascontiguousarray(values)), mask=missing)

    def whole(values: np.ndarray) -> np.ndarray:
        return np.append(values, np.zeros(len(ids) - len(values), "<f4"))

    def optional(values: np.ndarray | None, width: str) -> pa.Array:
        if values is None:
            return pa.nulls(len(rows), pa.list_(pa.from_numpy_dtype(width)))
        return lists(whole(values).astype(width), mask=is_dropped)

    advantages, own = whole(step.advantages), None if step.trainer_logprobs is None else whole(step.trainer_logprobs)
    spans = [r[r[:, 0] >= 0, 0] for r in runs]
    oldest = [int(span.min()) if span.size else step.step for span in spans]
    components = pa.map_(pa.string(), pa.float32())
    return pa.table(
        {
            "rollout": pa.array(np.arange(first, first + len(rows))),
            "adapter": [step.adapter] * len(rows),
            "step": pa.array([step.step] * len(rows), pa.int32()),
            "group": pa.array([number for number, *_ in rows], pa.int32()),
            "sample": pa.array([t.sample for *_, t in rows], pa.int32()),
            "uid": [group.uid for _, _, group, _, _ in rows],
            "prompt_key": pa.array([prompt_key(group.uid) for _, _, group, _, _ in rows], pa.int64()),
            "prompt": [text.prompt for _, text, *_ in rows],
            "messages": [text.messages for _, text, *_ in rows],
            "gold": [text.gold for _, text, *_ in rows],
            "answer": ["".join(text.answers[place : place + 1]) for _, text, _, place, _ in rows],
            "turns": ["".join(text.turns[place : place + 1]) for _, text, _, place, _ in rows],
            "finish_reason": [t.finish_reason for *_, t in rows],
            "reward": pa.array([t.reward if t.outcome is Outcome.OK else math.nan for *_, t in rows], pa.float32()),
            "components": pa.array([list(t.components.items()) for *_, t in rows], components),
            "advantage": np.where(is_dropped, np.float32(math.nan), mean(advantages)),
            "mismatch": pa.nulls(len(rows), pa.float32())
            if own is None
            else pa.array(mean(np.abs(own - logprobs)), mask=is_dropped),
            "solved": pa.array([t.correct for *_, t in rows], pa.bool_()),
            "truncated": [t.finish_reason == "length" for *_, t in rows],
            "stale": [version < step.step for version in oldest],
            "retried": [text.tries > 1 for _, text, *_ in rows],
            "dropped": pa.array(dropped, pa.string()),
            "oldest": pa.array(oldest, pa.int32()),
            "newest": pa.array([int(s.max()) if s.size else step.step for s in spans], pa.int32()),
            "versions": lists(
                np.concatenate([np.empty(0, "<i4"), *(r.ravel() for r in runs)]), _offsets([r.size for r in runs])
            ),
            "token_ids": lists(ids),
            "logprobs": lists(logprobs),
            "trainer_logprobs": optional(step.trainer_logprobs, "<f4"),
            "entropies": optional(step.entropies, "<f2"),
            "advantages": lists(advantages),
        }
    )


def _offsets(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)


def encoded(table: pa.Table) -> Any:
    """The table as a Parquet file in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    floats = [f"{name}.list.element" for name in FLOATS if name in table.column_names]
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=[*DICTIONARIES, "token_ids.list.element", "advantages.list.element"],
        use_byte_stream_split=floats,
    ) as writer:
        writer.write_table(table, row_group_size=ROWS)
    return sink.getvalue()


class RolloutWriter:
    """Appends rollouts in a thread; callers never wait for it. At most one writer per run folder.

    All files together have at most ``limit_bytes``. ``vocabulary`` returns the text of each token id; the thread calls
    it once in a run. A failure, such as a full disk, is one warning: later rollouts are not kept.
    """

    def __init__(self, run_folder: RunFolder, limit_bytes: int, vocabulary: Callable[[], Sequence[str]]) -> None:
        self._folder, self._limit, self._vocabulary = run_folder.rollouts, limit_bytes, vocabulary
        self._segment_bytes = min(SEGMENT_BYTES, limit_bytes // SEGMENTS)
        self.left_out = 0
        """Rollouts that are not kept: the thread was too far behind, or their step alone exceeds the limit."""
        self._taken = self._written = 0  # bytes, each counted by one thread
        self._queue: queue.SimpleQueue[StepRollouts | tuple[str, int] | None] = queue.SimpleQueue()
        self._thread = watched_thread("rollouts", self._work, self._failed)

    def write(self, step: StepRollouts) -> None:
        """Keep the rollouts of a step, or count them as left out where ``WAITING_BYTES`` wait."""
        if self.waiting_bytes > WAITING_BYTES:
            self._leave_out(step, "the disk takes them slower than they come")
        elif self._thread.is_alive():
            self._taken += step.waiting_bytes
            self._queue.put(step)

    @property
    def waiting_bytes(self) -> int:
        return self._taken - self._written

    def drop(self, adapter: str, step: int) -> None:
        """Remove rollouts of ``adapter`` from ``step`` onwards; a resumed run repeats these steps."""
        self._queue.put((adapter, step))

    def close(self) -> None:
        """Write what waits, for at most ``CLOSE_S``."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _failed(self, failed: BackgroundFailed) -> None:
        log.warning("rollouts are not kept from here on: %s", failed)

    def _leave_out(self, step: StepRollouts, why: str) -> None:
        if not self.left_out:
            log.warning("rollouts of step %d of %s are not kept: %s", step.step, step.adapter, why)
        self.left_out += len(step.columns)

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.parquet"):
            try:
                parquet_file(path).close()
            except ValueError as error:  # a loss of power: files are renamed into place and not synced
                path.rename(path.with_name(f"{path.name}.damaged"))
                log.warning("%s is damaged (%s): renamed to .damaged, its content is lost", path, error)
        used = {each.path for each in segments(self._folder)}
        for pattern in (".*.tmp", "*-*.parquet", "*-*.index"):  # an .index beside each file is of earlier versions
            for path in {*self._folder.glob(pattern)} - used:
                path.unlink()  # of a process that was killed
        while (work := self._queue.get()) is not None:
            if isinstance(work, StepRollouts):
                self._append(work)
                self._written += work.waiting_bytes
            else:
                self._drop(*work)

    def _append(self, step: StepRollouts) -> None:
        import pyarrow as pa

        words = self._folder / "vocabulary.parquet"
        if not words.exists() and len(made := encoded(pa.table({"text": list(self._vocabulary())}))) < self._limit // 4:
            write_file(words, made)
        files = segments(self._folder)
        first = files[-1].end if files else 0
        sampled = sum(columns.n_sampled for columns in step.columns)
        fits = LEAST_BYTES * sampled <= self._limit  # else it is not worth encoding
        if fits and len(table := rollout_table(step, first)):
            fits = self._place(table, first, first + len(table))
        if not fits:
            self._leave_out(step, f"a step of them exceeds run.keep_rollouts_mib, {self._limit >> 20} MiB")
        small = lambda each: each.nbytes < self._segment_bytes  # noqa: E731
        tail = [*takewhile(small, reversed(segments(self._folder)))][::-1]
        nbytes = sum(each.nbytes for each in tail)
        if len(tail) >= MERGED_FILES or (len(tail) > 1 and nbytes >= self._segment_bytes):
            merged = pa.concat_tables([parquet_file(each.path).read() for each in tail], promote_options="default")
            if self._place(merged, tail[0].first, tail[-1].end):
                for each in tail:
                    each.path.unlink()

    def _place(self, table: pa.Table, first: int, end: int) -> bool:
        """Write a file after making room for it; False if it exceeds the limit alone."""
        content, files = encoded(table), segments(self._folder)
        spare = self._limit - len(content) - sum(path.stat().st_size for path in self._folder.iterdir())
        if spare + sum(each.nbytes for each in files) < 0:
            return False
        while spare < 0:
            oldest = files.pop(1 if len(files) > 1 else 0)
            spare += oldest.nbytes
            oldest.path.unlink()
        write_file(self._folder / f"{first:09d}-{end:09d}.parquet", content)
        return True

    def _drop(self, adapter: str, step: int) -> None:
        import pyarrow.compute as pc

        for each in reversed(segments(self._folder)):  # a kill leaves no gap between steps
            file = parquet_file(each.path)
            void = (pc.field("adapter") == adapter) & (pc.field("step") >= step)
            if not len(file.read(["adapter", "step"]).filter(void)):
                continue
            if len(table := file.read().filter(~void)):
                write_file(each.path, encoded(table))
            else:
                each.path.unlink()
