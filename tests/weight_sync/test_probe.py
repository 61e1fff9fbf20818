from __future__ import annotations

import pytest

from areal_lora.errors import ParityError
from areal_lora.weight_sync.probe import ProbeExpectation, check_probe

from .helpers import ref

IDS = [[1, 2, 3], [4, 5]]
MINE = [[0.0, -1.0, -2.0], [0.0, -3.0]]
BASE = [[0.0, -1.5, -2.5], [0.0, -3.5]]


def check(served, *, mine=MINE, base=BASE, differs=True, tolerance=1e-4):
    expected = ProbeExpectation(token_ids=IDS, logprobs=mine, differs=differs)
    return check_probe(ref(3), "s:1", expected, served, base, tolerance)


def test_equal_scores_pass_and_entry_zero_is_ignored():
    result = check([[9.0, -1.0, -2.00003], [7.0, -3.0]])
    assert result.mean_abs == pytest.approx(1e-5)
    assert result.max_abs == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("served", "word"),
    [
        ([[0.0, -1.0, -2.001], [0.0, -3.0]], "mean"),
        ([[0.0, -1.0], [0.0, -3.0]], "lengths"),
        ([[0.0, -1.0, float("nan")], [0.0, -3.0]], "finite"),
        (BASE, "base"),
    ],
)
def test_disagreement_is_an_error_naming_version_and_server(served, word):
    with pytest.raises(ParityError, match=word) as e:
        check(served)
    assert "a@v3 on server s:1" in str(e.value)


def test_a_server_that_equals_its_base_is_caught_within_the_tolerance_too():
    with pytest.raises(ParityError, match="does not reach"):
        check(BASE, tolerance=100.0)
    check(BASE, mine=BASE, differs=False)  # version 0: B is zero, so equal to base is right


def test_a_probe_without_tokens_proves_nothing():
    with pytest.raises(ParityError, match="no token"):
        check_probe(
            ref(0), "s", ProbeExpectation(token_ids=[[1]], logprobs=[[0.0]], differs=False), [[0.0]], [[0.0]], 1.0
        )
