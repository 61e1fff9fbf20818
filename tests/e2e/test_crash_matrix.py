"""SIGKILL at named points of a step: nothing lost, nothing twice, at most one step again. Nightly all, five seeds each.

A run per seed and victim: its trainer, controller or server dies once at each of some of its points, in an order
and at an occurrence that the seed draws, and the run goes on to its last step. The commit deals out the policies of
sequences in flight, and to half of the runs episodes in workers that die, too.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, get_args

import pytest

from areal_lora.config.sections.run import InFlight
from tests.support.e2e.crash_judge import Damage, judge
from tests.support.e2e.crash_run import POINTS, CrashRun, execute
from tests.support.sizes import sample, seed, size

SEEDS = range(1, 1 + size(1, 5))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOST, MOST_JOINED = size(3, 99), size(1, 99)
"""Points of each victim in a run with one adapter, and with several."""
VICTIMS = sample(POINTS, 1)
"""Of a run with several adapters."""
BEHIND = 3


def ways() -> Iterator[dict[str, Any]]:
    """How a run samples, dealt out evenly. The first five have each policy, with and without workers."""
    rng = random.Random(seed())
    every = list(itertools.product(get_args(InFlight), (False, True)))
    while True:
        yield from ({"in_flight": policy, "workers": workers} for policy, workers in rng.sample(every, len(every)))


Judged = dict[str, list[tuple[CrashRun, Future[list[Damage]]]]]


def judged(run: CrashRun) -> list[Damage]:
    return judge(execute(run))


@pytest.fixture(scope="module")
def judgements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """All runs of this file, two at a time."""
    root, way = tmp_path_factory.mktemp("crashes"), ways()

    def make(**what: Any) -> CrashRun:
        return CrashRun(root=root, **what, **next(way))

    runs = {
        "alone": [make(victim=victim, seed=seed, most=MOST) for seed in SEEDS for victim in POINTS],
        "behind": [make(victim="trainer", seed=seed, behind=BEHIND) for seed in SEEDS],
        "joined": [make(victim=v, seed=seed, joined=2, most=MOST_JOINED) for seed in SEEDS for v in VICTIMS],
    }
    with ThreadPoolExecutor(2) as two_cores:
        yield {kind: [(run, two_cores.submit(judged, run)) for run in each] for kind, each in runs.items()}


def damages_of(judgements: Judged, kind: str) -> list[Damage]:
    damages = [damage for _, judgement in judgements[kind] for damage in judgement.result()]
    walls = ", ".join(f"{run.folder.name} {run.wall_s:.0f} s" for run, _ in judgements[kind])
    print(f"\n{len(damages)} kills in {len(judgements[kind])} runs: {walls}")
    return damages


def test_a_death_at_any_point_costs_at_most_one_step(judgements: Judged) -> None:
    damages = damages_of(judgements, "alone")
    print(f"{'killed at':36} kills  steps again  next step after (s)")
    for point in (p for points in POINTS.values() for p in sample(points, MOST)):
        here = [d for d in damages if d.kill.point == point]
        assert len(here) == len(SEEDS)
        took_s = [d.recovery_s for d in here if d.recovery_s is not None]
        lost = [d.lost_steps for d in here]
        print(
            f"{point:36} {len(here):5}  {sum(lost):4} of {len(lost):2}    "
            f"p50 {statistics.median(took_s):.1f}  max {max(took_s):.1f}"
        )
        assert max(lost) <= 1


def test_steps_that_were_not_durable_are_taken_again(judgements: Judged) -> None:
    """No prompt is lost or counted twice, whatever servers have made of the versions that are lost."""
    damages = damages_of(judgements, "behind")
    for damage in damages:
        print(f"{damage.kill.point:36} {damage.kill.times} times: {damage.lost_steps} steps again")
    assert 1 < max(damage.lost_steps for damage in damages) <= 1 + BEHIND


def test_a_death_beside_two_adapters_that_joined_costs_each_at_most_one_step(judgements: Judged) -> None:
    damages = damages_of(judgements, "joined")
    assert len(damages) == len(SEEDS) * sum(min(MOST_JOINED, len(POINTS[victim])) for victim in VICTIMS)
    for damage in damages:
        print(f"{damage.kill.point:36} {damage.kill.times} times: {damage.lost_steps} steps again")
        assert damage.lost_steps <= 1
