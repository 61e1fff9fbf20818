"""The CPU MoE LoRA layer against a token-by-token float64 loop."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_lora.engine.vllm_ext.cpu_lora import ExpertAdapters, ExpertPairs, ExpertProduct, Runs, moe_lora
from tests.support.engine.vllm_ext.older_cpu import OLDER_CPU
from tests.support.lazy import Lazy

cpu_kernels = Lazy("areal_lora.engine.vllm_ext.compat.cpu_kernels")

E, H, INTER, RANK, SLOTS = 6, 32, 24, 4, 3


def make(seed: int, dtype: torch.dtype, n_tokens: int, top_k: int, experts: int = E):
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * 0.3).to(dtype)

    adapters = ExpertAdapters(
        gate_a=rand(SLOTS, E, RANK, H),
        up_a=rand(SLOTS, E, RANK, H),
        gate_b=rand(SLOTS, E, INTER, RANK),
        up_b=rand(SLOTS, E, INTER, RANK),
        down_a=rand(SLOTS, E, RANK, INTER),
        down_b=rand(SLOTS, E, H, RANK),
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


@dataclass(frozen=True, slots=True)
class PlainProduct:
    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, runs: Runs) -> torch.Tensor:
        return torch.cat([x[rows] @ self.weight[expert].t() for expert, rows in runs])


def run(x, w1, w2, routing, ids, adapters, slots, product=PlainProduct) -> torch.Tensor:
    groups, group_of = np.unique(slots, return_inverse=True)
    return moe_lora(x, product(w1), product(w2), routing, ids.numpy(), adapters, groups, group_of)


MIXTURES = {
    "base": lambda n: np.full(n, -1),
    "one adapter": lambda n: np.full(n, 1),
    "last slot and base": lambda n: np.where(np.arange(n) % 3 == 0, -1, SLOTS - 1),
    "all": lambda n: np.arange(n) % (SLOTS + 1) - 1,
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_matches_float64_loop(mixture: str, n_tokens: int) -> None:
    args = make(7, torch.float32, n_tokens, 2)
    slots = MIXTURES[mixture](n_tokens)
    torch.testing.assert_close(run(*args, slots).double(), oracle(*args, slots), atol=2e-5, rtol=1e-5)


def test_gate_and_up_with_one_lora_a() -> None:
    """As the trainer publishes it; one slot has two, as of a stock adapter, and one expert differs in one number."""
    args = make(29, torch.float32, 40, 2)
    adapters, slots = args[-1], MIXTURES["all"](40)
    adapters.up_a[:2] = adapters.gate_a[:2]
    adapters.up_a[0, 3, -1, -1] += 1
    torch.testing.assert_close(run(*args, slots).double(), oracle(*args, slots), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """vLLM's oneDNN kernels where the CPU has them; some experts have more rows than one kernel takes."""
    monkeypatch.setattr(cpu_kernels.PackedExperts, "MAX_ROWS", 16)
    args = make(17, dtype, 60, 2)
    slots = MIXTURES["all"](60)
    want = oracle(*args, slots)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (run(*args, slots, cpu_kernels.expert_product).double() - want).abs().max() < tolerance * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_type_that_onednn_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """One line states the cost, and the weights' own memory may be replaced, as vLLM's parameter is."""

    def lacks(*_: object) -> None:
        raise RuntimeError("could not create a primitive descriptor")

    def product(weight: torch.Tensor) -> ExpertProduct:
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        made = cpu_kernels.expert_product(parameter)
        parameter.data = weight.new_zeros(1, 1, 1).expand(weight.shape)
        assert isinstance(made, partial)
        assert made.func is cpu_kernels.plain_product
        return made

    monkeypatch.setattr(cpu_kernels._custom_ops, "create_onednn_mm", lacks)
    cpu_kernels._warn_of_plain_experts.cache_clear()
    args = make(17, dtype, 60, 2)
    slots = MIXTURES["all"](60)
    want = oracle(*args, slots)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (run(*args, slots, product).double() - want).abs().max() < tolerance * want.abs().max()
    [line] = caplog.messages
    assert "model.dtype=float32" in line


@pytest.mark.skipif(OLDER_CPU.items() <= os.environ.items(), reason="this is the older CPU")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_all_of_it_on_a_cpu_with_avx2_only() -> None:
    """The tests of this file and of the loops, in a process that finds such a CPU."""
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(here), str(here.with_name("test_cpu_lora_loops.py"))],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | OLDER_CPU,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_without_an_adapter_do_not_see_one(packed: bool) -> None:
    product = cpu_kernels.PackedExperts if packed else PlainProduct
    args = make(3, torch.float32, 12, 2)
    mixed = run(*args, MIXTURES["last slot and base"](12), product)
    plain = run(*args, MIXTURES["base"](12), product)
    base_rows = np.arange(12) % 3 == 0
    assert (mixed[base_rows] - plain[base_rows]).abs().max() < 1e-6
    assert (mixed[~base_rows] - plain[~base_rows]).abs().max() > 1e-2


def test_a_bad_token_is_bad_alone() -> None:
    x, w1, w2, routing, ids, adapters = make(19, torch.float32, 30, 2)
    slots = MIXTURES["all"](30)
    clean = run(x, w1, w2, routing, ids, adapters, slots)
    x[0] = float("nan")
    dirty = run(x, w1, w2, routing, ids, adapters, slots)
    assert dirty[0].isnan().all()
    torch.testing.assert_close(dirty[1:], clean[1:], atol=1e-5, rtol=1e-5)


def test_bfloat16() -> None:
    args = make(11, torch.bfloat16, 20, 2)
    slots = MIXTURES["all"](20)
    want = oracle(*args, slots)
    assert (run(*args, slots).double() - want).abs().max() < 0.03 * want.abs().max()


def test_empty_experts_and_skew() -> None:
    args = make(5, torch.float32, 60, 2, experts=2)  # four of six experts get nothing
    args[4][:6] = torch.tensor([2, 3])  # two get few
    slots = MIXTURES["all"](60)
    torch.testing.assert_close(run(*args, slots).double(), oracle(*args, slots), atol=2e-5, rtol=1e-5)


def test_adapter_of_smaller_rank() -> None:
    """A slot whose last ranks are zeros acts like matrices without them."""
    x, w1, w2, routing, ids, a = make(23, torch.float32, 20, 2)
    slots = MIXTURES["all"](20)
    for down in (a.gate_a, a.up_a, a.down_a):
        down[1, :, 2:] = 0
    for up in (a.gate_b, a.up_b, a.down_b):
        up[1, ..., 2:] = 0
    small = ExpertAdapters(
        gate_a=a.gate_a[:, :, :2],
        up_a=a.up_a[:, :, :2],
        down_a=a.down_a[:, :, :2],
        gate_b=a.gate_b[..., :2],
        up_b=a.up_b[..., :2],
        down_b=a.down_b[..., :2],
    )
    got = run(x, w1, w2, routing, ids, a, slots)
    torch.testing.assert_close(got.double(), oracle(x, w1, w2, routing, ids, a, slots), atol=2e-5, rtol=1e-5)
    rows = slots == 1
    want = oracle(x, w1, w2, routing, ids, small, slots)
    torch.testing.assert_close(got[rows].double(), want[rows], atol=2e-5, rtol=1e-5)


def test_places_of_pairs() -> None:
    """Each cell's pairs in the order of their tokens; a negative expert's pair has the row of another."""
    ids, group_of = np.array([[0, 2], [2, -1], [2, 0], [0, 2]]), np.array([0, 1, 0, 0])
    pairs = ExpertPairs.of(ids, np.array([-1, 5]), group_of)
    assert pairs.source.tolist() == [0, 2, 3, 0, 2, 3, 1]
    assert pairs.row_of[ids >= 0].tolist() == [0, 3, 6, 4, 1, 2, 5]
    assert pairs.row_of[1, 1] in pairs.row_of[ids >= 0]
    assert pairs.runs == [(0, slice(0, 3)), (2, slice(3, 7))]
    assert pairs.cells.tolist() == [[5, 2, 6, 7]]


def test_many_experts() -> None:
    slots = np.arange(24) % 12
    ids = torch.arange(24 * 2).view(24, 2) * 60
    groups, group_of = np.unique(slots, return_inverse=True)
    pairs = ExpertPairs.of(ids.numpy(), groups, group_of)
    assert np.array_equal(pairs.source[pairs.row_of], np.arange(24)[:, None].repeat(2, axis=1))


def test_experts_of_another_rank_are_left_out() -> None:
    x, w1, w2, routing, ids, adapters = make(9, torch.float32, 16, 2)
    ids[ids >= 4] = -1
    ids[3] = -1
    slots = MIXTURES["all"](16)
    want = oracle(x, w1, w2, routing, ids, adapters, slots)
    torch.testing.assert_close(run(x, w1, w2, routing, ids, adapters, slots).double(), want, atol=2e-5, rtol=1e-5)
    none = run(x, w1, w2, routing, torch.full_like(ids, -1), adapters, slots)
    assert none.abs().max() == 0


def test_shared_expert_factors() -> None:
    x, w1, w2, routing, ids, a = make(13, torch.float32, 25, 2)
    shared = ExpertAdapters(
        gate_a=a.gate_a[:, :1],
        up_a=a.up_a[:, :1],
        gate_b=a.gate_b,
        up_b=a.up_b,
        down_a=a.down_a,
        down_b=a.down_b[:, :1],
    )
    full = ExpertAdapters(
        gate_a=shared.gate_a.expand(-1, E, -1, -1),
        up_a=shared.up_a.expand(-1, E, -1, -1),
        gate_b=a.gate_b,
        up_b=a.up_b,
        down_a=a.down_a,
        down_b=shared.down_b.expand(-1, E, -1, -1),
    )
    slots = MIXTURES["all"](25)
    want = oracle(x, w1, w2, routing, ids, full, slots)
    torch.testing.assert_close(run(x, w1, w2, routing, ids, shared, slots).double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 12])
def test_experts_without_slots_are_the_bases(n_tokens: int) -> None:
    """As of a server whose adapters have attention modules only."""
    x, w1, w2, routing, ids, _ = make(3, torch.float32, n_tokens, 2)
    slots = np.full(n_tokens, -1)
    got = run(x, w1, w2, routing, ids, None, slots)
    want = oracle(*make(3, torch.float32, n_tokens, 2), slots)
    assert (got.double() - want).abs().max() < 1e-5 * want.abs().max()
