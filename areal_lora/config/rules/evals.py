"""Rules about the sets of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding

LEAST_TEMPERATURE = 0.01
"""vLLM's minimum above 0."""


def eval_sets(config: Config, facts: Facts) -> Iterator[Finding]:
    longest = config.rollout.max_model_len
    for i, adapter in enumerate(config.adapters):
        for name, count in Counter(chosen.name for chosen in adapter.evals).items():
            if count > 1:
                yield Finding(
                    path=f"adapters.{i}.evals", reason=f"{count} sets are named {name!r}", fix="give each its own name"
                )
        for j, chosen in enumerate(adapter.evals):
            at = f"adapters.{i}.evals.{j}"
            if chosen.n_samples > 1 and chosen.temperature == 0:
                yield Finding(
                    path=f"{at}.temperature",
                    reason=f"at 0 all {chosen.n_samples} answers to a problem are the same",
                    fix="raise it, for example to 0.8, or set n_samples=1",
                )
            elif 0 < chosen.temperature < LEAST_TEMPERATURE:
                yield Finding(
                    path=f"{at}.temperature",
                    reason=f"vLLM's minimum above 0 is {LEAST_TEMPERATURE}",
                    fix="set it to 0 for greedy answers",
                )
            if chosen.max_new_tokens is not None and chosen.max_new_tokens >= longest:
                yield Finding(
                    path=f"{at}.max_new_tokens",
                    reason=f"{chosen.max_new_tokens} new tokens leave no room for a prompt in "
                    f"rollout.max_model_len = {longest}",
                    fix=f"lower it, or raise rollout.max_model_len above {chosen.max_new_tokens}",
                )
