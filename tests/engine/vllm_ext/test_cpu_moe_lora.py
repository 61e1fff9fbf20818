"""The CPU MoE LoRA layer against a token-by-token float64 loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.engine.vllm_ext import cpu_moe_lora
from areal_lora.engine.vllm_ext.cpu_moe_lora import ExpertAdapters, moe_lora

E, H, INTER, RANK, SLOTS = 6, 32, 24, 4, 3


def make(seed: int, dtype: torch.dtype, n_tokens: int, top_k: int, experts: int = E):
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * 0.3).to(dtype)

    adapters = ExpertAdapters(
        gate_a=rand(SLOTS, E, RANK, H), up_a=rand(SLOTS, E, RANK, H), gate_b=rand(SLOTS, E, INTER, RANK),
        up_b=rand(SLOTS, E, INTER, RANK), down_a=rand(SLOTS, E, RANK, INTER), down_b=rand(SLOTS, E, H, RANK),
    )
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(n_tokens)])
    routing = torch.rand(n_tokens, top_k, generator=g)
    return rand(n_tokens, H), rand(E, 2 * INTER, H), rand(E, H, INTER), routing, ids, adapters


def oracle(x, w1, w2, routing, ids, adapters, slots) -> torch.Tensor:
    d = {k: getattr(adapters, k).double() for k in ("gate_a", "up_a", "gate_b", "up_b", "down_a", "down_b")}
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        xt, s = x[t].double(), int(slots[t])
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if e < 0:
                continue
            gate, up = w1[e, :INTER].double() @ xt, w1[e, INTER:].double() @ xt
            if s >= 0:
                gate += d["gate_b"][s, e] @ (d["gate_a"][s, e] @ xt)
                up += d["up_b"][s, e] @ (d["up_a"][s, e] @ xt)
            a = gate * torch.sigmoid(gate) * up
            y = w2[e].double() @ a
            if s >= 0:
                y += d["down_b"][s, e] @ (d["down_a"][s, e] @ a)
            out[t] += routing[t, k].double() * y
    return out


def run(x, w1, w2, routing, ids, adapters, slots) -> torch.Tensor:
    groups, group_of = np.unique(slots, return_inverse=True)
    out = torch.full_like(x, float("nan"))
    moe_lora(out, x, w1, w2, routing, ids.numpy(), adapters, groups, group_of)
    return out


MIXTURES = {
    "base": lambda n: np.full(n, -1),
    "one adapter": lambda n: np.full(n, 1),
    "last slot and base": lambda n: np.where(np.arange(n) % 3 == 0, -1, SLOTS - 1),
    "all": lambda n: np.arange(n) % (SLOTS + 1) - 1,
}


@pytest.mark.parametrize("form", ["padded", "by expert"])
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_matches_float64_loop(monkeypatch: pytest.MonkeyPatch, form: str, mixture: str, n_tokens: int) -> None:
    monkeypatch.setattr(cpu_moe_lora, "MAX_PADDING", 10**9 if form == "padded" else 0)
    args = make(7, torch.float32, n_tokens, 2)
    slots = MIXTURES[mixture](n_tokens)
    torch.testing.assert_close(run(*args, slots).double(), oracle(*args, slots), atol=2e-5, rtol=1e-5)


def test_tokens_without_an_adapter_do_not_see_one() -> None:
    args = make(3, torch.float32, 12, 2)
    mixed = run(*args, MIXTURES["last slot and base"](12))
    plain = run(*args, MIXTURES["base"](12))
    base_rows = np.arange(12) % 3 == 0
    assert (mixed[base_rows] - plain[base_rows]).abs().max() < 1e-6
    assert (mixed[~base_rows] - plain[~base_rows]).abs().max() > 1e-2


def test_bfloat16() -> None:
    args = make(11, torch.bfloat16, 20, 2)
    slots = MIXTURES["all"](20)
    want = oracle(*args, slots)
    assert (run(*args, slots).double() - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.parametrize("max_padding", [0, 10**9])
def test_empty_experts_and_skew(monkeypatch: pytest.MonkeyPatch, max_padding: int) -> None:
    monkeypatch.setattr(cpu_moe_lora, "MAX_PADDING", max_padding)
    args = make(5, torch.float32, 30, 2, experts=2)  # four of six experts get nothing
    slots = MIXTURES["all"](30)
    torch.testing.assert_close(run(*args, slots).double(), oracle(*args, slots), atol=2e-5, rtol=1e-5)


def test_experts_of_another_rank_are_left_out() -> None:
    x, w1, w2, routing, ids, adapters = make(9, torch.float32, 16, 2)
    ids[ids >= 4] = -1
    slots = MIXTURES["all"](16)
    want = oracle(x, w1, w2, routing, ids, adapters, slots)
    torch.testing.assert_close(run(x, w1, w2, routing, ids, adapters, slots).double(), want, atol=2e-5, rtol=1e-5)
    none = run(x, w1, w2, routing, torch.full_like(ids, -1), adapters, slots)
    assert none.abs().max() == 0


def test_shared_expert_factors() -> None:
    x, w1, w2, routing, ids, a = make(13, torch.float32, 25, 2)
    shared = ExpertAdapters(
        gate_a=a.gate_a[:, :1], up_a=a.up_a[:, :1], gate_b=a.gate_b, up_b=a.up_b, down_a=a.down_a,
        down_b=a.down_b[:, :1],
    )
    full = ExpertAdapters(
        gate_a=shared.gate_a.expand(-1, E, -1, -1), up_a=shared.up_a.expand(-1, E, -1, -1), gate_b=a.gate_b,
        up_b=a.up_b, down_a=a.down_a, down_b=shared.down_b.expand(-1, E, -1, -1),
    )
    slots = MIXTURES["all"](25)
    want = oracle(x, w1, w2, routing, ids, full, slots)
    torch.testing.assert_close(run(x, w1, w2, routing, ids, shared, slots).double(), want, atol=2e-5, rtol=1e-5)
