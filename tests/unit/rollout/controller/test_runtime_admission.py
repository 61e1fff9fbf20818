"""Whose group starts next, with adapters that only count, and the two queues of a run together in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from areal_lora.rollout.controller.runtime import RECENT, Admission, Capacity, Claim
from tests.support.rollout.sharing import Profile, Sharing
from tests.support.sizes import sample, size

ENDLESS = 1 << 30


@dataclass
class Adapter:
    """Has ``left`` groups to start; the oldest one in flight ends first."""

    left: int
    running: int = 0
    idle: bool = False
    ended: list[int | None] = field(default_factory=list)
    claim: Claim = field(default_factory=lambda: Claim(sequences=8, groups=4, weight=2.0))
    fill: float = 1.0

    @property
    def places(self) -> float:
        return self.claim.sequences * self.fill

    def start_one(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.running += 1
        return True

    def end(self, tokens: int | None = 8) -> None:
        """A group ends, without an answer if ``tokens`` is None."""
        self.running -= 1
        self.ended.append(tokens)


def queue(claims: dict[str, Claim], adapters: dict[str, Adapter]) -> Admission:
    for name, adapter in adapters.items():
        adapter.claim = claims[name]
    return Admission(adapters)


def admit(sequences: int, claims: dict[str, Claim], adapters: dict[str, Adapter]) -> dict[str, int]:
    admission = queue(claims, adapters)
    admission.sequences = sequences
    admission.admit()
    return {name: adapter.running for name, adapter in adapters.items()}


def claims(**weights: float) -> dict[str, Claim]:
    return {name: Claim(sequences=8, groups=4, weight=weight) for name, weight in weights.items()}


def test_one_adapter_has_all_places() -> None:
    """As many groups as begin while there is room: the last one may be larger than what is left."""
    assert admit(64, claims(a=1.0), {"a": Adapter(100)}) == {"a": 8}
    assert admit(65, claims(a=1.0), {"a": Adapter(100)}) == {"a": 9}


def test_a_group_counts_the_places_that_its_answers_have_on_average() -> None:
    assert admit(64, claims(a=1.0), {"a": Adapter(100, fill=0.5)}) == {"a": 16}
    assert admit(64, claims(a=1.0, b=1.0), {"a": Adapter(100, fill=0.5), "b": Adapter(2)}) == {"a": 12, "b": 2}
    capacity = Capacity(sequences=64, n_samples=8)
    assert capacity.groups(2) == 16
    for _ in range(20 * RECENT):
        capacity.answered([4, 4, 4, 4, 4, 4, 4, 8])  # 36 of 64 tokens
    assert capacity.fill == pytest.approx(36 / 64)
    assert capacity.groups(2) == math.ceil(16 * 64 / 36)
    for _ in range(20 * RECENT):
        capacity.answered([1, 1, 1, 1, 1, 1, 1, 100])
    assert capacity.fill == pytest.approx(0.25)
    for lengths in [[0], [0, 0], [7]]:
        capacity.answered(lengths)
    assert 0.25 <= capacity.fill <= 1.0


def test_places_follow_the_weights_while_all_want_some() -> None:
    assert admit(8 * 14, claims(a=1.0, b=2.0, c=4.0), {n: Adapter(100) for n in "abc"}) == {"a": 2, "b": 4, "c": 8}


def test_places_that_nobody_else_wants_are_used() -> None:
    assert admit(8 * 14, claims(a=1.0, b=2.0, c=4.0), {"a": Adapter(100), "b": Adapter(1), "c": Adapter(0)}) == {
        "a": 13,
        "b": 1,
        "c": 0,
    }


def test_sequences_count_and_not_groups() -> None:
    made = {"a": Claim(sequences=16, groups=4, weight=1.0), "b": Claim(sequences=4, groups=4, weight=1.0)}
    assert admit(64, made, {"a": Adapter(100), "b": Adapter(100)}) == {"a": 2, "b": 8}


def test_a_newcomer_gets_the_places_that_come_free_until_it_has_its_part() -> None:
    adapters = {"a": Adapter(100), "b": Adapter(0, idle=True)}
    admission = queue(claims(a=1.0, b=1.0), adapters)
    admission.sequences = 64
    admission.admit()
    assert adapters["a"].running == 8
    adapters["b"].left, adapters["b"].idle = 100, False
    for _ in range(8):
        adapters["a"].end()  # the places that come free are of the one that had all
        admission.admit()
        assert sum(adapter.running for adapter in adapters.values()) == 8
        if adapters["b"].running == 4:
            break
    assert (adapters["a"].running, adapters["b"].running) == (4, 4)


@dataclass
class Noted(Adapter):
    """Puts its ``name`` into ``order`` with each group that starts."""

    name: str = ""
    order: list[str] = field(default_factory=list)

    def start_one(self) -> bool:
        begins = super().start_one()
        self.order += [self.name] * begins
        return begins


def slowly(admission: Admission, adapters: dict[str, Adapter]) -> None:
    """`Admission.admit` with the smallest time and the sum of the places looked for anew at every group."""
    admission._settle()
    candidates, waiting, accounts = list(adapters), list[str](), admission._accounts
    while candidates and sum(a.claim.sequences * a.running for a in adapters.values()) < admission.sequences:
        first = min(candidates, key=admission.time)
        start = admission.time(first)
        if adapters[first].start_one():
            for name in waiting:
                step = 0.0 if adapters[name].idle else accounts[name].claim.groups * accounts[name].estimate
                admission.catch_up(name, start, step)
        else:
            candidates.remove(first)
            waiting.append(first)


@pytest.mark.parametrize("seed", range(size(30, 600)))
def test_groups_start_in_the_order_of_times_and_of_adapters_at_equal_ones(seed: int) -> None:
    """Equal weights and few lengths make many times equal; adapters are added and have groups, or none, meanwhile."""
    print("seed", seed)
    started: list[list[str]] = []
    for admit in (lambda admission, _: admission.admit(), slowly):
        rng, order, adapters = random.Random(seed), list[str](), dict[str, Adapter]()
        admission = Admission(adapters)
        admission.sequences = rng.choice([8, 60, 400])
        for turn in range(60):
            if turn % 6 == 0:
                claim = Claim(sequences=rng.choice([1, 8, 8]), groups=4, weight=rng.choice([1.0, 1.0, 2.0]))
                adapters[f"{turn}"] = Noted(0, claim=claim, name=f"{turn}", order=order)
                admission.add(f"{turn}", adapters[f"{turn}"])
            for adapter in adapters.values():
                if rng.random() < 0.3:
                    adapter.left, adapter.idle = rng.choice([0, 1, 5, 50]), rng.random() < 0.1
                for _ in range(rng.randrange(adapter.running + 1)):
                    adapter.end(rng.choice([None, 8, 8, 16]))
            admit(admission, adapters)
            order.append("|")
        started.append(order)
    assert started[0] == started[1]
    assert len(started[0]) > 60 + 10, "of 60 turns"


@pytest.mark.parametrize("sequences", [0, 1])
def test_without_servers_nothing_starts(sequences: int) -> None:
    assert admit(sequences, claims(a=1.0), {"a": Adapter(9)}) == {"a": sequences}


# ---------------------------------------------------------------- over time


@dataclass
class Servers:
    """Places whose groups end in a random order, each after as many turns as it has tokens in a sequence."""

    admission: Admission
    adapters: dict[str, Adapter]
    tokens: dict[str, Callable[[], int]]
    claims: dict[str, Claim]
    turn: int = 0
    ends: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    had: Counter[str] = field(default_factory=Counter)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn += 1
            for name, adapter in self.adapters.items():
                due = self.ends.setdefault(name, [])
                while due and due[0][0] <= self.turn:
                    _, n = heapq.heappop(due)
                    adapter.end(n)
                    self.had[name] += n
            self.admission.admit()
            for name, adapter in self.adapters.items():
                while len(self.ends.setdefault(name, [])) < adapter.running:
                    n = self.tokens[name]()
                    heapq.heappush(self.ends[name], (self.turn + max(1, n // self.claims[name].sequences), n))

    @property
    def in_flight(self) -> int:
        return sum(self.claims[n].sequences * adapter.running for n, adapter in self.adapters.items())


def servers(rng: random.Random, weights: dict[str, float], places: int, left: int = ENDLESS) -> Servers:
    made = {n: Claim(sequences=rng.choice([1, 2, 8, 16]), groups=4, weight=w) for n, w in weights.items()}
    means = {n: rng.choice([4, 20, 100]) * made[n].sequences for n in weights}
    tokens = {n: (lambda n=n: max(1, round(means[n] * rng.uniform(0.3, 1.7)))) for n in weights}
    adapters = {n: Adapter(left) for n in weights}
    admission = queue(made, adapters)
    admission.sequences = places
    return Servers(admission, adapters, tokens, made)


@pytest.mark.parametrize(
    ("seed", "places"),
    sample(list(itertools.product(range(3), [1, 3, 8, 64, 200])), 5, lambda case: [f"{case[1]} places"]),
)
def test_tokens_follow_the_weights_whatever_the_places_lengths_and_groups(seed: int, places: int) -> None:
    """Within what is in flight, which no queue can take back, and without a place that stays free."""
    print(f"seed {seed}")
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    made = servers(random.Random(seed), weights, places)
    for _ in range(600):
        made.run(20)
        assert made.in_flight >= places
    largest = max(claim.sequences * 170 for claim in made.claims.values())
    slack = largest * (2 + max(adapter.running for adapter in made.adapters.values()))
    times = {n: made.had[n] / w for n, w in weights.items()}
    assert max(times.values()) - min(times.values()) <= slack
    if min(made.had.values()) > 40 * slack:
        for name, weight in weights.items():
            assert made.had[name] / made.had.total() == pytest.approx(weight / 7, rel=0.05)


def test_a_group_is_counted_with_its_tokens_once_they_are_known() -> None:
    """One place at a time, and answers ten times as long: a tenth of the groups."""
    made = claims(a=1.0, b=1.0)
    adapters = {"a": Adapter(ENDLESS), "b": Adapter(ENDLESS)}
    admission = queue(made, adapters)
    admission.sequences = 1
    had = Counter[str]()
    for _ in range(440):
        admission.admit()
        name = next(n for n, adapter in adapters.items() if adapter.running)
        adapters[name].end(1000 if name == "a" else 100)
        had[name] += 1
    assert had["b"] / had["a"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("tokens", [None, 0])
def test_groups_without_an_answer_or_without_tokens_are_not_free(tokens: int | None) -> None:
    adapters = {"a": Adapter(ENDLESS), "b": Adapter(ENDLESS)}
    admission = queue(claims(a=1.0, b=1.0), adapters)
    admission.sequences = 1
    had = Counter[str]()
    for _ in range(400):
        admission.admit()
        name = next(n for n, adapter in adapters.items() if adapter.running)
        adapters[name].end(8 if name == "a" else tokens)
        had[name] += 1
    assert had["a"] >= 40
    if tokens is None:
        assert had["a"] == pytest.approx(200, abs=2)


@pytest.mark.parametrize("seed", range(3))
def test_one_that_may_not_start_groups_is_owed_a_step_for_each_other_adapter_at_most(seed: int) -> None:
    print(f"seed {seed}")
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    made = servers(random.Random(seed), weights, 32)
    made.adapters["c"].left = 0
    made.run(8000)
    before = made.had.copy()
    assert before["c"] == 0
    assert before["a"] == pytest.approx(before["b"], rel=0.1), "no place waits for the one without groups"
    made.adapters["c"].left = ENDLESS
    made.run(8000)
    had = made.had - before
    step = max(made.claims[n].groups * made.claims[n].sequences * 170 for n in weights)
    slack = 170 * max(claim.sequences for claim in made.claims.values()) * 34
    assert had["c"] - min(had["a"], had["b"]) <= 2 * step + slack


def test_an_idle_one_and_a_newcomer_are_owed_nothing() -> None:
    made = claims(a=1.0, b=1.0)
    adapters = {"a": Adapter(ENDLESS), "b": Adapter(0, idle=True)}
    admission = queue(made, adapters)
    admission.sequences = 8

    def serve(groups: int) -> Counter[str]:
        had = Counter[str]()
        for _ in range(groups):
            admission.admit()
            name = next(n for n, adapter in adapters.items() if adapter.running)
            adapters[name].end()
            had[name] += 1
        return had

    assert serve(100) == {"a": 100}
    adapters["b"].left, adapters["b"].idle = ENDLESS, False
    had = serve(100)
    assert abs(had["a"] - had["b"]) <= 2, "it had been paused"
    adapters["c"] = Adapter(ENDLESS)
    admission.add("c", adapters["c"])
    had = serve(100)
    assert had["c"] == pytest.approx(50, abs=2)
    admission.leave("a")
    gone = adapters.pop("a")
    assert not gone.running
    assert serve(90)["c"] == pytest.approx(60, abs=2)


# ---------------------------------------------------------------- both queues


def equal() -> list[Profile]:
    return [Profile(name=name, weight=weight) for name, weight in zip("abc", (1, 2, 4), strict=True)]


def unlike() -> list[Profile]:
    return [
        Profile(name="a", weight=1, tokens=80, groups=2, samples=8),
        Profile(name="b", weight=2, tokens=20, groups=6, samples=4),
        Profile(name="c", weight=4, tokens=40, groups=4, samples=2),
    ]


SIDES = {"rollouts": (0.0001, (0.9, 1.0)), "both": (0.002, (0.05, 0.9)), "trainer": (0.008, (0.0, 0.02))}
"""Seconds of the trainer for a token, and the part of the time that it then waits."""


@pytest.mark.parametrize(
    ("profiles", "side", "pacing"),
    sample(list(itertools.product([equal, unlike], SIDES, ["fresh", "full"])), 0, lambda case: case),
)
def test_shares_of_trained_tokens_follow_the_weights_whichever_side_is_slower(
    profiles: Callable[[], list[Profile]], side: str, pacing: str
) -> None:
    """Steps of three adapters; the places are not a multiple of the weights."""
    train_token_s, (least, most) = SIDES[side]
    chosen = profiles()
    # The batches of unlike adapters are large compared with 200 steps' shares: one more or less is not unfair.
    warm_up, steps = (21, 200) if profiles is equal else (60, 500)
    whole = Sharing(chosen, places=12, token_s=0.02, train_s=0.0, train_token_s=train_token_s, pacing=pacing, seed=1)
    trained = whole.run(warm_up + steps)[warm_up:]
    tokens = Counter[str]()
    for step in trained:
        tokens[step.adapter] += step.tokens
    assert least <= whole.idle_s / whole.clock.now <= most, "the case is not what it says"
    for profile in chosen:
        assert tokens[profile.name] / tokens.total() == pytest.approx(profile.weight / 7, rel=0.05)
    if profiles is equal:
        for name in "abc":
            turns = [i for i, step in enumerate(trained) if step.adapter == name]
            assert max(b - a - 1 for a, b in itertools.pairwise(turns)) <= 12
