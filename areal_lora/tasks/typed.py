"""A problem that a person types, as the task would write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from areal_lora.config.sections.task import DatasetTask, TaskConfig
from areal_lora.errors import ConfigError
from areal_lora.types import Sample

_NAME = re.compile(r"\{(\w+)\}")


def typed_sample(task: TaskConfig, text: str, before: Sequence[dict[str, Any]] = ()) -> Sample:
    """The prompt of ``text`` in the task's format; ``before`` are earlier turns, which only a chat has.

    Raises ConfigError for a template that needs other columns than the prompt.
    """
    if isinstance(task, DatasetTask):
        text, names = _filled(task.format.template, text, {"prompt", task.columns.prompt})
        if names:
            reason = f"the prompt needs the column {names[0]!r}, too"
            raise ConfigError("task.format.template", reason, "use a server of `areal-lora serve` with whole prompts")
    elif not text.startswith("Q: "):
        text = f"Q: {text}\nA:"  # a generated word problem
    how = task.format
    if not how.is_chat:
        return Sample(uid="typed", prompt=text, answer=None)
    system = [] if how.system_prompt is None else [{"role": "system", "content": how.system_prompt}]
    messages = (*system, *before, {"role": "user", "content": text})
    return Sample(uid="typed", prompt=text, answer=None, messages=messages)


def _filled(template: str, text: str, known: set[str]) -> tuple[str, list[str]]:
    """``template`` with ``text``, and the names in it that nothing fills. A template without names stays a frame."""
    names = _NAME.findall(template)
    if not known & set(names):
        return template, names
    return _NAME.sub(lambda m: text if m[1] in known else m[0], template), []
