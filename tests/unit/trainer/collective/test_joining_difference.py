"""The plan that takes a run to its desired state: each difference, their order, and that any state is reached."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

import pytest

from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, DesiredPhase
from areal_lora.trainer.adapter import SERVED
from areal_lora.trainer.collective.joining import Note, difference
from areal_lora.trainer.work import AdapterChange, Join, SetPhase
from areal_lora.types import AdapterPhase

P = AdapterPhase
Leave = partial(SetPhase, phase=DesiredPhase.DELETED)
Pause = partial(SetPhase, phase=DesiredPhase.PAUSED)
Resume = partial(SetPhase, phase=DesiredPhase.ACTIVE)
Has = tuple[Mapping[str, AdapterPhase], Mapping[str, AdapterPhase]]


def want(*keys: str) -> DesiredAdapters:
    """``a.1``, ``b.2 paused``."""
    adapters = []
    for text in keys:
        key, _, phase = text.partition(" ")
        name, _, incarnation = key.partition(".")
        found = DesiredPhase(phase or "active")
        adapters.append(DesiredAdapter(name=name, incarnation=int(incarnation), phase=found, adapter={}))
    return DesiredAdapters(generation=1, adapters=tuple(adapters))


def has(here: Mapping[str, AdapterPhase] | None = None, absent: Mapping[str, AdapterPhase] | None = None) -> Has:
    return here or {}, absent or {}


CASES: list[tuple[DesiredAdapters, Has, AdapterChange | Note | None]] = [
    (want(), has(), None),
    (want("a.1"), has(), Join(adapter="a.1")),
    (want("a.1 paused"), has(), Join(adapter="a.1")),
    (want("a.1"), has({"a.1": P.ACTIVE}), None),
    (want("a.1"), has({"a.1": P.DRAINING}), None),
    (want("a.1 paused"), has({"a.1": P.ACTIVE}), Pause(adapter="a.1")),
    (want("a.1 paused"), has({"a.1": P.PENDING}), Pause(adapter="a.1")),
    (want("a.1 paused"), has({"a.1": P.DRAINING}), None),
    (want("a.1 paused"), has({"a.1": P.PAUSED}), None),
    (want("a.1 paused"), has({"a.1": P.FAILED}), None),
    (want("a.1"), has({"a.1": P.PAUSED}), Resume(adapter="a.1")),
    (want("a.1 deleted"), has({"a.1": P.ACTIVE}), Leave(adapter="a.1")),
    (want("a.1 deleted"), has({"a.1": P.FAILED}), Leave(adapter="a.1")),
    (want(), has({"a.1": P.PAUSED}), Leave(adapter="a.1")),
    (want("a.1 deleted"), has(), Note(adapter="a.1", phase=P.DELETED)),
    (want("a.1 deleted"), has(absent={"a.1": P.PENDING}), Note(adapter="a.1", phase=P.DELETED)),
    (want("a.1 deleted"), has(absent={"a.1": P.DELETED}), None),
    (want("a.1"), has(absent={"a.1": P.FAILED}), None),
    (want("a.1"), has(absent={"a.1": P.DONE}), None),
    (want("a.2"), has({"a.1": P.ACTIVE}), Leave(adapter="a.1")),
    (want("a.2"), has(absent={"a.1": P.DELETED}), Join(adapter="a.2")),
    (want("a.1", "b.1", "c.1"), has({"a.1": P.ACTIVE, "b.1": P.DONE}), Join(adapter="c.1")),
    (want("a.1", "b.1 paused", "c.1"), has({"a.1": P.ACTIVE, "b.1": P.PAUSED}, {"c.1": P.PENDING}), None),
    (want("b.1", "c.1"), has({"a.1": P.ACTIVE, "b.1": P.PAUSED}, {"c.1": P.PENDING}), Leave(adapter="a.1")),
    (want("b.1 paused", "c.1"), has({"b.1": P.PAUSED}, {"c.1": P.PENDING}), Join(adapter="c.1")),
]


@pytest.mark.parametrize(("desired", "there", "change"), CASES)
def test_each_difference_has_its_change(
    desired: DesiredAdapters, there: Has, change: AdapterChange | Note | None
) -> None:
    assert difference(desired, *there, capacity=2) == change


def test_one_more_than_servers_hold_waits_with_the_reason() -> None:
    note = difference(want("a.1", "b.1"), {"a.1": P.ACTIVE}, {}, configured=1, capacity=2)
    assert isinstance(note, Note)
    assert (note.adapter, note.phase) == ("b.1", P.PENDING)
    assert "rollout.max_adapters = 2" in note.reason


def test_any_desired_state_is_reached_and_then_nothing_changes() -> None:
    """Random walks: a run that carries out one change after another ends with what is desired, within its places."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        here: dict[str, AdapterPhase] = {}
        absent: dict[str, AdapterPhase] = {}
        capacity = rng.randint(1, 3)
        incarnations = dict.fromkeys("abcde", 1)
        for _ in range(6):
            for name in incarnations:
                incarnations[name] += rng.random() < 0.2
            chosen = rng.sample("abcde", rng.randint(0, 5))
            desired = want(
                *(f"{n}.{incarnations[n]} {rng.choice(['active', 'active', 'paused', 'deleted'])}" for n in chosen)
            )
            for _ in range(40):
                change = difference(desired, here, absent, capacity=capacity)
                if change is None:
                    break
                _carry_out(change, here, absent, rng)
                assert sum(phase in SERVED for phase in here.values()) <= capacity
            else:
                raise AssertionError(f"no end: {desired} {here} {absent}")
            wanted = {a.key: a.phase for a in desired.adapters if a.phase is not DesiredPhase.DELETED}
            assert set(here) <= set(wanted)
            assert all((here[k] is P.PAUSED) == (wanted[k] is DesiredPhase.PAUSED) for k in here if here[k] in SERVED)
            full = sum(phase in SERVED for phase in here.values()) == capacity
            assert full or all(key in here or absent[key] in (P.FAILED, P.DONE) for key in wanted)


def _carry_out(
    change: AdapterChange | Note, here: dict[str, AdapterPhase], absent: dict[str, AdapterPhase], rng: random.Random
) -> None:
    match change:
        case Join(adapter=key):
            absent.pop(key, None)
            target = absent if rng.random() < 0.2 else here
            target[key] = P.FAILED if target is absent else P.ACTIVE
        case SetPhase(adapter=key, phase=DesiredPhase.DELETED):
            del here[key]
            absent[key] = P.DELETED
        case SetPhase(adapter=key, phase=phase):
            here[key] = P.PAUSED if phase is DesiredPhase.PAUSED else P.ACTIVE
        case Note(adapter=key, phase=phase):
            absent[key] = phase
