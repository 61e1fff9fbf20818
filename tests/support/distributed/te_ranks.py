"""LoRA around layers that answer as Transformer Engine's do: what each of two ranks does, and the whole model.

The stand-ins keep TE's contract, with plain collectives of their own. A layer with a norm inside returns
``((out, normed), None)``. Its backward pass adds the gradient of ``normed``, unless that is of the whole sequence: with
``return_layernorm_output_gathered`` TE drops it from version 2.4 on. A row-parallel layer returns ``(out, None)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.config.models import TrainerConfig
from areal_lora.types import AdapterSpec

TP, TOKENS, HIDDEN, FFN, RANK, ALPHA = 2, 6, 16, 24, 4, 8.0
HF: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
}
# By layer: (inputs, outputs) of the whole model.
SIZES = {
    "linear_qkv": (HIDDEN, 32),
    "linear_proj": (HIDDEN, HIDDEN),
    "linear_fc1": (HIDDEN, 2 * FFN),
    "linear_fc2": (FFN, HIDDEN),
}
COLUMN = ("linear_qkv", "linear_fc1")
PATHS = {
    name: f"0.decoder.layers.0.{part}.{name}"
    for name, part in zip(SIZES, ("self_attention", "self_attention", "mlp", "mlp"), strict=True)
}


@dataclass(frozen=True)
class Numbers:
    """Of the whole model, float64: base weights, norms, lora_A and lora_B by layer; input and the loss's weights."""

    base: dict[str, Tensor]
    norm: dict[str, Tensor]
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    x: Tensor
    weight: Tensor


def numbers(seed: int) -> Numbers:
    """lora_A and lora_B can be held in fp32 exactly."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).double() / 2

    return Numbers(
        base={n: normal(o, i) for n, (i, o) in SIZES.items()},
        norm={n: 1 + normal(HIDDEN) for n in COLUMN},
        a={n: normal(RANK, i) for n, (i, _) in SIZES.items()},
        b={n: normal(o, RANK) for n, (_, o) in SIZES.items()},
        x=normal(TOKENS, 1, HIDDEN),
        weight=normal(TOKENS, 1, HIDDEN),
    )


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def firsts(y: Tensor, parts: int, n: int) -> Tensor:
    """The first ``n`` features of each of ``parts``: something that a rank can do by itself."""
    return torch.cat([part[..., :n] for part in y.chunk(parts, -1)], -1).tanh()


def whole(n: Numbers) -> dict[str, Tensor]:
    """The oracle: output and gradients of all that is trained, and of the input, by plain autograd."""
    trained = {f"{side}.{name}": t.clone().requires_grad_() for side in "ab" for name, t in getattr(n, side).items()}
    x = n.x.clone().requires_grad_()

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ n.base[name].t() + ALPHA / RANK * (y @ trained[f"a.{name}"].t()) @ trained[f"b.{name}"].t()

    y = linear("linear_qkv", normed(x, n.norm["linear_qkv"]))
    y = x + linear("linear_proj", firsts(y, TP, HIDDEN // TP))
    y = linear("linear_fc2", firsts(linear("linear_fc1", normed(y, n.norm["linear_fc1"])), TP, FFN // TP))
    (y * n.weight).sum().backward()
    return {"out": y.detach(), "x": x.grad} | {name: t.grad for name, t in trained.items()}


class Gather(torch.autograd.Function):
    """The whole sequence from the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(TP)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(TP)[dist.get_rank()]


class ReduceScatter(torch.autograd.Function):
    """This rank's part of the sequence of the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(TP)[dist.get_rank()]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        parts = [torch.empty_like(grad) for _ in range(TP)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class _Layer(nn.Module):
    def __init__(self, weight: Tensor, overlap: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape  # of this rank, as TE's
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.config = SimpleNamespace(sequence_parallel=True, tp_comm_overlap=False)
        self.ub_overlap_ag_fprop = overlap
        self.return_layernorm_output = self.return_layernorm_output_gathered = False


class LayerNormColumn(_Layer):
    parallel_mode = "column"

    def __init__(self, weight: Tensor, overlap: bool, norm: Tensor) -> None:
        super().__init__(weight, overlap)
        self.norm = nn.Parameter(norm, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Any, None]:
        part = normed(x, self.norm)
        total = Gather.apply(part)
        out = total @ self.weight.t()
        if not self.return_layernorm_output:
            return out, None
        return (out, total.detach() if self.return_layernorm_output_gathered else part), None


class Row(_Layer):
    parallel_mode = "row"

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return ReduceScatter.apply(x @ self.weight.t()), None


def own_part(name: str, n: Numbers, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Base weight, lora_A and lora_B of a rank: outputs split in column-parallel layers, else inputs."""
    w, a, b = n.base[name], n.a[name], n.b[name]
    return (
        (w.chunk(TP)[rank], a, b.chunk(TP)[rank]) if name in COLUMN else (w.chunk(TP, 1)[rank], a.chunk(TP, 1)[rank], b)
    )


def adapted(seed: int, overlap: bool) -> dict[str, Any]:
    """One rank: output, and gradients by name as `whole` has them, each a part or a piece; ``kept`` [n, 2], the shapes
    of matrices that wait for the backward pass."""
    from megatron.bridge.peft import utils

    from areal_lora.engine.common.adapter_memory import AdapterMemory
    from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
    from areal_lora.engine.layers.active import ActiveAdapters
    from areal_lora.engine.megatron_utils.megatron_model import initialize_parallel
    from areal_lora.engine.megatron_utils.modules import attach
    from areal_lora.families.shape import ModelShape

    utils.HAVE_TE, utils.TELayerNormColumnParallelLinear = True, LayerNormColumn
    utils.TECL, utils.TERL, utils.version = (LayerNormColumn,), (Row,), lambda name: "2.18.0"
    trainer, rank, n = TrainerConfig(world_size=TP, tp=TP), dist.get_rank(), numbers(seed)
    initialize_parallel(trainer, torch.device("cpu"))

    model = nn.Module()
    for name, path in PATHS.items():
        weight = own_part(name, n, rank)[0]
        layer = LayerNormColumn(weight, overlap, n.norm[name]) if name in COLUMN else Row(weight, overlap)
        place = model
        for step in path.split(".")[:-1]:
            if step not in dict(place.named_children()):
                place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        place.add_module(name, layer)

    shape = ModelShape.from_hf(HF)
    layout = ParallelLayout.of(trainer, layers=1, experts=shape.experts)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=ALPHA, target_modules=tuple(SIZES))
    memory = AdapterMemory(ShardedModel(shape=shape, layout=layout), spec, rank, torch.device("cpu"), torch.float64)
    active = ActiveAdapters()
    attach(model, memory, active)
    sites = {name: model.get_submodule(path) for name, path in PATHS.items()}
    for name, site in sites.items():
        _, a, b = own_part(name, n, rank)
        adapter = site.residents["a"]
        with torch.no_grad():
            adapter.lora_a.copy_(a)
            adapter.lora_b.copy_(b)

    x = n.x.chunk(TP)[rank].clone().requires_grad_()
    kept = list[torch.Size]()

    def keep(t: Tensor) -> Tensor:
        kept.append(t.shape)
        return t

    with active.using({"a": None}), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y, _ = sites["linear_qkv"](x)
        y = x + sites["linear_proj"](firsts(y, 1, HIDDEN // TP))[0]
        y, _ = sites["linear_fc2"](firsts(sites["linear_fc1"](y)[0], 1, FFN // TP))
        (y * n.weight.chunk(TP)[rank]).sum().backward()
    grads = {f"a.{name}": site.residents["a"].lora_a.grad for name, site in sites.items()}
    grads |= {f"b.{name}": site.residents["a"].lora_b.grad for name, site in sites.items()}
    grads["kept"] = torch.tensor([shape for shape in kept if len(shape) == 2])
    return {name: t.double().numpy() for name, t in ({"out": y.detach(), "x": x.grad} | grads).items()}
