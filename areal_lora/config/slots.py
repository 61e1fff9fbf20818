"""Adapter slots of a rollout server, from the configuration. Pure.

    newest of each adapter | one on its way | one that an evaluation keeps | old versions that sequences still use
             N             |       1        |              1               | finish: max_staleness x N
                                                                           | interrupt: max_staleness

Under ``finish`` every adapter's sequences may hold each version that is still trainable. Under ``interrupt`` sequences
follow the newest version, so the adapters share the rest.
"""

from __future__ import annotations

from areal_lora.config.models import Config


def adapter_capacity(config: Config) -> int:
    """Adapters that a server holds at a time."""
    return config.rollout.max_adapters or len(config.adapters)


def served_targets(config: Config) -> tuple[str, ...]:
    """Targets that servers have room for, sorted: those of the listed adapters and of newcomers."""
    of_service = config.service.target_modules if config.service else ()
    return tuple(sorted({*of_service, *(t for adapter in config.adapters for t in adapter.target_modules)}))


def has_tenants(config: Config) -> bool:
    """Whether people who do not trust each other have adapters: servers then ask for a key on loopback, too."""
    return config.service is not None and config.service.api is not None


def adapter_slots(config: Config) -> int:
    """Slots of a server; on CPUs vLLM has one more, which stays empty. Merged weights are one version, and the next."""
    rollout, adapters = config.rollout, adapter_capacity(config)
    if rollout.adapter_mode == "merged":
        return 2
    holders = adapters if rollout.in_flight == "finish" else 1
    return adapters + 2 + rollout.max_staleness * holders


def kept_versions(config: Config) -> int:
    """Versions of each adapter that keep their slots without a request: all of them fit beside the two others."""
    return (adapter_slots(config) - 2) // adapter_capacity(config)
