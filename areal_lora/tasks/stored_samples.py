"""Keep the rows of a data set in a file without a name, mapped into memory: a million rows cost pages that the kernel
can drop."""

import json
import mmap
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from areal_lora.types import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """``values`` are the columns, as JSON has them; ``place`` is ``file:line`` or ``file[index]``."""

    place: str
    values: dict[str, Any]


class StoredRows:
    """Rows in the order given, decoded at each access. The file is in ``folder``, else in that of temporary files."""

    def __init__(self, rows: Iterable[Row], folder: Path | None) -> None:
        """Raises OSError where the disk is full."""
        ends = array("q", [0])
        with tempfile.TemporaryFile(dir=folder) as file:
            for row in rows:
                # Not msgspec: integers may have more than 64 bits, text may have lone surrogates.
                ends.append(ends[-1] + file.write(json.dumps((row.place, row.values)).encode()))
            file.flush()
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if ends[-1] else None
        self._ends = np.array(ends, dtype=np.int64)  # [N + 1]: row i is the bytes from entry i to entry i + 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Row:
        if self._bytes is None:
            raise IndexError(index)
        begin, end = self._ends[index : index + 2]
        return Row(*json.loads(self._bytes[begin:end]))


@dataclass(frozen=True, slots=True, eq=False)
class StoredSamples(Sequence[Sample]):
    """The rows ``indices`` [N] int64 of ``rows``, each made a sample by ``sample_of(index, row)`` at each access."""

    rows: StoredRows
    indices: NDArray[np.int64]
    sample_of: Callable[[int, Row], Sample]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._at(row) for row in self.indices[index].tolist()]
        return self._at(int(self.indices[index]))

    def _at(self, row: int) -> Sample:
        return self.sample_of(row, self.rows[row])
