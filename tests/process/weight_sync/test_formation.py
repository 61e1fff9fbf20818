"""Servers are killed while their group forms: real processes, real gloo, and no limit of time would end the wait."""

from __future__ import annotations

import pytest

from areal_lora.config.models import WeightSyncConfig
from tests.support.weight_sync import processes as ps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MOMENTS = ("invited", "connecting", "signed in")


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightSyncConfig, "form_s", 36_000.0)


def test_the_death_of_a_member_ends_the_formation_for_the_others() -> None:
    last = len(MOMENTS)
    tree = ps.Tree(range(last + 1), most=8)
    try:
        for n, moment in enumerate(MOMENTS):
            tree.servers[f"server-{n}"].ask("die", n + 1, moment)
        report = tree.end(tree.begin())
        assert (report.attempts, sorted(report.lost)) == (last + 1, ps.names(*range(last)))
        assert tree.told == [set(ps.names(*range(n, last + 1))) for n in range(last + 1)]
    finally:
        tree.close()


def test_the_death_of_a_member_ends_the_formation_below_a_relay() -> None:
    tree = ps.Tree(range(3), most=2)
    try:
        tree.servers["server-2"].ask("die", 1, "invited")
        report = tree.end(tree.begin())
        assert (report.attempts, list(report.lost)) == (2, ["server-2"])
        assert tree.told == [set(ps.names(0, 1, 2)), set(ps.names(0, 1))]
    finally:
        tree.close()
