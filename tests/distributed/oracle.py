"""The independent truth: transformers in float64, LoRA as W + scale * B A with autograd through it.

Knows nothing of Megatron. Adapter tensors are the wire tensors (shared lora_A under the first
name), so a gradient with respect to one sums over all projections that share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

RANK, ALPHA = 4, 12.0
SCALE = ALPHA / RANK
VOCAB = 320
_FIRST = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
_SHARED = re.compile(r"\.(k_proj|v_proj|up_proj)\.lora_A\.")
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 192, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # Far from the usual 0.02: outputs must depend on every layer strongly enough to notice one that is wrong.
    "initializer_range": 0.15,
}  # fmt: skip


def make_model(folder: Path, kind: str) -> str:
    """A random tiny Qwen3 (``dense``) or Qwen3-MoE (``moe``) checkpoint; returns its path."""
    torch.manual_seed(0)
    config = (
        Qwen3Config(**_COMMON)
        if kind == "dense"
        else Qwen3MoeConfig(
            **_COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide norms that are swapped
                parameter.uniform_(0.5, 1.5)
    path = folder / kind
    model.save_pretrained(path)
    return str(path)


def adapter_shapes(kind: str) -> dict[str, tuple[int, int]]:
    """Unique wire tensors of a full adapter, written down from the model's sizes and nothing else."""
    shapes: dict[str, tuple[int, int]] = {}

    def add(module: str, n_in: int, n_out: int, own_a: bool = True) -> None:
        if own_a:
            shapes[f"{module}.lora_A.weight"] = (RANK, n_in)
        shapes[f"{module}.lora_B.weight"] = (n_out, RANK)

    for layer in range(4):
        base = f"model.layers.{layer}"
        for name, n_out in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            add(f"{base}.self_attn.{name}", 128, n_out, own_a=name == "q_proj")
        add(f"{base}.self_attn.o_proj", 128, 128)
        mlps = [(f"{base}.mlp", 192)] if kind == "dense" else [(f"{base}.mlp.experts.{e}", 64) for e in range(8)]
        for mlp, width in mlps:
            add(f"{mlp}.gate_proj", 128, width)
            add(f"{mlp}.up_proj", 128, width, own_a=False)
            add(f"{mlp}.down_proj", width, 128)
    return shapes


def random_adapter(kind: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.08 * torch.randn(s, generator=generator) for n, s in sorted(adapter_shapes(kind).items())}


def with_aliases(wire: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All Hugging Face names, each with a tensor of its own (what a PEFT file holds)."""
    full = dict(wire)
    for name in [n for n in wire if n.endswith("lora_B.weight")]:
        a_name = name.replace("lora_B", "lora_A")
        full[a_name] = wire[_SHARED.sub(lambda m: f".{_FIRST[m[1]]}.lora_A.", a_name)]
    return full


@dataclass(frozen=True)
class Truth:
    """What every layout must reproduce. ``logprobs`` are packed [T]; ``stepped`` are wire tensors after one step."""

    logprobs: Tensor
    stats: dict[str, float]
    grad_norm: float
    stepped: dict[str, Tensor]


class Oracle:
    def __init__(self, path: str, kind: str) -> None:
        self.kind = kind
        extra = {} if kind == "dense" else {"experts_implementation": "eager"}
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **extra).eval()
        self.base = {n: p.detach() for n, p in self.model.named_parameters()}

    def _merged(self, wire: Mapping[str, Tensor]) -> dict[str, Tensor]:
        full = with_aliases(wire)
        weights = dict(self.base)

        def delta(module: str) -> Tensor:
            return SCALE * full[f"{module}.lora_B.weight"].double() @ full[f"{module}.lora_A.weight"].double()

        for layer in range(4):
            base = f"model.layers.{layer}"
            names = [f"{base}.self_attn.{n}_proj" for n in "qkvo"]
            if self.kind == "dense":
                names += [f"{base}.mlp.{n}_proj" for n in ("gate", "up", "down")]
            for name in names:
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta(name)
            if self.kind == "moe":
                experts = [f"{base}.mlp.experts.{e}" for e in range(8)]
                fused = torch.stack([torch.cat([delta(f"{e}.gate_proj"), delta(f"{e}.up_proj")]) for e in experts])
                weights[f"{base}.mlp.experts.gate_up_proj"] = weights[f"{base}.mlp.experts.gate_up_proj"] + fused
                down = torch.stack([delta(f"{e}.down_proj") for e in experts])
                weights[f"{base}.mlp.experts.down_proj"] = weights[f"{base}.mlp.experts.down_proj"] + down
        return weights

    def score(
        self, rows: Sequence[Sequence[int]], wire: Mapping[str, Tensor] | None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Packed ([T] log-probabilities, [T] entropies), one sequence at a time, no padding, float64."""
        weights = self.base if wire is None else self._merged(wire)
        logprobs, entropies = [], []
        for row in rows:
            ids = torch.tensor([row])
            logits = functional_call(self.model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits[0]
            logp = torch.log_softmax(logits / temperature, -1)[:-1]
            zero = logp.new_zeros(1)
            logprobs.append(torch.cat([zero, logp.gather(1, ids[0, 1:, None])[:, 0]]))
            entropies.append(torch.cat([zero, -(logp.exp() * logp).sum(-1)]))
        return torch.cat(logprobs), torch.cat(entropies)

    def step(
        self,
        rows: Sequence[Sequence[int]],
        wire: Mapping[str, Tensor],
        weights: Tensor,
        mask: Tensor,
        *,
        denominator: float,
        lr: float,
        eps: float,
        max_grad_norm: float,
    ) -> Truth:
        """One gradient step of ``sum(mask * (weights * logp + 0.1 * entropy)) / denominator`` by torch's own Adam."""
        leaves = {n: t.double().clone().requires_grad_() for n, t in wire.items()}
        logprobs, entropy = self.score(rows, leaves)
        loss = (mask * (weights.double() * logprobs + 0.1 * entropy)).sum()
        (loss / denominator).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), max_grad_norm)
        torch.optim.Adam(leaves.values(), lr=lr, betas=(0.9, 0.95), eps=eps).step()
        return Truth(
            logprobs=logprobs.detach(),
            stats={"loss": float(loss.detach()), "tokens": float(mask.sum())},
            grad_norm=float(norm),
            stepped={n: t.detach() for n, t in leaves.items()},
        )
