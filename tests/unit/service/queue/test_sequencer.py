"""Operations against a model: arrivals in any order, retries, gaps, and crashes of either side between any two steps.

The trainer is a real `Backlog` with an executor of a few lines. Its checkpoints, written behind the answers, are all
that it keeps over a crash.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import (
    Acknowledgement,
    Backlog,
    Durable,
    Expects,
    LoadState,
    Loss,
    LossSettings,
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
    SaveState,
    ServiceHello,
    StateResult,
    StepResult,
    ToService,
    ToTrainer,
    ends_window,
)
from areal_lora.service.queue.ordering import AHEAD, GAP_S
from areal_lora.service.queue.queue_writer import seal
from areal_lora.service.queue.requests import Answer, Load, ModelAction, Pending, Save, Train
from areal_lora.service.queue.sequencer import completed, durable, expected, look, submit, to_send
from tests.support.service.ledger import QUOTA, Ledger
from tests.support.sizes import NIGHTLY, size

BEHIND = 2
"""Steps ahead of the disk."""


class Checkpoint(NamedTuple):
    """``history`` has the marks of the passes of each step that was made."""

    history: tuple[tuple[float, ...], ...] = ()
    version: int = 0
    outcomes: tuple[OperationCompletion, ...] = ()


@dataclass(slots=True)
class Executor:
    """One adapter. All but the ``durable`` checkpoint is lost in a crash. A checkpoint is written in two moments.

    ``verdicts`` are whether the pass with a mark fails: repeated after a crash it ends in the same way.
    """

    adapter: str = ""
    backlog: Backlog = field(default_factory=Backlog)
    newest: Checkpoint = field(default_factory=Checkpoint)
    window: tuple[float, ...] = ()
    writing: Checkpoint | None = None
    durable: Checkpoint = field(default_factory=Checkpoint)
    verdicts: dict[float, bool] = field(default_factory=dict)

    def begin(self, adapter: str) -> list[ToService]:
        self.adapter, self.backlog, self.window = adapter, Backlog(), ()
        self.newest, self.writing = self.durable, None
        return self.backlog.join(adapter, self.durable.version, self.durable.outcomes)

    def write(self) -> None:
        """Copy the newest version, as far as the adapter has one."""
        self.writing = self.newest._replace(outcomes=self.backlog.outcomes(self.adapter))

    def written(self) -> list[ToService]:
        assert self.writing is not None
        self.durable, self.writing = self.writing, None
        return self.backlog.durable(self.adapter, self.durable.version)

    def carry_out(self, operation: Operation, fault: bool) -> list[ToService]:
        outcome = self.backlog.refused(operation) or self._outcome(operation, fault)
        if ends_window(operation.what):
            self.window, self.newest = (), self.newest._replace(version=operation.number)
        return self.backlog.complete(operation, outcome)

    def _outcome(self, operation: Operation, fault: bool) -> Outcome:
        match operation.what:
            case Pass(settings=LossSettings(beta=float(mark))):
                if self.verdicts.setdefault(mark, fault):
                    return OperationFailure(reason="a fault", by_client=False)
                self.window += (mark,)
                return PassResult(logprobs=(), loss=mark)
            case OptimStep():
                self.newest = self.newest._replace(history=(*self.newest.history, self.window))
                return StepResult(step=len(self.newest.history), grad_norm=0.0, skipped=False)
            case SaveState():
                return StateResult(step=len(self.newest.history), n_bytes=1)
            case what:
                raise AssertionError(what)


class Exchange(RuleBasedStateMachine):
    """``script`` is what the client has sent, by seq."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.trainer = Ledger(), Executor()
        self.next: int | None = None
        self.model, self.adapter = self.ledger.model()
        self.script: dict[int, ModelAction] = {}
        self.answers: dict[int, Answer] = {}
        self.top = 0
        self.to_trainer: deque[ToTrainer] = deque()
        self.to_service: deque[ToService] = deque(self.trainer.begin(self.adapter))
        self.retried = 0

    # ------------------------------------------------------------ the client

    @rule(
        skip=st.sampled_from([0, 0, 0, 0, 1, 2]),
        kind=st.sampled_from(["pass", "pass", "pass", "pass", "step", "step", "save", "poison", "bad step"]),
    )
    def send(self, skip: int, kind: str) -> None:
        seq = self.top + 1 + skip
        self._submit(seq, self._ask(seq, kind))

    @rule(kind=st.sampled_from(["pass", "step"]), pick=st.integers(0, 99))
    def fill(self, kind: str, pick: int) -> None:
        missing = [seq for seq in range(1, self.top) if seq not in self.script]
        if missing:
            seq = missing[pick % len(missing)]
            self._submit(seq, self._ask(seq, kind))

    @precondition(lambda self: self.script)
    @rule(pick=st.integers(0, 99))
    def retry(self, pick: int) -> None:
        seq = sorted(self.script)[pick % len(self.script)]
        assert self._asked(seq, self.script[seq], "print") == f"{self.model}:{seq}"
        with pytest.raises(RequestError, match="another request"):
            self._asked(seq, self.script[seq], "another print")

    @rule()
    def time_passes(self) -> None:
        self.ledger.now_s += GAP_S
        self.ledger.change(seal)

    # ------------------------------------------------------------ the service

    @rule()
    def service_sends(self) -> None:
        self.to_trainer += (found := self.due())
        if self.next is not None:
            assert [operation.number for operation in found] == [*range(self.next, self.next + len(found))]
            self.next += len(found)

    def due(self) -> list[Operation]:
        start = self.next
        return [] if start is None else self.ledger.change(lambda tx: to_send(tx, self.adapter, start))

    @precondition(lambda self: self.to_service)
    @rule()
    def service_hears(self) -> None:
        match self.to_service.popleft():
            case OperationCompletion(adapter=adapter, number=number, outcome=outcome):
                self.ledger.change(lambda tx: completed(tx, adapter, number, outcome))
                self.to_trainer.append(Acknowledgement(adapter=adapter, number=number))
                self.next = self.next and max(self.next, number + 1)
            case Durable(adapter=adapter, number=number):
                self.ledger.change(lambda tx: durable(tx, adapter, number))
            case Expects(adapter=adapter, number=number):
                assert self.ledger.change(lambda tx: expected(tx, adapter, number)), "nothing covered is asked for"
                self.next = number

    @rule()
    def service_is_killed(self) -> None:
        """Its file stays. What was on the way is lost in both directions."""
        self.next = None
        self.to_trainer, self.to_service = deque([ServiceHello()]), deque()

    # ------------------------------------------------------------ both

    @rule(n=st.integers(1, 40), fault=st.integers(0, 3))
    def all_work(self, n: int, fault: int) -> None:
        """``n`` steps without a crash; sometimes the first operation fails."""
        for _ in range(n):
            if self.to_service:
                self.service_hears()
            elif self.to_trainer:
                self.trainer_hears()
            elif self.trainer.backlog.first([self.adapter]) is not None:
                self.trainer_works(fault)
                fault = 1
            elif self.trainer.newest.version > self.trainer.durable.version:
                self.service_sends()
                self.disk_works()
            else:
                self.service_sends()

    # ------------------------------------------------------------ the trainer

    @precondition(lambda self: self.to_trainer)
    @rule()
    def trainer_hears(self) -> None:
        self.to_service.extend(self.trainer.backlog.receive(self.to_trainer.popleft()))

    @rule(fault=st.integers(0, 9))
    def trainer_works(self, fault: int) -> None:
        if (operation := self.trainer.backlog.first([self.adapter])) is not None:
            while ends_window(operation.what) and self.trainer.backlog.ahead(self.adapter) > BEHIND:
                self.disk_works()
            self.to_service.extend(self.trainer.carry_out(operation, fault == 0))

    @rule()
    def disk_works(self) -> None:
        if self.trainer.writing is not None:
            self.to_service.extend(self.trainer.written())
        elif self.trainer.newest.version > self.trainer.durable.version:
            self.trainer.write()

    @rule(told=st.booleans(), written=st.booleans())
    def trainer_is_killed(self, told: bool, written: bool) -> None:
        """The service connects to the next one, and greets it; it may also have received what that sent at once.

        The checkpoint in progress is lost, or it is ``written`` and no one has received that.
        """
        self.answers_stay()
        if written and self.trainer.writing is not None:
            self.trainer.written()
        self.to_trainer, self.to_service = deque([ServiceHello()]), deque()
        begun = self.trainer.begin(self.adapter)
        self.to_service.extend(begun if told else [])
        self.next = self.next if told else None

    # ------------------------------------------------------------ what must hold

    @invariant()
    def answers_stay(self) -> None:
        for seq in self.script:
            found, _ = self.ledger.change(lambda tx, seq=seq: look(tx, "acme", f"{self.model}:{seq}"))
            if seq in self.answers:
                assert found == self.answers[seq], "the first answer stays"
            elif not isinstance(found, Pending):
                self.answers[seq] = found

    def teardown(self) -> None:
        """Everything arrives in the end; then clients and checkpoints speak of the same steps."""
        for _ in range(20):  # each look passes over one gap of a model
            self.time_passes()
        if self.script:  # so that the last window ends
            for kind in ("pass", "step"):
                self._submit(self.top + 1, self._ask(self.top + 1, kind))
        for _ in range(2000):
            if self.to_service:
                self.service_hears()
            elif self.to_trainer:
                self.trainer_hears()
            elif self.trainer.backlog.first([self.adapter]) is not None:
                self.trainer_works(1)
            elif self.due():
                self.service_sends()
            elif self.trainer.newest.version > self.trainer.durable.version:
                self.disk_works()
            else:
                break
        self.answers_stay()
        assert self.script.keys() == self.answers.keys(), "everything acknowledged is answered"
        self._check_windows()
        if self.script and isinstance(self.answers[self.top], StepResult):
            assert self.ledger.db.execute("SELECT COUNT(*) FROM client_operations").fetchone() == (0,)
            assert self.ledger.db.execute("SELECT COUNT(*) FROM requests WHERE action IS NOT NULL").fetchone() == (0,)
        self.ledger.db.close()

    def _check_windows(self) -> None:
        made, window, spoiled, before = [], [], False, 0
        for seq in sorted(self.script):
            action, answer = self.script[seq], self.answers[seq]
            spoiled, before = spoiled or seq != before + 1, seq
            match action:
                case Train(what=Pass(settings=marked)):
                    spoiled = spoiled or isinstance(answer, OperationFailure)
                    window.append(marked.beta or 0.0)
                    if isinstance(answer, PassResult):
                        assert answer.loss == marked.beta
                case Train(what=Poison(of_step=True)):
                    assert isinstance(answer, OperationFailure)
                    window, spoiled = [], False
                case Train(what=Poison()):
                    assert isinstance(answer, OperationFailure)
                    spoiled = True
                case Train(what=OptimStep()):
                    assert isinstance(answer, OperationFailure) == (spoiled or not window), (seq, answer)
                    if isinstance(answer, StepResult):
                        made.append(tuple(window))
                        assert answer.step == len(made)
                    window, spoiled = [], False
        assert self.trainer.durable.history == tuple(made), "each step once, in order, with its passes"

    def _ask(self, seq: int, kind: str) -> ModelAction:
        match kind:
            case "pass":
                return Train(what=Pass(data=(), loss=Loss.DRO, settings=LossSettings(beta=float(seq))))
            case "step":
                return Train(what=OptimStep(lr=1.0))
            case "bad step":
                return Train(what=Poison(reason="bad rate", of_step=True))
            case "poison":
                return Train(what=Poison(reason="bad data"))
            case _:
                return Save(name=f"at{seq}", overwrite=True)

    def _submit(self, seq: int, action: ModelAction) -> None:
        with suppress(RequestError):  # too many, too far ahead, passed over
            self._asked(seq, action, "print")
            self.script[seq] = action
            self.top = max(self.top, seq)

    def _asked(self, seq: int, action: ModelAction, fingerprint: str) -> str:
        return self.ledger.change(lambda tx: submit(tx, "acme", self.model, seq, fingerprint, action))


TestExchange = Exchange.TestCase
# The same walks in every run of the suite, new ones in each nightly run.
TestExchange.settings = settings(
    max_examples=size(100, 2000), stateful_step_count=50, deadline=None, derandomize=not NIGHTLY
)


def test_a_pass_that_failed_fails_again_after_a_restart() -> None:
    """Its client has received that, so the step of its window must not be made, even if the fault has passed."""
    it = Exchange()
    it.send(skip=0, kind="pass")
    it.all_work(n=20, fault=0)
    it.answers_stay()
    assert isinstance(it.answers[1], OperationFailure)
    it.trainer_is_killed(told=True, written=False)
    it.trainer.verdicts.clear()
    it.teardown()
    assert isinstance(it.answers[3], OperationFailure)


def test_at_most_so_many_are_ahead_of_the_outcomes() -> None:
    ledger = Ledger(msgspec.structs.replace(QUOTA, queued=99))
    model, adapter = ledger.model()
    for seq in range(1, AHEAD + 9):
        ledger.change(lambda tx, seq=seq: submit(tx, "acme", model, seq, "f", Train(what=Pass(data=(), loss=Loss.DRO))))

    def due(start: int) -> list[int]:
        return [each.number for each in ledger.change(lambda tx: to_send(tx, adapter, start))]

    assert due(1) == [*range(1, AHEAD + 1)]
    assert due(AHEAD + 1) == []
    scored = PassResult(logprobs=(), loss=0.0)
    for number in (1, 2):
        ledger.change(lambda tx, number=number: completed(tx, adapter, number, scored))
    assert due(AHEAD + 1) == [AHEAD + 1, AHEAD + 2]
    assert due(1) == [*range(1, AHEAD + 1)], "a restarted trainer repeats what has outcomes, as many at a time"
    assert due(3) == [*range(3, AHEAD + 3)]


def test_only_states_with_a_name_have_moments() -> None:
    """Also the state of a sampling session has them where an earlier version of the service logged its save."""
    ledger = Ledger()
    model, adapter = ledger.model()
    sampler = Save(for_sampler=True, sampler_seq=0)
    for seq, action in enumerate((Save(name="one"), Save(for_sampler=True, name="two"), sampler), 1):
        ledger.change(lambda tx, seq=seq, action=action: submit(tx, "acme", model, seq, "f", action))
    sent = [each.what for each in ledger.change(lambda tx: to_send(tx, adapter, 1))]
    states = SaveState(label="n1"), SaveState(label="n2"), SaveState(label="n4", moments=False)
    assert sent == [states[0], states[1], Publish(), states[2], Publish()]
    kept = StateResult(step=1, n_bytes=9)
    for number, what in enumerate(sent, 1):
        outcome = PublishResult(version=0) if isinstance(what, Publish) else kept
        ledger.change(lambda tx, number=number, outcome=outcome: completed(tx, adapter, number, outcome))
    path = f"tinker://{model}/sampler_weights/.4"
    for seq, optimizer in ((4, True), (5, False)):
        action = Load(path=path, optimizer=optimizer)
        ledger.change(lambda tx, seq=seq, action=action: submit(tx, "acme", model, seq, "f", action))
    refused, bare = (each.what for each in ledger.change(lambda tx: to_send(tx, adapter, 6)))
    assert isinstance(refused, Poison)
    assert "has no optimizer (fix: load its weights, or save by name)" in refused.reason
    assert bare == LoadState(adapter=adapter, label="n4", optimizer=False)
    logged = msgspec.msgpack.encode({"type": "SaveState", "label": "n4"})
    ledger.db.execute("UPDATE client_operations SET what = ? WHERE number = 4", (logged,))
    assert ledger.change(lambda tx: to_send(tx, adapter, 4))[0].what == SaveState(label="n4", moments=True)


def tick(it: Exchange, service_first: bool) -> bool:
    """One event of those that are due; False once all is done."""
    hears = (it.service_hears, bool(it.to_service)), (it.trainer_hears, bool(it.to_trainer))
    works = (
        (lambda: it.trainer_works(1), it.trainer.backlog.first([it.adapter]) is not None),
        (it.disk_works, it.trainer.newest.version > it.trainer.durable.version),
    )
    sends = it.service_sends, bool(it.due())
    order = (*hears, sends, *works) if service_first else (hears[1], *works, sends, hears[0])
    event = next((event for event, is_due in order if is_due), None)
    if event is not None:
        event()
    return event is not None


@pytest.mark.parametrize("service_first", [True, False])
def test_a_crash_of_the_trainer_at_any_event(service_first: bool) -> None:
    """Around each answer, checkpoint and message; and a second one while the log is repeated after the first."""
    at, there_is_more = 0, True
    while there_is_more:
        for told, written, again in ((False, False, 0), (True, True, 0), (False, True, 5)):
            it = Exchange()
            for kind in ("pass", "step", "pass", "step", "bad step"):
                it.send(skip=0, kind=kind)
            there_is_more = all(tick(it, service_first) for _ in range(at))
            it.trainer_is_killed(told, written)
            if again:
                all(tick(it, service_first) for _ in range(again))
                it.trainer_is_killed(told, written)
            it.teardown()
            assert len(it.trainer.durable.history) == 3, "two windows, and that of the teardown"
            assert [n for n, each in it.answers.items() if isinstance(each, OperationFailure)] == [5], "the bad step"
        at += 1
