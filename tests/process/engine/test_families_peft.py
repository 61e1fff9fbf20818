"""A converted adapter in stock PEFT and in stock vLLM equals the base with the adapter's products added to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal_lora.types import AdapterSpec, ExpertLayout
from tests.support.engine.merged import make
from tests.support.families.tiny_families import save
from tests.support.paths import SUPPORT

EVERYTHING = ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")
# peft 0.21 on transformers 5 takes gate_proj, up_proj and down_proj of a mixture either as the experts' only
# (Qwen3-MoE) or as everything but the experts' (Qwen2-MoE).
ATTENTION = ("linear_proj", "linear_qkv")
EXPERTS = (*ATTENTION, "expert.linear_fc1", "expert.linear_fc2")
OTHERS = (*ATTENTION, "mlp.linear_fc1", "mlp.linear_fc2", "shared_expert.linear_fc1", "shared_expert.linear_fc2")
PER_EXPERT, SHARED = ExpertLayout.PER_EXPERT, ExpertLayout.SHARED


def spec(targets: tuple[str, ...], layout: ExpertLayout, rank: int = 3) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=6.0, target_modules=targets, expert_layout=layout)


def model_of(path: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def logprobs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of tokens 1.. given those before, [T - 1]."""
    with torch.no_grad():
        scores: Tensor = model(tokens[None]).logits[0].log_softmax(-1)
    return scores[:-1].gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("kind", "layout", "targets"),
    [
        ("llama", PER_EXPERT, EVERYTHING),
        ("qwen2", PER_EXPERT, EVERYTHING),
        ("qwen3", PER_EXPERT, EVERYTHING),
        ("qwen3", PER_EXPERT, ("linear_fc2", "linear_qkv")),
        ("mixtral", PER_EXPERT, EVERYTHING),
        ("mixtral", SHARED, EVERYTHING),
        ("qwen3_moe", PER_EXPERT, EXPERTS),
        ("qwen3_moe", SHARED, EXPERTS),
        ("qwen2_moe", PER_EXPERT, OTHERS),
    ],
)
def test_peft_equals_the_merged_model(
    kind: str, layout: ExpertLayout, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folders = make(kind, save(kind, tmp_path), spec(targets, layout))
    tokens = torch.arange(2, 34)
    base = model_of(folders.base)
    before, merged = logprobs(base, tokens), logprobs(model_of(folders.merged), tokens)
    assert (merged - before).abs().max() > 0.1, "the adapter does something"
    through_peft = logprobs(PeftModel.from_pretrained(base, folders.adapter), tokens)
    torch.testing.assert_close(through_peft, merged, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("mixtral", SHARED), ("qwen2_moe", PER_EXPERT)])
def test_vllm_equals_the_merged_model(kind: str, layout: ExpertLayout, tmp_path: Path) -> None:
    """Experts called w1, w2, w3; and dense layers, experts and a shared expert, all adapted, in one model."""
    folders = make(kind, save(kind, tmp_path, wide=True), spec(EVERYTHING, layout, rank=8), size=0.1)
    tokens = torch.arange(2, 60)
    script = [sys.executable, str(SUPPORT / "engine" / "stock_scores.py"), folders.base, folders.adapter]
    done = subprocess.run(
        [*map(str, script), json.dumps(tokens.tolist())], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with_adapter, plain = (torch.tensor(row) for row in json.loads(done.stdout.splitlines()[-1]))
    merged, before = logprobs(model_of(folders.merged), tokens), logprobs(model_of(folders.base), tokens)
    assert (merged - before).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(plain, before, atol=1e-4, rtol=0)
    torch.testing.assert_close(with_adapter, merged, atol=1e-4, rtol=0)
