"""Products of several adapters' rows against one row after the other in float64, by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lora.engine.layers.active import ActiveAdapters, Dropout, PackedTokens
from areal_lora.engine.layers.grouped_lora import DownProjection, Groups, UpProjection, add_gradients, stacked

N_IN, RUNS, N_ROWS, SITE = 6, 2, 3, 11
RANKS = {"a": 3, "b": 8, "none": 0, "c": 1, "empty": 5}
"""Of the adapters in their order; one has no part in the layer, one no rows."""
SIZES = {"a": 4, "b": 1, "none": 3, "c": 2, "empty": 0}


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Layer:
    """Weights, gradients and rows of adapters of one layer; those ``named`` are in use."""

    def __init__(self, named: list[str], dropout: bool = False) -> None:
        draw = torch.Generator().manual_seed(3)
        drops = {"a": Dropout(rate=0.4, seed=5), "b": Dropout(rate=0.6, seed=2**62)} if dropout else {}
        self.active = ActiveAdapters({name: drops.get(name) for name in named})
        self.a: list[nn.Parameter | None] = []
        self.b: list[Tensor | None] = []
        self.grads: list[Tensor | None] = []
        for name in named:
            a = nn.Parameter(torch.randn(RANKS[name], N_IN, generator=draw))
            a.grad = torch.ones_like(a)
            # Runs of rows that lie apart, as those of a projection in a fused layer.
            b = torch.randn(2 * RUNS * N_ROWS, RANKS[name], generator=draw).unflatten(0, (RUNS, -1))[:, :N_ROWS]
            has_part = RANKS[name] > 0
            self.a.append(a if has_part else None)
            self.b.append(b if has_part else None)
            self.grads.append(torch.ones(2 * RUNS * N_ROWS, RANKS[name]).unflatten(0, (RUNS, -1))[:, :N_ROWS])
            if not has_part:
                self.grads[-1] = None
        sizes = torch.tensor([SIZES[name] for name in named])
        keys = torch.arange(int(sizes.sum())) * 7919
        owners = torch.arange(len(named)).repeat_interleave(sizes)
        self.rows = PackedTokens(keys=keys, ends=sizes.cumsum(0).int(), owners=owners)
        self.scales = [0.5 + i for i in range(len(named))]

    def __call__(self, x: Tensor) -> Tensor:
        groups, keep = Groups.of(self.rows), self.active.keep(self.rows, SITE, N_IN)
        hidden = DownProjection.apply(x, groups, keep, *self.a)
        out: Tensor = UpProjection.apply(hidden, groups, self.active.scale(self.scales, self.rows), self.b, self.grads)
        return out

    def exact(self, x: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Row by row in float64, and the weights that got gradients."""
        weights = [
            [] if a is None or b is None else [_exact(a), _exact(b)] for a, b in zip(self.a, self.b, strict=True)
        ]
        assert self.rows.owners is not None
        found = []
        for row, owner, key in zip(x, self.rows.owners.tolist(), self.rows.keys, strict=True):
            if not weights[owner]:
                found.append(torch.zeros(RUNS * N_ROWS, dtype=torch.float64) * row.sum())
                continue
            a, b = weights[owner]
            drop = list(self.active.each.values())[owner]
            kept = row if drop is None else row * drop.keep(key[None], SITE, N_IN)[0] / (1 - drop.rate)
            found.append(self.scales[owner] * b.flatten(0, 1) @ (a @ kept))
        return torch.stack(found), weights


def _exact(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def trained(layer: Layer, x: Tensor, slopes: Tensor) -> Tensor:
    out = layer(x)
    (out * slopes).sum().backward()
    return out


def inputs(layer: Layer) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    n = len(layer.rows.keys)
    return torch.randn(n, N_IN, generator=draw).requires_grad_(), torch.randn(n, RUNS * N_ROWS, generator=draw)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("named", [list(RANKS), ["b", "a"], ["none", "empty", "c"]], ids="-".join)
def test_products_and_gradients_are_those_of_a_loop(named: list[str], dropout: bool) -> None:
    print("seeds 3, 4")
    layer = Layer(named, dropout)
    x, slopes = inputs(layer)
    exact_x = _exact(x)
    want, weights = layer.exact(exact_x)
    got = trained(layer, x, slopes)
    (want * slopes).sum().backward()
    assert x.grad is not None
    assert exact_x.grad is not None
    for one, other in ((got, want), (x.grad, exact_x.grad)):
        assert float((one.double() - other).norm() / other.norm()) < 1e-6
    for name, a, grad, exact in zip(named, layer.a, layer.grads, weights, strict=True):
        if a is None or grad is None:
            continue
        for one, truth in ((a.grad, exact[0].grad), (grad, exact[1].grad)):
            assert one is not None
            if not SIZES[name]:
                assert bool((one == 1).all()), "it has no row: what was there stays"
                continue
            assert truth is not None
            assert float((one.double() - 1 - truth).norm() / truth.norm()) < 1e-5


def test_a_pass_repeats_its_bits_and_sees_no_other_adapter() -> None:
    layers = [Layer(list(RANKS)) for _ in range(3)]
    spoiled = layers[2].b[1]
    assert spoiled is not None
    spoiled.fill_(math.inf)
    found = []
    for layer in layers:
        x, slopes = inputs(layer)
        found.append([trained(layer, x, slopes).detach(), x.grad, layer.a, layer.grads])
    first, again, other = found
    assert layers[2].rows.owners is not None
    fine = layers[2].rows.owners != 1
    assert not other[0][~fine].isfinite().any()
    for part in (0, 1):
        assert torch.equal(first[part], again[part])
        assert torch.equal(first[part][fine], other[part][fine])
    for name, *each in zip(RANKS, *(layer.a for layer in layers), strict=True):
        grads = [None if a is None else a.grad for a in each]
        if grads[0] is not None:
            assert torch.equal(grads[0], grads[1])
            assert torch.equal(grads[0], grads[2]) == (name != "b")


def test_operators_do_not_grow_with_the_adapters() -> None:
    counts = []
    for named in (["a", "b"], list(RANKS), ["a", "b", "c"] * 5):
        layer = Layer(list(dict.fromkeys(named)))
        repeats = len(named) // len(layer.a)
        layer.a, layer.b, layer.grads = layer.a * repeats, layer.b * repeats, layer.grads * repeats
        layer.active = ActiveAdapters({str(i): None for i in range(len(named))})
        layer.scales *= repeats
        rows = layer.rows
        assert rows.ends is not None
        full = torch.cat([rows.ends, rows.ends[-1:].expand(len(named) - len(rows.ends))])
        layer.rows = PackedTokens(keys=rows.keys, ends=full, owners=rows.owners)
        x, slopes = inputs(layer)
        with Operators() as operators:
            trained(layer, x, slopes)
        counts.append(sorted(operators.names))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("shared", [False, True])
def test_stacks_of_experts_are_by_expert_and_adapter(shared: bool) -> None:
    """Two adapters of other ranks and one without a part; a matrix of all experts has the sum of their gradients."""
    parts = [torch.arange(12.0).view(3, 2, 2), None, torch.ones(1, 2) if shared else 5 * torch.ones(3, 1, 2)]
    stack = stacked(parts, 3)
    assert stack.shape == (9, 4, 2)
    for cell, matrix in enumerate(stack.tolist()):
        part = parts[cell % 3]
        rows = [] if part is None else part.expand(3, *part.shape[-2:])[cell // 3].tolist()
        assert matrix == rows + [[0.0, 0.0]] * (4 - len(rows))
    places = [None if part is None else torch.ones_like(part) for part in parts]
    add_gradients(stack.bfloat16(), places, 3)
    assert places[0] is not None
    assert places[2] is not None
    assert torch.equal(places[0], torch.arange(12.0).view(3, 2, 2) + 1)
    assert places[2].tolist() == ([[4.0, 4.0]] if shared else [[[6.0, 6.0]]] * 3)
    assert stacked([parts[0]], 3) is parts[0]
