"""pydantic's errors -> one ConfigError that names file, line, key and fix."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal_lora.config import schema
from areal_lora.config.reward import ONE, SEVERAL
from areal_lora.config.sources import COMMAND_LINE, Source, local_path, origin_of, value_at
from areal_lora.errors import ConfigError


def to_config_error(error: ValidationError, data: Any, sources: Sequence[Source]) -> ConfigError:
    # A misspelt key that is required reports itself twice; the unknown key is the cause.
    order = {"extra_forbidden": 0, "missing": 2}
    details = sorted(error.errors(), key=lambda d: order.get(d["type"], 1))
    first = details[0]
    path = _without_tags(first["loc"], data)
    name = schema.dotted(path)
    if first["type"] == "missing":
        labels = ", ".join(s.label for s in sources if s.label != COMMAND_LINE)
        return ConfigError(name, f"is required and set nowhere ({labels})", f"add {name}: <value>")
    source = origin_of(path, data, sources)
    where = ""
    if source is not None:
        local = local_path(path, data, source.data)
        where = f" in {source.where(local or path)}"
    if first["type"] == "extra_forbidden":
        return ConfigError(name, f"unknown key{where}", f"use {nearest_key(path, data)}")
    return ConfigError(name, f"{first['input']!r} is not allowed{where}", _what_is_allowed(first))


def _without_tags(loc: tuple[int | str, ...], data: Any) -> schema.Path:
    """pydantic puts the chosen ``kind`` or spelling into the location; keys have no such part."""
    path: list[schema.Key] = []
    for key in loc:
        here = value_at(data, tuple(path))
        if key in (ONE, SEVERAL) or (isinstance(here, dict) and key not in here and here.get("kind") == key):
            continue
        path.append(key)
    return tuple(path)


def nearest_key(path: schema.Path, data: Any) -> str:
    """The valid dotted key most like ``path``: among its siblings first, then anywhere in the tree."""
    section = schema.section_at(path[:-1], data)
    siblings = list(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(str(path[-1]), siblings, n=1)
    if close:
        return schema.dotted((*path[:-1], close[0]))
    everywhere: dict[str, str] = {}
    for key in schema.leaf_keys():
        everywhere.setdefault(key.rpartition(".")[2], key)
    close = difflib.get_close_matches(str(path[-1]), list(everywhere), n=1, cutoff=0.75)
    if close:
        return everywhere[close[0]]
    return "one of " + ", ".join(schema.dotted((*path[:-1], sibling)) for sibling in siblings)


def _what_is_allowed(detail: ErrorDetails) -> str:
    if detail["type"] == "union_tag_invalid":
        return f"give kind one of {detail['ctx']['expected_tags']}"
    text = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"give {text}" if text != detail["msg"] else detail["msg"]
