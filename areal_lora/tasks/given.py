"""The answer that a data set gives to a problem, for training on given answers."""

from __future__ import annotations

from areal_lora.errors import ConfigError
from areal_lora.tasks.rows import value_of
from areal_lora.types import Sample


def given_answer(sample: Sample, column: str | None) -> str:
    """The text in ``column``, the gold answer if it is None. Raises ConfigError for a row that has none."""
    try:
        value = sample.gold if column is None else value_of(sample.columns, column)
    except KeyError:
        value = None
    if isinstance(value, str) and value.strip():
        return value
    known = ", ".join(sample.columns) or "none"
    what = "gold answer" if column is None else f"text in column {column!r}"
    raise ConfigError("sft.column", f"{sample.uid} has no {what}", f"name a column of text; its columns: {known}")
