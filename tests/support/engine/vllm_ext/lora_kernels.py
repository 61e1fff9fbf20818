"""vLLM's LoRA kernels on slots that the receiver wrote, against float64 products; `triton_interpreter` runs them.

A line of JSON for each case: the largest error of each layer, the kernels that were launched, and their file. Numbers
are small integers times powers of two: every sum is exact in bfloat16, and the expected error 0. Only ``whole`` has
random ones, because the SiLU between the two products of an expert is not exact.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.model_manager import AdapterLRUCache
from vllm.lora.ops.triton_ops import fused_moe_lora_op, lora_expand_op, lora_shrink_op, utils
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.transfer_plan import wire_layout
from areal_lora.engine.vllm_ext.compat import weights
from areal_lora.engine.vllm_ext.worker.lora_install import StackedSlotWriter
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec, ExpertLayout
from tests.support.engine.vllm_ext import lora_layers
from tests.support.engine.vllm_ext.lora_layers import ATTENTION, MOE, TARGETS, LayerSizes
from tests.support.engine.vllm_ext.slots import install

CPU, BF16, F64 = torch.device("cpu"), torch.bfloat16, torch.float64
SECOND = ATTENTION.replace("layers.0", "layers.1")
TOP_K, BASE, HELD = 2, 0, (7, 9, 11)
"""Experts of a token; the ids of the base and of three adapters."""
# No size is a multiple of a kernel's block, and all of them differ.
SMALL = LayerSizes(hidden=96, head=8, ffn=160, expert_ffn=48, max_rank=16, slots=4)
MANY_SLOTS = LayerSizes(hidden=96, head=8, ffn=160, expert_ffn=48, max_rank=16, slots=16)
LARGE_RANK = LayerSizes(hidden=96, head=8, ffn=160, expert_ffn=48, max_rank=128, slots=16)
TWO_KERNELS = LayerSizes(hidden=96, head=8, ffn=160, expert_ffn=48, max_rank=256, slots=4)
TWO_UNSORTED = LayerSizes(hidden=96, head=8, ffn=160, expert_ffn=48, max_rank=256, slots=16)
OUTER, MANY_OUTER, TWO_OUTER = (replace(sizes, shared_outer=True) for sizes in (SMALL, MANY_SLOTS, TWO_KERNELS))
Errors = dict[str, float]


def output_width(sizes: LayerSizes, module: str) -> int:
    leaf, inner = module.rpartition(".")[2], sizes.expert_ffn if "experts" in module else sizes.ffn
    heads = {"q_proj": sizes.heads, "k_proj": sizes.kv_heads, "v_proj": sizes.kv_heads}
    return heads[leaf] * sizes.head if leaf in heads else inner if leaf in ("gate_proj", "up_proj") else sizes.hidden


def published(sizes: LayerSizes) -> dict[str, Any]:
    """The model's config.json: one dense layer, one of experts."""
    return (known_config("Qwen/Qwen3-30B-A3B") or {}) | {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "num_experts": sizes.experts,
        "hidden_size": sizes.hidden,
        "head_dim": sizes.head,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.ffn,
        "moe_intermediate_size": sizes.expert_ffn,
    }


class Adapter:
    """An adapter as the trainer lays it out; ``delta`` is its product in float64."""

    def __init__(
        self, sizes: LayerSizes, seed: int, dtype: str, layout: str = "", random: bool = False, **spec: Any
    ) -> None:
        self.sizes = sizes
        experts = ExpertLayout(layout or ("shared_outer" if sizes.shared_outer else "per_expert"))
        self.spec = AdapterSpec(name=f"a{seed}", base_model="m", target_modules=TARGETS, expert_layout=experts, **spec)
        shape = ModelShape.from_hf(published(sizes))
        one_rank = ParallelLayout.of(TrainerConfig(world_size=1), layers=shape.layers, experts=shape.experts)
        self.layout = wire_layout(ShardedModel(shape=shape, layout=one_rank), self.spec, dtype)
        rng, self.wire = np.random.default_rng(seed), {}
        for tensor in self.layout.shards[0].tensors:
            if random:
                values = 0.1 * rng.standard_normal(tensor.shape)
            else:  # few values in a row: |B A x| stays below 2**8, where bfloat16 holds every integer
                values = np.zeros(tensor.shape)
                drawn, n = ((-1, 1), 2) if ".lora_A." in tensor.name else ((-2, -1, 1, 2), 4)
                for row in values:
                    n_row = min(n, len(row))
                    row[rng.choice(len(row), n_row, replace=False)] = rng.choice(drawn, n_row)
            self.wire[tensor.name] = values.astype(np.float32)
        self.full = self.wire | {name: self.wire[of] for name, of in self.layout.aliases.items()}

    def delta(self, module: str, x: torch.Tensor) -> torch.Tensor:
        """[n, in] to [n, out] float64."""
        a, b = (torch.from_numpy(self.full[f"{module}.lora_{side}.weight"]).to(F64) for side in "AB")
        return self.spec.scale_of(module) * (x.to(F64) @ a.t()) @ b.t()


def adapters(sizes: LayerSizes, dtype: str, random: bool = False) -> dict[int, tuple[int, Adapter]]:
    """Slot and adapter by id. Ranks, scales and expert layouts differ; slot 1 has none."""
    r, full = sizes.max_rank - 4, sizes.max_rank
    shared = {"rank": 4, "alpha": 4.0, "rslora": True, "layout": "shared"}
    outer = {"rank": full, "alpha": float(full), "layout": "shared_outer"}
    made = (
        (2, Adapter(sizes, 1, dtype, rank=r, alpha=2.0 * r, random=random)),
        (0, Adapter(sizes, 2, dtype, random=random, **shared)),
        (3, Adapter(sizes, 3, dtype, random=random, **outer)),
    )
    return dict(zip(HELD, made, strict=True))


class Worker:
    """One worker of ``tp`` or ``ep``: vLLM's layers and their stacks, which our writer fills."""

    def __init__(self, sizes: LayerSizes, tp: int = 1, ep: int = 1, rank: int = 0) -> None:
        self.sizes, size = sizes, max(tp, ep)
        first, second = (lora_layers.dense_modules(sizes, size, rank) for _ in range(2))
        del first["model.layers.2.mlp.up_proj"]
        self.modules = first | {n.replace(ATTENTION, SECOND): m for n, m in second.items() if ATTENTION in n}
        self.modules[MOE] = lora_layers.expert_module(sizes, "FusedMoEWithLoRA", 1 if ep > 1 else tp, ep, rank)
        lora_layers.made(sizes, self.modules, BF16)
        self.packed = lora_layers.packed_modules(sizes.experts)
        self.packed[f"{SECOND}.qkv_proj"] = [f"{SECOND}.{x}_proj" for x in "qkv"]
        self.worker = lora_layers.worker_with(self.modules, self.packed)
        self.config = lora_layers.lora_config(sizes, BF16)
        self.manager = weights.adapter_manager(self.worker)
        self.manager.lora_config = self.config
        self.manager._registered_adapters = AdapterLRUCache(sizes.slots, self.manager.deactivate_adapter)
        self.manager._active_adapters = AdapterLRUCache(sizes.slots, self.manager._deactivate_adapter)
        self.manager.lora_index_to_id = [None] * sizes.slots
        weights.enable_slots(self.worker)
        self.writer = StackedSlotWriter(weights.bound_matrices(self.worker), sizes.max_rank)

    def load(self, held: Mapping[int, tuple[int, Adapter]], dtype: str) -> None:
        """Fill every slot with an older adapter of full rank, write the new ones, activate them."""
        full = self.sizes.max_rank
        for slot in range(4):
            old = Adapter(self.sizes, 90 + slot, dtype, rank=full, alpha=float(full))
            install(self.writer, slot, old.layout, old.wire, cuts=(3,))
        for lora_id, (slot, adapter) in held.items():
            install(self.writer, slot, adapter.layout, adapter.wire, cuts=(3,))
            weights.activate(self.worker, lora_id, slot, full)

    def serve(self, ids: np.ndarray) -> Any:
        """Do what vLLM's manager does before a step whose token i has the adapter ``ids[i]``; returns the experts."""
        for pointers in (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT, fused_moe_lora_op._LORA_PTR_DICT):
            pointers.clear()
        wrapper = PunicaWrapperGPU(len(ids), len(ids), CPU, lora_config=self.config, max_loras=self.sizes.slots)
        mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=True)
        wrapper.update_metadata(mapping, self.manager.lora_index_to_id, self.manager.lora_slots + 1, 32000)
        experts, moe = TritonExperts.__new__(TritonExperts), self.modules[MOE]
        moe.moe_config.activation, moe.moe_config.experts_per_token = MoEActivation.SILU, TOP_K
        moe.moe_config.moe_parallel_config.use_all2all_kernels = False
        experts.moe_config, experts.quant_config = moe.moe_config, FUSED_MOE_UNQUANTIZED_CONFIG
        experts.activation_config, experts.quantization_emulation = SimpleNamespace(clamp_limit=None), False
        moe._enable_aux_cuda_stream, moe._lora_stream, moe._events = False, None, None
        moe._moe_kernel = SimpleNamespace(fused_experts=experts, prepare_finalize=None)
        for module in self.modules.values():
            module.set_mapping(wrapper)  # the experts' hands its stacks to TritonExperts
        return experts


@dataclass(slots=True, kw_only=True)
class Drawn:
    """Tokens of a step, with adapters mixed."""

    n: int
    seed: int
    ids: np.ndarray = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.ids = np.random.default_rng(self.seed + 1).choice([BASE, *HELD], self.n)
        self.ids[:4] = [11, 7, 9, BASE][: self.n]

    def integers(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(-2, 3, shape)).to(BF16)

    def experts(self, sizes: LayerSizes) -> torch.Tensor:
        rows = [self.rng.choice(sizes.experts, TOP_K, replace=False) for _ in range(self.n)]
        return torch.from_numpy(np.stack(rows)).to(torch.int32)


def routed(
    drawn: Drawn, held: Mapping[int, tuple[int, Adapter]], x: torch.Tensor, topk: torch.Tensor, part: str
) -> Any:
    """Float64 products [n, k, out] of each token's experts; ``x`` is [n, in], or [n * k, in] for the second product."""
    [sizes] = {adapter.sizes for _, adapter in held.values()}
    out = torch.zeros(drawn.n, TOP_K, output_width(sizes, f"{MOE}.0.{part}"), dtype=F64)
    for i in range(drawn.n):
        for j in range(TOP_K):
            if drawn.ids[i] != BASE:
                row = x[i if len(x) == drawn.n else i * TOP_K + j][None]
                out[i, j] = held[drawn.ids[i]][1].delta(f"{MOE}.{int(topk[i, j])}.{part}", row)[0]
    return out


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    """Infinite where a number is NaN, which `max` with another error would leave out."""
    return float((found.to(F64) - want.to(F64)).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def dense(tp: int, dtype: str, n: int = 40) -> Errors:
    """Every linear layer by ``layer.apply``: qkv and gate_up merged, o and down row-parallel."""
    sizes, drawn, errors = SMALL, Drawn(n=n, seed=5), {}
    held, workers = adapters(sizes, dtype), [Worker(sizes, tp=tp, rank=rank) for rank in range(tp)]
    for worker in workers:
        worker.load(held, dtype)
    for name in workers[0].modules:
        if name == MOE:
            continue
        row_parallel = name.endswith(("o_proj", "down_proj"))
        leaf = name.rpartition(".")[2]
        n_in = {"o_proj": sizes.heads * sizes.head, "down_proj": sizes.ffn}.get(leaf, sizes.hidden)
        x, want = drawn.integers(n, n_in), {}
        for part in workers[0].packed.get(name, [name]):
            want[part] = torch.zeros(n, output_width(sizes, part), dtype=F64)
            for lora_id, (_, adapter) in held.items():
                rows = torch.from_numpy(drawn.ids == lora_id)
                want[part][rows] = adapter.delta(part, x[rows])
        total, error = torch.zeros(n, sizes.hidden, dtype=F64), 0.0
        for rank, worker in enumerate(workers):
            worker.serve(drawn.ids)
            cut = slice(rank * n_in // tp, (rank + 1) * n_in // tp) if row_parallel else slice(None)
            truth = (
                want[name] if row_parallel else torch.cat([_part(sizes, p, w, tp, rank) for p, w in want.items()], 1)
            )
            base, layer = drawn.integers(n, truth.shape[1]), worker.modules[name]
            layer.base_layer.quant_method = SimpleNamespace(apply=lambda layer, x, bias, base=base: base.clone())
            found = layer.apply(x[:, cut].contiguous())
            untouched = torch.from_numpy(drawn.ids == BASE)
            assert torch.equal(found[untouched], base[untouched]), f"{name}: tokens of the base changed"
            if row_parallel:
                total += found.to(F64) - base.to(F64)
            else:
                error = max(error, off(found.to(F64) - base.to(F64), truth))
        errors[name] = off(total, want[name]) if row_parallel else error
    return errors


def _part(sizes: LayerSizes, part: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """The columns of one worker; heads of keys and values are repeated above ``kv_heads`` workers."""
    if not part.endswith(("k_proj", "v_proj")):
        return whole.chunk(tp, dim=1)[rank]
    heads, at = max(1, sizes.kv_heads // tp), rank * sizes.kv_heads // tp
    return whole[:, at * sizes.head : (at + heads) * sizes.head]


def experts(sizes: LayerSizes, dtype: str, n: int, tp: int = 1, ep: int = 1) -> Errors:
    """Gate, up and down of the experts, as TritonExperts.apply calls them."""
    drawn, held = Drawn(n=n, seed=8), adapters(sizes, dtype)
    topk = drawn.experts(sizes)
    chosen = torch.from_numpy(drawn.rng.choice([0.5, 1.0, 2.0], (n, TOP_K))).float()
    x, y = drawn.integers(n, sizes.hidden), drawn.integers(n * TOP_K, sizes.expert_ffn)
    gate, up = (routed(drawn, held, x, topk, part) for part in ("gate_proj", "up_proj"))
    down, errors = routed(drawn, held, y, topk, "down_proj"), {"gate_up": 0.0}
    total = torch.zeros(n, TOP_K, sizes.hidden, dtype=F64)
    for rank in range(max(tp, ep)):
        worker = Worker(sizes, tp=tp, ep=ep, rank=rank)
        worker.load(held, dtype)
        kernel, module = worker.serve(drawn.ids), worker.modules[MOE]
        inner = sizes.expert_ffn // tp
        cut = slice(rank * inner, (rank + 1) * inner) if tp > 1 else slice(None)
        expert_map = module.base_layer.routed_experts.expert_map
        common = {
            "topk_weights": chosen,
            "w1": torch.empty(module.local_num_experts, 2 * inner, sizes.hidden),
            "w2": torch.empty(module.local_num_experts, sizes.hidden, inner),
            "num_tokens": n,
            "top_k_num": TOP_K,
        }
        base, context = drawn.integers(n, TOP_K, 2 * inner), kernel._lora_context
        found = base.clone()
        meta = kernel.apply_w13_lora(context, y=found, x=x, topk_ids=topk, expert_map=expert_map, **common)
        here = torch.ones(n, TOP_K, dtype=torch.bool) if expert_map is None else expert_map[topk.long()] >= 0
        want = torch.cat([gate[..., cut], up[..., cut]], dim=2) * here[..., None]
        errors["gate_up"] = max(errors["gate_up"], off(found.to(F64) - base.to(F64), want))
        base = drawn.integers(n, TOP_K, sizes.hidden)
        found = base.clone()
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
        more = dict(zip(names, meta, strict=True))
        kernel.apply_w2_lora(context, y=found, x=y[:, cut].contiguous(), **more, **common)
        total += found.to(F64) - base.to(F64)
    return errors | {"down": off(total, chosen[..., None] * down)}


def whole(n: int = 40) -> Errors:
    """TritonExperts.apply: base products, adapters, SiLU, router weights, sum. Errors relative to the largest output,
    with the adapters and, to see that they matter, without."""
    sizes, drawn = SMALL, Drawn(n=n, seed=11)
    held, worker = adapters(sizes, "bfloat16", random=True), Worker(sizes)
    worker.load(held, "bfloat16")
    kernel, topk = worker.serve(drawn.ids), drawn.experts(sizes)
    chosen = torch.softmax(torch.from_numpy(drawn.rng.standard_normal((n, TOP_K))), -1).float()

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(0.2 * drawn.rng.standard_normal(shape)).to(BF16)

    x, w1 = 5 * normal(n, sizes.hidden), normal(sizes.experts, 2 * sizes.expert_ffn, sizes.hidden)
    w2, out = normal(sizes.experts, sizes.hidden, sizes.expert_ffn), torch.zeros(n, sizes.hidden, dtype=BF16)
    spaces = (torch.zeros(n * TOP_K * 4 * sizes.hidden, dtype=BF16) for _ in range(2))
    activation = MoEActivation.SILU
    kernel.apply(out, x, w1, w2, chosen, topk, activation, sizes.experts, None, None, None, *spaces, None, False)
    gate_up = torch.cat([routed(drawn, held, x, topk, part) for part in ("gate_proj", "up_proj")], 2)
    results = {}
    for name, adapted in (("apply", True), ("without adapters", False)):
        h = torch.einsum("nh,nkfh->nkf", x.to(F64), w1.to(F64)[topk.long()]) + gate_up * adapted
        h = torch.nn.functional.silu(h[..., : sizes.expert_ffn]) * h[..., sizes.expert_ffn :]
        o = torch.einsum("nkf,nkhf->nkh", h, w2.to(F64)[topk.long()])
        o = o + routed(drawn, held, h.reshape(n * TOP_K, -1), topk, "down_proj") * adapted
        results[name] = (chosen.to(F64)[..., None] * o).sum(1)
    largest = float(results["apply"].abs().max())
    return {name: off(out, want) / largest for name, want in results.items()}


def planted(spoil: Callable[[Worker], object]) -> Errors:
    """The first product of the experts on slots that ``spoil`` has made wrong."""
    sizes, drawn = SMALL, Drawn(n=16, seed=8)
    worker, held = Worker(sizes), adapters(sizes, "float32")
    worker.load(held, "float32")
    spoil(worker)
    kernel, topk, x = worker.serve(drawn.ids), drawn.experts(sizes), drawn.integers(16, sizes.hidden)
    found = torch.zeros(16, TOP_K, 2 * sizes.expert_ffn, dtype=BF16)
    w1 = torch.empty(sizes.experts, 2 * sizes.expert_ffn, sizes.hidden)
    w2 = torch.empty(sizes.experts, sizes.hidden, sizes.expert_ffn)
    common = {"topk_weights": torch.ones(16, TOP_K), "w1": w1, "w2": w2, "num_tokens": 16, "top_k_num": TOP_K}
    kernel.apply_w13_lora(kernel._lora_context, y=found, x=x, topk_ids=topk, expert_map=None, **common)
    return {"gate_up": off(found, torch.cat([routed(drawn, held, x, topk, p) for p in ("gate_proj", "up_proj")], 2))}


def swap_slots(worker: Worker) -> None:
    ids = worker.manager.lora_index_to_id
    ids[0], ids[2] = ids[2], ids[0]


def swap_gate_and_up(worker: Worker) -> None:
    module = worker.modules[MOE]
    module.w13_lora_b_stacked = module.w13_lora_b_stacked[::-1]


def leave_a_cell_beyond_the_rank(worker: Worker) -> None:
    module = worker.modules[MOE]
    module.w13_lora_a_stacked[0][2, :, -1], module.w13_lora_b_stacked[0][2, ..., -1] = 1.0, 1.0


def shift_experts(worker: Worker) -> None:
    module = worker.modules[MOE]
    for stack in (*module.w13_lora_a_stacked, *module.w13_lora_b_stacked):
        stack.copy_(stack.roll(1, dims=1))


def disable(worker: Worker) -> None:
    worker.modules[MOE].adapter_enabled.fill_(0)


@contextmanager
def patched(owner: Any, **values: object) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    yield
    for name, value in before.items():
        setattr(owner, name, value)


def tiled(run: Callable[[], Errors]) -> Errors:
    """With 4 programs for each sum in place of 64, as a tuned configuration of vLLM has it."""
    default = lora_shrink_op.get_lora_op_configs
    few = {"split_k": 4, "block_k": 16}
    with patched(lora_shrink_op, get_lora_op_configs=lambda *a, **k: default(*a, **k) | few):
        return run()


def dependent_launch() -> Errors:
    """Hopper's launch of one kernel before the other ends: its barriers mean nothing to an interpreter."""
    from triton.language.extra import cuda

    quiet = {"gdc_wait": lambda **_: None, "gdc_launch_dependents": lambda **_: None}
    yes = {"supports_pdl": lambda *_: True}
    dual = SimpleNamespace(VLLM_LORA_ENABLE_DUAL_STREAM=True)
    with patched(cuda, **quiet), patched(lora_expand_op, **yes, envs=dual), patched(lora_shrink_op, **yes, envs=dual):
        return tiled(lambda: dense(1, "bfloat16", 24))


def active(run: Callable[[], Errors]) -> Errors:
    """With a grid of the adapters in the step, not of all slots."""
    every = lora_layers.lora_config

    def config(sizes: LayerSizes, dtype: torch.dtype) -> Any:
        return SimpleNamespace(**(vars(every(sizes, dtype)) | {"specialize_active_lora": True}))

    with patched(lora_layers, lora_config=config):
        return run()


def two_kernels(sizes: LayerSizes, n: int, *, tma: bool) -> Errors:
    """Above rank 128, on Hopper with tensor descriptors."""
    with patched(fused_moe_lora_op, supports_tma=lambda *_: tma):
        return experts(sizes, "bfloat16", n)


CASES: Mapping[str, Callable[[], Errors]] = {
    "dense float32": lambda: tiled(lambda: dense(1, "float32")),
    "dense bfloat16": lambda: tiled(lambda: dense(1, "bfloat16")),
    "dense tp 2": lambda: tiled(lambda: dense(2, "bfloat16")),
    "dense tp 4": lambda: tiled(lambda: dense(4, "bfloat16")),
    "dense dependent launch": dependent_launch,
    "dense active": lambda: active(lambda: tiled(lambda: dense(1, "bfloat16", 24))),
    "experts active": lambda: active(lambda: experts(SMALL, "bfloat16", 40)),
    "experts small batch": lambda: experts(MANY_SLOTS, "float32", 8),
    "experts sorted": lambda: experts(SMALL, "float32", 40),
    "experts unsorted": lambda: experts(LARGE_RANK, "bfloat16", 8),
    "experts ep 2": lambda: experts(SMALL, "bfloat16", 40, ep=2),
    "experts ep 4": lambda: experts(SMALL, "bfloat16", 40, ep=4),
    "experts tp 2": lambda: experts(SMALL, "bfloat16", 40, tp=2),
    "experts tp 4": lambda: experts(SMALL, "bfloat16", 40, tp=4),
    "experts shared small batch": lambda: experts(MANY_OUTER, "float32", 8),
    "experts shared sorted": lambda: experts(OUTER, "bfloat16", 40),
    "experts shared ep 2": lambda: experts(OUTER, "bfloat16", 40, ep=2),
    "experts shared tp 2": lambda: experts(OUTER, "float32", 40, tp=2),
    "experts shared rank 256": lambda: two_kernels(TWO_OUTER, 24, tma=False),
    "experts shared rank 256 descriptors": lambda: two_kernels(TWO_OUTER, 24, tma=True),
    "experts rank 256": lambda: two_kernels(TWO_KERNELS, 24, tma=False),
    "experts rank 256 unsorted": lambda: two_kernels(TWO_UNSORTED, 4, tma=False),
    "experts rank 256 descriptors": lambda: two_kernels(TWO_KERNELS, 24, tma=True),
    "experts rank 256 descriptors unsorted": lambda: two_kernels(TWO_UNSORTED, 4, tma=True),
    "whole": whole,
    "fault: swapped slots": lambda: planted(swap_slots),
    "fault: swapped gate and up": lambda: planted(swap_gate_and_up),
    "fault: a cell beyond the rank": lambda: planted(leave_a_cell_beyond_the_rank),
    "fault: shifted experts": lambda: planted(shift_experts),
    "fault: disabled": lambda: planted(disable),
}


def main(names: list[str]) -> None:
    launches: Counter[str] = Counter()
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    InterpretedFunction.run = counted
    for name in names:
        launches.clear()
        report = {"case": name, "errors": CASES[name](), "launches": launches, "file": lora_expand_op.__file__}
        print(json.dumps(report), flush=True)
