"""Combinations that the table `config.support` refuses. Which engine trains the model is said by the model's rule."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, shape_of
from areal_lora.config.support import MODEL, combination_of, combination_of_run, refusals


def combinations(config: Config, facts: Facts) -> Iterator[Finding]:
    family, shape = str((facts.hf_config or {}).get("model_type")), shape_of(facts)
    seen: set[tuple[str, str]] = set()
    of_adapters = [combination_of(config, adapter, family, shape) for adapter in config.adapters]
    for i, combination in enumerate(of_adapters or [combination_of_run(config, family, shape)]):
        for refusal in refusals(combination):
            at, reason = refusal.key.format(i=i), refusal.text(family)
            if refusal.key == MODEL or (at, reason) in seen:
                continue
            seen.add((at, reason))
            yield Finding(path=at, reason=reason, fix=refusal.fix, subject=reason)
