"""Counts what is dispatched on torch's ``meta`` device, where nothing is computed: of `real_sizes.py`."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view"}
SYNCS = {"nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "equal"}
"""On ``meta`` a value for the host raises; one of a tensor on the host waits for nothing."""
COLLECTIVES = {"c10d", "_c10d_functional"}
REST, BACKWARD = "rest", "backward"
PARTS = {"self_attn": "attention", "self_attention": "attention", "mlp": "mlp", "lm_head": "output"}
PARTS |= {"output_layer": "output"}
"""Of a module by the last component of its path."""


@dataclass(slots=True)
class Counts:
    """Of one pass. ``products`` are FLOPs of matrix products, without attention."""

    launches: int = 0
    collectives: int = 0
    host_copies: int = 0
    syncs: int = 0
    products: int = 0
    largest: int = 0  # elements, of what is no logits
    names: Counter[str] = field(default_factory=Counter)


class Meter(TorchDispatchMode):
    """Counts operators, and the bytes of the tensors on the device that are alive, by the part that made them.

    ``held`` are there before: weights, gradients.
    """

    def __init__(self, vocabulary: int, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.counts, self._vocabulary, self.part = Counts(), vocabulary, REST
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._alive: Counter[str] = Counter()
        self._known = {tensor.untyped_storage()._cdata for tensor in held}

    @property
    def alive(self) -> int:
        return sum(self._alive.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name, counts = func.overloadpacket.__name__, self.counts
        counts.syncs += name in SYNCS or (name == "repeat_interleave" and "output_size" not in (kwargs or {}))
        if func.namespace in COLLECTIVES:
            counts.collectives += name != "wait_tensor"
        elif any(x.is_meta for x in (*results, *inputs)):
            copied = any(x.device.type == "cpu" and x.dim() for x in inputs) and any(x.is_meta for x in results)
            counts.host_copies += copied
            if not (func.is_view or name in NO_LAUNCH or copied):
                counts.launches += 1
                counts.names[name] += 1
                counts.products += products(name, inputs, results)
        for tensor in results:
            if tensor.is_meta:
                if self._vocabulary not in tensor.shape:
                    counts.largest = max(counts.largest, tensor.numel())
                self._watch(tensor)
        return out

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._alive[self.part] += size
            if self.alive > self.peak:
                self.peak, self.at_peak = self.alive, dict(self._alive)
            weakref.finalize(storage, self._forget, key, size, self.part)

    def _forget(self, key: int, size: int, part: str) -> None:
        self._known.discard(key)
        self._alive[part] -= size

    @contextmanager
    def count(self) -> Iterator[Counts]:
        """Counts of the block alone."""
        self.counts = counts = Counts()
        yield counts
        self.counts = Counts()

    def follow(self, model: nn.Module) -> None:
        """Call what the modules of ``model`` make theirs."""

        def enter(part: str) -> Any:
            def hook(*_: object) -> None:
                self.part = part

            return hook

        for path, module in model.named_modules():
            if part := PARTS.get(path.rpartition(".")[2]):
                module.register_forward_pre_hook(enter(part))
                module.register_forward_hook(enter(REST))


def products(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """FLOPs of a matrix product, 0 for others: rows times columns times what is summed over, in all groups once."""
    if name == "_grouped_mm":
        x, weight = inputs[:2]
        # [T, in] by [n, in, out], or [out, T] by [T, in] to [n, out, in]: every row is in one group.
        return 2 * x.shape[0] * x.shape[1] * weight.shape[-1]
    if name in {"mm", "bmm"}:
        return 2 * results[0].numel() * inputs[0].shape[-1]
    return 2 * results[0].numel() * inputs[1].shape[-1] if name in {"addmm", "addmm_", "baddbmm"} else 0


class FusedNorm(torch.autograd.Function):
    """`functional.rms_norm` as a GPU computes it: one launch each way, its input is kept. ``meta`` takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: object) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].clone(), None, None, None


class FusedGate(torch.autograd.Function):
    """silu(x1) x2 of halves of x [..., 2 f], one launch each way, its input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: object) -> Tensor:
        ctx.save_for_backward(x)
        return x[..., : x.shape[-1] // 2].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.zeros_like(ctx.saved_tensors[0]), None, None, None


class OneLaunch(torch.autograd.Function):
    """In place of a fused kernel: from ``inputs`` to tensors of ``shapes``, one each, one launch each way."""

    @staticmethod
    def forward(ctx: Any, shapes: Sequence[Sequence[int]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.like = [(x.shape, x.dtype) for x in inputs]
        made = [x.new_empty(tuple(shape)) for x, shape in zip(inputs, shapes, strict=True)]
        made[0].zero_()
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.empty(shape, dtype=dtype, device=META) for shape, dtype in ctx.like]
        made[0].zero_()
        return None, *made
