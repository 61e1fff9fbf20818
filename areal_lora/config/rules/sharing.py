"""Rules about one device for a trainer rank and a server, and about the library that carries versions."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.broadcast import OF_DEVICES
from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.pools import shared_devices
from areal_lora.config.rules.findings import Finding
from areal_lora.errors import ConfigError


def devices_are_shared(config: Config, facts: Facts) -> Iterator[Finding]:
    """``cluster.share_devices`` has an effect, and the server's memory does not depend on the trainer's."""
    if not config.cluster.share_devices:
        return
    if config.cluster.device == "cpu":
        reason = "on CPUs there is no device, and processes share the machine anyway"
        yield Finding(path="cluster.share_devices", reason=reason, fix="set it to false")
        return
    if config.rollout.kv_cache_gib is None:
        yield Finding(
            path="rollout.kv_cache_gib",
            reason="vLLM would measure what is free on a device while a trainer rank takes its part of it",
            fix="set it, for example to 4",
        )
    if _share(config) is False:
        reason = "trainer ranks and servers are on different nodes, so no device is shared"
        yield Finding(path="cluster.share_devices", reason=reason, fix="set it to false")


def backend_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    """The named library sends between these devices."""
    backend, device = config.weight_sync.backend, config.cluster.device
    if backend in ("auto", "gloo"):
        return
    if backend != OF_DEVICES[device]:
        yield Finding(
            path="weight_sync.backend",
            reason=f"{backend} does not send the memory of cluster.device = {device}",
            fix="set it to auto",
        )
    elif _share(config):
        yield Finding(
            path="weight_sync.backend",
            reason=f"{backend} refuses two members on one device, and a trainer rank and a server share one",
            fix="set it to auto",
        )


def _share(config: Config) -> bool | None:
    """Whether a trainer rank and a server share a device; None if they have no place, which other rules report."""
    try:
        return bool(shared_devices(config))
    except ConfigError:
        return None
