"""Load the problems of a task: generated, from a GSM8K JSONL file, or from a hub data set."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, assert_never

from areal_lora.config.models import Gsm8kTask, TaskConfig, WordProblemsTask
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.tasks.rewards import extract_answer
from areal_lora.tasks.word_problems import Split, word_problem
from areal_lora.types import Sample

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_SPLITS: dict[Split, str] = {"train": "train", "eval": "test"}


def load_samples(task: TaskConfig, split: Split) -> list[Sample]:
    """Return all problems of one split, in a fixed order with stable uids.

    Raises ConfigError for a missing file, a bad row (``file:line``), a bad template or an
    answer without a number; EnvironmentError_ if a hub data set is not available.
    """
    match task:
        case WordProblemsTask():
            size = task.n_train if split == "train" else task.n_eval
            return [word_problem(task.seed, split, index) for index in range(size)]
        case Gsm8kTask():
            return _load_gsm8k(task, split)
        case _:
            assert_never(task)


def _load_gsm8k(task: Gsm8kTask, split: Split) -> list[Sample]:
    source = task.train if split == "train" else task.eval
    rows = _jsonl_rows(Path(source)) if Path(source).is_file() else _hub_rows(source, split)
    samples = []
    for index, (place, row) in enumerate(rows):
        if split == "eval" and index == task.n_eval:
            break
        question, answer = _text(row, "question", place), _text(row, "answer", place)
        if extract_answer(answer) is None:
            raise ConfigError(place, "the answer states no number", "end it with `#### n`")
        samples.append(Sample(uid=f"gsm8k/{split}/{index}", prompt=_prompt(task, question), answer=answer))
    if not samples:
        raise ConfigError(source, "no problems in this file")
    return samples


def _prompt(task: Gsm8kTask, question: str) -> str:
    if "{question}" not in task.prompt_template:
        raise ConfigError("task.prompt_template", "has no {question}", "write {question} where the problem goes")
    # replace, not format: a template may contain braces of its own (\boxed{}).
    return task.prompt_template.replace("{question}", question)


def _text(row: Any, field: str, place: str) -> str:
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(place, f"no text in field {field!r}", "each row needs the fields question and answer")
    return value


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ``(file:line, row)`` for every non-empty line."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise ConfigError(place, f"not a line of JSON: {error}") from error
        yield place, row


def _hub_rows(name: str, split: Split) -> Iterable[tuple[str, Any]]:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(name, "no such file", "give a JSONL file, or a hub name such as openai/gsm8k")
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentError_(
            f"{name}: not a file, and the hub needs the package `datasets`"
            " (fix: pip install datasets, or give a JSONL file)"
        ) from error
    hub_split = _HUB_SPLITS[split]
    try:
        rows = datasets.load_dataset(name, "main", split=hub_split)
    except Exception as error:  # fault boundary: the hub client raises many unrelated types
        reason = str(error).partition("\n")[0]
        raise EnvironmentError_(
            f"{name}: not a file, and the hub did not give it: {reason} (fix: give a JSONL file)"
        ) from error
    return ((f"{name}[{hub_split}][{index}]", row) for index, row in enumerate(rows))
