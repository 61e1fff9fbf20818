"""Rules about single adapters: targets, rank, groups, user code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, Severity, shape_of
from areal_lora.config.sizing.slots import served_targets
from areal_lora.errors import ConfigError
from areal_lora.families import targets
from areal_lora.families.family import Scope, covers
from areal_lora.families.patterns import check_patterns

LOW_RATE = 1e-5
"""Below it LoRA hardly learns at alpha / rank <= 1: lora_B starts at 0, and Adam moves it by about the rate a step."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


def adapter_names(config: Config, facts: Facts) -> Iterator[Finding]:
    for name, count in Counter(adapter.name for adapter in config.adapters).items():
        if count > 1:
            yield Finding(path="adapters", reason=f"{count} adapters are named {name!r}", fix="give each its own name")


def a_service_has_room(config: Config, facts: Facts) -> Iterator[Finding]:
    """Joining adapters are called ``name.incarnation``."""
    if config.service is None:
        return
    if config.rollout.max_adapters is None:
        yield Finding(
            path="rollout.max_adapters",
            reason="with a service the list does not state how many adapters there will be",
            fix="set it to the number of adapters that servers hold at a time",
        )
    for i, adapter in enumerate(config.adapters):
        if "." in adapter.name:
            yield Finding(
                path=f"adapters.{i}.name",
                reason=f"{adapter.name!r} has a dot, and the names of a service's adapters end in .N",
                fix="use a name without a dot",
            )
    if (shape := shape_of(facts)) is not None:
        try:
            targets.resolve(config.service.target_modules, [], shape)
        except ConfigError as error:
            yield Finding(path=f"service.{error.path}", reason=error.reason, fix=error.fix)


def servers_hold_them(config: Config, facts: Facts) -> Iterator[Finding]:
    limit = config.rollout.max_adapters
    if limit is not None and limit < len(config.adapters):
        yield Finding(
            path="rollout.max_adapters",
            reason=f"servers hold {limit} adapters, {len(config.adapters)} are listed",
            fix=f"set rollout.max_adapters={len(config.adapters)}, or leave it out",
        )


def staleness_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    limit = config.rollout.max_staleness
    for i, adapter in enumerate(config.adapters):
        if adapter.max_staleness is not None and adapter.max_staleness > limit:
            yield Finding(
                path=f"adapters.{i}.max_staleness",
                reason=f"{adapter.max_staleness} is above rollout.max_staleness = {limit}, for which servers have room",
                fix=f"raise rollout.max_staleness, or lower it to {limit}",
            )


def targets_exist(config: Config, facts: Facts) -> Iterator[Finding]:
    if (shape := shape_of(facts)) is None or facts.hf_config is None:
        return
    needed = shape.family.experts.vllm_dense_key if shape.family.experts else ""
    unserved = (
        needed and shape.dense_layers and not facts.hf_config.get(needed) and config.rollout.adapter_mode == "unmerged"
    )
    for i, adapter in enumerate(config.adapters):
        try:
            found = targets.resolve(adapter.target_modules, adapter.exclude_modules, shape)
        except ConfigError as error:
            yield Finding(path=f"adapters.{i}.{error.path}", reason=error.reason, fix=error.fix)
            continue
        try:
            check_patterns(shape, adapter.model_copy(update={"target_modules": list(found)}).spec(""))
        except ConfigError as error:
            yield Finding(path=f"adapters.{i}.{error.path}", reason=error.reason, fix=error.fix)
        if unserved and covers(found, "linear_fc1", Scope.MLP):
            yield Finding(
                path=f"adapters.{i}.target_modules",
                reason=f"vLLM adapts the dense layers of {shape.family.model_type} only if config.json has {needed}",
                fix="set rollout.adapter_mode=merged (no LoRA in vLLM), or add mlp.linear_fc1 to exclude_modules",
            )


def ranks_fit(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.rollout.adapter_mode == "merged":
        return  # no server holds an adapter
    limit = config.rollout.max_lora_rank
    if limit not in VLLM_LORA_RANKS:
        yield Finding(
            path="rollout.max_lora_rank",
            reason=f"vLLM does not take {limit}",
            fix=f"use one of {', '.join(map(str, VLLM_LORA_RANKS))}",
        )
    for i, adapter in enumerate(config.adapters):
        highest = adapter.spec("").max_rank
        if highest > limit:
            key = "rank" if highest == adapter.rank else "rank_pattern"
            yield Finding(
                path=f"adapters.{i}.{key}",
                reason=f"rank {highest} is above the servers' rollout.max_lora_rank = {limit}",
                fix=f"raise rollout.max_lora_rank or lower the rank to {limit}",
            )


def rates_suit_lora(config: Config, facts: Facts) -> Iterator[Finding]:
    """A rate for full fine-tuning is about a tenth of one for LoRA."""
    for i, adapter in enumerate(config.adapters):
        whole = adapter.model_copy(update={"rank_pattern": {}, "alpha_pattern": {}})
        optimizer, scale = adapter.optimizer, whole.spec("").scale_of("")
        if scale <= 1 and optimizer.lr * optimizer.lora_plus_ratio < LOW_RATE and not adapter.is_client:
            yield Finding(
                path=f"adapters.{i}.optimizer.lr",
                reason=f"{optimizer.lr:g} is low for LoRA whose product is scaled by {scale:g}: little may be learned",
                fix="use 1e-5 to 5e-5, or a higher alpha (docs/en/models.md)",
                severity=Severity.WARNING,
            )


def unserved(config: Config, adapter: AdapterConfig, facts: Facts) -> Finding | None:
    """Modules of a joining adapter for which servers have no room, since these are fixed when the servers start."""
    if (shape := shape_of(facts)) is None:
        return None
    has = targets.modules(served_targets(config), [], shape)
    lacks = sorted(targets.modules(adapter.target_modules, adapter.exclude_modules, shape).keys() - has.keys())
    if not lacks:
        return None
    return Finding(
        path="adapters.0.target_modules",
        reason=f"servers have no room for {lacks[0]}",
        fix=f"choose from {', '.join(served_targets(config))}, or start the run with other service.target_modules",
    )


def user_code(config: Config, facts: Facts) -> Iterator[Finding]:
    for problem in facts.code_problems:
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)


def no_clients(config: Config, facts: Facts) -> Iterator[Finding]:
    """It would never be driven: the service knows the adapters that it has made."""
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client:
            yield Finding(
                path=f"adapters.{i}.workflow.kind",
                reason="only the service of a run makes adapters of clients",
                fix="start the run with --serve, and create the adapter through the service",
            )


def batches(config: Config, facts: Facts) -> Iterator[Finding]:
    t = config.trainer
    replicas = max(1, t.world_size // (t.tp * t.pp))
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client:
            continue
        sampling = adapter.sampling
        if adapter.minibatches > sampling.prompts_per_step:
            yield Finding(
                path=f"adapters.{i}.minibatches",
                reason=f"{adapter.minibatches} minibatches cannot be cut from {sampling.prompts_per_step} prompts",
                fix=f"set it to at most {sampling.prompts_per_step}",
            )
        elif (
            sampling.prompts_per_step * (1 if adapter.sft.steps else sampling.n_samples)
            < replicas * adapter.minibatches
        ):
            yield Finding(
                path=f"adapters.{i}.sampling.prompts_per_step",
                reason=f"a minibatch has fewer sequences than the trainer's {replicas} data-parallel replicas",
                fix="raise it",
            )
