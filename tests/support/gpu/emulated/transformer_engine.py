"""What Transformer Engine's compiled extension computes, by its definitions: all its Python code stays its own.

Quantization, overlap of communication, and its Triton kernels that permute tokens are not here.
"""

from __future__ import annotations

import enum
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class DType(enum.IntEnum):
    """As in ``transformer_engine.h``."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


class _Numbers(type):
    """An enumeration whose members are numbered as they are read."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = sum(isinstance(value, int) for value in vars(cls).values())
        setattr(cls, name, number)
        return number


class Extension(ModuleType):
    """Other names are enumerations, or functions that raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name}")

        value = _Numbers(name, (), {}) if name[0].isupper() else missing
        setattr(self, name, value)
        return value


def generic_gemm(
    a: Tensor, trans_a: bool, b: Tensor, trans_b: bool, out: Tensor | None, quantizer: Any, dtype: int | None,
    bias: Tensor | None, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, workspace_size: int,
    accumulate: bool, split: bool, *, comm_overlap: Any = None, alpha: float = 1.0, **_: Any,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    """op(b) @ op(a): its matrices are columns first."""
    assert quantizer is None
    assert comm_overlap is None
    assert not gelu
    assert alpha == 1.0
    shape = (b.shape[-1],) if trans_b else b.shape[:-1]
    left, right = b.flatten(0, -2), a.flatten(0, -2)
    found = (left.t() if trans_b else left) @ (right.t() if trans_a else right)
    of_bias = None
    if bias is not None and bias.numel():
        if grad:
            of_bias = left.sum(0)
        else:
            found = found + bias
    found = found.to(a.dtype if dtype is None else DTYPES[DType(int(dtype))]).reshape(*shape, -1)
    if out is not None:
        target = out.view(found.shape)
        found = target.add_(found) if accumulate else target.copy_(found)
    return found, of_bias, None, None


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: int, margin: int, plus_one: bool
) -> tuple[Tensor, None, Tensor]:
    assert quantizer is None
    inverse = torch.rsqrt(x.float().square().mean(-1) + eps)
    found = (x.float() * inverse[:, None] * (weight.float() + plus_one)).to(DTYPES[DType(int(dtype))])
    return (found if out is None else out.copy_(found)), None, inverse


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, plus_one: bool
) -> tuple[Tensor, Tensor]:
    scaled, normed = grad.float() * (weight.float() + plus_one), x.float() * inverse[:, None]
    of_x = inverse[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


def _places(routing_map: Tensor, n: int) -> Tensor:
    """Positions in [experts, tokens] of the first ``n`` pairs, expert by expert."""
    return routing_map.bool().T.reshape(-1).int().argsort(descending=True, stable=True)[:n]


def moe_permute(x: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    rows = _places(routing_map, num_out_tokens) % len(x)
    return x.index_select(0, rows), rows


def moe_permute_with_probs(
    x: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    places = _places(routing_map, num_out_tokens)
    rows = places % len(x)
    return x.index_select(0, rows), probs.T.reshape(-1).index_select(0, places), rows


def moe_unpermute(x: Tensor, rows: Tensor, merging_probs: None = None, restore_shape: Any = None, **_: Any) -> Tensor:
    assert merging_probs is None
    found = torch.zeros(restore_shape, dtype=torch.float32, device=x.device)
    return found.index_add(0, rows, x.float()).to(x.dtype)


def _chunks(x: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    sizes, order = split_sizes.to(x.device).reshape(-1).long(), order.to(x.device).long()
    begins = (sizes.cumsum(0) - sizes).index_select(0, order)
    sizes = sizes.index_select(0, order)
    shift = begins - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(shift, sizes, output_size=len(x)) + torch.arange(len(x), device=x.device)


def moe_sort_chunks_by_index(x: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    return x.index_select(0, _chunks(x, split_sizes, order))


def moe_sort_chunks_by_index_with_probs(
    x: Tensor, probs: Tensor, split_sizes: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    rows = _chunks(x, split_sizes, order)
    return x.index_select(0, rows), probs.index_select(0, rows)


PERMUTATIONS = (
    moe_permute,
    moe_permute_with_probs,
    moe_unpermute,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)


def install() -> None:
    """Let ``transformer_engine.pytorch`` be imported, whose Python files are on the path."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # looks for no library
    extension = Extension("transformer_engine_torch")
    for value in (DType, generic_gemm, rmsnorm_fwd, rmsnorm_bwd):
        setattr(extension, value.__name__, value)
    spec = find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    files = Path(spec.origin).parent.glob("pytorch/**/*.py")
    used = {name for file in files for name in re.findall(r"\btex\.(\w+)", file.read_text())}
    extension.__all__ = sorted(used - {"general_gemm", "general_grouped_gemm"})  # type: ignore[attr-defined]
    permutation = Extension("transformer_engine.pytorch.permutation")
    for function in PERMUTATIONS:
        setattr(permutation, function.__name__, function)
    onnx = Extension("transformer_engine.pytorch.onnx_extensions")  # needs packages of its own
    for module in (extension, permutation, onnx):
        sys.modules[module.__name__] = module
    import transformer_engine.common as common

    common.load_framework_extension = lambda _: None
