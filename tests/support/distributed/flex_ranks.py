"""What each expert-parallel rank does: the same passes with Megatron's default token dispatcher and with a flex one.

A module takes the place of ``deep_ep``, with the calls that Megatron makes of DeepEP's `Buffer`: a token arrives once
at each rank that has one of its experts, in the order of ranks and tokens, with numbers of experts there, -1 elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.models import ModelConfig
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.engine.megatron_utils.cpu_patches import install_cpu_patches
from tests.support.distributed.engine_ranks import (
    OPTIMIZER,
    Case,
    export_gradients,
    forget_layout,
    loss_fn,
    make_batch,
    make_rows,
    make_spec,
    numpy_of,
    own_part,
    scores,
)

Handle = tuple[list[Tensor], list[int]]
"""For each rank which own tokens it has got, and how many of its tokens are here."""


class Event:
    def __init__(self, *_: object) -> None: ...

    def current_stream_wait(self) -> None: ...


class Buffer:
    """Of one process group, over gloo."""

    dispatched = 0
    set_num_sms = get_dispatch_config = get_combine_config = staticmethod(lambda _: Buffer)
    get_nvl_buffer_size_hint = get_rdma_buffer_size_hint = staticmethod(lambda *_: 0)

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    def get_dispatch_layout(self, indices: Tensor, num_experts: int, **_: object) -> tuple[Any, ...]:
        each = num_experts // self.group.size()
        owners = torch.where(indices < 0, -1, indices // each)
        targets = [(owners == rank).any(1) for rank in range(self.group.size())]
        return None, None, torch.tensor(each), targets, None

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: list[Tensor] | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: object,
    ) -> tuple[Any, ...]:
        if handle is not None:
            return torch.cat(self._exchange([x[kept] for kept in handle[0]])), None, None, None, None, Event()
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype is torch.float32
        Buffer.dispatched += 1
        rows, indices, weights = (
            self._exchange([values[kept] for kept in is_token_in_rank]) for values in (x, topk_idx, topk_weights)
        )
        each = int(num_tokens_per_expert or 0)
        local = torch.cat(indices) - self.group.rank() * each
        here = (local >= 0) & (local < each)
        counts = torch.bincount(local[here], minlength=each).tolist()
        found = torch.where(here, local, -1), torch.where(here, torch.cat(weights), 0.0)
        return torch.cat(rows), *found, counts, (is_token_in_rank, [len(part) for part in rows]), Event()

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **_: object
    ) -> tuple[Tensor, Tensor | None, Event]:
        return self._back(x, handle), None if topk_weights is None else self._back(topk_weights, handle), Event()

    def _back(self, rows: Tensor, handle: Handle) -> Tensor:
        kept, counts = handle
        out = rows.new_zeros(len(kept[0]), rows.shape[1])
        for mask, part in zip(kept, self._exchange(list(rows.split(counts))), strict=True):
            out[mask] += part
        return out

    def _exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """A part for each rank, to those of each rank for this one."""
        everyone: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyone, [part.detach() for part in parts], group=self.group)
        return [of_rank[self.group.rank()] for of_rank in everyone]


def both(path: str, case: Case, adapter: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Scores and gradients with the default dispatcher, then with a flex one."""
    install_cpu_patches()
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    stand_in, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(stand_in)["Buffer"], vars(utils)["EventHandle"], vars(utils)["EventOverlap"] = Buffer, Event, Event
    sys.modules |= {"deep_ep": stand_in, "deep_ep.utils": utils}
    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    seen = []
    for dispatcher in ("alltoall", "deepep"):
        trainer = case.trainer().model_copy(update={"moe_dispatcher": dispatcher})
        engine = MegatronEngine(ModelConfig(path=path, dtype="float32"), trainer, torch.device("cpu"))
        engine.add_adapter(make_spec("a", path, case), OPTIMIZER, seed=1)
        engine.load_adapter("a", {name: torch.from_numpy(values) for name, values in adapter.items()})
        batch = own_part(engine, make_batch(make_rows()))
        found = {"scores": scores(engine, batch, adapter="a")}
        engine.forward_backward(batch, loss_fn, need_entropy=True)
        seen.append(found | numpy_of(export_gradients(engine)))
        assert bool(Buffer.dispatched) == (dispatcher == "deepep")
        forget_layout()
    return seen
