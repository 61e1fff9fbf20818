"""Start-up guardrails: the rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against facts gathered by ``config.facts``. Each rule is one function in
this folder that yields findings.
"""

from __future__ import annotations

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules import adapters, algorithm, init_from, layout, machine, memory, model, rollout, slurm, task
from areal_lora.config.rules.findings import Finding, Rule, Severity, canonical, shape_of
from areal_lora.errors import ConfigError

RULES: tuple[Rule, ...] = (
    model.model_readable,
    model.model_trainable,
    model.combinations,
    model.adapters_divide,
    model.kernels_take_the_type,
    adapters.adapter_names,
    adapters.a_service_has_room,
    machine.service_fits,
    adapters.servers_hold_them,
    adapters.targets_exist,
    adapters.ranks_fit,
    adapters.rates_suit_lora,
    adapters.staleness_fits,
    init_from.init_from,
    adapters.user_code,
    algorithm.algorithm,
    algorithm.group_size,
    adapters.batches,
    task.seldom_meant,
    task.chat_template,
    task.columns_exist,
    task.sampling_is_trained,
    task.eval_sets,
    model.lengths,
    layout.engine_fits,
    layout.trainer_layout,
    layout.rollout_layout,
    slurm.components_agree,
    slurm.own_directives,
    slurm.servers_suffice,
    machine.cluster_is_reachable,
    machine.interface_counts,
    machine.devices_suffice,
    layout.devices_are_shared,
    layout.backend_fits,
    slurm.no_idle_node,
    machine.ports_free,
    memory.memory_suffices,
    memory.shared_base_fits,
    rollout.deterministic,
    rollout.merged_rollouts,
    rollout.time_outs,
)


def check_start(config: Config, facts: Facts) -> tuple[Finding, ...]:
    """`check` of a run at its start."""
    return check(config, facts, (adapters.no_clients, *RULES))


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
