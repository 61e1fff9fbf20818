"""Start-up guardrails: the rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against the facts of ``config.facts``. A rule is a function of this folder.
"""

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules import (
    adapter_rules as adapters,
    algorithm_rules as algorithms,
    layout_rules as layout,
    memory_rules as memory,
)
from areal_lora.config.rules.findings import Finding, Rule, Severity, canonical, shape_of
from areal_lora.errors import ConfigError

# fmt: off
RULES: tuple[Rule, ...] = (
    layout.model_readable, layout.model_trainable, layout.combinations, layout.servers_can_serve, adapters.adapter_list,
    adapters.service_fits, adapters.targets_exist, adapters.ranks_fit, adapters.rates_suit_lora, adapters.init_from,
    adapters.user_code, algorithms.algorithm, algorithms.group_size, adapters.router_replay, adapters.moe_dispatcher,
    adapters.batches, adapters.chat_template, adapters.columns_exist, adapters.sampling_is_trained, adapters.eval_sets,
    layout.answers_fit, layout.lengths, layout.engine_fits, layout.trainer_layout, layout.rollout_layout,
    layout.components_agree, layout.own_directives, memory.cluster_is_reachable, memory.interface_counts,
    memory.devices_suffice, layout.devices_are_shared, layout.backend_fits, layout.no_idle_node, memory.memory_suffices,
    memory.shared_base_fits, layout.deterministic, layout.engine_args_are_free, layout.time_outs, layout.profiled_steps,
    memory.remote_servers_fit, memory.base_can_be_rounded,
)
# fmt: on


def check_start(config: Config, facts: Facts) -> tuple[Finding, ...]:
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
