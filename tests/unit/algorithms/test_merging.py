import pytest
import torch

from areal_lora.algorithms.merging import CastLoss, CastSums, adapted_weights, merged
from areal_lora.errors import UnknownTensorError

A, B = torch.randn(2, 6), torch.randn(4, 2)
ADAPTER = {"x.q_proj.lora_A.weight": A, "x.q_proj.lora_B.weight": B}


def base(dtype=torch.float32):
    weights = {
        "x.q_proj.weight": torch.randn(4, 6),
        "x.norm.weight": torch.ones(6),
        "x.k_proj.weight": torch.ones(4, 6),
    }
    return {name: weight.to(dtype) for name, weight in weights.items()} | {"x.ids": torch.arange(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_float64_and_the_base_does_not_move(dtype):
    weights = base(dtype)
    before = {name: weight.clone() for name, weight in weights.items()}
    made = dict(merged(weights.items(), ADAPTER, lambda _: 1.5))
    want = before["x.q_proj.weight"].double() + 1.5 * B.double() @ A.double()
    assert made.keys() == weights.keys()
    assert torch.equal(made["x.q_proj.weight"], want.float().to(dtype)) or (
        dtype is torch.float32 and torch.allclose(made["x.q_proj.weight"].double(), want, atol=1e-6)
    )
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert all(torch.equal(made[name], before[name]) for name in weights if name != "x.q_proj.weight")


def test_another_type_is_for_all_floats():
    made = dict(merged(base().items(), ADAPTER, lambda _: 1.0, dtype=torch.bfloat16))
    assert {name: t.dtype for name, t in made.items() if t.dtype != torch.bfloat16} == {"x.ids": torch.int64}


def test_what_does_not_fit_is_refused():
    with pytest.raises(UnknownTensorError, match=r"the base lacks x.q_proj.weight \(1 such\)"):
        list(merged([("y.weight", torch.ones(1))], ADAPTER, lambda _: 1.0))
    for wrong in (torch.ones(6, 4), torch.ones(4, 6, dtype=torch.int8)):
        with pytest.raises(UnknownTensorError, match="belongs to another base"):
            list(merged([("x.q_proj.weight", wrong)], ADAPTER, lambda _: 1.0))
    assert adapted_weights(ADAPTER) == {"x.q_proj.weight"}


@pytest.mark.parametrize(("std", "unmoved"), [(1e-4, (0.5, 0.99)), (1e-1, (0.0, 0.05))])
def test_the_loss_of_the_cast_by_a_loop_over_elements(std, unmoved):
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(24, 32, generator=generator).bfloat16()
    delta = 0.05 * std * torch.randn(24, 32, generator=generator)
    delta[0] = 0
    loss = CastLoss()
    loss.add(weight, delta)
    same = touched = 0
    along = lost = whole = 0.0
    for w, d in zip(weight.flatten(), delta.flatten(), strict=True):
        stored = (w.double() + d.double()).float().bfloat16()
        moved = float(stored.double() - w.double())
        touched += d != 0
        same += d != 0 and float(stored) == float(w)
        along, lost, whole = along + moved * float(d), lost + (moved - float(d)) ** 2, whole + float(d) ** 2
    assert loss.unmoved == pytest.approx(int(same) / int(touched))
    assert (loss.survives, loss.error) == pytest.approx((along / whole, (lost / whole) ** 0.5), rel=1e-4)
    assert unmoved[0] <= loss.unmoved <= unmoved[1]
    assert CastLoss().survives == 1.0


def test_nothing_is_lost_in_float32():
    loss = CastLoss(dtype=torch.float32)
    loss.add(torch.zeros(3, 3), torch.full((3, 3), 1e-3))
    assert (loss.survives, loss.error, loss.unmoved) == (pytest.approx(1.0), 0.0, 0.0)


def test_the_losses_of_several_ranks_add_up_and_rows_stand_for_a_weight():
    generator = torch.Generator().manual_seed(3)
    weights = [0.02 * torch.randn(200, 32, generator=generator).bfloat16() for _ in range(2)]
    deltas = [1e-4 * torch.randn(200, 32, generator=generator) for _ in range(2)]
    whole, total = CastLoss(), CastSums()
    for weight, delta in zip(weights, deltas, strict=True):
        whole.add(weight, delta)
        one = CastLoss()
        one.add(weight, delta)
        total.include(one.sums())
    assert (total.survives, total.error, total.unmoved) == pytest.approx((whole.survives, whole.error, whole.unmoved))
    sampled = CastLoss(rows=64)
    sampled.add(weights[0], deltas[0])
    assert sampled.elements == 50 * 32, "every fourth row of 200"
    assert sampled.error == pytest.approx(whole.error, rel=0.15)
