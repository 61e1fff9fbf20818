"""Parts of transformers' models with the same values in fewer launches and less memory: norms, rotations, MLPs.

Each is recognised by its values in a small example; others compute themselves.
"""

from collections.abc import Callable
from copy import copy
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from areal_lora.engine.layers.attention import rotate

Rotation = Callable[..., tuple[Tensor, Tensor]]
ROTATION = "apply_rotary_pos_emb"
"""transformers' function of queries, keys, cosines and sines."""


def fuse_norms(model: nn.Module) -> None:
    """Let torch's fused kernel compute the RMSNorms (Zhang and Sennrich, arXiv 1910.07467) of ``model``.

    transformers' own makes three copies in fp32 and keeps them for the backward pass.
    """
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = partial(_rms_norm, module)


def fuse_rotations(model: nn.Module) -> None:
    """Let `rotate` compute the positions of queries and keys where ``model`` computes the usual formula.

    A layer's ``forward`` then reads another function under transformers' name; other models keep theirs.
    """
    for module in model.modules():
        forward: Any = type(module).forward
        own = forward.__globals__.get(ROTATION)
        if ROTATION in forward.__code__.co_names and _is_usual_rotation(own):
            names = {**forward.__globals__, ROTATION: partial(_rotated, own)}
            mine = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            mine.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(mine, module)


def _rotated(own: Rotation, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``query`` [1, h, t, d] and ``key`` [1, g, t, d]; other angles are for ``own``."""
    if query.dtype != cos.dtype or query.shape[2:] != cos.shape[1:]:
        return own(query, key, cos, sin)
    query, key = rotate(query.squeeze(0).transpose(0, 1), key.squeeze(0).transpose(0, 1), cos[0], sin[0])
    return query.transpose(0, 1)[None], key.transpose(0, 1)[None]


@cache
def _is_usual_rotation(own: Rotation) -> bool:
    """By its values: not of interleaved features, or a part of them."""
    with torch.device("cpu"), torch.no_grad():
        query = torch.linspace(-3.0, 5.0, 64).view(1, 4, 2, 8)
        angles = torch.linspace(0.1, 1.0, 8).view(1, 2, 4).repeat(1, 1, 2)
        try:
            found = own(query, query[:, :1], angles.cos(), angles.sin())
        except (TypeError, ValueError, IndexError, RuntimeError):
            return False  # other arguments
        pairs = zip(found, _rotated(own, query, query[:, :1], angles.cos(), angles.sin()), strict=True)
        return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in pairs)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _is_rms_norm(module: Any) -> bool:
    """By its parts and its values. Others, such as Gemma's with 1 + weight, compute themselves."""
    own = {name for name in vars(module).keys() - vars(nn.Module()).keys() if not name.startswith("_")}
    if own != {"variance_epsilon"} or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    with torch.device("cpu"), torch.no_grad():
        one: Any = object.__new__(type(module))  # its arguments are unknown
        nn.Module.__init__(one)
        one.weight, one.variance_epsilon = nn.Parameter(torch.linspace(-2.0, 2.0, 16)), module.variance_epsilon
        x = torch.linspace(-3.0, 5.0, 64).view(4, 16)
        return bool(torch.allclose(one(x), _rms_norm(one, x), rtol=1e-5, atol=1e-6))


class _GatedProduct(torch.autograd.Function):  # type: ignore[misc]
    """silu(gate) * up, rounded like the two operations of torch, which would keep silu(gate), too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (gate, up) = grads, ctx.saved_tensors
        d_gate = dy * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, nn.functional.silu(gate).mul_(dy)


def fuse_mlps(model: nn.Module) -> None:
    """Let `_GatedProduct` compute the dense SwiGLU MLPs (Shazeer, arXiv 2002.05202) of ``model``."""
    for module in model.modules():
        if _is_gated_mlp(module):
            module.forward = partial(_gated_mlp, module)


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module.down_proj(_GatedProduct.apply(module.gate_proj(x), module.up_proj(x)))
    return found


def _is_gated_mlp(module: Any) -> bool:
    """By its parts and its values, of smaller layers: others have factors or other activations."""
    parts = dict(module.named_children())
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    if type(parts["act_fn"]) is not type(ACT2FN["silu"]):
        return False
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)  # of the host alone: torch.manual_seed sets devices', too
        one = copy(module)
        layers = {name: nn.Linear(8, 8) for name in parts if name != "act_fn"}
        one._modules = {**parts, **layers}
        x = torch.linspace(-300.0, 500.0, 32).view(1, 4, 8)  # beyond the limits of those that clamp
        return bool(torch.allclose(one(x), _gated_mlp(one, x), rtol=1e-5, atol=1e-6))
