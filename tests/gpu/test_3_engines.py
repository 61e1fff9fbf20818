"""vLLM's kernels on our slots, the trainer in bfloat16, and a whole run on one card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from areal_lora.config.recorded import QUANTISED_TOLERANCE
from areal_lora.config.sections.run import Recompute
from tests.support.gpu.engines import LIMITS, alone, differences, judge
from tests.support.launcher.command import configs
from tests.support.paths import EXAMPLES

RUN_S = 560


def test_vllms_triton_kernels_read_our_slots(device: torch.device, record: Any) -> None:
    pytest.importorskip("vllm", reason="needs vLLM with CUDA")
    from tests.support.gpu.kernels import worst_error

    figures = worst_error(device)
    record("relative error at most 1e-2, base tokens equal bit for bit", figures)
    assert figures["relative_error"] <= 1e-2
    assert figures["base_tokens_changed"] == 0


@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_bfloat16_training_against_float32(engine: str, recompute: Recompute, record: Any, tmp_path: Path) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.bridge", reason="needs Megatron-core, Megatron-Bridge and Transformer Engine")
    found, exact = (alone(tmp_path, engine, dtype, recompute, "cuda") for dtype in ("bfloat16", "float32"))
    figures = differences(found, exact)
    record(f"(mean difference of log-probabilities, 1 - cosine of gradients) at most {LIMITS}; faults beyond", figures)
    judge(figures)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("quantization", "replay", "limit"),
    [(None, "off", 0.1), (None, "rollout", 0.1), ("fp8_per_channel", "off", QUANTISED_TOLERANCE)],
)
def test_a_whole_run_on_one_card(
    quantization: str | None, replay: str, limit: float, record: Any, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM with CUDA")
    overrides = [
        f"run.root={tmp_path}",
        "run.steps=20",
        "eval.every_steps=0",
        f"model.path={EXAMPLES / 'tiny_model'}",
        "adapters.0.task.kind=word_problems",
        "adapters.0.optimizer.lr=1e-3",
        "adapters.0.sampling.max_new_tokens=32",
        "rollout.max_model_len=256",
        "cluster.device_memory_gib=null",
        f"behaviour.router_replay={replay}",
        *([f"rollout.engine_args.quantization={quantization}"] if quantization else []),
    ]
    command = [sys.executable, "-m", "areal_lora.launch", *configs("one_gpu"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "gsm8k-grpo-one-gpu"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    publishes = [line for line in lines if line["kind"] == "publish"]
    rewards = [step["metrics"]["train/reward_mean"] for step in steps]
    figures = {
        "steps": len(steps),
        "probe_mean_abs": max(p["probe_mean_abs"] or 0.0 for p in publishes),
        "commit_ms": max(p["phases_ms"].get("commit") or 0.0 for p in publishes),
        "mismatch_kl_weights": max(step["metrics"].get("mismatch_kl/weights", 0.0) for step in steps),
        "replayed": min(step["metrics"].get("train/replayed", 0.0) for step in steps),
        "lost_servers": sum(len(p["lost"]) for p in publishes),
        "dropped_groups": sum(sum(step["dropped"].values()) for step in steps),
        "reward_first_quarter": float(np.mean(rewards[:5])),
        "reward_last_quarter": float(np.mean(rewards[-5:])),
    }
    record(f"served - trainer <= {limit}, commit < 2 ms, no server lost, reward rises", figures)
    # CPUs give up to 0.047 in bfloat16, 0.13 with weights and activations in fp8. A version that does not arrive is
    # found by the publish, which ends the run.
    assert figures["probe_mean_abs"] <= limit
    assert (figures["mismatch_kl_weights"] != 0) == (quantization is not None)
    assert (figures["replayed"] > 0.9) == (replay == "rollout")
    assert figures["commit_ms"] < 2.0
    assert figures["lost_servers"] == 0
    assert figures["reward_last_quarter"] > figures["reward_first_quarter"]
