"""Windows, numbers and outcomes of `Backlog`, against a second account that is kept by other rules."""

from __future__ import annotations

import math
import random

import pytest

from areal_lora.operations.protocol import (
    Acknowledgement,
    Backlog,
    Durable,
    Expects,
    LoadState,
    Loss,
    Operation,
    OperationCompletion,
    OperationFailure,
    OptimStep,
    Outcome,
    Pass,
    PassResult,
    Poison,
    Publish,
    PublishResult,
    ServiceHello,
    StateResult,
    StepResult,
    What,
)

PASS = Pass(data=(), loss=Loss.CROSS_ENTROPY)
STEP = OptimStep(lr=0.1)
LOAD = LoadState(adapter="a.1", label="n1", optimizer=True)
SCORED, STEPPED = PassResult(logprobs=(), loss=0.0), StepResult(step=1, grad_norm=1.0, skipped=False)
LOADED = StateResult(step=5, n_bytes=9)
BROKEN = OperationFailure(reason="broken", by_client=False)
DURABLE_7 = Durable(adapter="a.1", number=7)


def operation(number: int, what: What = PASS) -> Operation:
    return Operation(adapter="a.1", number=number, what=what)


def carried_out(backlog: Backlog, *whats: What | tuple[What, Outcome]) -> list[Outcome]:
    """Outcomes of operations 1, 2, ... of a new adapter; with a pair, of one that ends in that way."""
    backlog.join("a.1", 0)
    found: list[Outcome] = []
    usual: dict[type, Outcome] = {Pass: SCORED, OptimStep: STEPPED, LoadState: StateResult(step=0, n_bytes=1)}
    for number, given in enumerate(whats, 1):
        what, outcome = given if isinstance(given, tuple) else (given, None)
        assert backlog.receive(operation(number, what)) == []
        first = backlog.first(["a.1"])
        assert first == operation(number, what)
        [completed] = backlog.complete(
            first, backlog.refused(first) or outcome or usual.get(type(what), PublishResult(version=0))
        )
        assert isinstance(completed, OperationCompletion)
        found.append(completed.outcome)
    return found


def test_numbers_follow_each_other() -> None:
    backlog = Backlog()
    assert backlog.receive(operation(1)) == [], "no service is there"
    assert backlog.join("a.1", 0) == [Expects(adapter="a.1", number=1)]
    assert backlog.receive(operation(2)) == [Expects(adapter="a.1", number=1)]
    assert backlog.receive(operation(1)) == []
    assert backlog.receive(operation(1, STEP)) == [], "the second of a number is ignored"
    assert backlog.first(["b.1", "a.1"]) == operation(1)
    backlog.complete(operation(1), SCORED)
    assert backlog.first(["a.1"]) is None


def test_an_adapter_that_resumes_has_the_outcomes_of_its_checkpoint() -> None:
    kept, rest = [said(6, SCORED), said(7, STEPPED)], [DURABLE_7, Expects(adapter="a.1", number=8)]
    backlog = Backlog()
    assert backlog.join("a.1", 7, kept) == [*kept, *rest]
    assert backlog.receive(ServiceHello()) == [*kept, *rest]
    assert backlog.receive(Acknowledgement(adapter="a.1", number=6)) == []
    assert backlog.outcomes("a.1") == (said(7, STEPPED),)
    assert backlog.receive(ServiceHello()) == [said(7, STEPPED), *rest]
    assert backlog.receive(Acknowledgement(adapter="a.1", number=7)) == []
    assert backlog.receive(ServiceHello()) == rest
    assert backlog.ahead("a.1") == 0


def test_operations_of_an_adapter_that_left_fail() -> None:
    backlog = Backlog()
    backlog.join("a.1", 0)
    backlog.receive(operation(1))
    failed = OperationFailure(reason="it was deleted", by_client=False)
    assert backlog.leave("a.1", "it was deleted") == [OperationCompletion(adapter="a.1", number=1, outcome=failed)]
    assert backlog.receive(operation(2)) == [OperationCompletion(adapter="a.1", number=2, outcome=failed)]
    assert backlog.receive(ServiceHello()) == []


def test_a_window_needs_a_pass_with_gradients() -> None:
    score = Pass(data=(), loss=Loss.CROSS_ENTROPY, backward=False)
    step, _, again, _, last = carried_out(Backlog(), STEP, score, STEP, PASS, STEP)
    assert isinstance(step, OperationFailure)
    assert step.by_client
    assert step == again
    assert last == STEPPED


@pytest.mark.parametrize("bad", [(PASS, BROKEN), Poison(reason="broken"), (LOAD, BROKEN)])
def test_a_fault_poisons_its_window_alone(bad: What | tuple[What, Outcome]) -> None:
    _, fault, after, publish, step, *others = carried_out(Backlog(), PASS, bad, PASS, Publish(), STEP, PASS, STEP)
    assert fault == BROKEN
    assert after == step == OperationFailure(reason="its window has failed: broken", by_client=False)
    assert publish == PublishResult(version=0)
    assert others == [SCORED, STEPPED]


def test_a_poison_of_a_step_ends_its_window_and_no_other() -> None:
    poison = Poison(reason="no such rate", by_client=True, of_step=True)
    _, first, step, *others = carried_out(Backlog(), PASS, poison, STEP, PASS, STEP)
    assert first == OperationFailure(reason="no such rate", by_client=True)
    assert isinstance(step, OperationFailure)
    assert "no pass since the step before it" in step.reason, "the window before it is over"
    assert others == [SCORED, STEPPED]
    _, _, spoiled, *others = carried_out(Backlog(), PASS, Poison(reason="broken"), poison, PASS, STEP)
    assert spoiled == first
    assert others == [SCORED, STEPPED]


def test_outcomes_wait_for_those_before_them() -> None:
    """A publish that goes on holds up what follows it, and the log is not cut behind it."""
    backlog = Backlog()
    backlog.join("a.1", 0, ())
    for number, what in enumerate((PASS, Publish(), PASS, STEP, PASS), 1):
        backlog.receive(operation(number, what))
    assert backlog.complete(operation(1), SCORED) == [said(1, SCORED)]
    backlog.start(operation(2, Publish()), None)
    assert backlog.first(["a.1"]) == operation(3), "what follows may be carried out"
    assert backlog.complete(operation(3), SCORED) == []
    assert backlog.complete(operation(4, STEP), STEPPED) == []
    assert backlog.outcomes("a.1") == (said(1, SCORED), said(3, SCORED), said(4, STEPPED)), "what is known"
    assert backlog.durable("a.1", 4) == []
    assert backlog.receive(ServiceHello()) == [said(1, SCORED), Expects(adapter="a.1", number=6)]
    known = [said(2, PublishResult(version=0)), said(3, SCORED), said(4, STEPPED)]
    assert backlog.end("a.1", 2, PublishResult(version=0)) == [*known, Durable(adapter="a.1", number=4)]
    assert backlog.end("a.1", 2) == [], "once"
    assert backlog.leave("a.1", "left") == [said(5, OperationFailure(reason="left", by_client=False))]
    assert backlog.end("a.1", 5) == backlog.durable("a.1", 5) == [], "what has left is over"


def test_what_is_durable_is_cut_once_and_bounds_what_a_crash_repeats() -> None:
    backlog = Backlog()
    backlog.join("a.1", 0)
    assert backlog.ahead("a.1") == math.inf, "no run resumes from nothing"
    assert backlog.durable("a.1", 0) == [], "nothing is in the log yet"
    for number, what in enumerate((PASS, STEP, PASS, STEP, PASS, Poison(reason="x", of_step=True), PASS), 1):
        backlog.receive(operation(number, what))
        backlog.complete(operation(number, what), backlog.refused(operation(number, what)) or SCORED)
    assert backlog.ahead("a.1") == 3, "a window that failed is one, too"
    assert [each.number for each in backlog.outcomes("a.1")] == [1, 2, 3, 4, 5, 6], "7 is in no version"
    assert backlog.durable("a.1", 4) == [Durable(adapter="a.1", number=4)]
    assert backlog.ahead("a.1") == 1
    assert backlog.durable("a.1", 6) == [Durable(adapter="a.1", number=6)]
    backlog.receive(Acknowledgement(adapter="a.1", number=7))
    assert backlog.receive(ServiceHello()) == [Durable(adapter="a.1", number=6), Expects(adapter="a.1", number=8)]


@pytest.mark.parametrize("version", [1, 3, None])
def test_a_load_is_final_once_it_is_durable_under_whichever_version(version: int | None) -> None:
    """One that is not, fails with an adapter that leaves."""
    backlog = Backlog()
    backlog.join("a.1", 0, ())
    for number, what in enumerate((LOAD, PASS, STEP), 1):
        backlog.receive(operation(number, what))
    backlog.start(operation(1, LOAD), LOADED)
    assert backlog.complete(operation(2), SCORED) == backlog.complete(operation(3, STEP), STEPPED) == []
    later = [said(2, SCORED), said(3, STEPPED)]
    if version is None:
        left = OperationFailure(reason="left", by_client=False)
        assert backlog.leave("a.1", "left") == [said(1, left), *later]
    else:
        found = backlog.durable("a.1", version)
        assert found == [said(1, LOADED), *later, Durable(adapter="a.1", number=version)]


def test_what_is_known_of_an_adapter_that_leaves_does_not_fail() -> None:
    """Its step is made, and the log repeats it when the adapter is tried again."""
    backlog = Backlog()
    backlog.join("a.1", 0, ())
    for number, what in enumerate((PASS, Publish(), STEP, PASS), 1):
        backlog.receive(operation(number, what))
    backlog.complete(operation(1), SCORED)
    backlog.start(operation(2, Publish()), None)
    backlog.complete(operation(3, STEP), STEPPED)
    left = OperationFailure(reason="left", by_client=False)
    assert backlog.leave("a.1", "left") == [said(2, left), said(3, STEPPED), said(4, left)]


def said(number: int, outcome: Outcome) -> OperationCompletion:
    return OperationCompletion(adapter="a.1", number=number, outcome=outcome)


def test_random_windows() -> None:
    """A step succeeds exactly if its window has a pass that gave gradients and no fault."""
    seed = random.randrange(2**32)
    print("seed", seed)
    choose = random.Random(seed)
    kinds: list[What | tuple[What, Outcome]] = [PASS, PASS, PASS, STEP, STEP, (PASS, BROKEN), LOAD, (LOAD, BROKEN)]
    for _ in range(200):
        whats = [choose.choice(kinds) for _ in range(12)]
        found = carried_out(Backlog(), *whats)
        for at, what in enumerate(whats):
            if what is not STEP:
                continue
            begin = next((i for i in reversed(range(at)) if whats[i] is STEP or whats[i] is LOAD), -1) + 1
            faults = [w for w in whats[begin:at] if isinstance(w, tuple) and w[0] is PASS]
            # A load that fails begins a window as well, with a fault.
            loads = [i for i in range(begin, at) if isinstance(whats[i], tuple) and whats[i][0] is LOAD]
            if loads:
                begin, faults = loads[-1] + 1, [BROKEN]
            good = not faults and PASS in whats[begin:at]
            assert (found[at] == STEPPED) is good, (whats, at)
