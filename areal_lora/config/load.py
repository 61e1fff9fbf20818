"""YAML files and dotted overrides -> Config, or one ConfigError that names file, key and fix.

Files are merged in order: maps merge key by key, the entries of ``adapters`` merge by
``name`` (a single entry merges with a single entry), every other list replaces. A section
chosen by ``kind`` (task, algorithm) is replaced as a whole when an overlay changes its kind,
because the keys of the old kind mean nothing to the new one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal_lora.config import schema
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError

COMMAND_LINE = "the command line"
_TAGGED = frozenset({"task", "workflow", "reward", "algorithm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, or the overrides: what it set, and on which line."""

    label: str
    data: dict[str, Any]
    lines: dict[schema.Path, int]
    folder: Path

    def where(self, path: schema.Path) -> str:
        line = self.lines.get(path)
        return self.label if line is None else f"{self.label}:{line}"


def load_config(paths: Sequence[Path | str], overrides: Sequence[str] = ()) -> Config:
    """Read, merge, override, validate. Raises ConfigError with one line for the first thing that is wrong."""
    if not paths:
        raise ConfigError("--config", "no configuration file given", "--config examples/math/embedded.yaml")
    sources = [_read(Path(path)) for path in paths]
    merged: dict[str, Any] = {}
    for source in sources:
        merged = _merge_maps(merged, source.data, source.label)
    for override in overrides:
        merged, source = _apply_override(merged, override)
        sources.append(source)
    _resolve_paths(merged, sources)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise _to_config_error(error, merged, sources) from None


# --- reading -----------------------------------------------------------------------------


def _read(path: Path) -> Source:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "no such configuration file", "check the path given to --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None
    try:
        data = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), "is not valid YAML: " + " ".join(str(error).split())) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(str(path), f"holds a {type(data).__name__}, not key: value pairs")
    lines: dict[schema.Path, int] = {}
    if root is not None:
        _index_lines(root, (), lines, str(path))
    return Source(label=str(path), data=data, lines=lines, folder=path.resolve().parent)


def _index_lines(node: yaml.Node, path: schema.Path, lines: dict[schema.Path, int], label: str) -> None:
    """Record the line of each key; a key given twice is an error, YAML would silently keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _index_lines(item, (*path, i), lines, label)
    elif isinstance(node, yaml.MappingNode):
        seen: set[schema.Path] = set()
        for key, value in node.value:
            here = (*path, key.value)
            line = key.start_mark.line + 1
            if here in seen:
                raise ConfigError(schema.dotted(here), f"given twice in {label}:{line}", "keep one of the two")
            seen.add(here)
            lines[here] = line
            _index_lines(value, here, lines, label)


# --- merging -----------------------------------------------------------------------------


def _merge_maps(base: Mapping[str, Any], overlay: Mapping[str, Any], label: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        old = base.get(key)
        if key == "adapters" and isinstance(old, list) and isinstance(value, list):
            merged[key] = _merge_adapters(old, value, label)
        elif isinstance(old, dict) and isinstance(value, dict):
            changes_kind = key in _TAGGED and value.get("kind", old.get("kind")) != old.get("kind")
            merged[key] = dict(value) if changes_kind else _merge_maps(old, value, label)
        else:
            merged[key] = value
    return merged


def _merge_adapters(base: list[Any], overlay: list[Any], label: str) -> list[Any]:
    if len(base) == 1 and len(overlay) == 1 and isinstance(base[0], dict) and isinstance(overlay[0], dict):
        return [_merge_maps(base[0], overlay[0], label)]
    merged = list(base)
    names = [entry.get("name") for entry in base if isinstance(entry, dict)]
    for i, entry in enumerate(overlay):
        name = entry.get("name") if isinstance(entry, dict) else None
        if name is None:
            raise ConfigError(
                f"adapters.{i}", f"an entry without a name in {label} cannot be matched", f"name one of {names}"
            )
        if name in names:
            at = names.index(name)
            merged[at] = _merge_maps(merged[at], entry, label)
        else:
            merged.append(entry)
    return merged


# --- overrides ---------------------------------------------------------------------------


def _apply_override(data: dict[str, Any], text: str) -> tuple[dict[str, Any], Source]:
    """``a.b=c``: ``c`` is read as YAML; an adapter is addressed by number or name."""
    key, equals, raw = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(text, "is not an override", "write it as dotted.key=value")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise ConfigError(key, f"the value {raw!r} is not valid YAML", "quote it") from None
    parts = key.split(".")
    if parts[0] != "adapters" or len(parts) == 1:
        nested = _nest(parts, value)
        merged = _merge_maps(_check_is_map(data, parts), nested, COMMAND_LINE)
        return merged, Source(label=COMMAND_LINE, data=nested, lines={}, folder=Path.cwd())
    adapters = data.get("adapters")
    if not isinstance(adapters, list):
        raise ConfigError(key, "no configuration file has a list `adapters`")
    at, rest = _find_adapter(adapters, key)
    if not rest:
        raise ConfigError(key, "an adapter cannot be replaced as a whole", f"set one of its keys, {key}.rank=8")
    entry = _nest(rest, value)
    merged_entry = _merge_maps(_check_is_map(adapters[at], rest), entry, COMMAND_LINE)
    merged_adapters = [merged_entry if i == at else old for i, old in enumerate(adapters)]
    # Sources look an entry up by name, so that the error names the command line and not a file.
    nested = {"adapters": [{"name": merged_entry.get("name"), **entry}]}
    return {**data, "adapters": merged_adapters}, Source(label=COMMAND_LINE, data=nested, lines={}, folder=Path.cwd())


def _find_adapter(adapters: list[Any], key: str) -> tuple[int, list[str]]:
    """Position of the adapter that ``adapters.<number or name>.rest`` speaks of, and the rest."""
    address = key.removeprefix("adapters.")
    names = [str(entry.get("name")) for entry in adapters if isinstance(entry, dict)]
    for at, name in enumerate(names):
        # A name may itself hold dots.
        if address == name or address.startswith(name + "."):
            return at, [part for part in address.removeprefix(name).split(".") if part]
    first, _, rest = address.partition(".")
    if first.isdecimal() and int(first) < len(adapters):
        return int(first), rest.split(".") if rest else []
    raise ConfigError(key, f"there is no adapter {first!r}", f"use one of {', '.join(names)} or 0..{len(names) - 1}")


def _nest(parts: list[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return value


def _check_is_map(data: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """``data``, if the way to ``parts`` leads only through sections."""
    here: Any = data
    for depth, part in enumerate(parts[:-1]):
        here = here.get(part)
        if here is None:
            break
        if not isinstance(here, dict):
            at = ".".join(parts[: depth + 1])
            raise ConfigError(".".join(parts), f"{at} is a value, not a section", f"set {at}=...")
    return data


# --- paths -------------------------------------------------------------------------------


def _resolve_paths(data: dict[str, Any], sources: Sequence[Source]) -> None:
    """Make relative paths absolute where they exist next to the file that set them, or in the working folder."""
    spots: list[schema.Path] = [("model", "path")]
    for i, _ in enumerate(data.get("adapters") or []):
        spots += [("adapters", i, "task", "train"), ("adapters", i, "task", "eval"), ("adapters", i, "init_from")]
        spots += [
            ("adapters", i, *key) for key in (("reward", "path"), ("workflow", "path"), ("workflow", "environment"))
        ]
    for spot in spots:
        holder = _get(data, spot[:-1])
        value = holder.get(spot[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, str):
            continue
        if Path(value).expanduser().is_absolute():
            holder[spot[-1]] = str(Path(value).expanduser()) if value.startswith("~") else value
            continue
        source = _origin(spot, data, sources)
        folders = [Path.cwd()] if source is None else [source.folder, Path.cwd()]
        place, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")  # file.py:name
        found = next((folder / place for folder in folders if (folder / place).exists()), None)
        if found is not None:
            holder[spot[-1]] = f"{found.resolve()}{colon}{name}"


def _get(data: Any, path: schema.Path) -> Any:
    for key in path:
        if isinstance(data, dict):
            data = data.get(str(key))
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return None
    return data


def _origin(path: schema.Path, data: Any, sources: Sequence[Source]) -> Source | None:
    """The last source that set ``path``."""
    return next((s for s in reversed(sources) if _local_path(path, data, s.data) is not None), None)


def _local_path(path: schema.Path, data: Any, local: Mapping[str, Any]) -> schema.Path | None:
    """``path`` of the merged tree as it is numbered within one source; None where the source does not set it."""
    if path[:1] == ("adapters",) and len(path) > 1:
        entries = local.get("adapters")
        if not isinstance(entries, list):
            return None
        name = _get(data, (*path[:2], "name"))
        single = len(entries) == 1 and len(data["adapters"]) == 1
        at = next((i for i, e in enumerate(entries) if single or _is_named(e, name)), None)
        if at is None:
            return None
        path = ("adapters", at, *path[2:])
    holder = _get(local, path[:-1])
    key = path[-1]
    present = key in holder if isinstance(holder, dict) else isinstance(holder, list) and int(key) < len(holder)
    return path if present else None


def _is_named(entry: Any, name: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == name


# --- errors ------------------------------------------------------------------------------


def _to_config_error(error: ValidationError, data: Any, sources: Sequence[Source]) -> ConfigError:
    # A misspelt key that is required reports itself twice; the unknown key is the cause.
    order = {"extra_forbidden": 0, "missing": 2}
    details = sorted(error.errors(), key=lambda d: order.get(d["type"], 1))
    first = details[0]
    path = _without_tags(first["loc"], data)
    name = schema.dotted(path)
    if first["type"] == "missing":
        labels = ", ".join(s.label for s in sources if s.label != COMMAND_LINE)
        return ConfigError(name, f"is required and set nowhere ({labels})", f"add {name}: <value>")
    source = _origin(path, data, sources)
    where = ""
    if source is not None:
        local = _local_path(path, data, source.data)
        where = f" in {source.where(local or path)}"
    if first["type"] == "extra_forbidden":
        return ConfigError(name, f"unknown key{where}", f"use {nearest_key(path, data)}")
    return ConfigError(name, f"{first['input']!r} is not allowed{where}", _what_is_allowed(first))


def _without_tags(loc: tuple[int | str, ...], data: Any) -> schema.Path:
    """pydantic puts the chosen ``kind`` into the location; keys have no such part."""
    path: list[schema.Key] = []
    for key in loc:
        here = _get(data, tuple(path))
        if isinstance(here, dict) and key not in here and here.get("kind") == key:
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
