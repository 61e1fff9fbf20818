"""Find rollouts of a run: an index of one row of scalars per rollout in memory, texts and tokens from the files.

A query is a scan of the index. A search for text reads the matching rollouts, newest first, for at most ``SEARCH_S``;
its page states where the next one continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from areal_lora.obs.metrics.rollout_store import ROWS, parquet_file, segments
from areal_lora.run_folder.paths import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

PAGE = 25
SEARCH_S = 0.6
EXCERPT = 240
OTHERS = 200
EMBEDDED_TOKENS = 60_000
TOKENS = ("messages", "versions", "token_ids", "logprobs", "trainer_logprobs", "advantages", "entropies", "turns")
TEXTS = ("uid", "prompt", "gold", "answer", "finish_reason", "components", "dropped")
SCALARS = ("rollout", "adapter", "step", "group", "reward", "solved", "truncated", "stale", "retried")
WIDTHS = "rollout:<i8 prompt_key:<i8 step:<i4 group:<i4 reward:<f4 solved:i1 truncated:? stale:? retried:? dropped:?"
SCANNED = {name: width for name, _, width in (each.partition(":") for each in WIDTHS.split())}
INDEX = np.dtype([*SCANNED.items(), ("adapter", "<i2")])
HEAD = (*SCALARS, *TEXTS, "sample", "advantage", "mismatch", "oldest", "newest")


class RolloutFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rollout has to be; what is empty or None does not count. ``below``: its number is lower.

    ``text`` is a part of the prompt or of the answer, as it is written. ``trained``: not dropped.
    """

    adapter: str = ""
    step: int | None = None
    group: int | None = None
    outcome: Literal["", "solved", "failed", "truncated", "stale", "retried", "dropped", "trained"] = ""
    lowest: float | None = None
    highest: float | None = None
    text: str = ""
    below: int | None = None


class RolloutHead(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout without its tokens; columns as in `rollout_store.rollout_table`. NaN is null in JSON."""

    rollout: int
    adapter: str
    step: int
    group: int
    sample: int
    uid: str
    prompt: str
    answer: str
    gold: str
    finish_reason: str
    reward: float
    components: dict[str, float]
    advantage: float
    mismatch: float | None
    outcomes: list[str]
    oldest: int
    newest: int
    dropped: str | None = None


class RolloutTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of T tokens: their texts and what is known of each. ``versions`` are pairs of a version and a count."""

    head: RolloutHead
    messages: str
    tokens: list[str]
    versions: list[int]
    logprobs: list[float]
    trainer_logprobs: list[float] | None
    advantages: list[float]
    entropies: list[float] | None = None
    turns: str | None = None


class GroupPlace(msgspec.Struct, frozen=True, kw_only=True):
    adapter: str
    step: int
    group: int


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one group, and where ``others`` of the same problem are, at most ``OTHERS``."""

    rollouts: list[RolloutTokens]
    others: list[GroupPlace]


class RolloutPage(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts, newest first. ``matches`` is None where text was searched for. ``below`` continues; None at the end."""

    rows: list[RolloutHead]
    matches: int | None
    below: int | None


class RolloutOverview(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a run; ``groups`` are those that a page has inside."""

    run: str
    kept: int
    steps: tuple[int, int]
    adapters: list[str]
    groups: list[GroupView] = []


@dataclass(frozen=True, slots=True)
class _FileRows:
    """``opened`` stays readable when the file is merged or removed."""

    path: Path
    mark: tuple[int, int]
    opened: pq.ParquetFile
    rows: np.ndarray  # of INDEX


class RolloutRows:
    """The rows of all files of a folder, oldest first; ``index`` has their scalars. A place is a row's number there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: list[_FileRows] = []
        self._starts = np.zeros(1, np.int64)  # of each file among all rows
        self._lock = threading.Lock()
        self.index = np.empty(0, INDEX)
        self.adapters: list[str] = []

    def refresh(self) -> None:
        """Read what is new. A damaged file has no rows."""
        known = {(each.path, each.mark): each for each in self._loaded}
        found: list[_FileRows] = []
        for path in (file.path for file in segments(self._folder)):
            with suppress(FileNotFoundError, ValueError):  # merged or removed meanwhile; damaged
                stat = path.stat()
                mark = (stat.st_mtime_ns, stat.st_size)
                found.append(known.get((path, mark)) or self._load(path, mark))
        if [each.mark for each in found] != [each.mark for each in self._loaded]:
            self._loaded = found
            self._starts = np.cumsum([0, *(len(each.rows) for each in found)])
            # As bytes: numpy joins arrays of records field by field, which takes five times as long.
            self.index = np.frombuffer(b"".join(each.rows.data for each in found), INDEX)

    def _load(self, path: Path, mark: tuple[int, int]) -> _FileRows:
        """The columns of ``INDEX``, of which ``solved`` is -1 for null. Raises FileNotFoundError, ValueError."""
        opened = parquet_file(path)
        table = opened.read(INDEX.names)
        found, adapters = np.empty(len(table), INDEX), table["adapter"].combine_chunks().dictionary_encode()
        names = adapters.dictionary.to_pylist()
        self.adapters += [name for name in names if name not in self.adapters]
        found["adapter"] = np.array([self.adapters.index(name) for name in names], "<i2")[_values(adapters.indices)]
        for name in SCANNED:
            found[name] = _values((table[name].is_valid() if name == "dropped" else table[name]).combine_chunks())
        found["solved"][~_values(table["solved"].is_valid().combine_chunks())] = -1
        return _FileRows(path, mark, opened, found)

    def read(self, file: pq.ParquetFile, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        with self._lock:  # `RolloutIndex.tables` may be read in another thread
            return file.read_row_group(row_group, columns)

    def by_row_group(self, places: np.ndarray) -> Iterator[tuple[pq.ParquetFile, int, np.ndarray]]:
        """``(file, row group, rows in it)`` for each row group with some of the ``places``, in their order."""
        numbers = np.searchsorted(self._starts, places, "right") - 1
        rows = places - self._starts[numbers]
        changes = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(rows // ROWS) != 0)) + 1
        for part in np.split(np.arange(len(places)), changes):
            if len(part):
                yield self._loaded[numbers[part[0]]].opened, int(rows[part[0]] // ROWS), rows[part] % ROWS

    def dicts(self, places: np.ndarray, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        for file, row_group, rows in self.by_row_group(places):
            first = int(rows.min())
            # Not `take`: it imports pandas, which takes longer than all the rest of a first page.
            found = self.read(file, row_group, columns).slice(first, int(rows.max()) + 1 - first).to_pylist()
            yield from (found[row - first] for row in rows)


class RolloutIndex:
    """The rollouts of one run folder; each call reads what is new. Files stay open until they are merged or removed."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._run = folder.rollouts, folder.name
        self._rows = RolloutRows(self._folder)
        self._words: list[str] = []

    def overview(self) -> RolloutOverview:
        self._rows.refresh()
        steps = self._rows.index["step"]
        first, last = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        return RolloutOverview(run=self._run, kept=len(steps), steps=(first, last), adapters=self._rows.adapters)

    def page(self, chosen: RolloutFilter, limit: int = PAGE) -> RolloutPage:
        """The newest ``limit`` rollouts that match, with excerpts of their texts."""
        places = self._places(chosen)[::-1]
        matches, below = len(places), None
        if chosen.text:
            places, below = self._search(places, chosen.text, limit)
        elif matches > limit:
            places = places[:limit]
            below = int(self._rows.index["rollout"][places[-1]])
        rows = [_head(row, EXCERPT) for row in self._rows.dicts(places, HEAD)]
        return RolloutPage(rows=rows, matches=None if chosen.text else matches, below=below)

    def rollouts(self, chosen: RolloutFilter) -> list[RolloutHead]:
        """All that match, oldest first, with whole texts; ``text`` does not count."""
        return list(map(_head, self._rows.dicts(self._places(chosen), HEAD)))

    def group(self, place: GroupPlace) -> GroupView:
        """The group there; empty if it is not kept."""
        where = self._places(RolloutFilter(adapter=place.adapter, step=place.step, group=place.group))
        if not len(where):
            return GroupView(rollouts=[], others=[])
        rollouts = [self._tokens(row) for row in self._rows.dicts(where, [*HEAD, *TOKENS])]
        index = self._rows.index
        same = index[index["prompt_key"] == index["prompt_key"][where[0]]]
        keys = dict.fromkeys(same[["adapter", "step", "group"]].tolist())
        others = [GroupPlace(adapter=self._rows.adapters[a], step=s, group=g) for a, s, g in keys]
        return GroupView(rollouts=rollouts, others=[other for other in others if other != place][-OTHERS:])

    def ends(self) -> RolloutOverview:
        """The overview with the first and the last group of each adapter, up to about ``EMBEDDED_TOKENS`` tokens."""
        found, left = dict[GroupPlace, GroupView](), EMBEDDED_TOKENS
        overview = self.overview()
        for at in (0, -1):
            for code, name in enumerate(overview.adapters):
                where = np.flatnonzero((self._rows.index["adapter"] == code) & ~self._rows.index["dropped"])
                if not len(where):
                    continue
                step, group = (int(self._rows.index[column][where[at]]) for column in ("step", "group"))
                view = self.group(place := GroupPlace(adapter=name, step=step, group=group))
                left -= sum(len(one.tokens) for one in view.rollouts)
                if left < 0 and found:
                    return msgspec.structs.replace(overview, groups=list(found.values()))
                found[place] = view
        return msgspec.structs.replace(overview, groups=list(found.values()))

    def tables(self, chosen: RolloutFilter) -> Iterator[pa.Table]:
        """All columns of what matches, a row group at a time; ``text`` counts."""
        for file, row_group, rows in list(self._rows.by_row_group(self._places(chosen))):
            table = self._rows.read(file, row_group).take(rows)
            yield table.filter(_has_text(table, chosen.text)) if chosen.text else table

    def _places(self, chosen: RolloutFilter) -> np.ndarray:
        """Rows of the index with what is new, in order; the text does not count."""
        self._rows.refresh()
        of, wanted = self._rows.index, []
        if chosen.adapter:
            code = self._rows.adapters.index(chosen.adapter) if chosen.adapter in self._rows.adapters else -1
            wanted.append(of["adapter"] == code)
        for name in ("step", "group"):
            if (value := getattr(chosen, name)) is not None:
                wanted.append(of[name] == value)
        if chosen.outcome in ("solved", "failed"):
            wanted.append(of["solved"] == (chosen.outcome == "solved"))
        elif chosen.outcome == "trained":
            wanted.append(~of["dropped"])
        elif chosen.outcome:
            wanted.append(of[chosen.outcome])
        wanted += [of["reward"] >= np.float32(chosen.lowest)] if chosen.lowest is not None else []
        wanted += [of["reward"] <= np.float32(chosen.highest)] if chosen.highest is not None else []
        wanted += [of["rollout"] < chosen.below] if chosen.below is not None else []
        return np.flatnonzero(np.logical_and.reduce(wanted)) if wanted else np.arange(len(of["step"]))

    def _search(self, places: np.ndarray, text: str, limit: int) -> tuple[np.ndarray, int | None]:
        """The first ``limit`` of ``places`` with ``text``, and the number below which the search continues."""
        end_s, found, seen = time.monotonic() + SEARCH_S, list[np.ndarray](), 0
        for file, row_group, rows in self._rows.by_row_group(places):
            table = self._rows.read(file, row_group, ["prompt", "answer"]).take(rows)
            hits = np.flatnonzero(_has_text(table, text).to_numpy(zero_copy_only=False))
            found.append(places[seen + hits])
            seen += len(rows)
            if sum(map(len, found)) > limit or (time.monotonic() > end_s and seen < len(places)):
                break
        chosen = np.concatenate([places[:0], *found])
        if len(chosen) > limit:
            return chosen[:limit], int(self._rows.index["rollout"][chosen[limit - 1]])
        return chosen, int(self._rows.index["rollout"][places[seen - 1]]) if seen < len(places) else None

    def _tokens(self, row: dict[str, Any]) -> RolloutTokens:
        if not self._words and (path := self._folder / "vocabulary.parquet").exists():
            try:
                self._words = parquet_file(path).read()["text"].to_pylist()
            except ValueError:
                self._words = []  # damaged: tokens are shown by their ids
        words = self._words
        tokens = [words[token] if token < len(words) else f"<{token}>" for token in row["token_ids"]]
        return RolloutTokens(
            head=_head(row), tokens=tokens, **{name: row[name] for name in TOKENS if name != "token_ids"}
        )


def _values(column: pa.Array) -> np.ndarray:
    """Not ``to_numpy``: it imports pandas, which takes longer than all the rest of a first page."""
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        return _values(column.cast("int8")).astype(bool)
    return np.frombuffer(column.buffers()[1], column.type.to_pandas_dtype(), len(column))


def _has_text(table: pa.Table, text: str) -> pa.Array:
    import pyarrow.compute as pc

    hits = (pc.match_substring(table[name], text) for name in ("prompt", "answer"))
    return pc.or_(*hits).combine_chunks()


def _head(row: dict[str, Any], limit: int | None = None) -> RolloutHead:
    solved = {True: ["solved"], False: ["failed"]}.get(row["solved"], [])
    fields = {name: row[name] for name in RolloutHead.__struct_fields__ if name in row}
    fields |= {"prompt": row["prompt"][-limit:], "answer": row["answer"][:limit]} if limit else {}
    return RolloutHead(
        **fields
        | {
            "components": dict(row["components"]),
            "outcomes": solved + [name for name in ("truncated", "stale", "retried", "dropped") if row[name]],
        }
    )
