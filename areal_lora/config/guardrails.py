"""Rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against facts gathered elsewhere. Each rule is one
function that yields what it found.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator

from areal_lora.config.facts import Facts, server_ports
from areal_lora.config.findings import Finding, Rule, Severity, shape_of
from areal_lora.config.models import Config
from areal_lora.config.rules.init_from import init_from
from areal_lora.config.rules.layout import rollout_layout, trainer_layout
from areal_lora.config.rules.rollout import deterministic
from areal_lora.config.rules.run import time_outs
from areal_lora.errors import ConfigError
from areal_lora.families import targets
from areal_lora.families.family import Scope, covers
from areal_lora.families.published import is_hub_name, known_models
from areal_lora.families.registry import supported
from areal_lora.families.shape import base_bytes
from areal_lora.families.variants import unsupported
from areal_lora.network.addresses import WILDCARDS, as_network

__all__ = ["Finding", "Severity", "check", "resolve_targets"]

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


def check(config: Config, facts: Facts) -> tuple[Finding, ...]:
    """What is wrong, errors first; of several findings about one key only the first."""
    findings: dict[tuple[str, Severity], Finding] = {}
    for rule in RULES:
        for finding in rule(config, facts):
            findings.setdefault((finding.path, finding.severity), finding)
    return tuple(sorted(findings.values(), key=lambda finding: finding.severity))


def resolve_targets(config: Config, facts: Facts) -> Config:
    """``config`` with canonical ``target_modules`` and nothing left to exclude. It must have passed `check`."""
    shape = shape_of(facts)
    if shape is None:
        raise ConfigError("model.path", "its sizes are unknown", "give a Hugging Face model folder")
    adapters = [
        adapter.model_copy(
            update={
                "target_modules": list(targets.resolve(adapter.target_modules, adapter.exclude_modules, shape)),
                "exclude_modules": [],
            }
        )
        for adapter in config.adapters
    ]
    return config.model_copy(update={"adapters": adapters})


# --- rules: model ------------------------------------------------------------------------


def model_readable(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.hf_config is None:
        fix = "give a Hugging Face model folder"
        if is_hub_name(config.model.path):
            close = difflib.get_close_matches(config.model.path, known_models(), n=1)
            fix += ", start the run where a hub is reachable"
            fix += f", or did you mean {close[0]}" if close else ""
        yield Finding(path="model.path", reason=facts.model_problem, fix=fix)
        return
    kind = facts.hf_config.get("model_type")
    if kind not in supported():
        yield Finding(
            path="model.path", reason=f"model type {kind!r} is not supported", fix=f"use one of {supported()}"
        )
    elif shape_of(facts) is None:
        yield Finding(path="model.path", reason="config.json lacks sizes of the model", fix="use a complete folder")
    if not facts.model_is_local:
        yield Finding(
            path="model.path",
            reason=f"{config.model.path} is not whole in the hub's cache and is downloaded when the run starts",
            fix="none needed where a hub is reachable",
            severity=Severity.WARNING,
        )


def model_trainable(config: Config, facts: Facts) -> Iterator[Finding]:
    if shape_of(facts) and facts.hf_config is not None:
        for problem in unsupported(facts.hf_config):
            yield Finding(path="model.path", reason=problem, fix="use another model")


def lengths(config: Config, facts: Facts) -> Iterator[Finding]:
    longest = config.rollout.max_model_len
    for i, adapter in enumerate(config.adapters):
        new = adapter.sampling.max_new_tokens
        if new >= longest:
            yield Finding(
                path=f"adapters.{i}.sampling.max_new_tokens",
                reason=f"{new} new tokens leave no room for a prompt in rollout.max_model_len = {longest}",
                fix=f"lower it, or raise rollout.max_model_len above {new}",
            )
    budget = config.trainer.max_tokens_per_microbatch
    if budget < longest:
        yield Finding(
            path="trainer.max_tokens_per_microbatch",
            reason=f"{budget} cannot hold one sequence of rollout.max_model_len = {longest} tokens",
            fix=f"set it to at least {longest}",
        )
    probe = config.weight_sync.probe_tokens
    if probe >= longest:
        yield Finding(
            path="weight_sync.probe_tokens",
            reason=f"{probe} tokens do not fit rollout.max_model_len = {longest}",
            fix="lower it",
        )
    shape = shape_of(facts)
    if shape and shape.max_positions and longest > shape.max_positions:
        yield Finding(
            path="rollout.max_model_len",
            reason=f"{longest} is beyond the model's {shape.max_positions} positions",
            fix=f"set it to at most {shape.max_positions}",
        )


# --- rules: adapters ---------------------------------------------------------------------


def adapter_names(config: Config, facts: Facts) -> Iterator[Finding]:
    for name, count in Counter(adapter.name for adapter in config.adapters).items():
        if count > 1:
            yield Finding(path="adapters", reason=f"{count} adapters are named {name!r}", fix="give each its own name")


def targets_exist(config: Config, facts: Facts) -> Iterator[Finding]:
    if (shape := shape_of(facts)) is None or facts.hf_config is None:
        return
    needed = shape.family.experts.vllm_dense_key if shape.family.experts else ""
    unserved = needed and shape.dense_layers and not facts.hf_config.get(needed)
    for i, adapter in enumerate(config.adapters):
        try:
            found = targets.resolve(adapter.target_modules, adapter.exclude_modules, shape)
        except ConfigError as error:
            yield Finding(path=f"adapters.{i}.{error.path}", reason=error.reason, fix=error.fix)
            continue
        if unserved and covers(found, "linear_fc1", Scope.MLP):
            yield Finding(
                path=f"adapters.{i}.target_modules",
                reason=f"vLLM adapts the dense layers of {shape.family.model_type} only if config.json has {needed}",
                fix="add mlp.linear_fc1 to exclude_modules",
            )


def no_dropout(config: Config, facts: Facts) -> Iterator[Finding]:
    for i, adapter in enumerate(config.adapters):
        if adapter.dropout:
            yield Finding(
                path=f"adapters.{i}.dropout",
                reason=f"{adapter.dropout} would make log-probabilities random",
                fix="set it to 0.0",
            )


def ranks_fit(config: Config, facts: Facts) -> Iterator[Finding]:
    limit = config.rollout.max_lora_rank
    if limit not in VLLM_LORA_RANKS:
        yield Finding(
            path="rollout.max_lora_rank",
            reason=f"vLLM does not take {limit}",
            fix=f"use one of {', '.join(map(str, VLLM_LORA_RANKS))}",
        )
    for i, adapter in enumerate(config.adapters):
        if adapter.rank > limit:
            yield Finding(
                path=f"adapters.{i}.rank",
                reason=f"rank {adapter.rank} is above the servers' rollout.max_lora_rank = {limit}",
                fix=f"raise rollout.max_lora_rank or lower the rank to {limit}",
            )


def user_code(config: Config, facts: Facts) -> Iterator[Finding]:
    for problem in facts.code_problems:
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)


def groups(config: Config, facts: Facts) -> Iterator[Finding]:
    t = config.trainer
    replicas = max(1, t.world_size // (t.tp * t.pp))
    for i, adapter in enumerate(config.adapters):
        sampling = adapter.sampling
        if sampling.n_samples < 2:
            yield Finding(
                path=f"adapters.{i}.sampling.n_samples",
                reason=f"{adapter.algorithm.kind} compares the answers of one prompt and needs at least 2",
                fix="set it to 2 or more",
            )
        if adapter.minibatches > sampling.prompts_per_step:
            yield Finding(
                path=f"adapters.{i}.minibatches",
                reason=f"{adapter.minibatches} minibatches cannot be cut from {sampling.prompts_per_step} prompts",
                fix=f"set it to at most {sampling.prompts_per_step}",
            )
        elif sampling.prompts_per_step * sampling.n_samples < replicas * adapter.minibatches:
            yield Finding(
                path=f"adapters.{i}.sampling.prompts_per_step",
                reason=f"a minibatch has fewer sequences than the trainer's {replicas} data-parallel replicas",
                fix="raise it",
            )


# --- rules: machine ----------------------------------------------------------------------


def ports_free(config: Config, facts: Facts) -> Iterator[Finding]:
    for port in server_ports(config):
        if port > 65535:
            yield Finding(path="rollout.port", reason=f"{port} is not a port number", fix="use 0 or 1024..65535")
        elif port in facts.ports_in_use:
            yield Finding(
                path="rollout.port",
                reason=f"port {port} on {config.cluster.bind} is in use or may not be bound",
                fix="set rollout.port=0 to let the system choose, or another port",
            )


def devices_suffice(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.device == "cpu":
        return
    needed = config.trainer.world_size + config.rollout.servers * config.rollout.tp
    declared = cluster.nodes * cluster.devices_per_node
    if needed > declared:
        yield Finding(
            path="cluster.nodes",
            reason=f"{needed} devices are needed ({config.trainer.world_size} trainer, "
            f"{config.rollout.servers} x {config.rollout.tp} rollout) and {declared} are declared",
            fix="raise cluster.nodes or cluster.devices_per_node, or lower trainer.world_size or rollout.servers",
        )
    elif facts.devices is not None and facts.devices < needed:
        yield Finding(
            path="cluster.device",
            reason=f"{needed} {cluster.device} devices are needed and {facts.devices} are visible here",
            fix="lower trainer.world_size or rollout.servers, or set cluster.device=cpu",
        )


def cluster_is_reachable(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.kind == "local" and cluster.nodes > 1:
        yield Finding(
            path="cluster.nodes",
            reason=f"cluster.kind = local means this machine, not {cluster.nodes} nodes",
            fix="set cluster.nodes=1, or cluster.kind=slurm",
        )
    elif cluster.nodes > 1 and cluster.bind.startswith("127."):
        yield Finding(
            path="cluster.bind",
            reason=f"{cluster.nodes} nodes cannot reach each other on {cluster.bind}",
            fix="set cluster.bind=0.0.0.0",
        )


def interface_counts(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    try:
        as_network(cluster.interface)
    except ConfigError as error:
        yield Finding(path=error.path, reason=error.reason, fix=error.fix)
        return
    if cluster.interface != "auto" and cluster.bind not in WILDCARDS:
        yield Finding(
            path="cluster.interface",
            reason=f"{cluster.interface!r} contradicts cluster.bind = {cluster.bind}, which is used as it is",
            fix="set cluster.bind=0.0.0.0, or leave cluster.interface out",
        )
    elif facts.address_problem is not None and cluster.nodes == 1:  # several nodes: not a question about this machine
        problem = facts.address_problem
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)


def memory_suffices(config: Config, facts: Facts) -> Iterator[Finding]:
    shape = shape_of(facts)
    if config.cluster.device != "cpu" or facts.memory_bytes is None or shape is None:
        return
    copies = config.trainer.world_size + config.rollout.servers
    needed = copies * base_bytes(shape, config.model.dtype)
    needed += int(config.rollout.servers * (config.rollout.kv_cache_gib or 4.0) * 2**30)
    if needed > facts.memory_bytes:
        yield Finding(
            path="rollout.kv_cache_gib",
            reason=f"about {needed / 2**30:.0f} GiB are needed and this machine has {facts.memory_bytes / 2**30:.0f}",
            fix="use a smaller model, fewer processes or a smaller rollout.kv_cache_gib",
            severity=Severity.WARNING,
        )


RULES: tuple[Rule, ...] = (
    model_readable,
    model_trainable,
    adapter_names,
    targets_exist,
    no_dropout,
    ranks_fit,
    init_from,
    user_code,
    groups,
    lengths,
    trainer_layout,
    rollout_layout,
    cluster_is_reachable,
    interface_counts,
    devices_suffice,
    ports_free,
    memory_suffices,
    deterministic,
    time_outs,
)
