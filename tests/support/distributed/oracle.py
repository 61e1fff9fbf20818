"""The independent truth: transformers in float64, LoRA as W + scale * B A with autograd through it.

Knows nothing of Megatron. Adapter tensors are the wire tensors (shared lora_A under the first
name), so a gradient with respect to one sums over all projections that share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal_lora.types import TrainBatch

RANK, ALPHA = 4, 12.0
VOCAB, LAYERS, EXPERTS = 320, 4, 8
SHARED = "+shared"
"""Ends the kind of an adapter whose lora_A and lora_B all experts of a layer have in common."""
OUTER = "+outer"
"""Ends the kind of an adapter whose experts share lora_A of gate and up, and lora_B of down."""
PATTERNS = "+patterns"
"""Ends the kind of an adapter with rsLoRA and other ranks and alphas for some modules (`numbers`)."""
RANK_PATTERN = (("self_attn.(q|k|v)_proj", 6), (r"layers\.[13]\..*experts.*(gate|up)_proj", 2), (".*", RANK))
ALPHA_PATTERN = (("o_proj", 5.0), ("down_proj", 20.0))

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # Far from the usual 0.02: outputs must depend on every layer strongly enough to notice one that is wrong.
    "initializer_range": 0.15,
}
# Short, so that positions matter much, and unlike every default.
_ROPE = {"rope_theta": 300.0, "rope_type": "default"}
_LLAMA3 = {
    "rope_theta": 300.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def config_of(kind: str) -> PreTrainedConfig:
    """Each kind has something that the others have not: biases, tied embeddings, scaled rope, dense layers."""
    common: dict[str, Any] = {**_SIZES, "rope_parameters": _ROPE}
    match kind:
        case "dense":
            return Qwen3Config(**common, head_dim=32)
        case "moe":
            return Qwen3MoeConfig(**common, **_MOE, head_dim=32, num_experts=EXPERTS, norm_topk_prob=True)
        case "llama":
            return LlamaConfig(**{**common, "rope_parameters": _LLAMA3})
        case "qwen2":
            return Qwen2Config(**{**common, "tie_word_embeddings": True})
        case "mistral":
            return MistralConfig(**common, head_dim=32, sliding_window=None)
        case "mixtral":
            return MixtralConfig(**{**common, "intermediate_size": 64}, num_local_experts=EXPERTS)
        case "qwen2_moe":
            return Qwen2MoeConfig(
                **common,
                **_MOE,
                num_experts=EXPERTS,
                norm_topk_prob=False,
                shared_expert_intermediate_size=96,
                mlp_only_layers=[2],
            )
    raise ValueError(kind)


def make_model(folder: Path, kind: str) -> str:
    """A random tiny checkpoint; returns its path."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide norms that are swapped
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
    path = folder / kind
    model.save_pretrained(path)
    return str(path)


@dataclass(frozen=True)
class Module:
    """A projection: which module's lora_A and lora_B it has, and which parameter of transformers it is part of."""

    name: str
    n_in: int
    n_out: int
    a_of: str
    b_of: str
    parameter: str
    rank: int
    scale: float


def numbers(kind: str, name: str) -> tuple[int, float]:
    """Rank and scale of a module, written down for each kind of adapter."""
    if not kind.endswith(PATTERNS):
        return RANK, ALPHA / RANK
    layer, leaf = int(name.split(".")[2]), name.rpartition(".")[2]
    if leaf in ("q_proj", "k_proj", "v_proj"):
        return 6, ALPHA / 6**0.5
    if leaf in ("gate_proj", "up_proj") and layer in (1, 3):
        return 2, ALPHA / 2**0.5
    return RANK, {"o_proj": 5.0, "down_proj": 20.0}.get(leaf, ALPHA) / 2.0


def modules(kind: str) -> list[Module]:
    """All adapted projections of a model, written down from its sizes and nothing else."""
    model, shared, outer = kind.partition("+")[0], kind.endswith(SHARED), kind.endswith(OUTER)
    found: list[Module] = []

    def gated(
        base: str, width: int, names: tuple[str, str, str], like: str, fused: str | None = None, outer: str = ""
    ) -> None:
        gate, up, down = names
        for leaf, n_in, n_out, a_of, parameter in (
            (gate, 128, width, gate, "gate_up_proj"),
            (up, 128, width, gate, "gate_up_proj"),
            (down, width, 128, down, "down_proj"),
        ):
            where = f"{fused}.{parameter}" if fused else f"{base}.{leaf}.weight"
            name = f"{base}.{leaf}"
            found.append(
                Module(
                    name,
                    n_in,
                    n_out,
                    f"{outer if outer and leaf != down else like}.{a_of}",
                    f"{outer if outer and leaf == down else like}.{leaf}",
                    where,
                    *numbers(kind, name),
                )
            )

    plain = ("gate_proj", "up_proj", "down_proj")
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for leaf, n_out, a_of in (("q", 128, "q"), ("k", 64, "q"), ("v", 64, "q"), ("o", 128, "o")):
            name = f"{base}.self_attn.{leaf}_proj"
            a_name = f"{base}.self_attn.{a_of}_proj"
            found.append(Module(name, 128, n_out, a_name, name, f"{name}.weight", *numbers(kind, name)))
        if model in ("dense", "llama", "mistral", "qwen2") or (model == "qwen2_moe" and layer == 2):
            gated(f"{base}.mlp", 192, plain, f"{base}.mlp")
            continue
        if model == "qwen2_moe":
            gated(f"{base}.mlp.shared_expert", 96, plain, f"{base}.mlp.shared_expert")
        experts = f"{base}.block_sparse_moe.experts" if model == "mixtral" else f"{base}.mlp.experts"
        names = ("w1", "w3", "w2") if model == "mixtral" else plain
        for e in range(EXPERTS):
            first = f"{experts}.0" if outer else ""
            gated(f"{experts}.{e}", 64, names, f"{experts}.{0 if shared else e}", f"{base}.mlp.experts", first)
    return found


def adapter_shapes(kind: str) -> dict[str, tuple[int, int]]:
    """Unique wire tensors of a full adapter."""
    shapes: dict[str, tuple[int, int]] = {}
    for m in modules(kind):
        if m.a_of == m.name:
            shapes[f"{m.name}.lora_A.weight"] = (m.rank, m.n_in)
        if m.b_of == m.name:
            shapes[f"{m.name}.lora_B.weight"] = (m.n_out, m.rank)
    return shapes


def random_adapter(kind: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.08 * torch.randn(s, generator=generator) for n, s in sorted(adapter_shapes(kind).items())}


def random_head(seed: int = 31) -> dict[str, Tensor]:
    """The value head of a critic, by wire name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "value_head.weight": 0.1 * torch.randn(128, generator=generator),
        "value_head.bias": torch.randn(1, generator=generator),
    }


def with_aliases(wire: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """All Hugging Face names, each with a tensor of its own (what a PEFT file holds)."""
    full = {f"{m.name}.lora_A.weight": wire[f"{m.a_of}.lora_A.weight"] for m in modules(kind)}
    return full | {f"{m.name}.lora_B.weight": wire[f"{m.b_of}.lora_B.weight"] for m in modules(kind)}


@dataclass(frozen=True)
class Truth:
    """What every layout must reproduce. ``logprobs`` are packed [T]; ``stepped`` are wire tensors after one step."""

    logprobs: Tensor
    stats: dict[str, float]
    grad_norm: float
    grads: dict[str, Tensor]
    stepped: dict[str, Tensor]


def fixed_choice(gate: Any, routes: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A router of softmax scores: the weights and numbers of the experts ``routes`` [n, K] of its tokens, in float64.

    A token with -1 chooses itself.
    """
    shares = torch.softmax(hidden.reshape(len(routes), -1) @ gate.weight.t(), -1)
    chosen = torch.where(routes < 0, shares.topk(routes.shape[1]).indices, routes)
    weights = shares.gather(1, chosen)
    if vars(gate).get("norm_topk_prob", True):  # Mixtral's always are
        weights = weights / weights.sum(-1, keepdim=True)
    return shares.log(), weights, chosen


class Oracle:
    def __init__(self, path: str, kind: str) -> None:
        self.kind = kind
        eager = {"experts_implementation": "eager"} if "mo" in kind or "mixtral" in kind else {}
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **eager).eval()
        self.base = {n: p.detach() for n, p in self.model.named_parameters()}
        self.gates: list[Any] = [m for n, m in self.model.named_modules() if n.endswith("mlp.gate")]

    def _merged(self, wire: Mapping[str, Tensor]) -> dict[str, Tensor]:
        changes: dict[str, list[Tensor]] = {}
        for m in modules(self.kind):
            delta = m.scale * wire[f"{m.b_of}.lora_B.weight"].double() @ wire[f"{m.a_of}.lora_A.weight"].double()
            changes.setdefault(m.parameter, []).append(delta)
        weights = dict(self.base)
        for name, deltas in changes.items():
            if weights[name].dim() == 2:
                (delta,) = deltas
            else:  # experts one after the other, gate before up
                parts = len(deltas) // EXPERTS
                delta = torch.stack([torch.cat(deltas[e * parts : (e + 1) * parts]) for e in range(EXPERTS)])
            weights[name] = weights[name] + delta
        return weights

    def score(
        self,
        rows: Sequence[Sequence[int]],
        wire: Mapping[str, Tensor] | None,
        temperature: float = 1.0,
        routes: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Packed ([T] log-probabilities, [T] entropies), one sequence at a time, no padding, float64.

        ``routes`` [T, L, K] are the experts of each token in each layer with experts, ``kept`` [T, n] the ids over
        which each is normalised, with -1 where there are fewer; -1 alone: all.
        """
        weights = self.base if wire is None else self._merged(wire)
        logprobs, entropies = [], []
        lengths = [len(row) for row in rows]
        parts, sets = ([None] * len(rows) if each is None else each.split(lengths) for each in (routes, kept))
        for row, own, among in zip(rows, parts, sets, strict=True):
            ids = torch.tensor([row])
            for layer, gate in enumerate(self.gates if own is not None else ()):
                gate.forward = partial(fixed_choice, gate, own[:, layer])
            logits = functional_call(self.model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits[0]
            left_out = torch.zeros(logits.shape, dtype=torch.bool)
            for out, chosen in zip(left_out, among[1:] if among is not None else (), strict=False):
                if chosen[0] >= 0:
                    out[:] = True
                    out[chosen[chosen >= 0]] = False
            logp = torch.log_softmax((logits / temperature).masked_fill(left_out, -torch.inf), -1)[:-1]
            zero = logp.new_zeros(1)
            logprobs.append(torch.cat([zero, logp.gather(1, ids[0, 1:, None])[:, 0]]))
            entropies.append(torch.cat([zero, -(logp.exp() * logp.masked_fill(left_out[:-1], 0.0)).sum(-1)]))
            for gate in self.gates:
                vars(gate).pop("forward", None)
        return torch.cat(logprobs), torch.cat(entropies)

    def choices(self, rows: Sequence[Sequence[int]], wire: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        """[T, L, K] experts that transformers' own routers choose, sorted; [T, L] the score of the least of them minus
        that of the best other expert."""
        found: list[tuple[Tensor, Tensor]] = []

        def seen(gate: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            scores = torch.softmax(inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.t(), -1)
            least = scores.topk(gate.top_k + 1).values[:, -2:]
            found.append((output[-1].sort(-1).values, least[:, 0] - least[:, 1]))

        hooks = [gate.register_forward_hook(seen) for gate in self.gates]
        with torch.no_grad():
            self.score(rows, wire)
        for hook in hooks:
            hook.remove()
        n = len(self.gates)
        parts = [
            [torch.stack(each, 1) for each in zip(*found[i : i + n], strict=True)] for i in range(0, len(found), n)
        ]
        experts, apart = (torch.cat(each) for each in zip(*parts, strict=True))
        return experts, apart

    def value_step(
        self,
        rows: Sequence[Sequence[int]],
        wire: Mapping[str, Tensor],
        batch: TrainBatch,
        *,
        clip: float,
        denominator: float,
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """Packed values [T], gradients by wire name, and the summed clipped squared error: one sequence at a time."""
        leaves = {n: t.double().clone().requires_grad_() for n, t in wire.items()}
        weights = self._merged(leaves)
        values, loss, bounds = [], torch.zeros((), dtype=torch.float64), batch.cu_seqlens.tolist()
        for row, (a, b) in zip(rows, pairwise(bounds), strict=True):
            kwargs = {"input_ids": torch.tensor([row]), "use_cache": False, "output_hidden_states": True}
            hidden = functional_call(self.model, weights, kwargs=kwargs).hidden_states[-1][0]
            before = hidden[:-1] @ leaves["value_head.weight"] + leaves["value_head.bias"]
            values.append(torch.cat([before.new_zeros(1), before]))
            old, target = batch.values[a:b].double(), batch.returns[a:b].double()
            near = old + (values[-1] - old).clamp(-clip, clip)
            worse = torch.maximum((values[-1] - target) ** 2, (near - target) ** 2)
            loss = loss + (0.5 * worse * batch.loss_mask[a:b]).sum()
        (loss / denominator).backward()
        return torch.cat(values).detach(), {n: t.grad for n, t in leaves.items()}, float(loss.detach())

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
        routes: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> Truth:
        """One gradient step of ``sum(mask * (weights * logp + 0.1 * entropy)) / denominator`` by torch's own Adam."""
        leaves = {n: t.double().clone().requires_grad_() for n, t in wire.items()}
        logprobs, entropy = self.score(rows, leaves, routes=routes, kept=kept)
        loss = (mask * (weights.double() * logprobs + 0.1 * entropy)).sum()
        (loss / denominator).backward()
        grads = {n: t.grad.clone() for n, t in leaves.items()}
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), max_grad_norm)
        torch.optim.Adam(leaves.values(), lr=lr, betas=(0.9, 0.95), eps=eps).step()
        return Truth(
            logprobs=logprobs.detach(),
            stats={"loss": float(loss.detach()), "tokens": float(mask.sum())},
            grad_norm=float(norm),
            grads=grads,
            stepped={n: t.detach() for n, t in leaves.items()},
        )
