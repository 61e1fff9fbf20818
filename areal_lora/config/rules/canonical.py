"""Targets of a configuration in their canonical names, as servers, engines and estimates of memory take them."""

from __future__ import annotations

from areal_lora.config.models import Config
from areal_lora.families import targets
from areal_lora.families.shape import ModelShape


def canonical(config: Config, shape: ModelShape) -> Config:
    """``config`` with canonical ``target_modules`` and nothing left to exclude.

    Raises ConfigError for targets that the model does not have.
    """
    adapters = [
        adapter.model_copy(
            update={
                "target_modules": list(targets.resolve(adapter.target_modules, adapter.exclude_modules, shape)),
                "exclude_modules": [],
            }
        )
        for adapter in config.adapters
    ]
    service = config.service
    if service is not None:
        every = list(targets.resolve(service.target_modules, [], shape))
        service = service.model_copy(update={"target_modules": every})
    return config.model_copy(update={"adapters": adapters, "service": service})
