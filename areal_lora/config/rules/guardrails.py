"""Start-up guardrails: the rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against facts gathered by ``config.facts``. Each rule is one function in
this folder that yields findings.
"""

from __future__ import annotations

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules import adapter_rules, layout_rules, memory_rules, slurm, task_rules
from areal_lora.config.rules.findings import Finding, Rule, Severity, canonical, shape_of
from areal_lora.errors import ConfigError

# fmt: off
RULES: tuple[Rule, ...] = (
    layout_rules.model_readable, layout_rules.model_trainable, layout_rules.combinations,
    layout_rules.servers_can_serve, adapter_rules.adapter_list, adapter_rules.a_service_has_room,
    memory_rules.service_fits, adapter_rules.targets_exist, adapter_rules.ranks_fit, adapter_rules.rates_suit_lora,
    task_rules.init_from, adapter_rules.user_code, adapter_rules.algorithm, adapter_rules.group_size,
    adapter_rules.batches, task_rules.chat_template, task_rules.columns_exist,
    task_rules.sampling_is_trained, task_rules.eval_sets, layout_rules.lengths, layout_rules.engine_fits,
    layout_rules.trainer_layout, layout_rules.rollout_layout, slurm.components_agree, slurm.own_directives,
    slurm.servers_suffice, memory_rules.cluster_is_reachable, memory_rules.interface_counts,
    memory_rules.devices_suffice, layout_rules.devices_are_shared, layout_rules.backend_fits, slurm.no_idle_node,
    memory_rules.memory_suffices, memory_rules.shared_base_fits, layout_rules.deterministic,
    layout_rules.merged_rollouts, layout_rules.time_outs,
)
# fmt: on


def check_start(config: Config, facts: Facts) -> tuple[Finding, ...]:
    """`check` of a run at its start."""
    return check(config, facts, (adapter_rules.no_clients, *RULES))


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
