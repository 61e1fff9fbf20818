"""Samples of broad matrices: drawn by the commit, one of each kind, the same in every process of a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import pytest_report_header
from tests.support import sizes
from tests.support.paths import ROOT
from tests.support.sizes import VARIABLE, sample, seed

CASES = [(family, n) for family in ("dense", "moe", "critic") for n in range(20)]


def draw(monkeypatch: pytest.MonkeyPatch, by: str, suite: int = 5) -> list[tuple[str, int]]:
    monkeypatch.setenv(VARIABLE, by)
    return sample(CASES, suite, lambda case: [case[0], ("first", case[1] == 0)], nightly=False)


def test_a_sample_has_one_of_each_kind_in_the_order_of_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for by in map(str, range(50)):
        drawn = draw(monkeypatch, by)
        assert {family for family, _ in drawn} == {"dense", "moe", "critic"}
        assert any(n == 0 for _, n in drawn)
        assert len(drawn) == 5
        assert drawn == sorted(drawn, key=CASES.index)
        assert len(draw(monkeypatch, by, suite=1)) in (3, 4), "kinds come first"


def test_no_case_of_a_sample_of_kinds_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for by in map(str, range(50)):
        drawn = draw(monkeypatch, by, suite=0)
        for one in drawn:
            others = [case for case in drawn if case != one]
            assert len({family for family, _ in others}) + len({n == 0 for _, n in others}) < 5


def test_with_a_cost_a_sample_is_cheaper_and_has_one_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(cost: Callable[[int], float] | None) -> list[int]:
        drawn = []
        for by in map(str, range(50)):
            monkeypatch.setenv(VARIABLE, by)
            drawn.append(sample(range(60), 0, lambda n: [n % 3], nightly=False, cost=cost))
        assert all({n % 3 for n in chosen} == {0, 1, 2} for chosen in drawn)
        return [sum(chosen) for chosen in drawn]

    assert sum(costs(float)) < 0.75 * sum(costs(None))


def test_commits_reach_all_cases_and_one_commit_draws_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [draw(monkeypatch, str(by)) for by in range(100)]
    assert {case for cases in drawn for case in cases} == set(CASES)
    assert draw(monkeypatch, "7") == drawn[7]
    assert sample(CASES, 1, nightly=True) == CASES
    assert sample(CASES, 100, nightly=False) == CASES


def test_what_a_run_draws_by_is_the_commit_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    words = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "none"
    assert seed() == commit
    code = "from tests.support.sizes import seed; print(seed())"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == commit
    monkeypatch.setattr(sizes, "ROOT", ROOT.parent / "nowhere")
    assert seed() == commit, "what was drawn by remains"
    monkeypatch.delenv(VARIABLE)
    assert seed() == "none", "outside git"


def test_the_head_of_the_output_says_how_to_draw_again() -> None:
    assert f"{VARIABLE}={seed()}" in pytest_report_header()
