"""Start-up guardrails: the rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against facts gathered by ``config.facts``. Each rule is one function in
this folder that yields findings.
"""

from __future__ import annotations

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.adapters import (
    a_service_has_room,
    adapter_names,
    batches,
    no_clients,
    ranks_fit,
    rates_suit_lora,
    servers_hold_them,
    staleness_fits,
    targets_exist,
    user_code,
)
from areal_lora.config.rules.algorithm import algorithm, group_size
from areal_lora.config.rules.findings import Finding, Rule, Severity, canonical, shape_of
from areal_lora.config.rules.init_from import init_from
from areal_lora.config.rules.layout import backend_fits, devices_are_shared, engine_fits, rollout_layout, trainer_layout
from areal_lora.config.rules.machine import (
    cluster_is_reachable,
    devices_suffice,
    interface_counts,
    ports_free,
    service_fits,
)
from areal_lora.config.rules.memory import memory_suffices, shared_base_fits
from areal_lora.config.rules.model import (
    adapters_divide,
    combinations,
    kernels_take_the_type,
    lengths,
    model_readable,
    model_trainable,
)
from areal_lora.config.rules.rollout import deterministic, merged_rollouts, time_outs
from areal_lora.config.rules.slurm import components_agree, no_idle_node, own_directives, servers_suffice
from areal_lora.config.rules.task import chat_template, columns_exist, eval_sets, sampling_is_trained, seldom_meant
from areal_lora.errors import ConfigError

RULES: tuple[Rule, ...] = (
    model_readable,
    model_trainable,
    combinations,
    adapters_divide,
    kernels_take_the_type,
    adapter_names,
    a_service_has_room,
    service_fits,
    servers_hold_them,
    targets_exist,
    ranks_fit,
    rates_suit_lora,
    staleness_fits,
    init_from,
    user_code,
    algorithm,
    group_size,
    batches,
    seldom_meant,
    chat_template,
    columns_exist,
    sampling_is_trained,
    eval_sets,
    lengths,
    engine_fits,
    trainer_layout,
    rollout_layout,
    components_agree,
    own_directives,
    servers_suffice,
    cluster_is_reachable,
    interface_counts,
    devices_suffice,
    devices_are_shared,
    backend_fits,
    no_idle_node,
    ports_free,
    memory_suffices,
    shared_base_fits,
    deterministic,
    merged_rollouts,
    time_outs,
)


def check_start(config: Config, facts: Facts) -> tuple[Finding, ...]:
    """`check` of a run at its start."""
    return check(config, facts, (no_clients, *RULES))


def check(config: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """Return all findings, errors first; of several about one subject (by default: one key) only the first."""
    findings: dict[tuple[str, Severity, str], Finding] = {}
    for rule in rules:
        for finding in rule(config, facts):
            findings.setdefault((finding.path, finding.severity, finding.subject), finding)
    return tuple(sorted(findings.values(), key=lambda finding: finding.severity))


def resolve_targets(config: Config, facts: Facts) -> Config:
    """``config`` with canonical ``target_modules`` and nothing left to exclude. It must have passed `check`."""
    shape = shape_of(facts)
    if shape is None:
        raise ConfigError("model.path", "its sizes are unknown", "give a Hugging Face model folder")
    return canonical(config, shape)
