"""Every projection's B A, in float64, before and after; layouts are written down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from areal_lora.checkpoint.merged_folder import fused
from areal_lora.errors import AdapterError, UnknownTensorError
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import AdapterLayout, WireTensor, make_layout

HIDDEN, WIDTH, FFN, EXPERTS, LAYERS = 12, 8, 6, 2, 2
ATTENTION = {"q_proj": (WIDTH, HIDDEN), "k_proj": (4, HIDDEN), "v_proj": (4, HIDDEN), "o_proj": (HIDDEN, WIDTH)}
EXPERT = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
LEADERS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def spec(rank: int, alpha: float, layout: ExpertLayout = ExpertLayout.PER_EXPERT) -> AdapterSpec:
    return AdapterSpec(name="a", base_model="m", rank=rank, alpha=alpha, target_modules=("x",), expert_layout=layout)


def modules() -> dict[str, tuple[int, int]]:
    """Module -> (out, in)."""
    found = {}
    for layer in range(LAYERS):
        found |= {f"model.layers.{layer}.self_attn.{n}": s for n, s in ATTENTION.items()}
        for e in range(EXPERTS):
            found |= {f"model.layers.{layer}.mlp.experts.{e}.{n}": s for n, s in EXPERT.items()}
    return found


def layout_of(target: AdapterSpec) -> AdapterLayout:
    owned, aliases = [], {}
    for module, (out, inner) in modules().items():
        stem, _, leaf = module.rpartition(".")
        one = stem.replace("experts.1", "experts.0")
        shared, outer = target.expert_layout is ExpertLayout.SHARED, target.expert_layout is ExpertLayout.SHARED_OUTER
        stem_a = one if shared or (outer and leaf != "down_proj") else stem
        stem_b = one if shared or (outer and leaf == "down_proj") else stem
        wire_a, wire_b = f"{stem_a}.{LEADERS.get(leaf, leaf)}.lora_A.weight", f"{stem_b}.{leaf}.lora_B.weight"
        for name, wire, shape in (
            (f"{module}.lora_A.weight", wire_a, (target.rank, inner)),
            (f"{module}.lora_B.weight", wire_b, (out, target.rank)),
        ):
            if name == wire:
                owned.append((name, shape))
            else:
                aliases[name] = wire
    return make_layout(target, "float32", {0: owned}, aliases)


def folder(rank: int, seed: int = 0, leaves: tuple[str, ...] = (*ATTENTION, *EXPERT)) -> dict[str, torch.Tensor]:
    """What stock peft writes: every projection has a lora_A of its own."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (out, inner) in modules().items():
        if module.rpartition(".")[2] in leaves:
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inner, generator=g)
            tensors[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=g)
    return tensors


def initial(tensor: WireTensor) -> torch.Tensor:
    return torch.full(tensor.shape, 0.5 if "lora_A" in tensor.name else 0.0)


def product(tensors: dict[str, torch.Tensor], module: str, scale: float, layout: AdapterLayout | None = None):
    a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
    if layout is not None:
        a, b = layout.aliases.get(a, a), layout.aliases.get(b, b)
    return scale * tensors[b].double() @ tensors[a].double()


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(1, 5),
    spare=st.integers(0, 4),
    alpha=st.sampled_from([1.0, 3.0, 8.0, 16.0]),
    doublings=st.integers(-3, 3),
    shares=st.sets(st.sampled_from(sorted(LEADERS))),
    seed=st.integers(0, 99),
)
def test_no_product_changes(rank, spare, alpha, doublings, shares, seed) -> None:
    """Exact where the scales differ by a power of two: in float64 a rounded fp32 number would show at 1e-8."""
    tensors = folder(rank, seed)
    for leaf in shares:
        for module in modules():
            if module.endswith(leaf):
                other = module.replace(leaf, LEADERS[leaf])
                tensors[f"{module}.lora_A.weight"] = tensors[f"{other}.lora_A.weight"]
    needed = rank * max(3 - len(shares & {"k_proj", "v_proj"}), 1 if "up_proj" in shares else 2)
    source = spec(rank, alpha)
    target = spec(needed + spare, (source.alpha / source.rank) * 2.0**doublings * (needed + spare))
    layout = layout_of(target)
    got = fused(tensors, source, layout, initial)
    assert {n: tuple(t.shape) for n, t in got.items()} == {t.name: t.shape for t in layout.shards[0].tensors}
    for module in modules():
        want = product(tensors, module, (source.alpha / source.rank))
        torch.testing.assert_close(
            product(got, module, target.alpha / target.rank, layout), want, atol=1e-12, rtol=1e-12
        )
    small = layout_of(replace(target, rank=needed - 1))
    with pytest.raises(AdapterError, match=f"needs rank {needed}, the adapter has {needed - 1}"):
        fused(tensors, source, small, initial)


def test_other_scales_are_rounded_once() -> None:
    tensors, source, target = {n: t.bfloat16() for n, t in folder(2).items()}, spec(2, 5.0), spec(8, 24.0)
    layout = layout_of(target)
    got = fused(tensors, source, layout, initial)
    assert {t.dtype for t in got.values()} == {torch.float32}
    for module in modules():
        want = product(tensors, module, (source.alpha / source.rank))
        torch.testing.assert_close(product(got, module, target.alpha / target.rank, layout), want, atol=1e-5, rtol=0)
    name = "model.layers.1.self_attn.o_proj.lora_B.weight"
    torch.testing.assert_close(got[name][:, :2].double(), tensors[name].double() * (2.5 / 3.0), atol=0, rtol=2**-24)


def test_no_spare_row_is_dead() -> None:
    """A row of lora_A and its column of lora_B that are both zero have no gradient, now or ever."""
    got = fused(folder(2), spec(2, 2.0), layout_of(spec(9, 9.0)), initial)
    for name, tensor in got.items():
        if "lora_A" in name:
            assert bool(tensor.any(dim=1).all()), name


@pytest.mark.parametrize("expert_layout", list(ExpertLayout))
def test_what_fits_is_not_touched(expert_layout: ExpertLayout) -> None:
    declared = spec(3, 6.0, expert_layout)
    layout = layout_of(declared)
    g = torch.Generator().manual_seed(5)
    wire = {t.name: torch.randn(t.shape, generator=g) for t in layout.shards[0].tensors}
    tensors = wire | {name: wire[target].clone() for name, target in layout.aliases.items()}
    got = fused(tensors, declared, layout, initial)
    assert list(got) == list(wire)
    assert all(torch.equal(got[n], t) for n, t in wire.items())
    if expert_layout is ExpertLayout.SHARED_OUTER:
        # Other lora_A of gate and up are stacked, other lora_B of down cannot be.
        stock = folder(1, leaves=tuple(EXPERT))
        for name in [n for n in stock if "experts.1.down_proj.lora_B" in n]:
            stock[name] = stock[name.replace("experts.1", "experts.0")].clone()
        wide = layout_of(spec(4, 8.0, expert_layout))  # two experts, gate and up each
        held = fused(stock, spec(1, 2.0), wide, initial)
        for module in modules():
            if f"{module}.lora_A.weight" in stock:
                want = product(stock, module, 2.0)
                torch.testing.assert_close(product(held, module, 2.0, wide), want, atol=1e-12, rtol=1e-12)
        with pytest.raises(AdapterError, match="needs rank 4, the adapter has 3"):
            fused(stock, spec(1, 2.0), layout_of(spec(3, 6.0, expert_layout)), initial)
        stock["model.layers.1.mlp.experts.1.down_proj.lora_B.weight"] += 1e-3
        with pytest.raises(AdapterError, match=r"layers.1.mlp.experts.1.down_proj.lora_B.*per_expert"):
            fused(stock, spec(1, 2.0), wide, initial)
    if expert_layout is ExpertLayout.SHARED:
        other = layout_of(spec(3, 6.0))
        spread = fused(tensors, declared, other, initial)
        assert all(torch.equal(product(spread, m, 2.0, other), product(tensors, m, 2.0)) for m in modules()), (
            "one adapter for all experts is also one each"
        )
        tensors["model.layers.1.mlp.experts.1.down_proj.lora_B.weight"] += 1e-3
        with pytest.raises(AdapterError, match=r"layers.1.mlp.experts.1.down_proj.*per_expert"):
            fused(tensors, declared, layout, initial)


def test_projections_that_the_folder_does_not_adapt_stay_like_the_base() -> None:
    """q_proj and v_proj only is what peft adapts by default; twice the rank holds them."""
    tensors, source, target = folder(3, leaves=("q_proj", "v_proj")), spec(3, 3.0), spec(6, 6.0)
    layout = layout_of(target)
    got = fused(tensors, source, layout, initial)
    for module, (out, inner) in modules().items():
        known = module.endswith(("q_proj", "v_proj"))
        want = product(tensors, module, 1.0) if known else torch.zeros(out, inner, dtype=torch.float64)
        torch.testing.assert_close(product(got, module, 1.0, layout), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ("layers.1", UnknownTensorError, "layers.1.self_attn.k_proj is missing"),
        ("extra", UnknownTensorError, "layers.7.self_attn.k_proj is adapted there only"),
        ("size", AdapterError, "another model"),
    ],
)
def test_what_does_not_fit_is_refused(change: str, kind: type[Exception], words: str) -> None:
    tensors = folder(1)
    pair = [f"model.layers.1.self_attn.k_proj.lora_{side}.weight" for side in "AB"]
    match change:
        case "layers.1":
            tensors = {n: t for n, t in tensors.items() if n not in pair}
        case "extra":
            tensors |= {n.replace("layers.1", "layers.7"): tensors[n] for n in pair}
        case "size":
            tensors[pair[1]] = torch.zeros(5, 1)
    with pytest.raises(kind, match=words):
        fused(tensors, spec(1, 1.0), layout_of(spec(3, 3.0)), initial)
