"""Rules about an adapter's algorithm: combinations without meaning, and keys that the rest of it does not read."""

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, of_each_adapter
from areal_lora.config.sections.adapter import AdvantageName, AlgorithmConfig

UNGROUPED: frozenset[AdvantageName] = frozenset({"reinforce_pp", "batch", "remax", "gae", "none"})
"""Advantages that do not compare the answers of one prompt."""


@of_each_adapter
def algorithm(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    chosen, changed = adapter.algorithm, adapter.algorithm.changed()
    yield from (Finding(f"algorithm.{key}", reason, fix) for key, reason, fix in _problems(adapter))
    if chosen.mask_truncated and adapter.sft.steps >= config.run.steps:
        reason = f"sft.steps covers all {config.run.steps} steps, and no given answer is truncated"
        yield Finding("algorithm.mask_truncated", reason, "leave it at false")
    for key, reason in _without_effect(chosen):
        if key in changed:
            default = getattr(AlgorithmConfig(kind=chosen.kind), key)
            fix = "leave it out" if default is None else f"leave it at {default}"
            yield Finding(f"algorithm.{key}", reason, fix)


@of_each_adapter
def group_size(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    if adapter.sampling.n_samples > 1:
        return
    at = "sampling.n_samples"
    if ":" not in adapter.algorithm.advantage and adapter.algorithm.advantage not in UNGROUPED:
        reason = f"{adapter.algorithm.advantage} compares the answers of one prompt and needs at least 2"
        yield Finding(at, reason, "set it to 2 or more")
    elif adapter.algorithm.drop_uniform:
        reason = "a group of one answer has no variance of rewards, and algorithm.drop_uniform drops it"
        yield Finding(at, reason, "set it to 2 or more, or algorithm.drop_uniform=false")


def _problems(adapter: AdapterConfig) -> Iterator[tuple[str, str, str]]:
    """Key of the algorithm, reason, fix."""
    chosen = adapter.algorithm
    if chosen.eps_clip > 1:
        yield "eps_clip", f"a ratio is never below 1 - {chosen.eps_clip:g}", "set it to at most 1 (no lower clip)"
    if chosen.dual_clip is not None and chosen.dual_clip <= 1 + chosen.clip_high:
        reason = f"{chosen.dual_clip:g} is within the clip 1 + {chosen.clip_high:g}, which it bounds from outside"
        yield "dual_clip", reason, "raise it; 3 is usual"
    if chosen.behaviour_correction == "in_ratio" and chosen.loss == "reinforce":
        yield "behaviour_correction", "loss reinforce has no ratio", "set it to mask, truncate or none"
    if chosen.behaviour_correction != "mask" and chosen.behaviour_floor:
        reason = f"behaviour_correction {chosen.behaviour_correction} has no lower bound"
        yield "behaviour_floor", reason, "set it to 0, or algorithm.behaviour_correction=mask"
    if chosen.behaviour_correction == "auto" and chosen.behaviour_level != "token":
        yield "behaviour_level", "auto corrects single tokens", "leave it at token, or set another correction"
    bounds = f"[{chosen.behaviour_floor:g}, {chosen.behaviour_cap:g}]"
    outside = f"tokens of the policy itself, with w = 1, are outside of {bounds}"
    if chosen.behaviour_correction == "mask" and chosen.behaviour_floor >= min(1.0, chosen.behaviour_cap):
        yield "behaviour_floor", outside, "set it below 1 and below behaviour_cap"
    if chosen.behaviour_correction not in ("none", "in_ratio") and chosen.behaviour_cap < 1:
        yield "behaviour_cap", outside, "set it to 1 or more"
    if chosen.kl_coef and chosen.kl_in == "loss" and chosen.kl_estimator == "k1":
        yield "kl_estimator", "as a loss k1 has a gradient of mean zero", "use k2 or k3, or algorithm.kl_in=reward"
    if chosen.kl_coef and chosen.kl_in == "advantage" and chosen.kl_estimator != "k1":
        yield "kl_estimator", f"as an advantage {chosen.kl_estimator} is not the divergence's gradient", "use k1"
    if chosen.advantage == "none" and chosen.drop_uniform:
        yield "drop_uniform", "advantage none does not look at rewards", "set it to false"
    if chosen.advantage == "gdpo":
        reason = "advantage gdpo normalises each reward, and this changes their sum"
        if chosen.overlong_share:
            yield "overlong_share", reason, "set it to 0, and make the length a reward of its own"
        if chosen.kl_coef and chosen.kl_in == "reward":
            yield "kl_in", reason, "set it to loss or advantage"
        if chosen.drop_uniform:
            yield "drop_uniform", "answers with equal sums may differ in each reward", "set it to false"
    if chosen.teacher and adapter.sampling.temperature != 1:
        reason = "a served model states log-probabilities at temperature 1"
        yield "reference", reason, "set sampling.temperature=1, or leave reference at base"
    if chosen.overlong_share and adapter.workflow.kind != "single_turn":
        reason = f"max_new_tokens limits one answer, and workflow {adapter.workflow.kind} has several per sample"
        yield "overlong_share", reason, "set it to 0, and shape the reward in the workflow"
    moves = adapter.init_from is not None or adapter.sft.steps or chosen.reference_refresh_steps is not None
    if chosen.has_reference and not moves:
        reason = "the run starts at the base, and nothing renews the reference"
        yield "reference", reason, "leave it at base, or give init_from, sft.steps or reference_refresh_steps"
    if chosen.advantage == "none" and (not chosen.kl_coef or (chosen.reference == "base" and not moves)):
        reason = "nothing is learned: advantage none has no reward, and the run starts at the reference"
        yield "reference", reason, "give url and model of a teacher"
    if chosen.has_baseline and chosen.drop_uniform:
        reason = "a group whose answers have equal rewards still differs from its greedy answer"
        yield "drop_uniform", reason, "set it to false"


def _without_effect(chosen: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Keys that the rest of the algorithm does not read, with the reason."""
    if chosen.loss == "reinforce":
        for key in ("eps_clip", "eps_clip_high", "dual_clip"):
            yield key, "loss reinforce has no ratio to clip"
    if chosen.loss in ("cispo", "sapo", "dppo", "kpop"):
        yield "dual_clip", f"loss {chosen.loss} does not bound the objective"
    if chosen.behaviour_correction in ("none", "in_ratio"):
        for key in ("behaviour_level", "behaviour_cap"):
            yield key, f"behaviour_correction is {chosen.behaviour_correction}"
    if not chosen.kl_coef:
        for key in ("kl_estimator", "kl_in", "kl_target", "reference", "reference_refresh_steps"):
            yield key, "kl_coef is 0"
    elif not chosen.has_reference:
        yield "reference_refresh_steps", "no version replaces this reference"
    if not chosen.has_critic:
        for key in ("gamma", "gae_lambda", "critic_lr"):
            yield key, f"advantage {chosen.advantage} has no critic"
    if not chosen.overlong_share:
        yield "overlong_penalty", "overlong_share is 0"
