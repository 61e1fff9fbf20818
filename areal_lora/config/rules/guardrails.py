"""Start-up guardrails: the rules that a configuration must satisfy before anything starts.

``check`` is pure: it judges a configuration against facts gathered by ``config.facts``. Each rule is one function in
this folder that yields findings.
"""

from __future__ import annotations

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.adapters import adapter_names, groups, no_dropout, ranks_fit, targets_exist, user_code
from areal_lora.config.rules.findings import Finding, Rule, Severity, shape_of
from areal_lora.config.rules.init_from import init_from
from areal_lora.config.rules.layout import rollout_layout, trainer_layout
from areal_lora.config.rules.machine import (
    cluster_is_reachable,
    devices_suffice,
    interface_counts,
    memory_suffices,
    ports_free,
)
from areal_lora.config.rules.model import lengths, model_readable, model_trainable
from areal_lora.config.rules.rollout import deterministic
from areal_lora.config.rules.run import time_outs
from areal_lora.errors import ConfigError
from areal_lora.families import targets

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


def check(config: Config, facts: Facts) -> tuple[Finding, ...]:
    """Return the findings, errors first; of several findings about one key only the first."""
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
