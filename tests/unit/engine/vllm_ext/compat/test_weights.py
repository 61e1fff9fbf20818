"""Merged experts in the order of each kernel of vLLM, against the halves put together by hand."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal_lora.errors import AdapterError
from tests.support.lazy import Lazy

weights = Lazy("areal_lora.engine.vllm_ext.compat.weights")

MOE = "vllm.model_executor.layers.fused_moe"
EXPERTS, HIDDEN, INTER, TP, TP_RANK = 4, 8, 6, 2, 1
PROJECTIONS = ("gate_proj", "down_proj", "up_proj")
NAMES = [f"e.{e}.{p}" for e in range(EXPERTS) for p in PROJECTIONS]


def make_experts(backend: str, inter: int, hidden: int, held: list[int]) -> Any:
    """vLLM's layer with its own weights, all zero; what its constructor asks of a running engine is given."""
    config_, moe = import_module(f"{MOE}.config"), import_module(f"{MOE}.routed_experts").RoutedExperts
    config = config_.FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=INTER * TP,
        num_local_experts=len(held),
        num_logical_experts=EXPERTS,
        activation=import_module(f"{MOE}.activation").MoEActivation.SILU,
        device="cpu",
        routing_method=config_.RoutingMethodType.Renormalize,
        moe_parallel_config=replace(config_.FusedMoEParallelConfig.make_no_parallel(), tp_size=TP, tp_rank=TP_RANK),
        in_dtype=torch.float32,
    )
    config.intermediate_size_per_partition, config.hidden_dim = inter, hidden  # as vLLM rounds them up
    kind = import_module(f"{MOE}.unquantized_fused_moe_method").UnquantizedFusedMoEMethod
    layer, method = moe.__new__(moe), kind.__new__(kind)
    for module in (layer, method):
        nn.Module.__init__(module)
    method.moe, method.moe_kernel = config, None
    method.unquantized_backend = import_module(f"{MOE}.oracle.unquantized").UnquantizedMoeBackend[backend]
    method.create_weights(layer, len(held), hidden, inter, torch.float32)
    for weight in layer.parameters():
        weight.data.zero_()
    method.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(consumes_expert_mask=False))
    layer.quant_method, layer.moe_config = method, config
    layer.params_dtype, layer.local_num_experts, layer.hidden_size = torch.float32, len(held), hidden
    places = [held.index(e) if e in held else -1 for e in range(EXPERTS)]
    layer._expert_map = None if len(held) == EXPERTS else torch.tensor(places)
    return layer


def version(seed: int) -> dict[str, Tensor]:
    """Whole weights of all experts."""
    g = torch.Generator().manual_seed(seed)
    wide, narrow = (INTER * TP, HIDDEN), (HIDDEN, INTER * TP)
    return {f"{n}.weight": torch.randn(narrow if n.endswith("down_proj") else wide, generator=g) for n in NAMES}


def padded(part: Tensor, rows: int, cols: int) -> Tensor:
    return nn.functional.pad(part, (0, cols - part.shape[1], 0, rows - part.shape[0]))


def reverse(_: Any, w13: Tensor, w2: Tensor, **how: Any) -> None:
    """For FlashInfer's conversion of TensorRT-LLM's experts, which works in place, too, and needs its package."""
    w13.copy_(w13.flip(1))
    w2.copy_(w2.flip(2))


CASES = {
    "as they are loaded": ("TRITON", INTER, HIDDEN, [0, 1, 2, 3]),
    "in batches, half of the experts": ("BATCHED_TRITON", INTER, HIDDEN, [2, 3]),
    "up before gate": ("FLASHINFER_CUTLASS", INTER, HIDDEN, [0, 1, 2, 3]),
    "up before gate, rounded up": ("FLASHINFER_CUTLASS", INTER + 2, HIDDEN + 4, [0, 1]),
    "converted in place, rounded up": ("FLASHINFER_TRTLLM", 128, HIDDEN, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_version_is_whole_and_stays_where_graphs_read_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, inter, hidden, held = CASES[case]
    conversion = "convert_moe_weights_to_flashinfer_trtllm_block_layout"
    monkeypatch.setattr(import_module(f"{MOE}.oracle.unquantized"), conversion, reverse)
    layer = make_experts(backend, inter, hidden, held)
    addresses = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    fused = weights._Experts(layer, NAMES)
    own = slice(INTER * TP_RANK, INTER * (TP_RANK + 1))
    for seed in (1, 2, 1):
        new = version(seed)
        for part in fused.parts:
            assert part.full == new[part.name].shape
            if part.place is not None:
                rows, cols = part.place.shape
                part.place.copy_(new[part.name][part.row : part.row + rows, part.col : part.col + cols])
        fused.apply()
        for place, e in enumerate(held):
            gate, up = (padded(new[f"e.{e}.{p}.weight"][own], inter, hidden) for p in ("gate_proj", "up_proj"))
            down = padded(new[f"e.{e}.down_proj.weight"][:, own], hidden, inter)
            want = torch.cat([up, gate] if backend == "FLASHINFER_CUTLASS" else [gate, up])
            if backend == "FLASHINFER_TRTLLM":
                want, down = want.flip(0), down.flip(1)
            assert torch.equal(layer.w13_weight[place], want)
            assert torch.equal(layer.w2_weight[place], down)
    assert (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()) == addresses


def test_experts_that_cannot_be_written_again_are_refused_at_the_start() -> None:
    layer = make_experts("XPU", INTER, HIDDEN, [0, 1, 2, 3])
    layer.w13_weight.data = layer.w13_weight.data.transpose(1, 2).contiguous()
    with pytest.raises(AdapterError, match=r"for XPU .*set rollout\.engine_args\.moe_backend=triton"):
        weights._Experts(layer, NAMES)
