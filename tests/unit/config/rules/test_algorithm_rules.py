"""Combinations of an algorithm's keys that make no sense, all reported at once."""

from __future__ import annotations

from typing import get_args

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rules.algorithm_rules import UNGROUPED
from areal_lora.config.rules.guardrails import check
from areal_lora.config.sections.adapter import AdvantageName, Kind
from areal_lora.errors import ConfigError
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def load(*keys: str) -> Config:
    return load_config(FILES, [f"adapters.0.{key}" for key in keys])


def found(*keys: str) -> dict[str, str]:
    """Findings about the adapter: its key, then reason and fix."""
    findings = check(load(*keys), Facts(hf_config=None))
    return {f.path.removeprefix("adapters.0."): f"{f.reason}; {f.fix}" for f in findings if "adapters.0" in f.path}


TEACHER = ["reference.url=http://teacher:8000/v1", "reference.model=large"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_preset_passes(kind: str) -> None:
    keys = [f"algorithm.kind={kind}", *(f"algorithm.{key}" for key in TEACHER if kind == "distill")]
    assert found(*keys) == {}
    assert found(*keys, "algorithm.kl_coef=0.1", "minibatches=4") == {}


@pytest.mark.parametrize("key", ["top_p=0.9", "min_p=0.05"])
def test_a_truncated_distribution_has_a_bounded_number_of_ids(key: str) -> None:
    name = key.partition("=")[0]
    assert "set sampling.top_k, at most 256" in found(f"sampling.{key}")[f"sampling.{name}"]
    assert found(f"sampling.{key}", "sampling.top_k=256", "sampling.min_tokens=2") == {}
    assert "restricts sampling" in found("sampling.min_tokens=2")["sampling.min_tokens"]
    with pytest.raises(ConfigError, match=r"sampling\.top_k.*256"):
        load("sampling.top_k=257")


def test_a_teacher_knows_no_truncation() -> None:
    keys = ["algorithm.kind=distill", *(f"algorithm.{key}" for key in TEACHER)]
    assert "whole distribution" in found(*keys, "sampling.top_k=5")["algorithm.reference"]


def test_a_teacher_scores_at_temperature_1() -> None:
    keys = ["algorithm.kl_coef=0.1", *(f"algorithm.{key}" for key in TEACHER)]
    assert found(*keys) == {}
    assert "temperature 1" in found(*keys, "sampling.temperature=0.7")["algorithm.reference"]


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        (["eps_clip=1.5"], "eps_clip", "below 1"),
        (["dual_clip=1.1"], "dual_clip", "1 + 0.2"),
        (["kind=opo", "behaviour_correction=in_ratio"], "behaviour_correction", "no ratio"),
        (["kind=tis", "behaviour_floor=0.5"], "behaviour_floor", "no lower bound"),
        (["kind=mis", "behaviour_correction=auto"], "behaviour_level", "single tokens"),
        (["kind=icepop", "behaviour_correction=auto"], "behaviour_floor", "no lower bound"),
        (["behaviour_correction=auto", "behaviour_cap=0.9"], "behaviour_cap", "w = 1"),
        (["kind=icepop", "behaviour_floor=1"], "behaviour_floor", "w = 1"),
        (["behaviour_cap=0.9"], "behaviour_cap", "w = 1"),
        (["kl_coef=0.1", "kl_estimator=k1"], "kl_estimator", "mean zero"),
        (["kind=gpg", "eps_clip=0.3"], "eps_clip", "no ratio to clip"),
        (["kind=cispo", "dual_clip=9"], "dual_clip", "objective"),
        (["kind=cispo", "behaviour_cap=3"], "behaviour_cap", "in_ratio"),
        (["kl_in=reward"], "kl_in", "kl_coef is 0"),
        (["kl_target=0.1"], "kl_target", "kl_coef is 0"),
        (["reference=initial"], "reference", "kl_coef is 0"),
        (["kl_coef=0.1", "reference=initial"], "reference", "starts at the base"),
        (["kl_coef=0.1", "reference_refresh_steps=5"], "reference_refresh_steps", "no version replaces"),
        (["critic_lr=0.1"], "critic_lr", "no critic"),
        (["gae_lambda=0.9"], "gae_lambda", "no critic"),
        (["gamma=0.9"], "gamma", "no critic"),
        (["kind=remax", "drop_uniform=true"], "drop_uniform", "greedy answer"),
        (["kind=distill"], "reference", "the run starts at the reference"),
        (["kind=distill", *TEACHER, "kl_coef=0"], "reference", "nothing is learned"),
        (["kind=distill", *TEACHER, "kl_estimator=k3"], "kl_estimator", "not the divergence's gradient"),
        (["kind=distill", *TEACHER, "drop_uniform=true"], "drop_uniform", "does not look at rewards"),
        (["kl_coef=0.1", *TEACHER, "reference_refresh_steps=5"], "reference_refresh_steps", "no version replaces"),
        (["overlong_penalty=0.5"], "overlong_penalty", "overlong_share is 0"),
        (["kind=gdpo", "overlong_share=0.1"], "overlong_share", "normalises each reward"),
        (["kind=gdpo", "kl_coef=0.1", "kl_in=reward"], "kl_in", "normalises each reward"),
        (["kind=gdpo", "drop_uniform=true"], "drop_uniform", "may differ in each reward"),
    ],
)
def test_what_makes_no_sense_is_refused_with_key_reason_and_fix(keys: list[str], path: str, words: str) -> None:
    findings = found(*(f"algorithm.{key}" for key in sorted(keys, key=lambda key: not key.startswith("kind"))))
    assert list(findings) == [f"algorithm.{path}"]
    assert words in findings[f"algorithm.{path}"]


def test_all_problems_are_reported_at_once() -> None:
    keys = ("algorithm.kind=gpg", "algorithm.eps_clip=0.3", "algorithm.kl_estimator=k2", "sampling.n_samples=1")
    assert set(found(*keys)) == {"algorithm.eps_clip", "algorithm.kl_estimator", "sampling.n_samples"}


@pytest.mark.parametrize("advantage", get_args(AdvantageName))
def test_only_advantages_that_compare_a_prompts_answers_need_two(advantage: str) -> None:
    findings = found(f"algorithm.advantage={advantage}", "sampling.n_samples=1", "algorithm.kl_coef=0.1", "init_from=x")
    findings.pop("init_from", None)
    assert set(findings) == (set() if advantage in UNGROUPED else {"sampling.n_samples"})
    both = found("algorithm.advantage=batch", "algorithm.drop_uniform=true", "sampling.n_samples=1")
    assert "drop_uniform" in both["sampling.n_samples"]


def test_a_reference_that_differs_from_the_base_passes() -> None:
    for keys in (["init_from=x"], ["sft.steps=3"], ["algorithm.reference_refresh_steps=4"]):
        findings = found("algorithm.kl_coef=0.1", "algorithm.reference=initial", *keys)
        assert "algorithm.reference" not in findings


@pytest.mark.parametrize("named", [("agent", "workflow.path=x:y"), ("gym", "workflow.env=x:y")])
def test_an_agent_has_no_greedy_answer(named: tuple[str, str]) -> None:
    findings = found("algorithm.kind=remax", f"workflow.kind={named[0]}", named[1])
    assert "state how they are sampled" in findings["algorithm.advantage"]


def test_given_answers_are_never_truncated() -> None:
    keys = ("algorithm.mask_truncated=true", "sft.steps=3")
    assert found(*keys) == {}
    steps = load().run.steps
    assert f"all {steps} steps" in found(keys[0], f"sft.steps={steps}")["algorithm.mask_truncated"]


def test_a_length_penalty_needs_one_answer_per_sample() -> None:
    keys = ("algorithm.kind=dapo", "workflow.kind=custom", "workflow.path=x:y")
    assert "overlong_share" in next(iter(found(*keys)))


def test_a_key_beside_the_kind_overrides_the_preset() -> None:
    chosen = load("algorithm.kind=dapo", "algorithm.overlong_share=0.5").adapters[0].algorithm
    assert (chosen.eps_clip_high, chosen.overlong_share, chosen.drop_uniform) == (0.28, 0.5, True)
    assert chosen.changed() == {"overlong_share": 0.5}
    nulled = load("algorithm.eps_clip_high=null", "algorithm.kind=dapo").adapters[0].algorithm
    assert nulled.changed() == {"eps_clip_high": None}


def test_difficulty_needs_a_reward_that_states_what_is_correct() -> None:
    judge = ("reward.kind=model", "reward.url=http://127.0.0.1:1/classify", "reward.model=m")
    key = "sampling.difficulty"
    assert "does not state" in found(f"{key}=learnability", *judge)[key]
    assert key not in found(*judge)
    assert key not in found(f"{key}=learnability")


def test_a_curriculum_needs_columns_and_stages_that_follow_each_other() -> None:
    key = "sampling.difficulty"
    findings = found(f'{key}={{"level": {{"0": {{"easy": 1}}}}}}')
    assert "word_problems has none" in findings[key]
    for chosen, words in (
        ('{"level": {"0": {"easy": 1}, "4": {"easy": 0}}}', "draws nothing from step 4 on"),
        ('{"level": {"3": {"easy": 1}}}', "starts at step 0"),
        ('{"level": {}}', "starts at step 0"),
        ('{"level": {"0": {"easy": 1}}, "book": {"0": {"a": 1}}}', "goes by one column"),
        ('{"level": {"-1": {"easy": 1}}}', "a number of at least 0"),
        ("lernability", "learnability"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(f"{key}={chosen}")
