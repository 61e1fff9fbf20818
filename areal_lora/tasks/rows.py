"""Read the rows of a data set: JSONL, JSON, CSV and parquet files, folders of them, and hub data sets.

A row is a dict of JSON values with its place, ``file:line`` or ``file[index]``, for error messages. JSONL, JSON and
CSV are read here, because a column may hold values of different types, which Arrow does not store. Parquet is read by
pyarrow; folders and hub names by Hugging Face's `datasets`, whose cache is used.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.families.registry import is_hub_name

KINDS = "a JSONL, JSON, CSV or parquet file, a folder of them, or a hub name such as openai/gsm8k"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Where rows come from: ``path`` as configured, the rest for folders and hub names; ``key`` is its key."""

    path: str
    key: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def on_hub(self) -> bool:
        return not Path(self.path).exists() and _names_a_set(self.path)


@dataclass(frozen=True, slots=True)
class Row:
    """``values`` are the columns, as JSON has them."""

    place: str
    values: dict[str, Any]


def _names_a_set(path: str) -> bool:
    """Whether ``path`` reads as ``org/name``. ``data/train.jsonl`` is a file, also where it does not exist."""
    return is_hub_name(path) and Path(path).suffix.lower() not in _READERS


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


def read_rows(source: RowSource) -> Iterator[Row]:
    """Yield all rows in a fixed order.

    Raises ConfigError for a missing file, a kind of file that is not known and a broken row; EnvironmentError_ where a
    package is missing or the hub does not give the data set.
    """
    path = Path(source.path)
    if path.is_file():
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise ConfigError(source.key, f"{path} is no file of a known kind", f"give {KINDS}")
        return (Row(place, _columns(place, values)) for place, values in reader(path))
    if not path.is_dir() and not _names_a_set(source.path):
        raise ConfigError(source.key, f"{source.path}: no such file or folder", f"give {KINDS}")
    return _from_datasets(source)


def _columns(place: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(place, f"is a {type(values).__name__}, not an object with columns", 'write {"prompt": ...}')
    return {str(name): _plain(value) for name, value in values.items()}


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield place, json.loads(line.decode("utf-8"))
                except ValueError as error:
                    raise ConfigError(place, f"not a line of JSON: {error}", "correct or remove the line") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise ConfigError(str(path), f"not JSON: {error}", "write a list of objects, or use JSONL") from error
    if not isinstance(content, list):
        raise ConfigError(str(path), "holds no list of objects", "write [{...}, {...}], or use JSONL")
    return ((f"{path}[{index}]", values) for index, values in enumerate(content))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            for values in reader:
                place = f"{path}:{reader.line_num}"
                if None in values or None in values.values():
                    raise ConfigError(place, "has another number of fields than the first line", "quote its commas")
                yield place, values
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{reader.line_num + 1}", f"not a line of CSV: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise _missing(path, "pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(str(path), f"not a parquet file: {error}") from error
    index = 0
    with file:
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                yield f"{path}[{index}]", values
                index += 1


_READERS: dict[str, Callable[[Path], Iterable[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}


def _from_datasets(source: RowSource) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise _missing(source.path, "datasets") from error
    name, folder = source.path, Path(source.path).is_dir()
    try:
        if folder and any((Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(name)
            rows = loaded[source.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(name, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # fault boundary: the library raises many unrelated types
        reason = " ".join(str(error).split())[:300]
        if folder:
            raise ConfigError(source.key, f"{name}: {reason}", "check its files and split") from error
        raise EnvironmentError_(
            f"{name}: not a file, and the hub did not give it: {reason} (fix: give a JSONL or parquet file, or check "
            "name, subset, split and network)"
        ) from error
    return (
        Row(place, _columns(place, values))
        for index, values in enumerate(rows)
        for place in [f"{name}[{source.split}][{index}]"]
    )


def _missing(what: Path | str, package: str) -> EnvironmentError_:
    return EnvironmentError_(
        f"{what}: reading it needs the package {package} (fix: pip install {package}, or use JSONL)"
    )


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: a date as text, a decimal as a number; bytes (images) are omitted."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case decimal.Decimal():
            return float(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case bytes() | bytearray():
            return None
    return str(value)
