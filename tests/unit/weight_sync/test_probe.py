"""The truth check as arithmetic: what it must find, and what it must never call wrong."""

from __future__ import annotations

import random

import pytest

from areal_lora.errors import ParityError
from areal_lora.weight_sync.probe import ProbeExpectation, check_probe
from tests.support.sizes import size
from tests.support.weight_sync.helpers import ref

IDS = [[1, 2, 3], [4, 5]]
MINE = [[0.0, -1.0, -2.0], [0.0, -3.0]]
BASE = [[0.0, -1.5, -2.5], [0.0, -3.5]]


def check(served, *, mine=MINE, base=BASE, tolerance=1e-4):
    expected = ProbeExpectation(token_ids=IDS, logprobs=mine, base=BASE)
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
    check(BASE, mine=BASE)  # version 0: B is zero, so equal to base is right


def test_a_server_without_a_base_is_compared_with_the_trainer_and_the_version_before():
    assert check(MINE, base=None).differs
    with pytest.raises(ParityError, match="mean"):
        check(BASE, base=None)


def test_a_cast_that_loses_the_adapter_is_no_lost_version():
    """What bfloat16 swallows of a merged adapter must not look like an adapter that did not arrive."""
    expected = ProbeExpectation(token_ids=IDS, logprobs=MINE, base=BASE, lossy=True)
    check_probe(ref(3), "s:1", expected, BASE, BASE, 1.0)
    with pytest.raises(ParityError, match="mean"):
        check_probe(ref(3), "s:1", expected, BASE, BASE, 1e-4)


def test_a_probe_without_tokens_proves_nothing():
    with pytest.raises(ParityError, match="no token"):
        check_probe(
            ref(0), "s", ProbeExpectation(token_ids=[[1]], logprobs=[[0.0]], base=[[0.0]]), [[0.0]], [[0.0]], 1.0
        )


TIE = 0.496  # nats by which one token differed in a real run


def drawn(rng: random.Random, std: float, n: int = 4, length: int = 32) -> list[list[float]]:
    return [[0.0, *(rng.gauss(0.0, std) for _ in range(length - 1))] for _ in range(n)]


def plus(*terms):
    return [[sum(xs) for xs in zip(*rows, strict=True)] for rows in zip(*terms, strict=True)]


class Case:
    """A trainer and a right server whose kernels disagree by ``kernels``, an adapter whose effect is ``effect``.

    ``jitter`` is what the server's batching adds to every score it gives, ``wobble`` the trainer's own. ``rounding``
    is that of each version on each side, always the same, as in bfloat16; the probe holds every context four times.
    ``first``: the version before is version 0, which is the base. Without ``parent`` it is not known. ``routed``: in
    one sequence the trainer's new version, and only it, chooses another expert.
    """

    def __init__(
        self,
        seed,
        *,
        effect=1e-3,
        kernels=1e-2,
        jitter=0.0,
        wobble=0.0,
        step=1.0,
        rounding=0.0,
        first=False,
        parent=True,
        routed=False,
    ):
        self.rng = random.Random(seed)
        self.jitter, self.wobble, self.rounding, self.rounded = jitter, wobble, rounding, {}
        self.first, self.parent, self.routed = first, parent, routed
        self.tie = drawn(self.rng, 0.0, n=2) + drawn(self.rng, TIE if routed else 0.0, n=1) + drawn(self.rng, 0.0, n=1)
        truth, self.moved = [[0.0] + [-1.5] * 31] * 4, drawn(self.rng, effect)
        self.older = [[x * (1 - step) for x in row] for row in self.moved] if step < 1 else drawn(self.rng, effect)
        self.trainer, self.server = truth, plus(truth, drawn(self.rng, kernels))

    def check(self, serves="v", tolerance=0.05):
        """What the server says when it really serves ``v``, the ``base`` or the version ``before``."""
        shifts = {"v": self.moved, "base": drawn(self.rng, 0.0), "before": self.older}
        if self.first:
            shifts["before"] = shifts["base"]

        def rounded(side, what):
            what = "base" if what == "before" and self.first else what
            return self.rounded.setdefault((side, what), drawn(self.rng, self.rounding, n=1) * 4)

        def trainer(what):
            return plus(self.trainer, shifts[what], drawn(self.rng, self.wobble), rounded("trainer", what))

        def server(what):
            return plus(self.server, shifts[what], drawn(self.rng, self.jitter), rounded("server", what))

        expected = ProbeExpectation(
            token_ids=[[1] * 32] * 4,
            logprobs=plus(trainer("v"), self.tie),
            base=trainer("base"),
            parent=ref(2) if self.parent else None,
            before=trainer("before") if self.parent else None,
            noise=3 * self.wobble,
            routed=self.routed,
        )
        return check_probe(ref(3), "s:1", expected, server(serves), server("base"), tolerance, server("before"))


@pytest.mark.parametrize("jitter", [0.0, 1e-6, 5e-5])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(("serves", "word"), [("base", "its base"), ("before", "a@v2")])
def test_an_adapter_far_below_the_tolerance_that_does_not_arrive_is_found_at_once(serves, word, routed, jitter):
    """Trainer and server disagree ten times as much as the adapter does anything; within the server that cancels."""
    for seed in range(30):
        with pytest.raises(ParityError, match=f"still answers like {word}"):
            Case(seed, jitter=jitter, routed=routed).check(serves)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jitter": 1e-6},
        {"jitter": 3e-4},
        {"jitter": 1e-3},
        {"jitter": 1e-2},
        {"effect": 1e-5, "jitter": 1e-5},
        {"effect": 1e-7, "jitter": 0.0},
        {"effect": 1e-7, "jitter": 1e-2},
        {"effect": 0.0},
        {"effect": 3e-2},
        {"effect": 0.0, "wobble": 1e-2},
        {"effect": 1e-3, "wobble": 1e-2},
        {"effect": 1e-2, "wobble": 1e-2},
        {"step": 0.01},
        {"step": 0.01, "jitter": 1e-5},
        {"step": 0.01, "jitter": 1e-3, "wobble": 1e-3},
        {"step": 0.1, "rounding": 2e-2},
        {"effect": 2e-2, "step": 0.1, "rounding": 2e-2},
        {"effect": 2e-2, "step": 0.1, "rounding": 2e-2, "parent": False},
        {"first": True, "step": 0.1, "rounding": 2e-2},
        {"routed": True, "rounding": 2e-2},
        {"routed": True, "jitter": 1e-2},
    ],
    ids=str,
)
def test_a_right_server_is_never_called_wrong(options):
    for seed in range(size(100, 400)):
        assert Case(seed, **options).check("v").compared < 0.05, f"seed {seed}"


@pytest.mark.parametrize(("serves", "word"), [("base", "its base"), ("before", "a@v2")])
def test_a_version_that_does_not_arrive_is_found_in_bfloat16_too(serves, word):
    """The same scores to the last bit are proof at any effect; with jitter, an effect above the rounding is found."""
    for seed in range(30):
        with pytest.raises(ParityError, match=f"still answers like {word}"):
            Case(seed, rounding=2e-2).check(serves)
        with pytest.raises(ParityError, match=f"still answers like {word}"):
            Case(seed, effect=0.5, rounding=2e-2, jitter=1e-2).check(serves, tolerance=9.0)


def test_where_nothing_is_known_of_the_version_before_only_the_base_counts():
    assert Case(1, parent=False).check("before").differs


@pytest.mark.parametrize("routed", [True, False])
def test_a_tie_between_experts_spoils_one_sequence_of_a_routed_model_only(routed):
    ids, mine = [[1] * 32] * 4, [[0.0] + [-1.5] * 31] * 4
    expected = ProbeExpectation(token_ids=ids, logprobs=mine, base=mine, routed=routed)
    served = [list(row) for row in mine]
    served[2][7] += TIE
    if not routed:
        with pytest.raises(ParityError, match="different policies"):
            check_probe(ref(3), "s:1", expected, served, mine, 1e-4)
        return
    result = check_probe(ref(3), "s:1", expected, served, mine, 1e-4)
    assert result.compared == 0.0
    assert result.mean_abs == pytest.approx(TIE / 124)
    served[0][9] += TIE  # two sequences of four: not a tie
    with pytest.raises(ParityError, match="different policies"):
        check_probe(ref(3), "s:1", expected, served, mine, 1e-4)


def test_weights_that_differ_are_found_in_a_routed_model_too():
    for seed in range(30):
        rng = random.Random(seed)
        mine = drawn(rng, 0.5)
        expected = ProbeExpectation(token_ids=[[1] * 32] * 4, logprobs=mine, base=mine, routed=True)
        with pytest.raises(ParityError, match="different policies"):
            check_probe(ref(3), "s:1", expected, plus(mine, drawn(rng, 3e-4)), mine, 1e-4)
