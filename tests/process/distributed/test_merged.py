"""Merged weights are base + alpha / rank * B @ A in every layout, of the version at the call; the base stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.merged_ranks import SEEDS, publish_many
from tests.support.distributed.oracle import ALPHA, EXPERTS, LAYERS, OUTER, RANK, SHARED, make_model
from tests.support.distributed.spawn import run_ranks
from tests.support.sizes import sample, size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSIONS, VERSIONS_OF_FOUR = size(12, 200), 6
EVERY = [
    Case("tp2 ep2", 2, "moe", tp=2, ep=2),
    Case("tp2 ep2, one adapter for all experts", 2, f"moe{SHARED}", tp=2, ep=2),
    Case("tp2, lora_A of gate and up shared", 2, f"moe{OUTER}", tp=2),
    Case("ep2, lora_A of gate and up shared", 2, f"moe{OUTER}", ep=2),
    Case("tp2 ep2, lora_A of gate and up shared", 2, f"moe{OUTER}", tp=2, ep=2),
    Case("fsdp2", 2, "moe", engine="fsdp"),
    Case("fsdp2, lora_A of gate and up shared", 2, f"moe{OUTER}", engine="fsdp"),
    Case("ep4, lora_A of gate and up shared", 4, f"moe{OUTER}", ep=4),
    Case("ep2 etp2, lora_A of gate and up shared", 4, f"moe{OUTER}", ep=2, etp=2, tp=2),
    Case("fsdp4, lora_A of gate and up shared", 4, f"moe{OUTER}", engine="fsdp"),
    Case("tp2, two replicas", 4, f"moe{OUTER}", tp=2),
    Case("ep2, two replicas", 4, f"moe{SHARED}", ep=2),
    Case("tp2 pp2", 4, "moe", tp=2, pp=2),
]


def kinds(case: Case) -> Iterator[object]:
    """What a sample has at least one layout of."""
    yield case.expert_layout
    yield case.engine, case.world
    yield "replicas of", case.tp, case.world // math.lcm(case.tp, case.ep * case.etp) > case.pp
    yield from (name for name, n in (("tp", case.tp), ("ep", case.ep), ("etp", case.etp)) if n > 1)


CASES = sample(EVERY, 0, kinds)
World = tuple[dict[str, np.ndarray], dict[str, list[dict[str, Any]]]]
"""Weights of the base, and by layout what each rank has seen."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    tmp = tmp_path_factory.mktemp("merged")
    path = make_model(tmp, "moe")
    (tmp / "ranks").mkdir()
    seen: dict[str, list[dict[str, Any]]] = {}
    for n, versions in ((2, VERSIONS), (4, VERSIONS_OF_FOUR)):
        cases = [case for case in CASES if case.world == n]
        ranks = run_ranks(publish_many, n, tmp / "ranks", (path, cases, versions))
        seen |= {case.name: [rank[case.name] for rank in ranks] for case in cases}
    return load_file(Path(path) / "model.safetensors"), seen


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_weight_is_what_a_float64_oracle_says(world: World, case: Case) -> None:
    base, seen = world
    found = seen[case.name]
    names = found[0]["names"]
    assert len(names) == len(set(names)) == LAYERS * (4 + 3 * EXPERTS)
    for seed in range(SEEDS):
        weights = {n: w for rank in found for n, w in rank["weights"][seed].items()}
        assert sorted(weights) == sorted(names), "every weight is sent, by one rank"
        assert sum(len(rank["weights"][seed]) for rank in found) == len(names)
        adapter, aliases = found[0]["adapters"][seed], found[0]["aliases"]
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            a, b = (adapter[aliases.get(n, n)] for n in (f"{module}.lora_A.weight", f"{module}.lora_B.weight"))
            delta = ALPHA / RANK * b.astype(np.float64) @ a.astype(np.float64)
            assert np.abs(delta).max() > 0.01
            assert np.abs(weight - (base[name].astype(np.float64) + delta)).max() < 1e-6, name


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_layout_sends_the_same_numbers_from_all_of_its_ranks(world: World, case: Case) -> None:
    """Bit for bit those of another layout with the same adapter; ranks that hold the same share the weights."""
    _, seen = world
    by_rank = [sum(w.nbytes for w in rank["weights"][0].values()) for rank in seen[case.name]]
    senders = case.ep * case.world // math.lcm(case.tp, case.ep * case.etp)
    assert sum(nbytes > 0 for nbytes in by_rank) == senders
    assert max(by_rank) < 1.3 * sum(by_rank) / senders
    for other in (other for other in CASES if other.expert_layout == case.expert_layout):
        for seed in range(SEEDS):
            mine, theirs = (
                {n: w.tobytes() for rank in seen[c.name] for n, w in rank["weights"][seed].items()}
                for c in (case, other)
            )
            assert mine == theirs


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_200_versions_leave_the_base_and_do_not_drift(world: World, case: Case) -> None:
    """On two ranks at night; fewer in the suite, and on four."""
    for found in world[1][case.name]:
        assert found["base"], "the model that trains is the same, bit for bit"
        assert found["digests"] == dict.fromkeys(range(SEEDS), 1), "equal adapters give equal bytes in every version"
        assert found["survives"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_late_reader_gets_the_version_of_the_call(world: World, case: Case) -> None:
    assert [found["late"] for found in world[1][case.name]] == [[True] * SEEDS] * case.world


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_an_error_in_the_middle_names_the_tensor(world: World, case: Case) -> None:
    """What was broken off before left the base and the next versions alone: see the tests above."""
    reasons = [found["broken"] for found in world[1][case.name]]
    assert any("down_proj.weight is in no safetensors file" in reason for reason in reasons)
