"""The training state is independent of its layout: bit for bit the same after other layouts (contracts C4, C9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.oracle import SHARED, make_model
from tests.support.distributed.spawn import run_ranks
from tests.support.distributed.state_ranks import begin, carry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KINDS = ("moe", f"moe{SHARED}")


def cases(kind: str) -> list[Case]:
    every = [
        Case("ep2", 2, kind, ep=2),
        Case("tp2", 2, kind, tp=2),
        Case("pp2", 2, kind, pp=2, stages=(1, 3)),
        Case("pp2_virtual", 2, kind, pp=2, stages=(1, 1, 1, 1)),
        Case("etp2", 2, kind, etp=2),
        Case("fsdp2", 2, kind, engine="fsdp"),
        Case("dp2", 2, kind),
    ]
    # Only splits of experts, and the engine, concern what experts share.
    return [case for case in every if kind == "moe" or case.name in ("ep2", "etp2", "fsdp2")]


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    tmp = tmp_path_factory.mktemp("state")
    path = make_model(tmp, "moe")
    found = {}
    for kind in KINDS:
        folder = tmp / f"{kind}-worlds"
        folder.mkdir()
        seen = run_ranks(begin, 1, folder, (path, Case("one", 1, kind)))[0]
        steps = run_ranks(carry, 2, folder, (path, cases(kind), seen["state"]))
        last = steps[0][cases(kind)[-1].name]["state"]
        (folder / "back").mkdir()
        back = run_ranks(carry, 1, folder / "back", (path, [Case("back", 1, kind)], last))[0]
        found[kind] = {"begin": seen, "ranks": steps, "back": back["back"]}
    return found


def equal(one: Any, other: Any) -> bool:
    (step, a), (other_step, b) = one, other
    return (
        step == other_step
        and a.keys() == b.keys()
        and all(a[p].keys() == b[p].keys() and all(a[p][n].tobytes() == b[p][n].tobytes() for n in a[p]) for p in a)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_exports_what_it_was_given(journeys: Any, kind: str) -> None:
    journey = journeys[kind]
    want = journey["begin"]["state"]
    assert want[0] == 2
    assert all(np.abs(t).max() > 0 for name, t in want[1]["exp_avg_sq"].items() if "lora_B" in name and ".0." in name)
    for case in cases(kind):
        for rank in journey["ranks"]:
            assert equal(rank[case.name]["state"], want), case.name
    assert equal(journey["back"]["state"], want)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_nothing_had_happened(journeys: Any, kind: str) -> None:
    journey = journeys[kind]
    assert equal(journey["back"]["moved"], journey["begin"]["moved"])
    assert journey["back"]["after"] == journey["begin"]["after"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_layouts_go_on_within_rounding(journeys: Any, kind: str) -> None:
    """Adam with lost moments, or a clock at 0, would take other steps: of another size by far."""
    journey = journeys[kind]
    before, want = journey["begin"]["state"][1]["weight"], journey["begin"]["moved"][1]["weight"]
    largest = max(float(np.abs(want[n] - before[n]).max()) for n in want)
    for case in cases(kind):
        seen = journey["ranks"][0][case.name]
        assert [s["lr"] for s in seen["after"]] == [s["lr"] for s in journey["begin"]["after"]]
        moved = seen["moved"][1]["weight"]
        error = max(float(np.abs(moved[n] - want[n]).max()) for n in want)
        assert error < 2e-3 * largest, (case.name, error, largest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(journeys: Any, kind: str) -> None:
    seen = journeys[kind]["begin"]
    assert seen["refused"]["missing"][0] == "UnknownTensorError"
    assert "1 missing" in seen["refused"]["missing"][1]
    assert seen["refused"]["shape"][0] == "AdapterError"
    assert equal(seen["untouched"], seen["moved"])
