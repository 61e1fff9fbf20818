"""The memory estimate of a rank and a replica if one size were doubled. Pure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from areal_lora.config.models import Config
from areal_lora.config.sizing.memory import job_memory
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape

AS_IT_IS = "as it is"


class WhatIf(NamedTuple):
    """Bytes of the largest trainer rank and of a server replica: of one device, and of the host."""

    change: str
    rank_device: int
    rank_host: int
    server_device: int
    server_host: int


def what_if(config: Config, shape: ModelShape) -> Iterator[WhatIf]:
    """The estimate as it is, and with each change that the model and the nodes admit."""
    for change, other in _changes(config, shape):
        try:
            processes = job_memory(other, shape)
        except ConfigError:
            continue  # its nodes have no room for it
        sizes = [
            max(getattr(memory, where) for memory in processes if memory.role == role)
            for role in ("trainer", "rollout")
            for where in ("device", "host")
        ]
        yield WhatIf(change, *sizes)


def _changes(config: Config, shape: ModelShape) -> Iterator[tuple[str, Config]]:
    t, r = config.trainer, config.rollout
    yield AS_IT_IS, config
    adapters = [adapter.model_copy(update={"rank": 2 * adapter.rank}) for adapter in config.adapters]
    highest = max([r.max_lora_rank, *(adapter.rank for adapter in adapters)])
    doubled = config.model_copy(update={"adapters": adapters})
    yield "adapter rank x 2", _with(doubled, "rollout", max_lora_rank=highest)
    budget = t.max_tokens_per_microbatch
    yield "micro-batch x 2", _with(config, "trainer", max_tokens_per_microbatch=2 * budget)
    length = 2 * r.max_model_len
    longer = _with(config, "rollout", max_model_len=length)
    yield "context x 2", _with(longer, "trainer", max_tokens_per_microbatch=max(budget, -(-length // t.cp)))
    yield "trainer ranks x 2", _with(config, "trainer", world_size=2 * t.world_size)
    if t.engine == "megatron" and shape.experts and not shape.experts % (2 * t.ep):
        divides = not t.world_size % (2 * t.ep * t.etp * t.pp)
        ranks = t.world_size if divides else 2 * t.world_size
        name = "expert parallel x 2" if divides else "expert parallel x 2, trainer ranks x 2"
        yield name, _with(config, "trainer", ep=2 * t.ep, world_size=ranks)
    if t.recompute == "none":
        yield "full recompute", _with(config, "trainer", recompute="full")
    else:
        yield "no recompute", _with(config, "trainer", recompute="none")


def _with(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
