"""YAML files and dotted overrides -> Config, or a ConfigError for each key that names file, key and fix.

Files merge over files, overrides over files. Maps merge key by key; the entries of ``adapters`` merge by ``name``, a
single entry with a single entry; every other list replaces. An overlay that changes the ``kind`` of a section replaces
the whole section, because the keys of the old kind mean nothing to the new one.
"""

import difflib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal_lora.config import models
from areal_lora.config.sections.section import described
from areal_lora.config.sections.task import BUILT_IN, TAGS
from areal_lora.errors import ConfigError, ConfigErrors

COMMAND_LINE = "the command line"
GIVEN = "the given mapping"
_TAGGED = frozenset({"task", "format", "workflow", "reward", "algorithm"})
"""Sections with a ``kind``."""
_NAMED = ("env", "loss", "advantage")  # keys whose value may be a name
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, or the overrides: what it set, and on which line."""

    label: str
    data: dict[str, Any]
    lines: dict[models.Path, int]
    folder: Path

    def where(self, path: models.Path) -> str:
        line = self.lines.get(path)
        return self.label if line is None else f"{self.label}:{line}"


def read_source(path: Path) -> Source:
    """Parse one YAML file. Raises ConfigError for a missing, unreadable or malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "no such configuration file", "check the path given to --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}", "give a YAML file to --config") from None
    try:
        data = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # also of a day that is none
        # The parser's problem with its line, without its copy of the text.
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        fix = "correct indentation, quotes, brackets; no tabs, no tags"
        raise ConfigError(at, f"is not valid YAML: {problem}", fix) from None
    data = {} if data is None else data
    if not isinstance(data, dict):
        reason = f"holds a {type(data).__name__}, not key: value pairs"
        raise ConfigError(str(path), reason, "start with a section such as `run:`")
    lines: dict[models.Path, int] = {}
    try:
        _index_lines(root, (), lines, str(path))
    except RecursionError:
        raise ConfigError(str(path), "is nested without end", "put no alias into what it names") from None
    return Source(label=str(path), data=data, lines=lines, folder=path.resolve().parent)


def _index_lines(node: yaml.Node | None, path: models.Path, lines: dict[models.Path, int], label: str) -> None:
    """Record the line of each key; a key given twice is an error, YAML would silently keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _index_lines(item, (*path, i), lines, label)
    elif isinstance(node, yaml.MappingNode):
        seen: set[models.Path] = set()
        for key, value in node.value:
            here = (*path, key.value)
            line = key.start_mark.line + 1
            if here in seen:
                raise ConfigError(models.dotted(here), f"given twice in {label}:{line}", "keep one of the two")
            seen.add(here)
            lines[here] = line
            _index_lines(value, here, lines, label)


def origin_of(path: models.Path, data: Any, sources: Sequence[Source]) -> Source | None:
    """The last source that set ``path``."""
    return next((s for s in reversed(sources) if local_path(path, data, s.data) is not None), None)


def local_path(path: models.Path, data: Any, local: Mapping[str, Any]) -> models.Path | None:
    """``path`` of the merged tree as it is numbered within one source; None where the source does not set it."""
    if path[:1] == ("adapters",) and len(path) > 1:
        entries = local.get("adapters")
        if not isinstance(entries, list):
            return None
        name = models.value_at(data, (*path[:2], "name"))
        single = len(entries) == 1 and len(data["adapters"]) == 1
        at = next((i for i, e in enumerate(entries) if single or (isinstance(e, dict) and e.get("name") == name)), None)
        if at is None:
            return None
        path = ("adapters", at, *path[2:])
    holder = models.value_at(local, path[:-1])
    key = path[-1]
    present = key in holder if isinstance(holder, dict) else isinstance(holder, list) and int(key) < len(holder)
    return path if present else None


_PACKAGE = Path(__file__).resolve().parents[1]


def examples() -> Path:
    installed = _PACKAGE / "examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples"


def configuration_file(path: Path) -> Path:
    """``path``, or the shipped example of this name if ``path`` is a bare name of no file of the working folder."""
    if path.exists() or path.name != str(path):
        return path
    return next(iter(sorted(examples().glob(f"*/{path.name}"))), path) if path.suffix in (".yaml", ".yml") else path


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
        if key not in TAGS and not (isinstance(here, dict) and key not in here and here.get("kind") == key):
            path.append(key)
    return tuple(path)


def nearest_key(path: models.Path, data: Any) -> str:
    """The key most like ``path``, among its siblings first."""
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


def merge_maps(base: Mapping[str, Any], overlay: Mapping[str, Any], label: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        old = base.get(key)
        if key == "adapters" and isinstance(old, list) and isinstance(value, list):
            merged[key] = _merge_adapters(old, value, label)
        elif isinstance(old, dict) and isinstance(value, dict):
            changes_kind = key in _TAGGED and value.get("kind", old.get("kind")) != old.get("kind")
            merged[key] = dict(value) if changes_kind else merge_maps(old, value, label)
        else:
            merged[key] = value
    return merged


def _merge_adapters(base: list[Any], overlay: list[Any], label: str) -> list[Any]:
    if len(base) == 1 and len(overlay) == 1 and isinstance(base[0], dict) and isinstance(overlay[0], dict):
        return [merge_maps(base[0], overlay[0], label)]
    given = Counter(entry.get("name") for entry in overlay if isinstance(entry, dict))
    if repeated := [name for name, count in given.items() if name is not None and count > 1]:
        raise ConfigError("adapters", f"{label} names {repeated[0]!r} twice", "give each adapter its own name")
    merged = list(base)
    names = [entry.get("name") for entry in base if isinstance(entry, dict)]
    for i, entry in enumerate(overlay):
        name = entry.get("name") if isinstance(entry, dict) else None
        if name is None:
            reason = f"an entry without a name in {label} cannot be matched"
            raise ConfigError(f"adapters.{i}", reason, f"name one of {names}")
        if name in names:
            at = names.index(name)
            merged[at] = merge_maps(merged[at], entry, label)
        else:
            merged.append(entry)
    return merged


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=c`` as key and value, which is read as YAML. Raises ConfigError for a text that is none."""
    key, equals, raw = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(text, "is not an override", "write it as dotted.key=value")
    try:
        return key, yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError):  # ValueError: a date that does not exist
        raise ConfigError(key, f"the value {raw!r} is not valid YAML", "quote it") from None


def apply_override(data: dict[str, Any], text: str) -> tuple[dict[str, Any], Source]:
    """The merged tree; an adapter is addressed by number or name. Raises as `parse_override`."""
    key, value = parse_override(text)
    parts = key.split(".")
    if parts[0] != "adapters" or len(parts) == 1:
        nested = _nest(parts, value)
        merged = merge_maps(_check_is_map(data, parts), nested, COMMAND_LINE)
    else:
        adapters = data.get("adapters")
        if not isinstance(adapters, list):
            raise ConfigError(key, "no configuration file has a list `adapters`", "add one to a file")
        at, rest = _find_adapter(adapters, key)
        if not rest:
            raise ConfigError(key, "an adapter cannot be replaced as a whole", f"set one of its keys, {key}.rank=8")
        changed = merge_maps(_check_is_map(adapters[at], rest), _nest(rest, value), COMMAND_LINE)
        merged = {**data, "adapters": [changed if i == at else old for i, old in enumerate(adapters)]}
        # Sources look an entry up by name, so that the error names the command line and not a file.
        nested = {"adapters": [{"name": changed.get("name"), **_nest(rest, value)}]}
    return merged, Source(label=COMMAND_LINE, data=nested, lines={}, folder=Path.cwd())


def _find_adapter(adapters: list[Any], key: str) -> tuple[int, list[str]]:
    """Return the position of the adapter in ``adapters.<number or name>.rest``, and the rest."""
    address = key.removeprefix("adapters.")
    names = [str(entry.get("name")) for entry in adapters if isinstance(entry, dict)]
    for at, name in enumerate(names):
        # A name may itself hold dots.
        if address == name or address.startswith(name + "."):
            return at, [part for part in address.removeprefix(name).split(".") if part]
    first, _, rest = address.partition(".")
    if first.isdecimal() and int(first) < len(adapters):
        return int(first), rest.split(".") if rest else []
    numbers = "0" if len(names) == 1 else f"0 to {len(names) - 1}"
    raise ConfigError(key, f"there is no adapter {first!r}", f"use {' or '.join(names)}, or its number, {numbers}")


def _nest(parts: list[str], value: Any) -> dict[str, Any]:
    return {parts[0]: _nest(parts[1:], value) if parts[1:] else value}


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


def load_config(
    parts: Sequence[Path | str | Mapping[str, Any]],
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Mapping[str, str]] | None = None,
) -> models.Config:
    """Read, merge, override, validate. A part is a YAML file or a mapping of the same shape.

    A bare file name may be that of a shipped example. Relative paths in a mapping are looked up in the working folder.

    ``given`` are sections of the only adapter, such as ``reward``, of which keys that no part sets are taken.

    Raises ConfigError, or ConfigErrors where keys are unknown, missing or of a wrong type in several places.
    """
    if not parts:
        raise ConfigError("--config", "no configuration file given", "--config examples/math/embedded.yaml")
    sources = [_source(part) for part in parts]
    merged: dict[str, Any] = {}
    for source in sources:
        merged = merge_maps(merged, source.data, source.label)
    for override in overrides:
        merged, source = apply_override(merged, override)
        sources.append(source)
    for section, keys in (given or {}).items():
        merged = _with_given(merged, section, keys)
    _resolve_paths(merged, sources)
    try:
        return models.Config.model_validate(merged)
    except ValidationError as error:
        errors = to_config_errors(error, merged, sources)
        raise (errors[0] if len(errors) == 1 else ConfigErrors(errors)) from None


def _with_given(data: dict[str, Any], section: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """``data`` with ``keys`` below those of the section, unless this is of another kind that has keys of its own."""
    match data.get("adapters"):
        case [dict() as adapter] if isinstance(old := adapter.get(section, {}), dict):
            if old.get("kind", keys["kind"]) in (keys["kind"], *BUILT_IN):
                return data | {"adapters": [adapter | {section: {**keys, **old, "kind": keys["kind"]}}]}
    return data


def _source(part: Path | str | Mapping[str, Any]) -> Source:
    if isinstance(part, Mapping):
        return Source(label=GIVEN, data=_plain(part), lines={}, folder=Path.cwd())
    return read_source(configuration_file(Path(part)))


def _plain(value: Any) -> Any:
    """A copy with dicts, lists and text for paths, as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _resolve_paths(data: dict[str, Any], sources: Sequence[Source]) -> None:
    """Make relative paths absolute where they exist next to the file that set them, or in the working folder."""
    spots: list[models.Path] = [("model", "path"), ("service", "api", "data")]
    keys = "task.train task.eval task.keep init_from reward.path workflow.path workflow.env"
    for i, adapter in enumerate(entries if isinstance(entries := data.get("adapters"), list) else ()):
        sets = adapter.get("evals") if isinstance(adapter, dict) else None
        n_sets = len(sets) if isinstance(sets, list) else 0
        spots += [("adapters", i, "evals", j, "task", key) for j in range(n_sets) for key in ("train", "eval", "keep")]
        spots += [("adapters", i, *key.split(".")) for key in f"{keys} algorithm.loss algorithm.advantage".split()]
        rewards = adapter.get("reward") if isinstance(adapter, dict) else None
        spots += [("adapters", i, "reward", j, "path") for j in range(len(rewards) if isinstance(rewards, list) else 0)]
    for spot in spots:
        holder = models.value_at(data, spot[:-1])
        value = holder.get(spot[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, str) or (spot[-1] in _NAMED and ".py:" not in value):
            continue
        holder[spot[-1]] = value = os.path.expanduser(value)
        source = origin_of(spot, data, sources)
        folders = [Path.cwd()] if source is None else [source.folder, Path.cwd()]
        place, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")  # file.py:name
        found = next((folder / place for folder in folders if (folder / place).exists()), None)
        if found is not None and not Path(value).is_absolute():
            holder[spot[-1]] = f"{found.resolve()}{colon}{name}"
