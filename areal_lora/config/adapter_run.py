"""The run of one adapter: its own settings, with the run's in place of those that it leaves out.

They are resolved where they are used, not when a configuration is read: a resume with ``run.steps=200`` then counts
for every adapter that has no ``steps`` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.errors import ConfigError

ENDLESS = 1 << 53
"""Steps of an adapter that a client drives."""
PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}
"""nats, by type of the base; measured: docs/en/results.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRun:
    """``steps`` are training steps, ``seed`` that of prompt order, initial values and sampling.

    ``max_staleness`` is in versions, ``eval_every`` and ``checkpoint_every`` in steps (``eval_every`` 0: first and
    last version only). ``weight`` is the adapter's part of the trained tokens relative to other adapters'.
    """

    steps: int
    seed: int
    max_staleness: int
    eval_every: int
    checkpoint_every: int
    wire_dtype: Literal["float32", "bfloat16"]
    weight: float

    @property
    def endless(self) -> bool:
        """Whether a client decides how many steps there are."""
        return self.steps == ENDLESS

    @property
    def end(self) -> int | None:
        """Training steps; None where no one knows."""
        return None if self.endless else self.steps


def adapter_run(config: Config, adapter: AdapterConfig) -> AdapterRun:
    """The settings that count for ``adapter``, an entry of ``config.adapters``."""
    steps = config.run.steps if adapter.steps is None else adapter.steps
    every = config.checkpoint.every_steps if adapter.checkpoint_every_steps is None else adapter.checkpoint_every_steps
    return AdapterRun(
        steps=ENDLESS if adapter.is_client else steps,
        seed=config.run.seed if adapter.seed is None else adapter.seed,
        max_staleness=config.rollout.max_staleness if adapter.max_staleness is None else adapter.max_staleness,
        eval_every=config.eval.every_steps if adapter.eval_every_steps is None else adapter.eval_every_steps,
        checkpoint_every=1 if adapter.is_client else every,
        wire_dtype=_wire_dtype(config),
        weight=adapter.weight,
    )


def _wire_dtype(config: Config) -> Literal["float32", "bfloat16"]:
    """Merged weights are sums in fp32, cast once: to the type in which servers hold them."""
    if config.rollout.adapter_mode == "merged":
        return config.model.dtype
    return config.weight_sync.wire_dtype or config.model.dtype


def probe_tolerance(config: Config) -> float:
    """Largest allowed mean difference of a probe, nats: the run's own, else what rounding in the base's type needs."""
    return config.weight_sync.probe_tolerance or PROBE_TOLERANCES[config.model.dtype]


def adapter_runs(config: Config) -> dict[str, AdapterRun]:
    """The settings of every adapter by name, in the order of the configuration."""
    return {adapter.name: adapter_run(config, adapter) for adapter in config.adapters}


def steps_of(config: Config) -> dict[str, int]:
    """Training steps of every adapter by name."""
    return {name: run.steps for name, run in adapter_runs(config).items()}


def ends_of(config: Config) -> dict[str, int | None]:
    """Training steps of every adapter by name; None where no one knows."""
    return {name: run.end for name, run in adapter_runs(config).items()}


def total_steps(config: Config) -> int:
    """Training steps of all adapters together."""
    return sum(steps_of(config).values())


def more_steps(config: Config, made: Mapping[str, int]) -> list[str]:
    """The overrides with which every adapter makes as many steps again as it has ``made``."""
    adapters = [adapter for adapter in config.adapters if not adapter.is_client]
    shared = [made.get(adapter.name, 0) for adapter in adapters if adapter.steps is None]
    own = [adapter.name for adapter in adapters if adapter.steps is not None]
    words = [f"run.steps={2 * max(1, *shared)}"] if shared else []
    return words + [f"adapters.{name}.steps={2 * max(1, made.get(name, 0))}" for name in own]


def adapter_named(config: Config, name: str | None = None) -> AdapterConfig:
    """The adapter called ``name``; without a name the only one. Raises ConfigError where there is none such."""
    names = ", ".join(adapter.name for adapter in config.adapters)
    if name is None and len(config.adapters) > 1:
        raise ConfigError("adapters", f"the run has several: {names}", "name one of them")
    for adapter in config.adapters:
        if name in (None, adapter.name):
            return adapter
    raise ConfigError("adapters", f"the run has no adapter {name!r}; it has {names}", "name one of these")
