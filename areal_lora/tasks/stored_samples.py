"""Keep the rows of a data set in a file without a name, mapped into memory: a million rows cost pages that the kernel
can drop."""

import json
import mmap
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        self._ends = array("q", [0])  # [N + 1]: row i is the bytes from entry i to i + 1
        with tempfile.TemporaryFile(dir=folder) as file:
            for row in rows:
                # Not msgspec: integers may have more than 64 bits, text may have lone surrogates.
                self._ends.append(self._ends[-1] + file.write(json.dumps((row.place, row.values)).encode()))
            file.flush()
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._ends[-1] else b""

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Row:
        return Row(*json.loads(self._bytes[self._ends[index] : self._ends[index + 1]]))


class StoredSamples(Sequence[Sample]):
    """The rows ``indices`` of ``rows``, each made a sample by ``sample_of(index, row)`` at each access."""

    def __init__(self, rows: StoredRows, indices: Iterable[int], sample_of: Callable[[int, Row], Sample]) -> None:
        self.rows, self.indices, self.sample_of = rows, array("q", indices), sample_of

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self.sample_of(index, self.rows[index]) for index in self.indices[place]]
        return self.sample_of(self.indices[place], self.rows[self.indices[place]])

    def asked(self, place: int) -> str:
        """All that a model is shown of a sample: equal for copies alone."""
        sample = self[place]
        return repr((sample.prompt, sample.messages))


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
            raise ConfigError(key, f"{sample.uid} has no column {chosen.column!r}", fix) from None
        found.setdefault(value, array("q")).append(index)
    for first, weights in chosen.stages:
        if unknown := [value for value in weights if value not in found]:
            reason = f"no row has {unknown[0]!r} in column {chosen.column!r}"
            fix = f"give weights to: {', '.join(sorted(found)[:20])}"
            raise ConfigError(f"{key}.{chosen.column}.{first}", reason, fix)
    return found
