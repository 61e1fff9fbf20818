"""Load the problems of a task: the rows of any data set, or generated word problems.

A row of a JSONL, JSON, CSV or parquet file, of a folder of them or of a hub data set is a dict of JSON values with its
place, ``file:line`` or ``file[index]``, for error messages. JSONL, JSON and CSV are read here, because a column may
hold values of different types, which Arrow does not store. Parquet is read by pyarrow; folders and hub names by Hugging
Face's `datasets`, whose cache is used.

A row becomes a `Sample`: the text of the prompt or its chat messages, the gold answer, and all columns, which a reward
may take as arguments. ``gsm8k`` is a preset of ``dataset``.
"""

import csv
import datetime
import decimal
import difflib
import json
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from areal_lora.config.sections.task import Columns, DatasetTask, PromptFormat, TaskConfig
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.families.registry import is_hub_name
from areal_lora.processes.loading import load_import_path
from areal_lora.processes.log import get_logger
from areal_lora.tasks.rewards import extract_answer
from areal_lora.tasks.stored_samples import (
    Row,
    StoredRows,
    StoredSamples,
    chat_messages,
    names_in,
    placeholders_of,
    until_answer,
    value_of,
)
from areal_lora.tasks.word_problems import Split, word_problem
from areal_lora.types import Sample

log = get_logger(__name__)

KINDS = "a JSONL, JSON, CSV or parquet file, a folder of them, or a hub name such as openai/gsm8k"
HELD_OUT = 256  # rows of ``train`` that are held out if the task has no ``eval`` and no ``n_eval``


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


def _names_a_set(path: str) -> bool:
    """Whether ``path`` reads as ``org/name``. ``data/train.jsonl`` is a file, also where it does not exist."""
    return is_hub_name(path) and Path(path).suffix.lower() not in _READERS


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
    try:
        return {_plain(str(name)): _plain(value) for name, value in values.items()}
    except RecursionError:
        raise ConfigError(place, "is nested too deeply", "write flat columns") from None


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield place, json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise ConfigError(place, f"not a line of JSON: {error}", "correct or remove the line") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"not JSON: {error}", "write a list of objects, or use JSONL") from error
    if not isinstance(content, list):
        raise ConfigError(str(path), "holds no list of objects", "write [{...}, {...}], or use JSONL")
    return ((f"{path}[{index}]", values) for index, values in enumerate(content))


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise ConfigError for a name that two columns have: a row would keep one of them.

    Columns without a name may be several: spreadsheets end lines with commas.
    """
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise ConfigError(str(path), f"has two columns {twice!r}", "give each column a name of its own")


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 30)  # the default, 128 KiB, is less than a long text
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            _check_names(path, reader.fieldnames or ())
            for values in reader:
                place = f"{path}:{reader.line_num}"
                if None in values or None in values.values():
                    raise ConfigError(place, "has another number of fields than the first line", "quote its commas")
                yield place, values
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{reader.line_num + 1}", f"not a line of CSV: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(str(path), f"not a parquet file: {error}") from error
    index = 0
    with file:
        _check_names(path, file.schema_arrow.names)
        try:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    yield f"{path}[{index}]", values
                    index += 1
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise ConfigError(f"{path}[{index}]", f"cannot be read from here on: {error}", "write it again") from error


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
        fix = "pip install datasets, or use JSONL"
        raise EnvironmentError_(f"{source.path}: reading it needs the package datasets (fix: {fix})") from error
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
    places = (f"{name}[{source.split}][{index}]" for index in count())
    return (Row(place, _columns(place, values)) for place, values in zip(places, rows, strict=False))


def _plain(value: Any) -> Any:
    """Return ``value`` as msgpack can hold it: a date and an integer of more than 64 bits as text, a decimal as a
    number; bytes (images) are omitted, and half a surrogate pair is a question mark."""
    match value:
        case int() if not -(2**63) <= value < 2**64:
            return str(value)
        case None | bool() | int() | float():
            return value
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_plain(str(key)): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case decimal.Decimal():
            return float(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case bytes() | bytearray():
            return None
    return str(value)


def load_samples(
    task: TaskConfig, split: Split, folder: Path | None = None, first: int | None = None
) -> Sequence[Sample]:
    """Return all problems of one split, in a fixed order with stable uids; rows are kept in a file in ``folder``.
    With ``first`` only so many of the split's file, which is read no further: held-out ones may be among them.

    Raises ConfigError for a missing file or column, a bad row (``file:line``), a bad template or an answer of the
    wrong kind; EnvironmentError_ if a hub data set or a package is not available.
    """
    if isinstance(task, DatasetTask):
        if first is None:
            return _problems(task, split, folder)
        rows = islice(_kept(task, read_rows(_source(task, split))), first)
        return [_problem(task, split, index, row) for index, row in enumerate(rows)]
    size = task.n_train if split == "train" else task.n_eval
    return [word_problem(0, split, index, long=task.level == "three_step") for index in range(size)][:first]


def reads_hub(task: TaskConfig) -> bool:
    return isinstance(task, DatasetTask) and (_source(task, "train").on_hub or _source(task, "eval").on_hub)


def _source(task: DatasetTask, split: Split) -> RowSource:
    held_out = split == "eval" and task.eval is not None
    return RowSource(
        path=task.eval if split == "eval" and task.eval is not None else task.train,
        key="task.eval" if held_out else "task.train",
        subset=task.subset,
        split=task.eval_split if held_out else task.train_split,
        revision=task.revision,
    )


_stored, _checked = WeakValueDictionary[Hashable, StoredRows](), WeakValueDictionary[Hashable, StoredSamples]()
"""What another adapter of this process holds: the same rows of the same file, unchanged, and a task's samples of it."""


def _rows(task: DatasetTask, source: RowSource, folder: Path | None) -> StoredRows:
    if task.keep is not None:  # code, which may have changed
        return StoredRows(_kept(task, read_rows(source)), folder)
    path = Path(source.path)
    changed_ns = path.stat().st_mtime_ns if path.exists() else 0
    key = (replace(source, key=""), changed_ns, json.dumps(task.where, sort_keys=True))
    if path.is_dir() or (rows := _stored.get(key)) is None:  # the time of a folder is not that of its files
        rows = _stored[key] = StoredRows(_kept(task, read_rows(source)), folder)
    return rows


def _problems(task: DatasetTask, split: Split, folder: Path | None) -> StoredSamples:
    """Raises ConfigError where there is none, and for the first row that is no problem."""
    source = _source(task, split)
    rows = _rows(task, source, folder)
    key = (rows, split, task.model_dump_json())
    if (found := _checked.get(key)) is not None:
        return found
    every = StoredSamples(rows, range(len(rows)), lambda index, row: _problem(task, split, index, row))
    indices: Iterable[int] = every.indices
    if task.eval is None and len(rows):
        # The same rows are held out at every start and with every seed of the run.
        size = min(HELD_OUT, len(rows) // 5) if task.n_eval is None else task.n_eval
        if not 0 < size < len(rows):
            reason = f"{size} of {len(rows)} rows would be held out"
            raise ConfigError("task.n_eval", reason, "give task.eval, or a number that leaves rows to train on")
        indices = sorted(random.Random("held out").sample(range(len(rows)), size))
        if split == "train":  # no copies of them either: public sets have a problem up to a hundred times
            held_out, shown = frozenset(indices), set(map(every.shown, indices))
            others = [index for index in every.indices if index not in held_out]
            indices = [index for index in others if every.shown(index) not in shown] or others  # of one problem: a try
            if n_copies := len(others) - len(indices):
                log.info("%s: %d copies of rows that are held out are not trained on", source.path, n_copies)
    if not len(rows):
        why = "no problems in this file" if not task.where and task.keep is None else "no row passes the filter"
        raise ConfigError(source.path, why, "check the file, task.where and task.keep")
    made = StoredSamples(rows, islice(indices, task.n_train if split == "train" else task.n_eval), every.sample_of)
    sum(1 for _ in made)  # raises for the first bad row
    _checked[key] = made
    return made


def _problem(task: DatasetTask, split: Split, index: int, row: Row) -> Sample:
    sample = _sample(f"{task.kind}/{split}/{index}", row, task.columns, task.format)
    if task.kind == "gsm8k":
        if not isinstance(sample.answer, str) or not sample.answer.strip():
            raise ConfigError(row.place, "no text in column 'answer'", "each row needs the columns question and answer")
        if extract_answer(sample.answer) is None:
            raise ConfigError(row.place, "the answer states no number", "end it with `#### n`")
    return sample


def _kept(task: DatasetTask, rows: Iterable[Row]) -> Iterator[Row]:
    keep = None if task.keep is None else load_import_path(task.keep)
    for row in rows:
        for name, wanted in task.where.items():
            value = _column(row, name, "task.where")
            if value not in wanted if isinstance(wanted, list) else value != wanted:
                break
        else:
            try:
                kept = keep is None or bool(keep(dict(row.values)))
            except Exception as error:  # fault boundary: a user's filter may fail in any way
                reason = f"{task.keep} fails: {type(error).__name__}: {error}"
                raise ConfigError(row.place, reason, "correct task.keep") from error
            if kept:
                yield row


def _column(row: Row, name: str, key: str) -> Any:
    try:
        return value_of(row.values, name)
    except KeyError:
        fix = f"set {key} to one of: {', '.join(names_in(row.values))}"
        raise ConfigError(row.place, f"no column {name!r}", fix) from None


def _text(row: Row, name: str, key: str) -> str:
    value = _column(row, name, key)
    if not isinstance(value, str) or not value.strip():
        fix = f"set task.columns.messages={name}" if isinstance(value, list) else f"remove the row, or set {key}"
        raise ConfigError(row.place, f"no text in column {name!r}", fix)
    return value


def _sample(uid: str, row: Row, columns: Columns, how: PromptFormat) -> Sample:
    messages = _messages(columns, row)
    if messages is None:
        prompt = _filled(how.template, row, columns.prompt)
        messages = [{"role": "user", "content": prompt}]
    elif how.is_chat:
        prompt = "\n".join(m["content"] for m in messages if m["role"] != "system")
    else:
        raise ConfigError("task.format.kind", "messages need a chat template", "set task.format.kind=chat")
    answer = None if columns.answer is None else _column(row, columns.answer, "task.columns.answer (or null)")
    if not how.is_chat:
        return Sample(uid=uid, prompt=prompt, answer=answer, columns=row.values)
    if how.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": how.system_prompt}, *messages]
    return Sample(uid=uid, prompt=prompt, answer=answer, messages=tuple(messages), columns=row.values)


def _filled(template: str, row: Row, prompt_column: str) -> str:
    """``template`` with the row's columns. Other braces stay, as do arguments of LaTeX commands: ``\\boxed{answer}``.

    Raises ConfigError for a placeholder that is almost a column, or a missing field of one.
    """
    values, wrong = dict[str, str](), ""
    known = list(dict.fromkeys(("prompt", *names_in(row.values))))
    placeholders = placeholders_of(known)
    for name in filter(None, placeholders.findall(template)):
        if name in ("prompt", prompt_column):
            values[name] = _text(row, prompt_column, "task.columns.prompt")
        elif name in known:
            values[name] = str(value_of(row.values, name))
        elif name.partition(".")[0] in row.values or difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            wrong = name
    if wrong or not values:
        reason = f"{{{wrong}}} is no column of {row.place}" if wrong else "names no column"
        fix = f"write one of {', '.join(f'{{{name}}}' for name in known)}"
        fix += f", or {{ {wrong} }} for text in braces" if wrong else ""
        raise ConfigError("task.format.template", reason, fix)
    return placeholders.sub(lambda match: values.get(match[1], match[0]), template)


def _messages(columns: Columns, row: Row) -> list[dict[str, Any]] | None:
    if columns.messages is None:
        return None
    value = _column(row, columns.messages, "task.columns.messages")
    messages = chat_messages(value, row.place, f"column {columns.messages!r}")
    if messages[-1]["role"] == "assistant" and not (messages := until_answer(messages)):
        raise ConfigError(row.place, "all messages are the answer, so there is no prompt", "put a user's message first")
    return messages


def typed_sample(task: TaskConfig, text: str, before: Sequence[dict[str, Any]] = ()) -> Sample:
    """The prompt of ``text`` in the task's format; ``before`` are earlier turns, which only a chat has.

    Raises ConfigError for a template that needs other columns than the prompt.
    """
    how = task.format
    if isinstance(task, DatasetTask):
        placeholders = placeholders_of(own := {"prompt", task.columns.prompt})
        names = list(filter(None, placeholders.findall(how.template)))
        if names and own.isdisjoint(names):
            reason = f"the prompt needs the column {names[0]!r}, too"
            raise ConfigError("task.format.template", reason, "use a server of `areal-lora serve` with whole prompts")
        text = placeholders.sub(lambda match: text if match[1] in own else match[0], how.template)
    elif not text.startswith("Q: "):
        text = f"Q: {text}\nA:"  # a generated word problem
    if not how.is_chat:
        return Sample(uid="typed", prompt=text, answer=None)
    system = [] if how.system_prompt is None else [{"role": "system", "content": how.system_prompt}]
    messages = (*system, *before, {"role": "user", "content": text})
    return Sample(uid="typed", prompt=text, answer=None, messages=messages)
