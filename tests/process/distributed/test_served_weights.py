"""Scores by the weights that servers hold, in every way to divide a model, against transformers in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.distributed.engine_ranks import Case, make_rows
from tests.support.distributed.oracle import OUTER, make_model, random_adapter
from tests.support.distributed.served_ranks import KINDS, ONLY, score_as_served
from tests.support.distributed.spawn import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
CASES = [
    Case("tp2 ep2", 2, "moe", tp=2, ep=2),
    Case("etp2", 2, f"moe{OUTER}", etp=2, budget=75),
    Case("pp2, virtual", 2, "moe", pp=2, stages=(1, 1, 1, 1), budget=60),
    Case("cp2", 2, "dense", cp=2, budget=75),
    Case("shared expert, tp2", 2, "qwen2_moe", tp=2),
    Case("fsdp2", 2, "moe", engine="fsdp", budget=75),
    Case("fsdp2, shared expert", 2, "qwen2_moe", engine="fsdp", budget=75),
    Case("fsdp2, cp2", 2, "dense", engine="fsdp", cp=2, budget=75),
]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""A server has one matrix of each."""


@cache
def magnitudes() -> np.ndarray:
    """All that float8_e4m3fn has, sorted: 3 bits of mantissa, exponents from -6 to 8, 448 is the largest."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    return np.array(small + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1])


def nearest(x: np.ndarray) -> np.ndarray:
    """Ties to the even mantissa."""
    table = magnitudes()
    bounds = (table[1:] + table[:-1]) / 2
    at = np.searchsorted(bounds, np.abs(x))
    tie = (np.abs(x) == bounds[np.minimum(at, len(bounds) - 1)]) & (at % 2 == 1)
    return np.sign(x) * table[at + tie]


def rounded(weights: list[np.ndarray], kind: str) -> list[np.ndarray]:
    """Of matrices that a server holds as one, in fp32; a channel is divided by its scale, a matrix multiplied."""
    whole = np.concatenate(weights)
    if kind == "fp8_per_channel":
        scale = np.abs(whole).max(1, keepdims=True) / np.float32(448)
        found = nearest(whole / scale).astype(np.float32) * scale
    else:
        scale = np.abs(whole).max() / np.float32(448)
        found = nearest(whole * (np.float32(1) / scale)).astype(np.float32) * scale
    return np.split(found, np.cumsum([len(w) for w in weights])[:-1])


def quantise(model: Any, kind: str) -> None:
    """Linear layers of attention, of MLPs, and of experts; neither routers nor gates, embeddings nor the output."""
    weights = {name: p.detach().float().numpy() for name, p in model.named_parameters()}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in weights:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf.endswith("_proj") and not name.endswith("bias"):
            alike = next((names for names in FUSED if leaf in names), (leaf,))
            groups.setdefault((parent, *alike), []).append(name)
    for names in groups.values():
        parts = [weights[name] for name in names]
        if parts[0].ndim == 3:
            found = [np.stack([rounded([matrix], kind)[0] for matrix in parts[0]])]
        else:
            found = rounded(parts, kind)
        for name, values in zip(names, found, strict=True):
            model.get_parameter(name).data.copy_(torch.from_numpy(values))


@cache
def truth(path: str, kind: str) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    if kind != "base":
        quantise(model, kind)
    scores: list[Tensor] = []
    with torch.no_grad():
        for row in make_rows():
            logp = model(torch.tensor([row])).logits[0].log_softmax(-1)[:-1]
            scores += [torch.zeros(1), logp.gather(1, torch.tensor(row)[1:, None])[:, 0]]
    return torch.cat(scores).numpy()


World = tuple[dict[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Paths of the models, and what each rank has seen."""
    tmp: Path = tmp_path_factory.mktemp("served")
    paths = {kind: make_model(tmp, kind) for kind in {case.model for case in CASES}}
    wires = {kind: {n: t.numpy() for n, t in random_adapter(kind, 9).items()} for kind in {c.kind for c in CASES}}
    (tmp / "ranks").mkdir()
    return paths, run_ranks(score_as_served, 2, tmp / "ranks", (paths, CASES, wires))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_scores_are_those_of_the_weights_that_servers_hold(world: World, case: Case) -> None:
    paths, seen = world
    found, path = seen[0][case.name], paths[case.model]
    for kind in KINDS[:2]:
        wanted = truth(path, kind)
        assert np.abs(wanted - truth(path, "base")).mean() > 100 * TOLERANCE
        assert np.abs(found[kind] - wanted).max() < TOLERANCE, kind
    assert np.abs(found["lora"] - truth(path, "base")).mean() > 100 * TOLERANCE
    assert np.abs(found["merged"] - found["lora"]).max() < TOLERANCE
    assert [rank[case.name]["moved"] for rank in seen] == [[], []], "the base is as it was"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_of_a_few_sequences_the_micro_batches_that_have_them_are_scored(world: World, case: Case) -> None:
    found, rows = world[1][0][case.name], make_rows()
    bounds = np.cumsum([0, *map(len, rows)])[1:-1]
    for few, every in (("only", "lora"), ("only served", KINDS[0])):
        scored = [bool(own.any()) for own in np.split(found[few], bounds)]
        assert scored[ONLY]
        assert not all(scored)
        for own, whole, there in zip(np.split(found[few], bounds), np.split(found[every], bounds), scored, strict=True):
            assert np.abs(own - whole).max() < TOLERANCE or not there
