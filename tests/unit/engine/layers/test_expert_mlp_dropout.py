"""Masks from a counter: their statistics, what they depend on, and gradients with them against autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from areal_lora.engine.layers.active import (
    ActiveAdapters,
    Dropout,
    PackedTokens,
    from_lanes,
    kept,
    site_key,
    step_seed,
    text_keys,
    to_lanes,
)
from areal_lora.engine.layers.expert_mlp import ExpertLora, expert_mlp

SITE = site_key("model.layers.0.self_attn.q_proj")
SEED = 3


def keys_of(n: int, seed: int = SEED) -> Tensor:
    return torch.from_numpy(text_keys(np.random.default_rng(seed).integers(0, 300, n)))


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_each_row_column_and_pair_drops_its_share(rate: float) -> None:
    dropped = ~Dropout(rate=rate, seed=step_seed(1, 0)).keep(keys_of(512), SITE, 512)
    sigma = (rate * (1 - rate)) ** 0.5
    share = dropped.float()
    assert abs(float(share.mean()) - rate) < 5 * sigma / 512
    for axis in (0, 1):
        assert float((share.mean(axis) - rate).abs().max()) < 5 * sigma / 512**0.5
        centred = (share - rate) / sigma
        for shift in (1, 2, 64):  # no row or column follows another one
            correlation = (centred * centred.roll(shift, axis)).mean()
            assert abs(float(correlation)) < 5 / 512, (axis, shift)
    spectrum = torch.linalg.svdvals(((share - rate) / sigma).double())
    assert float(spectrum[0]) < 2.2 * 512**0.5, "as a random matrix (Marchenko and Pastur): 2 sqrt(n)"


def test_a_mask_depends_on_step_seed_site_and_text_only() -> None:
    keys, one = keys_of(64), Dropout(rate=0.5, seed=step_seed(1, 0))
    mask = one.keep(keys, SITE, 96)
    assert torch.equal(mask, Dropout(rate=0.5, seed=step_seed(1, 0)).keep(keys, SITE, 96))
    assert torch.equal(mask[10:20, 32:], one.keep(keys[10:20], SITE, 64, first=32)), "a part is computed alone"
    assert torch.equal(mask, one.keep(keys, torch.full((64,), SITE), 96))
    others = [
        Dropout(rate=0.5, seed=step_seed(1, 1)).keep(keys, SITE, 96),
        Dropout(rate=0.5, seed=step_seed(2, 0)).keep(keys, SITE, 96),
        one.keep(keys, site_key("model.layers.1.self_attn.q_proj"), 96),
        one.keep(keys_of(64, seed=4), SITE, 96),
    ]
    for other in others:
        assert 0.4 < float((other == mask).float().mean()) < 0.6


def test_a_token_is_known_by_the_text_up_to_it() -> None:
    text = np.array([5, 7, 7, 9, 2])
    same, other = text_keys(np.array([5, 7, 7, 1, 2])), text_keys(text)
    assert np.array_equal(same[:3], other[:3])
    assert not (same[3:] == other[3:]).any()
    assert len({*other.tolist(), *text_keys(np.array([7, 5, 7, 9, 2])).tolist()[:1]}) == 6
    assert text_keys(np.array([7, 5]))[1] != other[1], "the order counts"


def test_lanes_hold_every_key() -> None:
    keys = torch.cat([keys_of(100), torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
    assert torch.equal(from_lanes(to_lanes(keys)), keys)


@pytest.mark.parametrize("shared", ["", "a1 b1 a2 b2", "a1 b2"])
def test_experts_with_masks_equal_autograd(shared: str) -> None:
    print("seed", SEED)
    torch.manual_seed(SEED)
    h, f, r, splits = 6, 5, 3, (4, 0, 7)
    ends, n = torch.tensor(splits).cumsum(0).int(), sum(splits)
    lora = {"a1": (r, h), "b1": (2 * f, r), "a2": (r, f), "b2": (h, r)}
    parts = {
        name: torch.randn(*(() if name in shared else (3,)), *shape).requires_grad_() for name, shape in lora.items()
    }
    x, probs = torch.randn(n, h).requires_grad_(), torch.rand(n).requires_grad_()
    w1, w2 = torch.randn(3, 2 * f, h), torch.randn(3, h, f)
    drop = Dropout(rate=0.4, seed=5)
    fc = [
        ExpertLora(parts["a1"], parts["b1"], 1.5, torch.tensor((11,) if shared == "a1 b1 a2 b2" else (11, 12, 13))),
        ExpertLora(parts["a2"], parts["b2"], 0.5, torch.tensor((21, 22, 23))),
    ]
    keys = keys_of(n)
    y = expert_mlp(x, probs, [(fc[0], fc[1])], (w1, w2), ends, ActiveAdapters({"a": drop}), PackedTokens(keys=keys))
    weight = torch.randn(n, h)
    leaves = [x, probs, *parts.values()]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    (y * weight).sum().backward()
    found = [leaf.grad for leaf in leaves]
    # The reference, in float64.
    x, probs, *others = leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts, w1, w2 = dict(zip(parts, others, strict=True)), w1.double(), w2.double()

    def of(name: str, e: int) -> Tensor:
        return parts[name] if name in shared else parts[name][e]

    total, at = torch.zeros((), dtype=torch.float64), 0
    for e, count in enumerate(splits):  # expert by expert, with masks of one row at a time
        for t in range(at, at + count):
            site = 11 if shared == "a1 b1 a2 b2" else (11, 12, 13)[e]
            first, second = (
                drop.keep(keys[t : t + 1], place, size)[0] for place, size in ((site, h), ((21, 22, 23)[e], f))
            )
            g = w1[e] @ x[t] + 1.5 * of("b1", e) @ of("a1", e) @ (x[t] * first / 0.6)
            u = functional.silu(g[:f]) * g[f:] * probs[t]
            row = w2[e] @ u + 0.5 * of("b2", e) @ of("a2", e) @ (u * second / 0.6)
            torch.testing.assert_close(y[t].double(), row, atol=2e-5, rtol=1e-5)
            total = total + (row * weight[t]).sum()
        at += count
    expected = torch.autograd.grad(total, leaves)
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-5
    assert kept(x, None) is x
