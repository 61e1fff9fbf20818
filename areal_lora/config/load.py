"""YAML files and dotted overrides -> Config, or a ConfigError for each key that names file, key and fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from areal_lora.config import schema
from areal_lora.config.merge import apply_override, merge_maps
from areal_lora.config.models import Config
from areal_lora.config.problems import to_config_errors
from areal_lora.config.sources import Source, configuration_file, origin_of, read_source, value_at
from areal_lora.errors import ConfigError, ConfigErrors

GIVEN = "the given mapping"


def load_config(
    parts: Sequence[Path | str | Mapping[str, Any]],
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Mapping[str, str]] | None = None,
) -> Config:
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
        return Config.model_validate(merged)
    except ValidationError as error:
        errors = to_config_errors(error, merged, sources)
        raise (errors[0] if len(errors) == 1 else ConfigErrors(errors)) from None


def _with_given(data: dict[str, Any], section: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """``data`` with ``keys`` below those of the section, unless this is of another kind."""
    match data.get("adapters"):
        case [dict() as adapter] if isinstance(old := adapter.get(section, {}), dict):
            if old.get("kind", keys["kind"]) == keys["kind"]:
                return data | {"adapters": [adapter | {section: {**keys, **old}}]}
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
