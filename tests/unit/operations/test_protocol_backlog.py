"""Windows, numbers and outcomes of `Backlog`, against a second account that is kept by other rules."""

from __future__ import annotations

import random

import pytest

from areal_lora.operations.protocol import (
    Acknowledgement,
    Backlog,
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
BROKEN = OperationFailure(reason="broken", by_client=False)


def operation(number: int, what: What = PASS) -> Operation:
    return Operation(adapter="a.1", number=number, what=what)


def carried_out(backlog: Backlog, *whats: What | tuple[What, Outcome]) -> list[Outcome]:
    """Outcomes of operations 1, 2, ... of a new adapter; with a pair, of one that ends in that way."""
    backlog.join("a.1", None)
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
    assert backlog.join("a.1", None) == [Expects(adapter="a.1", number=1)]
    assert backlog.receive(operation(2)) == [Expects(adapter="a.1", number=1)]
    assert backlog.receive(operation(1)) == []
    assert backlog.receive(operation(1, STEP)) == [], "the second of a number is ignored"
    assert backlog.first(["b.1", "a.1"]) == operation(1)
    backlog.complete(operation(1), SCORED)
    assert backlog.first(["a.1"]) is None


def test_an_adapter_that_resumes_has_the_outcome_of_its_checkpoint() -> None:
    last = OperationCompletion(adapter="a.1", number=7, outcome=STEPPED)
    backlog = Backlog()
    assert backlog.join("a.1", last) == [last, Expects(adapter="a.1", number=8)]
    assert backlog.receive(ServiceHello()) == [last, Expects(adapter="a.1", number=8)]
    assert backlog.receive(Acknowledgement(adapter="a.1", number=7)) == []
    assert backlog.receive(ServiceHello()) == [Expects(adapter="a.1", number=8)]


def test_operations_of_an_adapter_that_left_fail() -> None:
    backlog = Backlog()
    backlog.join("a.1", None)
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
    backlog = Backlog()
    backlog.join("a.1", None)
    for number, what in enumerate((PASS, STEP, PASS, Publish(), STEP), 1):
        backlog.receive(operation(number, what))
    assert backlog.complete(operation(1), SCORED) == [said(1, SCORED)]
    backlog.start(operation(2, STEP), STEPPED)
    assert backlog.first(["a.1"]) == operation(3), "what follows may be carried out"
    assert backlog.complete(operation(3), SCORED) == []
    backlog.start(operation(4, Publish()), None)
    assert backlog.refused(operation(5, STEP)) is None, "its window began with the step that is not final"
    backlog.start(operation(5, STEP), STEPPED)
    assert backlog.end("a.1", 4, PublishResult(version=2)) == []
    assert backlog.receive(ServiceHello()) == [said(1, SCORED), Expects(adapter="a.1", number=6)]
    known = [said(2, STEPPED), said(3, SCORED), said(4, PublishResult(version=2))]
    assert backlog.end("a.1", 2) == known
    assert backlog.end("a.1", 2) == [], "once"
    assert backlog.leave("a.1", "gone") == [said(5, OperationFailure(reason="gone", by_client=False))]
    assert backlog.end("a.1", 5) == [], "what has left is over"


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
