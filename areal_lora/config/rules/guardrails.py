"""Start-up guardrails: the rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against the facts of ``config.facts``. A rule is a function of this folder.
"""

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules import adapter_rules, algorithm_rules, layout_rules, memory_rules
from areal_lora.config.rules.findings import Finding, Rule, Severity

# fmt: off
RULES: tuple[Rule, ...] = (
    layout_rules.model_readable, layout_rules.model_trainable, layout_rules.combinations,
    layout_rules.servers_can_serve, adapter_rules.adapter_list, adapter_rules.service_fits, adapter_rules.targets_exist,
    adapter_rules.ranks_fit, adapter_rules.rates_suit_lora, adapter_rules.init_from, adapter_rules.user_code,
    algorithm_rules.algorithm, algorithm_rules.group_size, adapter_rules.router_replay, adapter_rules.moe_dispatcher,
    adapter_rules.batches, adapter_rules.chat_template, adapter_rules.columns_exist, adapter_rules.sampling_is_trained,
    adapter_rules.eval_sets, layout_rules.answers_fit, layout_rules.lengths, layout_rules.engine_fits,
    layout_rules.trainer_layout, layout_rules.rollout_layout, layout_rules.components_agree,
    layout_rules.own_directives, memory_rules.cluster_is_reachable, memory_rules.interface_counts,
    memory_rules.devices_suffice, layout_rules.devices_are_shared, layout_rules.backend_fits, layout_rules.no_idle_node,
    memory_rules.memory_suffices, memory_rules.shared_base_fits, layout_rules.deterministic,
    layout_rules.engine_args_are_free, layout_rules.time_outs, layout_rules.profiled_steps,
    memory_rules.remote_servers_fit, memory_rules.base_can_be_rounded, adapter_rules.measured_versions,
)
# fmt: on


def check_start(config: Config, facts: Facts) -> tuple[Finding, ...]:
    return check(config, facts, (adapter_rules.no_clients, *RULES))


def check(config: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """Return all findings, errors first; of several about one subject (by default: one key) only the first."""
    findings: dict[tuple[str, Severity, str], Finding] = {}
    for rule in rules:
        for finding in rule(config, facts):
            findings.setdefault((finding.path, finding.severity, finding.subject), finding)
    return tuple(sorted(findings.values(), key=lambda finding: finding.severity))
