"""Keep the rows of a data set in a file without a name, mapped into memory: a million rows cost pages that the kernel
can drop."""

import json
import mmap
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from areal_lora.config.sections.adapter import StagedDifficulty
from areal_lora.errors import ConfigError
from areal_lora.types import Sample, gold_text


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
        self._ends = np.array(ends, dtype=np.int64)  # [N + 1]: row i is the bytes from entry i to i + 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Row:
        if self._bytes is None:
            raise IndexError(index)
        start, end = self._ends[index : index + 2]
        return Row(*json.loads(self._bytes[start:end]))


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


def value_of(columns: Mapping[str, Any], name: str) -> Any:
    """The value of column ``name``, or of a field in it: ``reward_model.ground_truth``. A column whose own name has
    dots takes precedence.

    Raises KeyError where the row has neither.
    """
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def names_in(columns: Mapping[str, Any]) -> Iterator[str]:
    """What a column may be called: the fields of an object by their paths."""
    for name, value in columns.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{field}" for field in names_in(value))


def indices_by_value(samples: Sequence[Sample], chosen: StagedDifficulty) -> "dict[str, array[int]]":
    """Indices of the samples, ascending, by the text of their value in the column: of ``true`` and 1 that of JSON.

    Raises ConfigError for a sample without it, and for a weight of a value that none has.
    """
    found, key = dict[str, "array[int]"](), "sampling.difficulty"
    for index, sample in enumerate(samples):
        try:
            value = gold_text(value_of(sample.columns, chosen.column))
        except KeyError:
            fix = f"name one of: {', '.join(names_in(sample.columns))}"
            raise ConfigError(f"{key}.column", f"{sample.uid} has no column {chosen.column!r}", fix) from None
        found.setdefault(value, array("q")).append(index)
    for number, stage in enumerate(chosen.stages):
        if unknown := [value for value in stage.weights if value not in found]:
            reason = f"no row has {unknown[0]!r} in column {chosen.column!r}"
            raise ConfigError(
                f"{key}.stages.{number}.weights", reason, f"give weights to: {', '.join(islice(found, 20))}"
            )
    return found
