"""Run vLLM's Triton kernels for LoRA with Triton's interpreter, on vLLM's CPU build: ``python -m ... CASE [CASE ...]``.

A process of its own with TRITON_INTERPRET=1, since triton and vLLM are changed before the cases of `lora_kernels` are
imported. With KERNEL_FILES, a folder with another vLLM, the kernels are those of that one. Hidden: compilation (ptxas,
wgmma), CUDA graphs, races, speed, and the operations in `REPLACED`, which are written again in Python.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.backends import Backend, backends
from triton.runtime import interpreter

REPLACED = ("moe_lora_align_block_size", "moe_align_block_size", "moe_sum")
"""CUDA operations of `vllm._custom_ops`."""
H100_UNITS = 132  # sizes the grid


def _float32(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _bfloat16(handle: Any) -> Any:
    """Rounded to nearest even, as a GPU does."""
    bits = np.ascontiguousarray(handle.data, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))
    data = (bits >> np.uint64(16)).astype(np.uint16).reshape(np.shape(handle.data))
    return interpreter.TensorHandle(data, tl.bfloat16)


def _repair_bfloat16() -> None:
    """The interpreter holds bfloat16 as uint16, and would compute with the bit patterns, without an error."""
    builder = interpreter.InterpreterBuilder
    binary, cast, dot = builder.binary_op, builder.cast_impl, builder.create_dot

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        found = binary(self, _float32(lhs), _float32(rhs), op)
        return found if found.data.dtype == np.bool_ else _bfloat16(found)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return cast(self, src, dst_type)
        if source == tl.bfloat16:
            return cast(self, _float32(src), dst_type)
        return _bfloat16(cast(self, src, tl.float32))

    builder.binary_op, builder.cast_impl = binary_op, cast_impl
    builder.create_dot = lambda self, a, b, d, *rest: dot(self, _float32(a), _float32(b), d, *rest)


def _patch_once() -> None:
    """Each call of a device function patches triton.language again, which is nearly all of the time; once per launch
    and kind of module (with tl, tl.core or both) is enough."""
    patch, held = interpreter._patch_lang, {}

    def once(fn: Any) -> Any:
        kind = frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)
        if kind in held:
            return SimpleNamespace(restore=lambda: None)
        outermost = not held
        held[kind] = patch(fn)

        def restore() -> None:
            if outermost:
                for scope in reversed(held.values()):
                    scope.restore()
                held.clear()

        return SimpleNamespace(restore=restore)

    interpreter._patch_lang = once


class KernelFiles(importlib.abc.MetaPathFinder):
    """Take the Triton files of vllm.lora from another wheel, unpacked in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("vllm.lora.ops.triton_ops"):
            return None
        place = self._folder / name.replace(".", "/")
        if place.is_dir():
            locations = [str(place)]
            return importlib.util.spec_from_file_location(
                name, place / "__init__.py", submodule_search_locations=locations
            )
        return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))


def _sorted_by_expert(
    pairs: Sequence[int], experts: list[int], block: int, n_experts: int, expert_map: torch.Tensor | None, numel: int
) -> tuple[list[int], list[int]]:
    """Pairs (token, place in top-k) of each expert, padded with ``numel`` to blocks, and the expert of each block."""
    ids: list[int] = []
    blocks: list[int] = []
    for expert in range(n_experts):
        mine = [pair for pair in pairs if experts[pair] == expert]
        padded = -(-len(mine) // block) * block
        ids += mine + [numel] * (padded - len(mine))
        blocks += [expert if expert_map is None else int(expert_map[expert])] * (padded // block)
    return ids, blocks


def _lora_align(
    topk_ids, tokens, n_experts, block, max_loras, padded, m_blocks, out, experts, post, enabled, lora_ids, expert_map
) -> None:
    flat, top_k, numel = topk_ids.reshape(-1).tolist(), topk_ids.shape[1], topk_ids.numel()
    for lora in sorted({i for i in lora_ids.tolist() if 0 <= i < max_loras}):
        mine = [pair for pair in range(numel) if int(tokens[pair // top_k]) == lora] if enabled[lora] else []
        ids, blocks = _sorted_by_expert(mine, flat, block, n_experts, expert_map, numel)
        row = torch.full((padded,), numel, dtype=torch.int32)
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        out.view(max_loras, padded)[lora] = row
        experts.view(max_loras, m_blocks)[lora, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        post[lora] = len(ids)


def _align(topk_ids, n_experts, block, out, experts, post, expert_map=None, scatter_idx=None) -> None:
    flat, numel = topk_ids.reshape(-1).tolist(), topk_ids.numel()
    ids, blocks = _sorted_by_expert(range(numel), flat, block, n_experts, expert_map, numel)
    out.fill_(numel)
    out[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    experts.fill_(-1)
    experts[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    post[0] = len(ids)


def install() -> None:
    """Change triton and vLLM; before anything else imports them."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "@triton.jit decides at import"
    _repair_bfloat16()
    _patch_once()
    # A CPU build takes Triton only if it has a backend "cpu", which it does not use itself.
    backends["cpu"] = Backend(compiler=None, driver=None)  # type: ignore[arg-type]
    import vllm.triton_utils

    del backends["cpu"]
    assert vllm.triton_utils.HAS_TRITON, "vLLM imports Triton's functions, not its placeholders"
    if folder := os.environ.get("KERNEL_FILES"):
        sys.meta_path.insert(0, KernelFiles(Path(folder)))
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    by_name = dict(zip(REPLACED, (_lora_align, _align, lambda x, out, *_: out.copy_(x.float().sum(1))), strict=True))
    for name, function in by_name.items():
        setattr(ops, name, function)
    type(current_platform).num_compute_units = classmethod(lambda cls, device_id=0: H100_UNITS)


if __name__ == "__main__":
    install()
    from tests.support.engine.vllm_ext import lora_kernels

    lora_kernels.main(sys.argv[1:])
