"""Load the problems of a task: the rows of any data set, or generated word problems.

``gsm8k`` is a preset of ``dataset``. A row becomes a `Sample`: the text of the prompt or its chat messages, the gold
answer, and all columns, which a reward may take as arguments.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, assert_never

from areal_lora.config.sections.task import Columns, DatasetTask, PromptFormat, TaskConfig, WordProblemsTask
from areal_lora.errors import ConfigError
from areal_lora.tasks.loading import load_import_path
from areal_lora.tasks.rewards import extract_answer
from areal_lora.tasks.rows import Row, RowSource, read_rows, value_of
from areal_lora.tasks.word_problems import Split, long_problem, word_problem
from areal_lora.types import Sample

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
HELD_OUT = 256
"""Rows of ``train`` that are held out if the task has no ``eval`` and no ``n_eval``."""


def load_samples(task: TaskConfig, split: Split) -> list[Sample]:
    """Return all problems of one split, in a fixed order with stable uids.

    Raises ConfigError for a missing file or column, a bad row (``file:line``), a bad template or an answer of the
    wrong kind; EnvironmentError_ if a hub data set or a package is not available.
    """
    match task:
        case WordProblemsTask():
            size = task.n_train if split == "train" else task.n_eval
            make = long_problem if task.level == "three_step" else word_problem
            return [_reformatted(make(task.seed, split, index), task.format) for index in range(size)]
        case DatasetTask():
            return list(_problems(task, split))
        case _:
            assert_never(task)


def hub_sources(task: TaskConfig) -> list[RowSource]:
    """The splits of ``task`` that are on the hub."""
    match task:
        case WordProblemsTask():
            return []
        case DatasetTask():
            splits: tuple[Split, ...] = ("train", "eval") if task.eval else ("train",)
            sources = [_source(task, split) for split in splits if split == "eval" or task.train]
            return [source for source in sources if source.on_hub]
        case _:
            assert_never(task)


def _source(task: DatasetTask, split: Split) -> RowSource:
    held_out = split == "eval" and task.eval is not None
    return RowSource(
        path=task.eval if held_out and task.eval is not None else task.train,
        key="task.eval" if held_out else "task.train",
        subset=task.subset,
        split=task.eval_split if held_out else task.train_split,
        revision=task.revision,
    )


def _problems(task: DatasetTask, split: Split) -> Iterator[Sample]:
    """Raises ConfigError where there is none."""
    source = _source(task, split)
    rows = list(enumerate(_kept(task, read_rows(source))))
    if task.eval is None and rows:
        # The same rows are held out at every start and with every seed of the run.
        size = min(HELD_OUT, len(rows) // 5) if task.n_eval is None else task.n_eval
        if not 0 < size < len(rows):
            reason = f"{size} of {len(rows)} rows would be held out"
            raise ConfigError("task.n_eval", reason, "give task.eval, or a number that leaves rows to train on")
        held_out = frozenset(random.Random("held out").sample(range(len(rows)), size))
        rows = [(index, row) for index, row in rows if (index in held_out) == (split == "eval")]
    most = task.n_train if split == "train" else task.n_eval
    if not rows:
        why = "no problems in this file" if not task.where and task.keep is None else "no row passes the filter"
        raise ConfigError(source.path, why, "check the file, task.where and task.keep")
    for index, row in islice(rows, most):
        identity: Any = index
        if task.columns.id is not None:
            identity = _column(row, task.columns.id, "task.columns.id")
            if not isinstance(identity, str | int) or identity == "":
                raise ConfigError(row.place, f"{identity!r} identifies no row", "use a column of texts or integers")
        sample = _sample(f"{task.kind}/{split}/{identity}", row, task.columns, task.format)
        if task.kind == "gsm8k":
            if not isinstance(sample.answer, str) or not sample.answer.strip():
                fix = "each row needs the columns question and answer"
                raise ConfigError(row.place, "no text in column 'answer'", fix)
            if extract_answer(sample.answer) is None:
                raise ConfigError(row.place, "the answer states no number", "end it with `#### n`")
        yield sample


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
        fix = f"set {key} to one of: {', '.join(_names(row.values))}"
        raise ConfigError(row.place, f"no column {name!r}", fix) from None


def _names(columns: Mapping[str, Any]) -> Iterator[str]:
    """What a column may be called: the fields of an object by their paths."""
    for name, value in columns.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{field}" for field in _names(value))


def _text(row: Row, name: str, key: str) -> str:
    value = _column(row, name, key)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(row.place, f"no text in column {name!r}", f"remove the row, or set {key}")
    return value


def _reformatted(sample: Sample, how: PromptFormat) -> Sample:
    """A generated problem in another format than its own."""
    if how == PromptFormat():
        return sample
    row = Row(sample.uid, {"prompt": sample.prompt, "answer": sample.answer})
    return _sample(sample.uid, row, Columns(), how)


def _sample(uid: str, row: Row, columns: Columns, how: PromptFormat) -> Sample:
    messages = _messages(columns, row)
    if messages is None:
        prompt = _filled(how.template, row, columns.prompt)
        messages = [{"role": "user", "content": prompt}]
    elif how.is_chat:
        prompt = "\n".join(str(m["content"]) for m in messages if m["role"] != "system")
    else:
        raise ConfigError("task.format.kind", "messages need a chat template", "set task.format.kind=chat")
    answer = None if columns.answer is None else _column(row, columns.answer, "task.columns.answer (or null)")
    if not how.is_chat:
        return Sample(uid=uid, prompt=prompt, answer=answer, columns=row.values)
    if how.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": how.system_prompt}, *messages]
    return Sample(uid=uid, prompt=prompt, answer=answer, messages=tuple(messages), columns=row.values)


def _filled(template: str, row: Row, prompt_column: str) -> str:
    """``template`` with the row's columns. Braces around anything else stay: a template may contain ``\\boxed{}``."""
    own = "prompt" if "prompt" in row.values else prompt_column
    values = {name: str(value) for name, value in row.values.items()}
    named = set(_PLACEHOLDER.findall(template))
    if named & {"prompt", prompt_column}:
        values["prompt"] = _text(row, own, "task.columns.prompt")
        values[prompt_column] = _text(row, prompt_column, "task.columns.prompt")
    elif not named & row.values.keys():
        columns = ", ".join(f"{{{name}}}" for name in row.values)
        raise ConfigError("task.format.template", "names no column", f"write {{prompt}} or one of {columns}")
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _messages(columns: Columns, row: Row) -> list[dict[str, Any]] | None:
    if columns.messages is None:
        return None
    messages = _column(row, columns.messages, "task.columns.messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages)
    ):
        raise ConfigError(
            row.place, f"column {columns.messages!r} holds no list of messages", "each has role and content"
        )
    if messages[-1]["role"] == "assistant":
        fix = "remove it, and name the gold answer's column in task.columns.answer"
        raise ConfigError(row.place, "the last message is the assistant's, so there is nothing to answer", fix)
    return messages
