"""Rules about the base model, and about lengths that have to fit it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity, shape_of
from areal_lora.families.published import is_hub_name, known_models
from areal_lora.families.registry import supported
from areal_lora.families.variants import unsupported


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
