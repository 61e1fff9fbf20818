"""Adapters that may join a run: one for each place that servers have free, as large as their slots hold. Pure."""

from __future__ import annotations

from areal_lora.config.models import AdapterConfig, ClientWorkflowConfig, Config
from areal_lora.config.slots import adapter_capacity, served_targets


def newcomers(config: Config) -> list[AdapterConfig]:
    """The largest adapters that can join beside the listed ones; none without a service.

    Each has the rank ``rollout.max_lora_rank`` and all targets that servers can adapt.
    """
    if config.service is None:
        return []
    settings = {
        "rank": config.rollout.max_lora_rank,
        "alpha": 1.0,
        "target_modules": list(served_targets(config)),
        "workflow": ClientWorkflowConfig(),
    }
    places = adapter_capacity(config) - len(config.adapters)
    return [AdapterConfig.model_validate({"name": f"newcomer-{i}", **settings}) for i in range(places)]
