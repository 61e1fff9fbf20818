"""Adapters of the desired state as entries of the configuration: what joins a run is configured like what began it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.problems import to_config_errors
from areal_lora.config.sources import Source
from areal_lora.errors import ConfigError
from areal_lora.run_folder.desired import DesiredAdapter, read_desired
from areal_lora.run_folder.paths import RunFolder


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
    """``error`` about the only entry of ``adapters`` with a path that begins at that entry."""
    return ConfigError(error.path.removeprefix("adapters.0."), error.reason, error.fix.replace("adapters.0.", ""))


def alone(config: Config, adapter: AdapterConfig) -> Config:
    """``config`` with this adapter only."""
    return config.model_copy(update={"adapters": [adapter]})


def with_joined(config: Config, run_folder: RunFolder) -> Config:
    """``config`` with the adapters of the run's desired state beside its own, for those who look at the run.

    Settings that are none are skipped; the adapter's state says what is wrong with them.
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
