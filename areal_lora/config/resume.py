"""The rule for resuming: which keys must stay as they are between two starts with one run folder. Pure.

`RUN`, `ADAPTER` and `SEED` are the rule. Every other key may change: parallel layouts, servers, steps, learning rate,
algorithm, sampling, evaluation, checkpoints, cluster. It is applied twice:

- `conflict` compares two configurations, before anything starts;
- `adapter_conflict` compares a checkpoint with the configuration, before its tensors are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from areal_lora.config.adapter_run import adapter_run
from areal_lora.config.models import AdapterConfig, Config, ModelConfig
from areal_lora.errors import ConfigError
from areal_lora.types import AdapterSpec

RUN = {"model.path": "the adapter belongs to its base model", "model.dtype": "the adapter belongs to its base model"}
SEED = "it fixes the order of the prompts"
ADAPTER = {
    "rank": "it is the shape of the trained tensors",
    "alpha": "it scales what was trained",
    "rslora": "it scales what was trained",
    "rank_pattern": "it is the shape of the trained tensors",
    "alpha_pattern": "it scales what was trained",
    "target_modules": "it names the trained tensors",
    "exclude_modules": "it names the trained tensors",
    "expert_layout": "it names the trained tensors",
    "dropout": "it is part of what the adapter is declared as",
    "init_from": "the run has started with it",
    "task": "it fixes which prompt is which",
}
"""Keys that must stay as they are, and what would be wrong otherwise."""
_SIZE_OF_EVAL = {"n_eval", "eval"}
"""Parts of a task that only evaluations see."""


def conflict(before: Config, now: Config) -> ConfigError | None:
    """The first fixed key in which ``now`` differs from the configuration that the run was started with."""
    for key, why in RUN.items():
        if error := _differs(why, key, _at(before, key), _at(now, key)):
            return error
    if error := _other_commit(before.model, now.model):
        return error
    names, wanted = (sorted(adapter.name for adapter in config.adapters) for config in (before, now))
    if error := _differs("a run keeps its adapters", "adapters", names, wanted):
        return error
    was = {adapter.name: adapter for adapter in before.adapters}
    for adapter in now.adapters:
        seeds = adapter_run(before, was[adapter.name]).seed, adapter_run(now, adapter).seed
        path = "run.seed" if adapter.seed is None else f"adapters.{adapter.name}.seed"
        if error := _differs(SEED, path, *seeds):
            return error
        for key, why in ADAPTER.items():
            values = [_at(one, key) for one in (was[adapter.name], adapter)]
            if key == "task":
                free = _evaluation_only(*values)
                values = [{k: v for k, v in value.items() if k not in free} for value in values]
            if error := _differs(why, f"adapters.{adapter.name}.{key}", *values):
                return error
    return None


def _evaluation_only(*tasks: dict[str, Any]) -> set[str]:
    """Keys of a task that change no training prompt: none where held-out rows are taken from the training rows."""
    shared = any(task["kind"] == "dataset" and task["eval"] is None for task in tasks)
    return set() if shared else _SIZE_OF_EVAL


def adapter_conflict(trained: AdapterSpec, now: AdapterConfig, index: int, source: str) -> ConfigError | None:
    """The first fixed key in which adapter number ``index`` differs from the one that ``source`` was trained with.

    Only what a spec declares is compared.
    """
    before, want = _declared(trained), _declared(now.spec(trained.base_model))
    for key, why in ADAPTER.items():
        if key in before:
            values = before[key], want[key]
            if error := _differs(why, f"adapters.{index}.{key}", *values, source=f"{source} was trained"):
                return error
    return None


def _declared(spec: AdapterSpec) -> dict[str, Any]:
    values = asdict(spec) | {"expert_layout": spec.expert_layout.value}
    return {key: sorted(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _other_commit(before: ModelConfig, now: ModelConfig) -> ConfigError | None:
    """A revision of a hub name may be given another way if it is the same commit; None where one is not known."""
    if before.commit is None or now.commit is None or before.commit == now.commit:
        return None
    was = before.revision or before.commit
    return ConfigError(
        "model.revision",
        f"it is {now.revision} (commit {now.commit}), but the run was started with commit "
        f"{before.commit}, and the adapter belongs to its base model",
        f"set it back to {was}, choose another run.name, or start over with --fresh",
    )


def changes(before: Config, now: Config) -> list[str]:
    """``rollout.servers 1 -> 2`` for every key that differs, in the order of the configuration."""
    return [f"{path} {was} -> {value}" for path, was, value in _pairs("", _tree(before), _tree(now)) if was != value]


def _tree(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return tree | {"adapters": {adapter["name"]: adapter for adapter in tree["adapters"]}}


def _pairs(path: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _pairs(f"{path}.{key}" if path else key, before.get(key), now.get(key))
    else:
        yield path, before, now


def _at(section: Any, path: str) -> Any:
    """The value at a dotted path as JSON would have it; lists of names in one order."""
    value = section.model_dump(mode="json")
    for key in path.split("."):
        value = value[key]
    return sorted(value) if isinstance(value, list) else value


def _differs(why: str, path: str, before: Any, now: Any, source: str = "the run was started") -> ConfigError | None:
    if before == now:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        path, before, now = next(found for found in _pairs(path, before, now) if found[1] != found[2])
    return ConfigError(
        path,
        f"it is {now}, but {source} with {before}, and {why}",
        f"set it back to {before}, choose another run.name, or start over with --fresh",
    )
