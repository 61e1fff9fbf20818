"""What layers keep and compute again, on two layers with attention, against the same layers that keep everything."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lora.config.sections.run import Recompute
from areal_lora.engine.layers import recompute as module, varlen
from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens
from areal_lora.engine.layers.attention import AttentionPlan, Segment, attend
from areal_lora.engine.layers.recompute import recompute
from areal_lora.engine.layers.varlen import VarlenRuns
from tests.support.engine.layers import plain_attention

HEADS, WIDTH, TOKENS = 2, 8, 13
CPU = torch.device("cpu")
TREE = [Segment(start=0, own=4), *(Segment(start=4 + 4 * i, own=4, shared_start=0, shared=4) for i in range(2))]
RECOMPUTED: tuple[Recompute, ...] = ("selective", "full", "offload")


class Layer(nn.Module):
    """Attention with a frozen projection, and a trained one after it."""

    def __init__(self, active: ActiveAdapters) -> None:
        super().__init__()
        self.active, self.keys = active, list[Any]()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.qkv.requires_grad_(False)

    def forward(self, hidden_states: Tensor, *, plan: AttentionPlan) -> tuple[Tensor, None]:
        self.keys.append(self.active.tokens and self.active.tokens.keys)
        q, k, v = self.qkv(hidden_states).view(TOKENS, 3, HEADS, WIDTH).unbind(1)
        return hidden_states + self.out(attend(plan, q, k, v)).tanh(), None


class Kernels(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def stack(kind: Recompute) -> tuple[nn.ModuleList, ActiveAdapters]:
    torch.manual_seed(3)
    active = ActiveAdapters()
    layers = nn.ModuleList(Layer(active) for _ in range(2))
    recompute(layers, kind, active)
    return layers, active


def train(layers: nn.ModuleList, plan: AttentionPlan) -> list[Tensor]:
    """The output, and the gradients: the first input wants none, like embeddings."""
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(4))
    for layer in layers:
        x, _ = layer(hidden_states=x, plan=plan)
    x.square().sum().backward()
    return [x.detach(), *(p.grad for p in layers.parameters() if p.grad is not None)]


def plan_of(segments: list[Segment]) -> AttentionPlan:
    return AttentionPlan(segments, TOKENS, CPU)


@pytest.mark.parametrize("segments", [TREE, [Segment(start=0, own=12)]], ids=["tree", "sequence"])
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_every_kind_gives_what_keeping_everything_gives(kind: Recompute, segments: list[Segment]) -> None:
    found, truth = (train(stack(one)[0], plan_of(segments)) for one in (kind, "none"))
    assert len(truth) == 5
    for value, whole in zip(found, truth, strict=True):
        assert torch.equal(value, whole)


@pytest.mark.parametrize(("kind", "passes"), [("none", 1), ("selective", 1), ("full", 2), ("offload", 2)])
def test_selective_computes_attention_once(kind: Recompute, passes: int) -> None:
    layers, _ = stack(kind)
    with Kernels() as kernels:
        train(layers, plan_of([Segment(start=0, own=12)]))
    assert kernels.found["_scaled_dot_product_flash_attention_for_cpu"] == 2 * passes
    assert kernels.found["tanh"] == 2 * (1 if kind == "none" else 2)


@torch.library.custom_op("areal_lora_test::flash", mutates_args=())
def kernel(q: Tensor, k: Tensor, v: Tensor, cu: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`plain_attention.forward` as one operator, as on a GPU."""
    runs = copy.copy(VarlenRuns.__new__(VarlenRuns))
    runs.cu_q, runs.cu_k = cu
    return plain_attention.forward(runs, q, k, v, causal=causal, scale=scale)[:2]


def test_the_passes_over_a_tree_do_not_change_what_their_kernels_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_attention.install(monkeypatch)

    def forward(runs: VarlenRuns, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor, Any]:
        out, lse = kernel(q, k, v, [runs.cu_q, runs.cu_k], how["causal"], how["scale"])
        return out, lse, (q.new_zeros(2), q.new_zeros(()))

    monkeypatch.setattr(varlen, "forward", forward)
    monkeypatch.setattr(module, "ATTENTION", {torch.ops.areal_lora_test.flash.default})
    found = []
    for kind, calls in (("none", 4), ("selective", 4), ("full", 8)):
        with Kernels() as kernels:
            found.append(train(stack(kind)[0], plan_of(TREE)))
        assert kernels.found["flash"] == calls, kind
    for values in found[1:]:
        assert all(torch.equal(value, whole) for value, whole in zip(values, found[0], strict=True))


def test_inputs_of_layers_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, torch.Size]] = []
    for name in ("_to_host", "_to_device"):
        whole = getattr(module, name)

        def spied(x: Any, name: str = name, whole: Any = whole) -> Any:
            moved.append((name, (x[1] if isinstance(x, tuple) else x).shape))
            return whole(x)

        monkeypatch.setattr(module, name, spied)
    layers, _ = stack("offload")
    train(layers, plan_of(TREE))
    assert moved == [("_to_host", (TOKENS, 16))] * 2 + [("_to_device", (TOKENS, 16))] * 2


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_layer_is_recomputed_with_the_keys_of_its_micro_batch(kind: Recompute) -> None:
    layers, active = stack(kind)
    losses = []
    for number in range(2):
        active.tokens = PackedTokens(keys=torch.tensor([number]))
        x = torch.randn(TOKENS, 16)
        for layer in layers:
            x, _ = layer(x, plan=plan_of(TREE))
        losses.append(x.sum())
    for loss in losses:
        loss.backward()
    for layer in layers:
        assert [int(keys) for keys in layer.keys] == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_nothing_is_kept_of_a_pass_without_gradients(kind: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkpoint", None)
    layers, _ = stack(kind)
    with torch.no_grad():
        layers[0](torch.randn(TOKENS, 16), plan=plan_of(TREE))
