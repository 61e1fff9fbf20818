"""A converted adapter in stock PEFT and in stock vLLM equals the base with the adapter's products added to it."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal_lora.checkpoint.adapter_io import load_peft
from areal_lora.types import AdapterSpec, ExpertLayout
from tests.support.engine import stock_scores
from tests.support.engine.merged import make
from tests.support.families.tiny_families import save
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES
from tests.support.lazy import Lazy

peft = Lazy("peft")

EVERYTHING = ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")
# peft 0.21 on transformers 5 takes gate_proj, up_proj and down_proj of a mixture either as the experts' only
# (Qwen3-MoE) or as everything but the experts' (Qwen2-MoE).
ATTENTION = ("linear_proj", "linear_qkv")
EXPERTS = (*ATTENTION, "expert.linear_fc1", "expert.linear_fc2")
OTHERS = (*ATTENTION, "mlp.linear_fc1", "mlp.linear_fc2", "shared_expert.linear_fc1", "shared_expert.linear_fc2")
PER_EXPERT, SHARED = ExpertLayout.PER_EXPERT, ExpertLayout.SHARED


OWN = re.escape(str([".*\\.gate_up_proj"]))


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
    config = json.loads((folders.adapter / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {}), "ranks are equal"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # peft 0.21 adds these patterns itself where it fuses experts, matches them, and warns that it did not.
        warnings.filterwarnings("ignore", rf"The following (rank|alpha)_pattern keys .*: {OWN}\.$", RuntimeWarning)
        through_peft = logprobs(peft.PeftModel.from_pretrained(base, folders.adapter), tokens)
    torch.testing.assert_close(through_peft, merged, atol=2e-4, rtol=1e-4)


def numbers(name: str) -> tuple[int, float]:
    """The ranks and scales of `PATTERNED`, by hand: alpha / sqrt(rank)."""
    layer, leaf = int(name.split(".")[2]), name.rpartition(".")[2]
    if leaf in ("q_proj", "k_proj", "v_proj"):
        return 5, 6.0 / 5**0.5
    if leaf in ("gate_proj", "up_proj", "w1", "w3") and layer == 1:
        return 2, 6.0 / 2**0.5
    if leaf in ("down_proj", "w2"):
        return 4, 3.0 / 2.0
    return 3, 6.0 / 3**0.5


PATTERNED = replace(
    spec(EVERYTHING, PER_EXPERT),
    rslora=True,
    rank_pattern=(("(q|k|v)_proj", 5), (r"layers\.1\..*\.(gate_proj|up_proj|w1|w3)", 2), ("down_proj|w2", 4)),
    alpha_pattern=((r"model\.layers\.\d+\..*(down_proj|w2)", 3.0),),
)


@pytest.mark.parametrize(
    ("kind", "one"),
    [
        ("llama", PATTERNED),
        ("mixtral", PATTERNED),
        ("qwen3_moe", replace(PATTERNED, target_modules=EXPERTS)),
        ("qwen2_moe", replace(PATTERNED, target_modules=OTHERS)),
    ],
)
def test_peft_and_we_read_ranks_and_scales_alike(kind: str, one: AdapterSpec, tmp_path: Path) -> None:
    """Stock peft on transformers 5 has fused experts, and patterns of single experts must hold there, too."""
    folders = make(kind, save(kind, tmp_path), one, numbers=numbers)
    tokens = torch.arange(2, 34)
    base = model_of(folders.base)
    before, merged = logprobs(base, tokens), logprobs(model_of(folders.merged), tokens)
    assert (merged - before).abs().max() > 0.1, "the adapter does something"
    through_peft = logprobs(peft.PeftModel.from_pretrained(base, folders.adapter), tokens)
    torch.testing.assert_close(through_peft, merged, atol=2e-4, rtol=1e-4)
    loaded, tensors = load_peft(folders.adapter)
    assert loaded == one
    for module in {name.rpartition(".lora_")[0] for name in tensors}:
        assert tensors[f"{module}.lora_A.weight"].shape[0] == numbers(module)[0]
        assert loaded.scale_of(module) == pytest.approx(numbers(module)[1], rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_equals_the_merged_model(tmp_path: Path) -> None:
    """Experts called w1, w2, w3; and dense layers, experts and a shared expert, all adapted, in one model."""
    tokens, every = torch.arange(2, 60), []
    for kind, layout in (("mixtral", SHARED), ("qwen2_moe", PER_EXPERT)):
        (tmp_path / kind).mkdir()
        every.append(make(kind, save(kind, tmp_path / kind, wide=True), spec(EVERYTHING, layout, rank=8), size=0.1))
    words = [json.dumps(tokens.tolist())]
    words += [str(folder) for folders in every for folder in (folders.base, folders.adapter)]
    said = starter_of(ROLES["rollout.python"]).output(stock_scores.__name__, words, 560.0)
    lines = [line for line in said.splitlines() if line.startswith("[[")]
    for folders, line in zip(every, lines, strict=True):
        with_adapter, plain = (torch.tensor(row) for row in json.loads(line))
        merged, before = logprobs(model_of(folders.merged), tokens), logprobs(model_of(folders.base), tokens)
        assert (merged - before).abs().max() > 0.1, "the adapter does something"
        torch.testing.assert_close(plain, before, atol=1e-4, rtol=0)
        torch.testing.assert_close(with_adapter, merged, atol=1e-4, rtol=0)
