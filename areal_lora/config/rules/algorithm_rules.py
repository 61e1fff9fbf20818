"""Rules about ``adapters[].algorithm``: combinations of keys that make no sense."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding
from areal_lora.config.sections.algorithm import AdvantageName, AlgorithmConfig

UNGROUPED: frozenset[AdvantageName] = frozenset({"reinforce_pp", "batch", "remax", "gae"})
"""Advantages that do not compare the answers of one prompt."""

Problem = tuple[str, str, str]
"""Key of the algorithm, reason, fix."""


def algorithm(config: Config, facts: Facts) -> Iterator[Finding]:
    for i, adapter in enumerate(config.adapters):
        chosen, changed = adapter.algorithm, adapter.algorithm.changed()
        for key, reason, fix in _problems(adapter):
            yield Finding(path=f"adapters.{i}.algorithm.{key}", reason=reason, fix=fix)
        for key, reason in _without_effect(chosen):
            if key in changed:
                default = getattr(AlgorithmConfig(kind=chosen.kind), key)
                fix = "leave it out" if default is None else f"leave it at {default}"
                yield Finding(path=f"adapters.{i}.algorithm.{key}", reason=reason, fix=fix)


def group_size(config: Config, facts: Facts) -> Iterator[Finding]:
    for i, adapter in enumerate(config.adapters):
        if adapter.sampling.n_samples > 1:
            continue
        at = f"adapters.{i}.sampling.n_samples"
        if adapter.algorithm.advantage not in UNGROUPED:
            reason = f"{adapter.algorithm.advantage} compares the answers of one prompt and needs at least 2"
            yield Finding(path=at, reason=reason, fix="set it to 2 or more")
        elif adapter.algorithm.drop_uniform:
            reason = "a group of one answer has no variance of rewards, and algorithm.drop_uniform drops it"
            yield Finding(path=at, reason=reason, fix="set it to 2 or more, or algorithm.drop_uniform=false")


def _problems(adapter: AdapterConfig) -> Iterator[Problem]:
    chosen = adapter.algorithm
    yield from (*_bounds(chosen), *_behaviour(chosen), *_kl(chosen))
    yield from (*_reward(adapter), *_reference(adapter), *_baseline(adapter))


def _bounds(chosen: AlgorithmConfig) -> Iterator[Problem]:
    if chosen.eps_clip > 1:
        yield "eps_clip", f"a ratio is never below 1 - {chosen.eps_clip:g}", "set it to at most 1 (no lower clip)"
    if chosen.dual_clip is not None and chosen.dual_clip <= 1 + chosen.clip_high:
        reason = f"{chosen.dual_clip:g} is within the clip 1 + {chosen.clip_high:g}, which it bounds from outside"
        yield "dual_clip", reason, "raise it; 3 is usual"


def _behaviour(chosen: AlgorithmConfig) -> Iterator[Problem]:
    if chosen.ratio == "rollout" and chosen.behaviour_correction != "none":
        reason = "the ratio current/rollout already corrects for the behaviour policy, this would do it twice"
        yield "behaviour_correction", reason, "set it to none, or algorithm.ratio=proximal"
    if chosen.ratio == "rollout" and chosen.loss == "reinforce":
        yield "ratio", "loss reinforce has no ratio", "set it to proximal"
    if chosen.behaviour_correction != "mask" and chosen.behaviour_floor:
        reason = f"behaviour_correction {chosen.behaviour_correction} has no lower bound"
        yield "behaviour_floor", reason, "set it to 0, or algorithm.behaviour_correction=mask"
    if chosen.behaviour_correction == "mask" and chosen.behaviour_floor >= min(1.0, chosen.behaviour_cap):
        reason = f"tokens of the policy itself, with w = 1, are outside of {_range(chosen)}"
        yield "behaviour_floor", reason, "set it below 1 and below behaviour_cap"
    if chosen.behaviour_correction != "none" and chosen.behaviour_cap < 1:
        reason = f"tokens of the policy itself, with w = 1, are outside of {_range(chosen)}"
        yield "behaviour_cap", reason, "set it to 1 or more"


def _range(chosen: AlgorithmConfig) -> str:
    return f"[{chosen.behaviour_floor:g}, {chosen.behaviour_cap:g}]"


def _kl(chosen: AlgorithmConfig) -> Iterator[Problem]:
    if chosen.kl_coef and chosen.kl_in == "loss" and chosen.kl_estimator == "k1":
        yield "kl_estimator", "as a loss k1 has a gradient of mean zero", "use k2 or k3, or algorithm.kl_in=reward"


def _reward(adapter: AdapterConfig) -> Iterator[Problem]:
    chosen = adapter.algorithm
    if chosen.overlong_share and adapter.workflow.kind != "single_turn":
        reason = f"max_new_tokens limits one answer, and workflow {adapter.workflow.kind} has several per sample"
        yield "overlong_share", reason, "set it to 0, and shape the reward in the workflow"


def _reference(adapter: AdapterConfig) -> Iterator[Problem]:
    chosen = adapter.algorithm
    if not chosen.kl_coef or chosen.reference == "base":
        return
    if adapter.init_from is None and not adapter.sft.steps and chosen.reference_refresh_steps is None:
        reason = "the run starts at the base, and nothing renews the reference"
        yield "reference", reason, "leave it at base, or give init_from, sft.steps or reference_refresh_steps"


def _baseline(adapter: AdapterConfig) -> Iterator[Problem]:
    chosen = adapter.algorithm
    if not chosen.has_baseline:
        return
    if chosen.drop_uniform:
        reason = "a group whose answers have equal rewards still differs from its greedy answer"
        yield "drop_uniform", reason, "set it to false"


def _without_effect(chosen: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Keys that the rest of the algorithm does not read, with the reason."""
    if chosen.loss == "reinforce":
        for key in ("eps_clip", "eps_clip_high", "dual_clip"):
            yield key, "loss reinforce has no ratio to clip"
    if chosen.loss == "cispo":
        yield "dual_clip", "loss cispo bounds the weight of the log-probability, not the objective"
    if chosen.behaviour_correction == "none":
        for key in ("behaviour_level", "behaviour_cap"):
            yield key, "behaviour_correction is none"
    if not chosen.kl_coef:
        for key in ("kl_estimator", "kl_in", "kl_target", "reference", "reference_refresh_steps"):
            yield key, "kl_coef is 0"
    elif chosen.reference == "base":
        yield "reference_refresh_steps", "reference is base, which no version replaces"
    if not chosen.has_critic:
        for key in ("gamma", "gae_lambda", "value_clip", "critic_lr", "critic_rank"):
            yield key, f"advantage {chosen.advantage} has no critic"
    if not chosen.overlong_share:
        yield "overlong_penalty", "overlong_share is 0"
