"""YAML files and dotted overrides -> Config, or a ConfigError for each key that names file, key and fix.

Files merge over files, overrides over files. Maps merge key by key; the entries of ``adapters`` merge by ``name``, a
single entry with a single entry; every other list replaces. An overlay that changes the ``kind`` of a section replaces
the whole section, because the keys of the old kind mean nothing to the new one; a format
keeps them, unless it becomes a template. An empty list of ``adapters`` and an empty map of keys of one's own replace.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal_lora.config import models
from areal_lora.config.sections.section import described
from areal_lora.config.sections.task import BUILT_IN
from areal_lora.errors import ConfigError, ConfigErrors

COMMAND_LINE = "the command line"
GIVEN = "the given mapping"
_TAGGED = frozenset({"task", "format", "workflow", "reward", "algorithm"})
"""Sections with a ``kind``."""
# fmt: off
OWN_KEYS = frozenset({
    "where", "args", "engine_args", "rank_pattern", "alpha_pattern", "chat_template_kwargs", "parameters", "judges",
    "difficulty", "srun_extra", "wrapper",
})
# fmt: on
"""Maps whose keys are the user's."""
_NAMED = ("env", "tool_parser", "loss", "advantage")  # keys whose value may be a name
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


@dataclass(frozen=True, slots=True)
class Origin:
    """What has set a key: a file, with the line, or the overrides. Relative paths are looked up in ``folder``."""

    label: str
    folder: Path
    line: int | None = None

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


class KeyTree(dict[str, Any]):
    """A mapping of the configuration, with the ``origins`` of its keys."""

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
        super().__init__(values)
        self.origins = dict(origins)


class _Loader(yaml.SafeLoader):
    """Its mappings are trees. A key given twice is an error, YAML would silently keep the last. 1e-3 is a number, 0 a
    text as a key, as in overrides."""

    def __init__(self, text: str, origin: Origin) -> None:
        super().__init__(text)
        self._origin = origin

    def tree(self, node: yaml.MappingNode) -> KeyTree:
        origins: dict[str, Origin] = {}
        for key, _ in node.value:
            name, here = str(key.value), replace(self._origin, line=key.start_mark.line + 1)
            if name in origins:
                raise ConfigError(name, f"given twice in {here}", "keep one of the two")
            origins[name] = here
        values: dict[Any, Any] = self.construct_mapping(node, deep=True)  # deep: one that is in itself is an error
        values = {str(key) if type(key) is int else key: value for key, value in values.items()}
        return KeyTree(values, dict.fromkeys(map(str, values), self._origin) | origins)


_Loader.add_constructor(_Loader.DEFAULT_MAPPING_TAG, _Loader.tree)
# YAML 1.2's, without integers: PyYAML, of YAML 1.1, requires a point and the exponent's sign.
_FLOAT = re.compile(r"^[-+]?(\.\d+|\d+\.\d*|\d+(?=[eE]))([eE][-+]?\d+)?$", re.ASCII)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
# What a text that is no YAML raises, such as a day that does not exist or a value that is in itself.
_NO_YAML = (yaml.YAMLError, ValueError, TypeError, AttributeError, IndexError, RecursionError)


def read_source(path: Path) -> KeyTree:
    """Parse one YAML file. Raises ConfigError for a missing, unreadable or malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "no such configuration file", "check the path given to --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}", "give a YAML file to --config") from None
    try:
        data = _Loader(text, Origin(str(path), path.resolve().parent)).get_single_data()
    except _NO_YAML as error:
        # The parser's problem with its line, without its copy of the text.
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        fix = "correct indentation, quotes, brackets; no tabs, no tags, no alias in what it names"
        raise ConfigError(at, f"is not valid YAML: {problem}", fix) from None
    data = KeyTree({}, {}) if data is None else data
    if not isinstance(data, KeyTree):
        reason = f"holds a {type(data).__name__}, not key: value pairs"
        raise ConfigError(str(path), reason, "start with a section such as `run:`")
    return data


def tracked(value: Any, origin: Origin) -> Any:
    """A copy with trees, lists and text for paths, as YAML has them, all set by ``origin``."""
    if isinstance(value, Mapping):
        values = {str(key): tracked(item, origin) for key, item in value.items()}
        return KeyTree(values, dict.fromkeys(values, origin))
    if isinstance(value, list | tuple):
        return [tracked(item, origin) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def origin_of(path: models.Path, data: Any) -> Origin | None:
    """What has set ``path`` last, or the nearest section above it that was set."""
    found = None
    for key in path:
        if isinstance(data, KeyTree):
            found = data.origins.get(str(key), found)
        data = models.value_at(data, (key,))
    return found


_PACKAGE = Path(__file__).resolve().parents[1]


def examples() -> Path:
    installed = _PACKAGE / "examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples"


def configuration_file(path: Path) -> Path:
    """``path``, or the shipped example of this name if ``path`` is a bare name of no file of the working folder."""
    if os.path.exists(path) or path.name != str(path):
        return path
    return next(iter(sorted(examples().glob(f"*/{path.name}"))), path) if path.suffix in (".yaml", ".yml") else path


def to_config_errors(error: ValidationError, data: KeyTree, labels: Sequence[str]) -> list[ConfigError]:
    """One ConfigError for each key that is wrong: unknown keys, then wrong values, then missing keys.

    ``labels`` name what ``data`` was made from.
    """
    order = {"extra_forbidden": 0, "missing": 2}
    errors: dict[str, ConfigError] = {}
    for detail in sorted(error.errors(), key=lambda d: order.get(d["type"], 1)):
        found = _to_config_error(detail, data, labels)
        # A misspelt key that is required is unknown and missing; the unknown key is the cause.
        if detail["type"] != "missing" or not any(e.fix == f"use {found.path}" for e in errors.values()):
            errors.setdefault(found.path, found)
    return list(errors.values())


def _to_config_error(first: ErrorDetails, data: KeyTree, labels: Sequence[str]) -> ConfigError:
    path = models.without_tags(first["loc"], data)
    name = models.dotted(path)
    if first["type"] == "missing":
        return ConfigError(name, f"is required and set nowhere ({', '.join(labels)})", f"add {name}: <value>")
    if first["type"] in _TAG_FAULTS:
        path = (*path, "kind")
        name = models.dotted(path)
    if first["type"] == "union_tag_not_found":
        return ConfigError(name, "is required and set nowhere", f"add {name}, or give the file that this one overlays")
    origin = origin_of(path, data)
    where = "" if origin is None else f" in {origin}"
    if first["type"] == "extra_forbidden":
        return ConfigError(name, f"unknown key{where}", f"use {models.nearest_key(path, data)}")
    if first["type"] == "value_error":
        reason, _, fix = str(first["ctx"]["error"]).partition(": ")
        return ConfigError(name, reason + (where and f" ({where.strip()})"), fix)
    value = models.value_at(data, path) if first["type"] in _TAG_FAULTS else first["input"]
    return ConfigError(name, f"{value!r} is not allowed{where}", _what_is_allowed(first))


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


def merge_maps(base: KeyTree, overlay: KeyTree, at: str = "") -> KeyTree:
    """``at`` is the way to both, with a dot last. Raises ConfigError for an override that another one would drop."""
    merged = KeyTree(base, base.origins | overlay.origins)
    for key, value in overlay.items():
        old = base.get(key)
        if key == "adapters" and isinstance(old, list) and isinstance(value, list) and value:
            merged[key] = _merge_adapters(old, value, overlay.origins[key])
        elif isinstance(old, KeyTree) and isinstance(value, KeyTree) and (value or key not in OWN_KEYS):
            # A format without a kind is a template; a chat has all keys of a template.
            new = value.get("kind")
            changes_kind = key in _TAGGED and new not in (None, old.get("kind", "template"))
            changes_kind &= key != "format" or new == "template"
            given = [name for name, origin in old.origins.items() if origin.label == COMMAND_LINE]
            if changes_kind and (dropped := [name for name in given if value.keys() != {name}]):
                reason = f"kind {new} would drop {', '.join(dropped)} of the command line"
                raise ConfigError(f"{at}{key}", reason, f"give {at}{key}.kind={new} once, with no other kind")
            merged[key] = value if changes_kind else merge_maps(old, value, f"{at}{key}.")
        else:
            merged[key] = value
    return merged


def _merge_adapters(base: list[Any], overlay: list[Any], origin: Origin) -> list[Any]:
    if len(base) == 1 and len(overlay) == 1 and isinstance(base[0], KeyTree) and isinstance(overlay[0], KeyTree):
        return [merge_maps(base[0], overlay[0], "adapters.0.")]
    given = Counter(entry.get("name") for entry in overlay if isinstance(entry, dict))
    if repeated := [name for name, count in given.items() if name is not None and count > 1]:
        raise ConfigError("adapters", f"{origin} names {repeated[0]!r} twice", "give each adapter its own name")
    merged = list(base)
    names = [entry.get("name") for entry in base if isinstance(entry, dict)]
    for i, entry in enumerate(overlay):
        name = entry.get("name") if isinstance(entry, dict) else None
        if name is None:
            reason = f"an entry without a name in {origin} cannot be matched"
            raise ConfigError(f"adapters.{i}", reason, f"name one of {names}")
        if name in names:
            at = names.index(name)
            merged[at] = merge_maps(merged[at], entry, f"adapters.{name}.")
        else:
            merged.append(entry)
    return merged


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=c`` as key and value, which is read as YAML. Raises ConfigError for a text that is none."""
    key, equals, raw = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(text, "is not an override", "write it as dotted.key=value")
    origin = Origin(COMMAND_LINE, Path.cwd())
    try:
        return key, tracked(_Loader(raw, origin).get_single_data(), origin)
    except _NO_YAML:
        raise ConfigError(key, f"the value {raw!r} is not valid YAML", "quote it") from None


def apply_override(data: KeyTree, text: str) -> KeyTree:
    """The merged tree; an adapter is addressed by number or name. Raises as `parse_override`."""
    key, value = parse_override(text)
    parts = key.split(".")
    if parts[0] != "adapters" or len(parts) == 1:
        return merge_maps(_check_is_map(data, parts), _nest(parts, value))
    adapters = data.get("adapters")
    if not isinstance(adapters, list):
        raise ConfigError(key, "no configuration file has a list `adapters`", "add one to a file")
    at, rest = _find_adapter(adapters, key)
    if not rest:
        raise ConfigError(key, "an adapter cannot be replaced as a whole", f"set one of its keys, {key}.rank=8")
    changed = merge_maps(_check_is_map(adapters[at], rest), _nest(rest, value), key.removesuffix(".".join(rest)))
    return KeyTree(data | {"adapters": [changed if i == at else old for i, old in enumerate(adapters)]}, data.origins)


def _find_adapter(adapters: list[Any], key: str) -> tuple[int, list[str]]:
    """Return the position of the adapter in ``adapters.<number or name>.rest``, and the rest."""
    address = key.removeprefix("adapters.")
    names = {at: str(entry.get("name")) for at, entry in enumerate(adapters) if isinstance(entry, KeyTree)}
    for at, name in names.items():
        # A name may itself hold dots.
        if address == name or address.startswith(name + "."):
            return at, [part for part in address.removeprefix(name).split(".") if part]
    first, _, rest = address.partition(".")
    if first.isdecimal() and int(first) in names:
        return int(first), rest.split(".") if rest else []
    numbers = "0" if len(names) == 1 else f"0 to {len(names) - 1}"
    raise ConfigError(
        key, f"there is no adapter {first!r}", f"use {' or '.join(names.values())}, or its number, {numbers}"
    )


def _nest(parts: list[str], value: Any) -> KeyTree:
    for part in reversed(parts):
        value = tracked({part: value}, Origin(COMMAND_LINE, Path.cwd()))
    assert isinstance(value, KeyTree)
    return value


def _check_is_map(data: KeyTree, parts: list[str]) -> KeyTree:
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
    merged = KeyTree({}, {})
    for _, data in sources:
        merged = merge_maps(merged, data)
    # A kind replaces its section, so it comes before the section's keys, but not before what makes the section.
    ordered = list[tuple[str, str]]()
    for text in overrides:
        key, at = text.partition("=")[0], len(ordered)
        while key.endswith(".kind") and at and not key.startswith(ordered[at - 1][0]):
            at -= 1
        ordered.insert(at, (key.removesuffix(".kind") + ".", text))
    for _, text in ordered:
        merged = apply_override(merged, text)
    for section, keys in (given or {}).items():
        _add_given(merged, section, keys)
    _resolve_paths(merged)
    try:
        return models.Config.model_validate(merged)
    except ValidationError as error:
        errors = to_config_errors(error, merged, [label for label, _ in sources])
        raise (errors[0] if len(errors) == 1 else ConfigErrors(errors)) from None


def _add_given(data: KeyTree, section: str, keys: Mapping[str, str]) -> None:
    """Add ``keys`` below those of the section, unless this is of another kind that has keys of its own."""
    match data.get("adapters"):
        case [KeyTree() as adapter] if isinstance(old := adapter.get(section, KeyTree({}, {})), KeyTree):
            if old.get("kind", keys["kind"]) in (keys["kind"], *BUILT_IN):
                adapter[section] = KeyTree({**keys, **old, "kind": keys["kind"]}, old.origins)


def _source(part: Path | str | Mapping[str, Any]) -> tuple[str, KeyTree]:
    """The label and the content of one part."""
    if isinstance(part, Mapping):
        return GIVEN, tracked(part, Origin(GIVEN, Path.cwd()))
    path = configuration_file(Path(part))
    return str(path), read_source(path)


def _resolve_paths(data: KeyTree) -> None:
    """Make relative paths absolute where they exist next to the file that set them, or in the working folder."""
    spots: list[models.Path] = [("model", "path"), ("service", "api", "data")]
    keys = "task.train task.eval task.keep init_from reward.path workflow.path workflow.env workflow.tool_parser"
    for i, adapter in enumerate(entries if isinstance(entries := data.get("adapters"), list) else ()):
        sets = adapter.get("evals") if isinstance(adapter, dict) else None
        n_sets = len(sets) if isinstance(sets, list) else 0
        spots += [("adapters", i, "evals", j, "task", key) for j in range(n_sets) for key in ("eval", "keep")]
        spots += [("adapters", i, *key.split(".")) for key in f"{keys} algorithm.loss algorithm.advantage".split()]
        rewards = adapter.get("reward") if isinstance(adapter, dict) else None
        spots += [("adapters", i, "reward", j, "path") for j in range(len(rewards) if isinstance(rewards, list) else 0)]
    for spot in spots:
        holder = models.value_at(data, spot[:-1])
        value = holder.get(spot[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, str) or (spot[-1] in _NAMED and ".py:" not in value):
            continue
        if not value:
            raise ConfigError(models.dotted(spot), "is empty", "name a file or folder, or leave the key out")
        holder[spot[-1]] = value = os.path.expanduser(value)
        origin = origin_of(spot, data)
        folders = [Path.cwd()] if origin is None else [origin.folder, Path.cwd()]
        place, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")  # file.py:name
        found = next((folder / place for folder in folders if os.path.exists(folder / place)), None)
        if found is not None and not Path(value).is_absolute():
            holder[spot[-1]] = f"{found.resolve()}{colon}{name}"
