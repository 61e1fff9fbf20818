"""Overlays of examples/math in whole runs: every algorithm learns the task in the nightly tests, one short run always.

Others of the suite run ppo.yaml (`test_critic_run`) and merged.yaml (`test_merged_run`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from areal_lora.cli.serve import served
from areal_lora.config.recorded import read_config_here
from areal_lora.config.sections.adapter import Kind
from areal_lora.run_folder.paths import RunFolder
from tests.support.e2e.metrics import records
from tests.support.launcher.command import configs, forked_run
from tests.support.paths import EXAMPLES
from tests.support.sizes import NIGHTLY, sample

STEPS = 12
LEARNT = 0.80
"""Accuracy of greedy answers to 256 held-out problems; 0.328 before training."""
NEAR = 0.05

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
nightly = pytest.mark.skipif(not NIGHTLY, reason="a whole run each: only with AREAL_LORA_NIGHTLY=1")
Learn = Callable[..., float]


def run(root: Path, *arguments: str) -> Path:
    root.mkdir(exist_ok=True)
    done = subprocess.run(
        forked_run(root, *arguments, f"run.root={root}", "run.name=overlay"),
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "overlay"


@pytest.fixture(scope="module")
def learn(tmp_path_factory: pytest.TempPathFactory) -> Learn:
    """Accuracy after `STEPS` steps with some overlays; each such run is made once."""
    found: dict[tuple[str, ...], float] = {}

    def accuracy(*overlays: str) -> float:
        if overlays not in found:
            folder = run(
                tmp_path_factory.mktemp("a run"), *configs(*overlays), f"run.steps={STEPS}", "eval.every_steps=0"
            )
            evals = {r["version"]: r["accuracy"] for r in records(folder) if r["kind"] == "eval"}
            assert sorted(evals) == [0, STEPS]
            print(f"{', '.join(overlays) or 'grpo'}: {evals[0]:.3f}, {evals[STEPS]:.3f}")
            assert evals[0] < LEARNT / 2, "the base has not learnt it yet"
            found[overlays] = evals[STEPS]
        return found[overlays]

    return accuracy


@nightly
@pytest.mark.parametrize("kind", sorted({*get_args(Kind)} - {"distill"}))
def test_an_algorithm_learns_the_task(learn: Learn, kind: str) -> None:
    assert learn(*([] if kind == "grpo" else [kind])) >= LEARNT


@nightly
def test_distillation_from_a_served_version_learns_the_task(tmp_path: Path) -> None:
    """The teacher is what another run has made, behind vLLM's own server; no answer has a reward."""
    quick = ("run.steps=10", "eval.every_steps=0", "rollout.max_model_len=288")
    folder = RunFolder(run(tmp_path / "teacher", *configs(), *quick))
    config = read_config_here(folder)
    with served(folder, config, config.adapters[0], ["newest"], 0) as server:
        keys = {"url": server.url, "model": server.models[0]}
        teacher = [f"adapters.gsm8k.algorithm.reference.{key}={value}" for key, value in keys.items()]
        student = run(tmp_path / "student", *configs("distill"), *quick[:2], *teacher)
    accuracy = [record["accuracy"] for record in records(student) if record["kind"] == "eval"]
    kl = [record["metrics"]["train/kl"] for record in records(student) if record["kind"] == "step"]
    print(f"accuracy {accuracy}, divergence from the teacher {kl}")
    assert accuracy[-1] >= LEARNT
    assert kl[-1] < kl[0] / 2


@nightly
def test_given_answers_and_then_rollouts_learn_the_task(learn: Learn) -> None:
    assert learn("sft") >= LEARNT


@nightly
def test_the_fsdp_engine_learns_the_task(learn: Learn) -> None:
    assert learn("embedded_fsdp") >= LEARNT


@nightly
def test_merged_and_unmerged_rollouts_end_alike(learn: Learn) -> None:
    assert learn("merged") >= LEARNT
    assert abs(learn("merged") - learn()) <= NEAR


def test_every_algorithm_has_an_overlay() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} >= set(get_args(Kind)) - {"grpo"}


def test_updates_along_the_trainers_own_routes(tmp_path: Path) -> None:
    """Of any servers: these return no routes."""
    folder = run(
        tmp_path,
        *configs("gspo"),
        "behaviour.router_replay=old",
        "run.steps=3",
        "eval.every_steps=0",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        "adapters.gsm8k.task.n_eval=16",
    )
    metrics = [record["metrics"] for record in records(folder) if record["kind"] == "step"]
    assert len(metrics) == 3
    assert sum(step["train/log_ratio_abs"] for step in metrics) > 0, "later minibatches are of a policy that has moved"
    assert all("train/replayed" not in step for step in metrics)


CASES = [
    ("fsdp", "float32"),
    ("fsdp", "bfloat16"),
    ("megatron", "bfloat16"),
    ("fsdp", "float16"),
    ("megatron", "float16"),
]


@pytest.mark.parametrize(("engine", "dtype"), sample(CASES, 1, lambda case: {*case} & {"fsdp", "bfloat16", "float16"}))
def test_given_answers_and_then_rollouts(tmp_path: Path, engine: str, dtype: str) -> None:
    """A base in bfloat16 needs no other key."""
    folder = run(
        tmp_path,
        *configs(*(["embedded_fsdp"] if engine == "fsdp" else []), "sft"),
        f"model.dtype={dtype}",
        "run.steps=5",
        "eval.every_steps=0",
        "rollout.max_staleness=1",
        "adapters.gsm8k.sft.steps=2",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        "adapters.gsm8k.task.n_eval=16",
    )
    metrics = [record["metrics"] for record in records(folder) if record["kind"] == "step"]
    given = [step["extra/given_fraction"] for step in metrics]
    assert given[:2] == [1.0, 1.0]
    assert given[-1] == 0.0, "the answers of the last batch are rollouts"
    assert metrics[-1]["train/reward_mean"] < 1.0, "and not all of them are right"
    assert all(step["train/grad_norm"] > 0 for step in metrics)
    differences = [record["probe_mean_abs"] for record in records(folder) if record["kind"] == "publish"]
    print(f"mean |logp trainer - logp server| by version: {differences}")
    assert len(differences) == len(metrics) + 1
    audited = [step for step in metrics if step.get("train/audited_tokens")]
    assert audited
    limits = {"float32": (0.0, 1e-4, 1e-4), "bfloat16": (1e-3, 0.15, 0.2), "float16": (1e-4, 0.1, 0.1)}
    rounding, probe, audit = limits[dtype]
    assert all(rounding < difference < probe for difference in differences), "rounding of the dtype, and no more"
    assert all(step["train/audit_gap"] < audit for step in audited)
