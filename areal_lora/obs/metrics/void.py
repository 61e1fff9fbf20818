"""Find the void records of a metrics file: one pass to note every record, a second pass to filter.

A resumed run repeats steps: its ``resume`` record voids earlier records of later versions of the adapter. Of several
records of one kind and version the last one counts. Memory grows with resumes and repeats, not with records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass

BEFORE = frozenset({"step", "sample"})
"""Kinds whose ``index`` is the version that they start from; the ``index`` of every other kind is one that was made."""
RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The identity of a record. ``what`` separates records of one kind and index; None: the record has no repeats."""

    kind: str
    adapter: str
    index: int
    what: Hashable | None = ""


class VoidRecords:
    """First pass: ``note`` every record with its place in the file, in order. Second pass: filter by ``holds``."""

    def __init__(self) -> None:
        # By adapter, (place, version) of the effective resumes, ascending in both: a later resume from an older
        # version voids everything that an earlier one does.
        self._resumes: dict[str, list[tuple[int, int]]] = {}
        self._highest: dict[tuple[str, str, Hashable], int] = {}
        self._last: dict[tuple[str, str, Hashable, int], int] = {}

    def note(self, place: int, mark: Mark) -> None:
        if mark.kind == RESUME:
            self._resume(place, mark)
        elif mark.what is not None:
            key = (mark.kind, mark.adapter, mark.what)
            highest = self._highest.get(key)
            if highest is None or mark.index > highest:
                self._highest[key] = mark.index  # no earlier record, or only void ones
            else:
                self._last[*key, mark.index] = place

    @property
    def nothing(self) -> bool:
        return not self._resumes and not self._last

    def holds(self, place: int, mark: Mark) -> bool:
        """Whether the record at ``place`` is valid. A resume always is."""
        if mark.kind == RESUME:
            return True
        resumes = self._resumes.get(mark.adapter, [])
        later = bisect_right(resumes, place, key=lambda entry: entry[0])
        if later < len(resumes) and mark.index > _last_valid(mark.kind, resumes[later][1]):
            return False
        return self._last.get((mark.kind, mark.adapter, mark.what, mark.index), place) <= place

    def _resume(self, place: int, mark: Mark) -> None:
        resumes = self._resumes.setdefault(mark.adapter, [])
        while resumes and resumes[-1][1] >= mark.index:
            resumes.pop()
        resumes.append((place, mark.index))
        for key, highest in self._highest.items():
            if key[1] == mark.adapter:
                self._highest[key] = min(highest, _last_valid(key[0], mark.index))


def _last_valid(kind: str, version: int) -> int:
    """The last index that stays valid after a resume from ``version``."""
    return version - 1 if kind in BEFORE else version
