"""Rules about the base model, what it can be combined with (`config.support`), and lengths that have to fit it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity, shape_of
from areal_lora.config.support import (
    MODEL,
    combination_of,
    combination_of_run,
    engine_problems,
    engines,
    group_of,
    refusals,
)
from areal_lora.families.family_engines import ENGINES
from areal_lora.families.published import is_hub_name, known_models
from areal_lora.families.registry import supported
from areal_lora.network.request_size import too_large


def model_readable(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.hf_config is None:
        fix = "give a Hugging Face model folder"
        if is_hub_name(config.model.path):
            close = difflib.get_close_matches(config.model.path, known_models(), n=1)
            fix += ", start the run where a hub is reachable"
            fix += f", or did you mean {close[0]}" if close else ""
        yield Finding(path="model.path", reason=facts.model_problem, fix=fix)
        return
    if engines(facts.hf_config) and shape_of(facts) is None:
        known = facts.hf_config["model_type"] in supported() or facts.checkpoint is not None
        yield Finding(
            path="model.path",
            reason="config.json lacks sizes of the model"
            if known
            else "the layers of a family without a row are read from its safetensors files, which are not here",
            fix="use a complete folder",
        )
    if not facts.model_is_local:
        yield Finding(
            path="model.path",
            reason=f"{config.model.path} is not whole in the hub's cache and is downloaded when the run starts",
            fix="none needed where a hub is reachable",
            severity=Severity.WARNING,
        )


def model_trainable(config: Config, facts: Facts) -> Iterator[Finding]:
    """An engine trains a model with this config.json."""
    if facts.hf_config is None:
        return
    possible = engines(facts.hf_config)
    if not possible:
        reasons = [f"{engine}: {why}" for engine in ENGINES for why in engine_problems(engine, facts.hf_config)]
        fix = f"use a model of type {', '.join(supported())}, or one that docs/en/models.md lists"
        yield Finding(path="model.path", reason=f"no engine trains it; {'; '.join(reasons)}", fix=fix)
    elif config.trainer.engine not in possible:
        reason = "; ".join(engine_problems(config.trainer.engine, facts.hf_config))
        fix = f"set trainer.engine={possible[0]}, or use another model"
        yield Finding(path="model.path", reason=reason, fix=fix)


def adapters_divide(config: Config, facts: Facts) -> Iterator[Finding]:
    """Whether the workers of a server can divide this family's adapters."""
    if facts.hf_config is None:
        return
    kind, tp = facts.hf_config.get("model_type"), config.rollout.tp
    if group_of(str(kind)) == "no row" and tp > 1:
        reason = f"{tp}, but adapters of model type {kind!r}, which has no row, are not divided"
        yield Finding(path="rollout.tp", reason=reason, fix="set it to 1")


def kernels_take_the_type(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.cluster.device == "cuda" and config.model.dtype == "float32":
        yield Finding(
            path="model.dtype",
            reason="vLLM's LoRA kernels on GPUs take 16-bit types only, and would end the servers while they start",
            fix="set model.dtype=bfloat16",
        )


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
        sizes = [(f"adapters.{i}.sampling", adapter.sampling.n_samples)]
        sizes += [(f"adapters.{i}.evals.{j}", chosen.n_samples) for j, chosen in enumerate(adapter.evals)]
        for at, n in sizes:
            if reason := too_large(1, n, longest):
                yield Finding(path=f"{at}.n_samples", reason=reason, fix="lower it, or rollout.max_model_len")
    budget = config.trainer.max_tokens_per_microbatch
    if budget < longest:
        yield Finding(
            path="trainer.max_tokens_per_microbatch",
            reason=f"{budget} cannot hold one sequence of rollout.max_model_len = {longest} tokens",
            fix=f"set it to at least {longest}",
        )
    shape = shape_of(facts)
    if shape and shape.max_positions and longest > shape.max_positions:
        yield Finding(
            path="rollout.max_model_len",
            reason=f"{longest} is beyond the model's {shape.max_positions} positions",
            fix=f"set it to at most {shape.max_positions}",
        )


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
