"""What may change between two starts with one run folder, key by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_conflict, changes, conflict, differences, sampled_as
from tests.support.paths import EXAMPLES


def config(*overrides: str) -> Config:
    return load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], list(overrides))


@pytest.mark.parametrize(
    "change",
    [
        "run.steps=99",
        "trainer.world_size=1",
        "trainer.ep=1",
        "trainer.tp=2",
        "rollout.servers=3",
        "rollout.tp=2",
        "rollout.max_staleness=0",
        "rollout.in_flight=interrupt",
        "adapters.gsm8k.optimizer.lr=3.0e-4",
        "adapters.gsm8k.optimizer.schedule=cosine",
        "adapters.gsm8k.minibatches=2",
        "adapters.gsm8k.sampling.prompts_per_step=7",
        "adapters.gsm8k.sampling.n_samples=3",
        "adapters.gsm8k.sampling.max_new_tokens=9",
        "adapters.gsm8k.algorithm.kl_coef=0.1",
        "adapters.gsm8k.task.n_eval=11",
        "eval.every_steps=0",
        "checkpoint.every_steps=4",
        "run.max_restarts=0",
        "adapters.gsm8k.reward_weights=[2]",
        "weight_sync.bucket_mib=1",
        "cluster.kind=slurm",
    ],
)
def test_may_change(change: str) -> None:
    assert conflict(config(), config(change)) is None
    assert changes(config(), config()) == []
    [line] = changes(config(), config(change))
    assert line.startswith(change.partition("=")[0].replace("adapters.0", "adapters.gsm8k"))


TEACHER = "adapters.gsm8k.algorithm.reference={url: http://127.0.0.1:9/v1, model: %s}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ([], "temperature 1, top_p 1, top_k 0, min_p 0"),
        (["adapters.gsm8k.sampling.n_samples=3", "adapters.gsm8k.algorithm.kind=dapo"], ""),
        (["adapters.gsm8k.sampling.temperature=0.7"], "temperature 0.7, top_p 1, top_k 0, min_p 0"),
        (["adapters.gsm8k.sampling.top_k=20", "adapters.gsm8k.sampling.min_p=0.1"], "top_k 20, min_p 0.1"),
        (["adapters.gsm8k.algorithm.kind=remax"], "min_p 0, greedy answers"),
        (["behaviour.router_replay=rollout"], "min_p 0, routes"),
        (["adapters.gsm8k.algorithm.kl_coef=0.1", TEACHER % "large"], "min_p 0, teacher large"),
    ],
)
def test_what_groups_of_an_earlier_start_are_compared_by(change: list[str], text: str) -> None:
    before, now = (sampled_as(each, each.adapters[0]) for each in (config(), config(*change)))
    assert text in now
    assert (before == now) == (text in before)


def test_keys_that_one_configuration_lacks_are_none() -> None:
    first, second = {"a": {"b": [1, 2]}, "c": 3}, {"a": {"b": [1, 5, 6], "d": "x"}}
    assert list(differences(first, second)) == [("a.b", [1, 2], [1, 5, 6]), ("a.d", None, "x"), ("c", 3, None)]


@pytest.mark.parametrize(
    ("change", "path", "was", "now"),
    [
        ("run.seed=5", "run.seed", "1", "5"),
        ("model.path=other", "model.path", "tiny_model", "other"),
        ("model.dtype=bfloat16", "model.dtype", "float32", "bfloat16"),
        ("adapters.gsm8k.rank=4", "adapters.gsm8k.rank", "8", "4"),
        ("adapters.gsm8k.alpha=32", "adapters.gsm8k.alpha", "16.0", "32.0"),
        ("adapters.gsm8k.target_modules=[linear_fc1]", "adapters.gsm8k.target_modules", "linear_qkv", "linear_fc1"),
        ("adapters.gsm8k.expert_layout=shared", "adapters.gsm8k.expert_layout", "per_expert", "shared"),
        ("adapters.gsm8k.task.n_train=3", "adapters.gsm8k.task.n_train", "4096", "3"),
        ("adapters.gsm8k.name=other", "adapters", "gsm8k", "other"),
    ],
)
def test_must_not_change(change: str, path: str, was: str, now: str) -> None:
    error = conflict(config(), config(change))
    assert error is not None
    assert error.path == path
    assert was in error.reason
    assert now in error.reason
    assert "--fresh" in error.fix
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "was", "now", "refused"),
    [
        ("longrope", 256, 257, True),
        ("longrope", 257, 200, True),
        ("longrope", 200, 256, False),
        ("longrope", 257, 300, False),
        ("llama3", 256, 257, False),
    ],
)
def test_a_length_stays_on_its_side_of_the_original_context(
    kind: str, was: int, now: int, refused: bool, tmp_path: Path
) -> None:
    """Trainer and servers take LongRoPE's long factors at every position where the longest sequence is above it."""
    rope = {"rope_type": kind, "original_max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps({"rope_parameters": rope}))
    error = conflict(*(config(f"model.path={tmp_path}", f"rollout.max_model_len={n}") for n in (was, now)))
    assert (error is not None) == refused
    if error is not None:
        assert error.path == "rollout.max_model_len"
        assert f"it is {now}, but the run was started with {was}" in error.reason
        assert "\n" not in str(error)


STAGES = "adapters.gsm8k.sampling.difficulty={level: {0: {easy: 1}, 100: {easy: 1, hard: 2}}}"


@pytest.mark.parametrize("difficulty", ["{level: {0: {easy: 1}, 50: {easy: 1, hard: 2}}}", "uniform", "learnability"])
def test_a_curriculum_by_stages_stays_as_it_is(difficulty: str) -> None:
    """The ledger would refuse it after the start: positions are prompts by the weights of their stage."""
    changed = config(f"adapters.gsm8k.sampling.difficulty={difficulty}")
    assert conflict(config(STAGES), config(STAGES)) is None
    for pair in ((config(STAGES), changed), (changed, config(STAGES))):
        error = conflict(*pair)
        assert error is not None
        assert error.path.startswith("adapters.gsm8k.sampling.difficulty")
        assert "it fixes the order of the prompts" in error.reason
    uniform = config("adapters.gsm8k.sampling.difficulty=uniform")
    assert conflict(uniform, config("adapters.gsm8k.sampling.difficulty=learnability")) is None


def test_a_task_of_another_kind_is_named() -> None:
    before = config()
    task = {"kind": "gsm8k", "train": "a.jsonl", "eval": "b.jsonl"}
    data = before.model_dump(mode="json")
    data["adapters"][0]["task"] = task
    error = conflict(before, Config.model_validate(data))
    assert error is not None
    assert (error.path, "word_problems" in error.reason) == ("adapters.gsm8k.task.kind", True)


OWN = ("adapters.gsm8k.task.kind=dataset", "adapters.gsm8k.task.train=a.jsonl")


@pytest.mark.parametrize("change", ["adapters.gsm8k.task.n_eval=11", "adapters.gsm8k.task.eval=b.jsonl"])
def test_rows_held_out_of_the_training_rows_stay_held_out(change: str) -> None:
    """Otherwise a resume would train on rows that were held out before."""
    error = conflict(config(*OWN), config(*OWN, change))
    assert error is not None
    assert error.path == change.partition("=")[0]
    apart = (*OWN, "adapters.gsm8k.task.eval=c.jsonl")
    assert conflict(config(*apart), config(*apart, change)) is None


def test_the_order_of_modules_and_adapters_is_nothing() -> None:
    data = config().model_dump(mode="json")
    [adapter] = data["adapters"]
    adapter["target_modules"] = ["linear_fc1", "linear_fc2"]
    data["adapters"] = [adapter, adapter | {"name": "other"}]
    before = Config.model_validate(data)
    adapter["target_modules"] = ["linear_fc2", "linear_fc1"]
    data["adapters"] = data["adapters"][::-1]
    assert conflict(before, Config.model_validate(data)) is None


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_the_order_of_patterns_is_kept(key: str) -> None:
    """The first one that matches counts: in another order q has the number of all, and its product another scale."""
    patterns = ("{'(q|k|v)_proj': 2, '.*': 8}", "{'.*': 8, '(q|k|v)_proj': 2}")
    before, now = (config(f"adapters.gsm8k.{key}={each}").adapters[0] for each in patterns)
    trained = before.spec("base")
    assert adapter_conflict(trained, before, 0, "v000003") is None
    error = adapter_conflict(trained, now, 0, "v000003")
    assert error is not None
    assert (error.path, "v000003 was trained" in error.reason) == (f"adapters.0.{key}", True)


@pytest.mark.parametrize(
    ("was", "now", "key"),
    [
        ({"level": [1, 2]}, {"level": [1, 2, None]}, ".where.level"),
        ({"level": [1, 2]}, {"level": [1, 3]}, ".where.level.1"),
        ({}, {"level": None}, ""),
    ],
)
def test_a_condition_on_rows_that_has_changed_is_named(was: dict[str, Any], now: dict[str, Any], key: str) -> None:
    """A list of another length as a whole, with what to set it back to; also where only an empty value came."""
    before, after = (config(*OWN, f"adapters.0.task.where={json.dumps(where)}") for where in (was, now))
    error = conflict(before, after)
    assert error is not None
    assert error.path == f"adapters.gsm8k.task{key}"
    assert f"with {2 if key.endswith('1') else was['level']}," in error.reason if key else "'where': {}" in error.reason
