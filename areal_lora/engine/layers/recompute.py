"""Activations of decoder layers that the backward pass computes again (Chen et al., arXiv 1604.06174)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from areal_lora.config.sections.run import Recompute
from areal_lora.engine.layers.active import ActiveAdapters

_ATEN = torch.ops.aten
ATTENTION = frozenset(
    {
        _ATEN._flash_attention_forward.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""The kernels whose results ``selective`` keeps: their work grows with the square of a sequence, the rest does not."""


def recompute(layers: Iterable[nn.Module], kind: Recompute, active: ActiveAdapters) -> None:
    """Let ``layers`` keep what `trainer.recompute` names, beside their first input, the hidden states."""
    for layer in layers if kind != "none" else ():
        layer.forward = partial(_recomputed, layer.forward, kind, active)


def _recomputed(
    forward: Callable[..., Any],
    kind: Recompute,
    active: ActiveAdapters,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(hidden_states, *args, **kwargs)
    tokens = active.tokens

    def again(*args: Any, **kwargs: Any) -> Any:
        active.tokens = tokens  # of this micro-batch: a pipeline has passed later ones meanwhile
        return forward(*args, **kwargs)

    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, list(ATTENTION))
    if kind != "offload":
        return checkpoint(again, hidden_states, *args, **how, **kwargs)
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device):
        return checkpoint(again, hidden_states, *args, **how, **kwargs)


def _to_host(x: Tensor) -> tuple[torch.device, Tensor]:
    """The copy is in the order of the device's work: the host does not wait for it."""
    held = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return x.device, held.copy_(x, non_blocking=True)


def _to_device(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, held = packed
    return held.to(device, non_blocking=True)
