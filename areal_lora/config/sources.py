"""Sources of configuration keys: files with line numbers, overrides, and the examples that come with the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_lora.config import models
from areal_lora.errors import ConfigError

COMMAND_LINE = "the command line"


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
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        reason = f"holds a {type(data).__name__}, not key: value pairs"
        raise ConfigError(str(path), reason, "start with a section such as `run:`")
    lines: dict[models.Path, int] = {}
    if root is not None:
        _index_lines(root, (), lines, str(path))
    return Source(label=str(path), data=data, lines=lines, folder=path.resolve().parent)


def _not_yaml(path: Path, error: yaml.YAMLError) -> ConfigError:
    """The parser's problem with its line, without its copy of the text."""
    mark = getattr(error, "problem_mark", None)
    at = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return ConfigError(at, f"is not valid YAML: {problem}", "correct indentation, quotes, brackets; no tabs, no tags")


def _index_lines(node: yaml.Node, path: models.Path, lines: dict[models.Path, int], label: str) -> None:
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
    """Folder of the shipped examples."""
    installed = _PACKAGE / "examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples"


def configuration_file(path: Path) -> Path:
    """``path``, or the shipped example of this name if ``path`` is a bare name of no file of the working folder."""
    if path.exists() or path.name != str(path):
        return path
    return next(iter(sorted(examples().glob(f"*/{path.name}"))), path) if path.suffix in (".yaml", ".yml") else path
