"""The resolved configuration of a run, as its run folder records it, with the adapters that have joined since.

What joins a run is configured like what started it: adapters of the desired state become entries of ``adapters``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.problems import to_config_errors, without_tags
from areal_lora.config.sources import Source, value_at
from areal_lora.errors import ConfigError
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.desired import DesiredAdapter, read_desired
from areal_lora.run_folder.paths import RunFolder


def write_config(run_folder: RunFolder, config: Config) -> None:
    """Record ``config``; readers see the previous file or the new one."""
    write_file(run_folder.config, config.model_dump_json(indent=2))


def read_config(run_folder: RunFolder) -> Config:
    """Inverse of :func:`write_config`. Raises ConfigError for a missing file and for one of another version."""
    data = _without_old_keys(json.loads(_content(run_folder)))
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(
            str(run_folder.config),
            f"this version cannot read it ({error.error_count()} keys differ), so the run cannot be resumed",
            "set another run.name, or start over with --fresh",
        ) from None


def _without_old_keys(data: Any) -> Any:
    """``data`` without the keys of an earlier version that are constants now."""
    try:
        Config.model_validate(data)
    except ValidationError as error:
        for detail in error.errors():
            if detail["type"] == "extra_forbidden":
                path = without_tags(detail["loc"], data)
                del value_at(data, path[:-1])[path[-1]]
    return data


def read_config_here(run_folder: RunFolder) -> Config:
    """The configuration of the run, at the place where its folder is now, with the adapters that have joined.

    Raises ConfigError for a file that is half-written or of another version of areal_lora.
    """
    try:
        json.loads(_content(run_folder))
    except ValueError as error:
        reason = f"it is not JSON ({error}): it was cut short or edited"
        raise ConfigError(str(run_folder.config), reason, "restore the file, or start over with --fresh") from None
    return moved_here(with_joined(read_config(run_folder), run_folder), run_folder)


def moved_here(config: Config, run_folder: RunFolder) -> Config:
    """``config`` with the root and name that ``run_folder`` has now."""
    run = config.run.model_copy(update={"root": run_folder.path.parent, "name": run_folder.path.name})
    return config.model_copy(update={"run": run})


def config_digest(run_folder: RunFolder) -> str:
    """sha256 of the recorded file, in hex. Raises ConfigError for a missing file."""
    return hashlib.sha256(_content(run_folder)).hexdigest()


def _content(run_folder: RunFolder) -> bytes:
    try:
        return run_folder.config.read_bytes()
    except FileNotFoundError:
        reason = "the run folder has no resolved configuration"
        raise ConfigError(str(run_folder.config), reason, "name the folder of a started run") from None


def joined(config: Config, desired: DesiredAdapter) -> AdapterConfig:
    """The entry of ``adapters`` for ``desired``, named by its key. Raises ConfigError whose path is a key of it."""
    data = config.model_dump(mode="json") | {"adapters": [desired.adapter | {"name": desired.key}]}
    try:
        [adapter] = Config.model_validate(data).adapters
    except ValidationError as error:
        source = Source(label=f"the settings of {desired.key}", data=data, lines={}, folder=Path.cwd())
        raise own_path(to_config_errors(error, data, [source])[0]) from None
    return adapter


def own_path(error: ConfigError) -> ConfigError:
    """``error`` about the only entry of ``adapters`` with a path that starts at that entry."""
    return ConfigError(error.path.removeprefix("adapters.0."), error.reason, error.fix.replace("adapters.0.", ""))


def alone(config: Config, adapter: AdapterConfig) -> Config:
    """``config`` with this adapter only."""
    return config.model_copy(update={"adapters": [adapter]})


def with_joined(config: Config, run_folder: RunFolder) -> Config:
    """``config`` with the adapters of the run's desired state beside its own, for readers of the run.

    Invalid settings are skipped; the adapter's state names what is wrong with them.
    """
    if config.service is None:
        return config
    return config.model_copy(
        update={"adapters": [*config.adapters, *_valid(config, read_desired(run_folder).adapters)]}
    )


def _valid(config: Config, adapters: Iterable[DesiredAdapter]) -> Iterator[AdapterConfig]:
    for desired in adapters:
        try:
            yield joined(config, desired)
        except ConfigError:
            continue
