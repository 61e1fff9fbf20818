"""Planted causes, each alone and all together: each has its own part, and the parts add up to the whole."""

from __future__ import annotations

import copy
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_lora.algorithms.mismatch import split
from tests.support.families.tiny_families import save

CAUSES = ("record", "staleness", "replay", "numerics")
Parts = dict[str, tuple[float, float]]


def parts_of(recorded: Tensor, sampled: Tensor, current: Tensor, own: Tensor, trained: Tensor) -> Parts:
    """With the sums checked against the definitions of the whole."""
    pairs = (recorded, trained), (sampled, trained), (current, trained), (current, own)
    found = {cause: (part.gap, part.kl) for cause, part in split(dict(zip(CAUSES, pairs, strict=True))).items()}
    d = trained - recorded
    assert sum(gap for gap, _ in found.values()) == pytest.approx(float(d.abs().mean()), rel=1e-9, abs=1e-15)
    assert sum(kl for _, kl in found.values()) == pytest.approx(float(d.square().mean()) / 2, rel=1e-9, abs=1e-15)
    return found


def only(cause: str, parts: Parts) -> float:
    """The divergence of a cause where no other has a part."""
    assert [part for other, part in parts.items() if other != cause] == [(0.0, 0.0)] * 3
    return parts[cause][1]


def test_planted_noise_is_on_the_line_of_its_cause() -> None:
    """Also where each score of a server has rounding of its own, which is no other adapter and no staleness."""
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    generator, n = torch.Generator().manual_seed(seed), 400_000

    def noise() -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    planted = {"record": 0.03, "staleness": 0.06, "replay": 0.04, "numerics": 0.05}
    drawn, rounding = {cause: planted[cause] * noise() for cause in CAUSES}, [0.05 * noise() for _ in range(3)]

    def chain(*active: str, rounded: bool = False) -> Parts:
        record, stale, replay, numerics = (drawn[cause] * (cause in active) for cause in CAUSES)
        first, second, third = (x * rounded for x in rounding)
        own = torch.zeros(n, dtype=torch.float64)
        current = own - numerics * (not rounded)
        sampled = current - stale
        return parts_of(sampled - record + first, sampled + second, current + third, own, own + replay)

    together, coarse = chain(*CAUSES), chain(*CAUSES, rounded=True)
    for cause in CAUSES:
        assert only(cause, chain(cause)) == pytest.approx(planted[cause] ** 2 / 2, rel=0.02)
        assert together[cause][1] == pytest.approx(planted[cause] ** 2 / 2, rel=0.1)
        assert coarse[cause][1] == pytest.approx(planted[cause] ** 2 / 2, rel=0.1)


def test_a_cause_that_reduces_the_mismatch_has_a_part_below_zero() -> None:
    record, own, trained = torch.zeros(2), torch.tensor([0.3, -0.2]), torch.tensor([0.1, 0.0])
    found = parts_of(*(x.double() for x in (record, record, record, own, trained)))
    assert found["numerics"][0] == pytest.approx(0.25)
    assert found["replay"][0] == pytest.approx(-0.2)


def moved(model: Any, generator: torch.Generator, sign: int) -> None:
    """An adapter of rank 2 on attention."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            a, b = (torch.randn(*shape, generator=generator) for shape in ((2, weight.shape[1]), (weight.shape[0], 2)))
            weight.data += 0.006 * sign * (b @ a).to(weight.dtype)


def quantised(model: Any) -> None:
    """Seven bits a weight of attention and experts."""
    for name, weight in model.named_parameters():
        if "self_attn" in name or "experts" in name:
            step = weight.data.abs().amax() / 63
            weight.data = (weight.data / step).round() * step


def spoil_an_expert(model: Any, generator: torch.Generator, sign: int) -> None:
    """Of each layer."""
    for name, weight in model.named_parameters():
        if name.endswith("experts.down_proj"):
            weight.data[int(torch.randint(4, (1,), generator=generator))] *= 1 + 0.3 * sign


def routed(routes: Tensor, _: Any, __: Any, found: Any) -> Any:
    logits, weights, _ = found
    scores = logits.softmax(-1).gather(1, routes)
    return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), routes


def test_causes_planted_in_a_mixture_have_their_parts(tmp_path: Path) -> None:
    """Policies of a tiny model: servers of a quantised base, versions, a spoiled expert when an answer was sampled, and
    one of a hundred routes that differs. Else routes are fixed: near a tie every cause would flip them. Each adapter
    and each expert comes with its opposite: causes are not correlated by the chance of a few draws."""
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    whole = AutoModelForCausalLM.from_pretrained(
        save("qwen3_moe", tmp_path), dtype=torch.float64, experts_implementation="eager"
    ).eval()

    @cache
    def logprobs(draw: int, *, server: bool, newer: bool, spoiled: bool = False, flips: bool = False) -> Tensor:
        model = copy.deepcopy(whole)
        seeded = [torch.Generator().manual_seed(seed + draw // 4 * 4 + i) for i in range(4)]
        tokens = torch.randint(64, (8, 96), generator=seeded[0])
        if server:
            quantised(model)
        if newer:
            moved(model, seeded[1], 1 - draw % 2 * 2)
        if spoiled:
            spoil_an_expert(model, seeded[2], 1 - draw // 2 % 2 * 2)
        for gate in [module for name, module in model.named_modules() if name.endswith("mlp.gate")]:
            routes = torch.rand(tokens.numel(), 4, generator=seeded[3]).argsort(1)
            some = torch.rand(tokens.numel(), generator=seeded[3]) < 0.01
            routes[:, 0] = torch.where(some & flips, routes[:, 2], routes[:, 0])
            gate.register_forward_hook(partial(routed, routes[:, :2]))
        with torch.no_grad():
            found = model(tokens).logits.double().log_softmax(-1)
        return found[:, :-1].gather(2, tokens[:, 1:, None]).flatten()

    def chain(*active: str) -> Parts:
        server, stale, spoiled, flips = (c in active for c in ("numerics", "staleness", "record", "replay"))
        policies: list[dict[str, bool]] = [
            {"server": server, "newer": not stale, "spoiled": spoiled},
            {"server": server, "newer": not stale},
            {"server": server, "newer": True},
            {"server": False, "newer": True},
            {"server": False, "newer": True, "flips": flips},
        ]
        return parts_of(*(torch.cat([logprobs(draw, **of) for draw in range(48)]) for of in policies))

    together = chain(*CAUSES)
    for cause in CAUSES:
        alone = only(cause, chain(cause))
        print(cause, alone, together[cause][1] / alone)
        assert alone > 1e-4
        assert together[cause][1] == pytest.approx(alone, rel=0.1)
