"""Adapter slots of a rollout server, from the configuration. Pure.

    newest of each adapter | one on its way | one that an evaluation keeps | old versions that sequences still use
             N             |       1        |              1               | finish: max_staleness x N
                                                                           | interrupt: max_staleness

Under ``finish`` every adapter's sequences may hold each version that is still trainable. Under ``interrupt`` sequences
follow the newest version, so the adapters share the rest.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from areal_lora.config.models import AdapterConfig, ClientWorkflowConfig, Config


def adapter_capacity(config: Config) -> int:
    """Adapters that a server holds at a time."""
    return config.rollout.max_adapters or len(config.adapters)


def served_targets(config: Config) -> tuple[str, ...]:
    """Targets that servers have room for, sorted: those of the listed adapters and of joining ones."""
    of_service = config.service.target_modules if config.service else ()
    return tuple(sorted({*of_service, *(t for adapter in config.adapters for t in adapter.target_modules)}))


def has_tenants(config: Config) -> bool:
    """Whether tenants that do not trust each other have adapters: servers then require a key on loopback, too."""
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


def joining_adapters(config: Config) -> list[AdapterConfig]:
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
    return [AdapterConfig.model_validate({"name": f"joining-{i}", **settings}) for i in range(places)]


RAMP = 2  # doublings from the first bucket to a full one


def bucket_ends(nbytes: int, bucket_bytes: int) -> list[int]:
    """Ideal ends of buckets if tensors could be cut anywhere: a ramp up, equal buckets, a ramp down, ``nbytes``."""
    ramp = [max(bucket_bytes >> k, 1) for k in range(RAMP, 0, -1)]
    while ramp and 2 * sum(ramp) > nbytes:
        ramp.pop()  # too little for the whole ramp
    down = ramp[::-1]
    inner = nbytes - 2 * sum(ramp)
    if ramp and inner <= ramp[-1]:  # a short bucket between long ones would cost a round for nothing
        inner += ramp.pop()
    n = -(-inner // bucket_bytes)
    sizes = [*ramp, *(inner * (k + 1) // n - inner * k // n for k in range(n)), *down]
    return [total for total in accumulate(sizes) if total]


def largest_bucket(nbytes: int, bucket_bytes: int) -> int:
    """Bytes of the largest bucket of a shard; 0 for an empty one."""
    ends = [0, *bucket_ends(nbytes, bucket_bytes)]
    return max((b - a for a, b in pairwise(ends)), default=0)
