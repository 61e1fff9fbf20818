"""YAML files and dotted overrides -> Config, or one ConfigError that names file, key and fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from areal_lora.config import schema
from areal_lora.config.merge import apply_override, merge_maps
from areal_lora.config.models import Config
from areal_lora.config.problems import to_config_error
from areal_lora.config.shipped import configuration_file
from areal_lora.config.sources import Source, origin_of, read_source, value_at
from areal_lora.errors import ConfigError

GIVEN = "the given mapping"


def load_config(parts: Sequence[Path | str | Mapping[str, Any]], overrides: Sequence[str] = ()) -> Config:
    """Read, merge, override, validate. A part is a YAML file or a mapping of the same shape.

    A bare file name may be that of a shipped example. Relative paths in a mapping are looked up in the working folder.

    Raises ConfigError with one line for the first thing that is wrong.
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
    _resolve_paths(merged, sources)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise to_config_error(error, merged, sources) from None


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
    spots: list[schema.Path] = [("model", "path"), ("service", "api", "data")]
    for i, adapter in enumerate(data.get("adapters") or []):
        sets = adapter.get("evals") if isinstance(adapter, dict) else None
        for j, _ in enumerate(sets if isinstance(sets, list) else []):
            spots += [("adapters", i, "evals", j, "task", key) for key in ("train", "eval", "keep")]
        spots += [("adapters", i, "task", "train"), ("adapters", i, "task", "eval"), ("adapters", i, "init_from")]
        spots += [
            ("adapters", i, *key)
            for key in (("reward", "path"), ("workflow", "path"), ("workflow", "environment"), ("task", "keep"))
        ]
        rewards = adapter.get("reward") if isinstance(adapter, dict) else None
        spots += [("adapters", i, "reward", j, "path") for j in range(len(rewards) if isinstance(rewards, list) else 0)]
    for spot in spots:
        holder = value_at(data, spot[:-1])
        value = holder.get(spot[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, str):
            continue
        if Path(value).expanduser().is_absolute():
            holder[spot[-1]] = str(Path(value).expanduser()) if value.startswith("~") else value
            continue
        source = origin_of(spot, data, sources)
        folders = [Path.cwd()] if source is None else [source.folder, Path.cwd()]
        place, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")  # file.py:name
        found = next((folder / place for folder in folders if (folder / place).exists()), None)
        if found is not None:
            holder[spot[-1]] = f"{found.resolve()}{colon}{name}"
