"""pydantic's errors -> a ConfigError for each key, which names file, line, key and fix."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal_lora.config import models
from areal_lora.config.sections.section import described
from areal_lora.config.sections.task import ONE, SEVERAL
from areal_lora.config.sources import COMMAND_LINE, Source, local_path, origin_of
from areal_lora.errors import ConfigError

_TAG_FAULTS = ("union_tag_invalid", "union_tag_not_found")
_NUMBERS = {
    "greater_than": "greater than",
    "greater_than_equal": "of at least",
    "less_than": "less than",
    "less_than_equal": "of at most",
}
_NOUNS = {
    "int_": "an integer",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "a text",
    "dict_": "keys with values below it",
    "model_": "the keys of this section below it",
}
"""What to give, by the beginning of pydantic's type of error."""


def to_config_errors(error: ValidationError, data: Any, sources: Sequence[Source]) -> list[ConfigError]:
    """One ConfigError for each key that is wrong: unknown keys, then wrong values, then missing keys."""
    order = {"extra_forbidden": 0, "missing": 2}
    errors: dict[str, ConfigError] = {}
    for detail in sorted(error.errors(), key=lambda d: order.get(d["type"], 1)):
        found = _to_config_error(detail, data, sources)
        # A misspelt key that is required is unknown and missing; the unknown key is the cause.
        if detail["type"] != "missing" or not any(e.fix == f"use {found.path}" for e in errors.values()):
            errors.setdefault(found.path, found)
    return list(errors.values())


def _to_config_error(first: ErrorDetails, data: Any, sources: Sequence[Source]) -> ConfigError:
    path = without_tags(first["loc"], data)
    name = models.dotted(path)
    if first["type"] == "missing":
        labels = ", ".join(s.label for s in sources if s.label != COMMAND_LINE)
        return ConfigError(name, f"is required and set nowhere ({labels})", f"add {name}: <value>")
    if first["type"] in _TAG_FAULTS:
        path = (*path, "kind")
        name = models.dotted(path)
    if first["type"] == "union_tag_not_found":
        return ConfigError(name, "is required and set nowhere", f"add {name}, or give the file that this one overlays")
    source = origin_of(path, data, sources)
    where = ""
    if source is not None:
        local = local_path(path, data, source.data)
        where = f" in {source.where(local or path)}"
    if first["type"] == "extra_forbidden":
        return ConfigError(name, f"unknown key{where}", f"use {nearest_key(path, data)}")
    if first["type"] == "value_error":
        reason, _, fix = str(first["ctx"]["error"]).partition(": ")
        return ConfigError(name, reason + (where and f" ({where.strip()})"), fix)
    value = models.value_at(data, path) if first["type"] in _TAG_FAULTS else first["input"]
    return ConfigError(name, f"{value!r} is not allowed{where}", _what_is_allowed(first))


def without_tags(loc: tuple[int | str, ...], data: Any) -> models.Path:
    """pydantic puts the chosen ``kind`` or spelling into the location; keys have no such part."""
    path: list[models.Key] = []
    for key in loc:
        here = models.value_at(data, tuple(path))
        if key in (ONE, SEVERAL) or (isinstance(here, dict) and key not in here and here.get("kind") == key):
            continue
        path.append(key)
    return tuple(path)


def nearest_key(path: models.Path, data: Any) -> str:
    """The valid dotted key most like ``path``: among its siblings first, then anywhere in the tree."""
    section = models.section_at(path[:-1], data)
    siblings = list(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(str(path[-1]), siblings, n=1)
    if close:
        return models.dotted((*path[:-1], close[0]))
    everywhere: dict[str, str] = {}
    for key in models.leaf_keys():
        everywhere.setdefault(key.rpartition(".")[2], key)
    close = difflib.get_close_matches(str(path[-1]), list(everywhere), n=1, cutoff=0.75)
    if close and len(close[0]) > 1:  # one letter is a coincidence
        return everywhere[close[0]]
    at = models.dotted(path[:-1])
    return f"one of {', '.join(siblings)}" + (f" below {at}" if at else "")


def _what_is_allowed(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "union_tag_invalid":
        return f"give one of {context['expected_tags']}"
    if kind in _NUMBERS:
        return f"give a number {_NUMBERS[kind]} {next(iter(context.values()))}"
    if kind == "string_pattern_mismatch":
        return f"give {described(context['pattern'])}"
    if kind == "string_type" and isinstance(detail["input"], int | float):
        return "give a text: put the value into quotes"
    if kind == "list_type":
        return "give a list: [...], or one entry a line, each after `- `"
    noun = next((_NOUNS[start] for start in _NOUNS if kind.startswith(start)), None)
    if noun is not None:
        return f"give {noun}"
    text = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"give {text}" if text != detail["msg"] else detail["msg"]
