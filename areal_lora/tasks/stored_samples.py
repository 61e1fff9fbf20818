"""Keep the rows of a data set in a file without a name, mapped into memory: a million rows cost pages that the kernel
can drop. Read their chat messages, and the data set's own answers to its prompts: texts or conversations."""

import json
import mmap
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config.sections.adapter import StagedDifficulty
from areal_lora.errors import ConfigError
from areal_lora.types import Sample, content_text, gold_text


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

    def shown(self, place: int) -> str:
        """Equal for copies alone: what a model is shown and the gold answer, or the whole row if it has none.

        Rows of an environment may have one prompt, and differ by a seed or a level.
        """
        sample = self[place]
        return repr((sample.prompt, sample.messages, sample.columns if sample.answer is None else sample.answer))


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


def placeholders_of(names: Iterable[str]) -> re.Pattern[str]:
    """Placeholders of a template: of words and dots, and ``names``, which may have blanks or hyphens.

    No group: an argument of LaTeX.
    """
    name = "|".join([r"\w+(?:\.\w+)*", *map(re.escape, filter(None, names))])
    return re.compile(rf"\\[A-Za-z]{{2,}}\*?\{{(?:[\w.]+|{name})\}}|\{{({name})\}}")


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


def chat_messages(value: Any, path: str, what: str) -> list[dict[str, Any]]:
    """``value`` as agents' requests give it to chat templates: no key is null, arguments of calls are decoded, content
    is text.

    Raises ConfigError, at ``path``, for what is no list of messages; ``what`` names it.
    """
    if isinstance(value, str):
        raise ConfigError(
            path, f"{what} is text, not a list of messages", "name a list of objects, not their JSON text"
        )
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ConfigError(path, f"{what} holds no list of messages", "each has role and content")
    messages = [{key: part for key, part in message.items() if part is not None} for message in value]
    for i, message in enumerate(messages):
        if calls := message.pop("tool_calls", None):  # Arrow has an empty list or null in messages without calls
            if not isinstance(calls, list) or not all(
                isinstance(c, dict) and c.keys() & {"function", "name"} for c in calls
            ):
                raise ConfigError(path, f"{what}, message {i}: tool_calls are no calls of functions", "correct them")
            flat = (_decoded(call) for call in calls)  # templates take both forms
            message["tool_calls"] = [c | {"function": _decoded(c["function"])} if "function" in c else c for c in flat]
            message.setdefault("content", "")
        if "content" in value[i] and message.get("role") != "assistant":  # an empty answer is none
            message.setdefault("content", "")
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(path, f"{what}, message {i} lacks role or content", "write both, or remove the row")
        try:
            message["content"] = content_text(message["content"])
        except ValueError as error:
            raise ConfigError(path, f"{what}, message {i}: content: {error}", "remove the row") from None
    return messages


def _decoded(function: Any) -> Any:
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = msgspec.json.decode(function["arguments"])
            msgspec.msgpack.encode(arguments)  # as a reward gets them: integers have 64 bits there
            return function | {"arguments": arguments}
        except (msgspec.DecodeError, OverflowError, RecursionError):  # the text itself, as in agents' requests
            pass
    return function


def until_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages before the first of the assistant's."""
    n = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:n]


def given_answer(sample: Sample, column: str | None) -> list[dict[str, Any]]:
    """The messages after the prompt of ``sample``, from the assistant's first to its last.

    They are one of the text in ``column``, which is the gold answer if it is None, or the list of messages there, which
    may start with those of the prompt. Raises ConfigError for a row that has neither.
    """
    try:
        value = sample.gold if column is None else value_of(sample.columns, column)
    except KeyError:
        value = None
    if isinstance(value, str) and value.strip():
        return [{"role": "assistant", "content": value}]
    if not isinstance(value, list):
        known = ", ".join(sample.columns) or "none"
        what = "gold answer" if column is None else f"text in column {column!r}"
        raise ConfigError("sft.column", f"{sample.uid} has no {what}", f"name a column of text; its columns: {known}")
    messages = chat_messages(value, "sft.column", what := f"{sample.uid}: column {column!r}")
    before, roles = until_answer(messages), [message["role"] for message in messages]
    n = len(before)
    twice = next((i for i, pair in enumerate(pairwise(roles)) if pair == ("assistant", "assistant")), None)
    for wrong, reason, fix in (
        (sample.messages is None, "holds messages, not text", "set task.format.kind=chat"),
        (roles[-1] != "assistant", "does not end with an answer of the assistant's", "remove what follows the last"),
        (twice is not None, f"has two messages of the assistant's in a row, from message {twice}", "make them one"),
        (
            n and before != list(sample.messages or ())[-n:],
            "starts with other messages than the prompt's",
            f"set task.columns.messages={column}",
        ),
    ):
        if wrong:
            raise ConfigError("sft.column", f"{what} {reason}", fix)
    return messages[n:]
