"""Operations against a model: arrivals in any order, retries, gaps, and crashes of either side between any two steps.

The trainer is a real `Backlog` with an executor of a few lines. Its checkpoints are all that it keeps over a crash.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_lora.operations.link import SendWindows
from areal_lora.operations.protocol import (
    Acknowledgement,
    Backlog,
    Expects,
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
    SaveState,
    ServiceHello,
    StateResult,
    StepResult,
    ToService,
    ToTrainer,
    ends_window,
)
from areal_lora.service.queue.ordering import GAP_S
from areal_lora.service.queue.queue_writer import seal
from areal_lora.service.queue.requests import Answer, ModelAction, Pending, Save, Train
from areal_lora.service.queue.sequencer import completed, expected, look, submit, to_send
from areal_lora.service.refused import RequestError
from tests.support.service.ledger import Ledger
from tests.support.sizes import NIGHTLY, size

LOST = "a restart of the trainer"


@dataclass(slots=True)
class Executor:
    """One adapter. ``steps`` and ``window`` are lost in a crash, ``checkpoint`` is not.

    ``history`` has the marks of the passes of each step that was made, as the checkpoints have them. ``faulted`` are
    the marks of passes that have failed at least once, over crashes as well.
    """

    backlog: Backlog = field(default_factory=Backlog)
    history: tuple[tuple[float, ...], ...] = ()
    window: tuple[float, ...] = ()
    checkpoint: tuple[tuple[tuple[float, ...], ...], OperationCompletion | None] = ((), None)
    faulted: set[float] = field(default_factory=set)

    def begin(self, adapter: str) -> list[ToService]:
        self.backlog, self.window, self.history = Backlog(), (), self.checkpoint[0]
        return self.backlog.join(adapter, self.checkpoint[1])

    def carry_out(self, operation: Operation, fault: bool) -> list[ToService]:
        outcome = self.backlog.refused(operation) or self._outcome(operation, fault)
        sent = self.backlog.complete(operation, outcome)
        if ends_window(operation.what):
            self.window = ()
            [done] = sent
            assert isinstance(done, OperationCompletion)
            self.checkpoint = (self.history, done)
        return sent

    def _outcome(self, operation: Operation, fault: bool) -> Outcome:
        match operation.what:
            case Pass(settings=marked) if fault:
                self.faulted.add(marked.beta or 0.0)
                return OperationFailure(reason="a fault that passes", by_client=False)
            case Pass(settings=marked):
                self.window += (marked.beta or 0.0,)
                return PassResult(logprobs=(), loss=marked.beta or 0.0)
            case OptimStep():
                self.history += (self.window,)
                return StepResult(step=len(self.history), grad_norm=0.0, skipped=False)
            case SaveState():
                return StateResult(step=len(self.history), n_bytes=1)
            case what:
                raise AssertionError(what)


class Exchange(RuleBasedStateMachine):
    """``script`` is what the client has sent, by seq."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.trainer, self.windows = Ledger(), Executor(), SendWindows()
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
        if (due := self.windows.due(self.adapter)) is not None:
            for operation in self.ledger.change(lambda tx: to_send(tx, self.adapter, *due)):
                assert self.windows.sends(self.adapter, operation.number)
                self.to_trainer.append(operation)

    @precondition(lambda self: self.to_service)
    @rule()
    def service_hears(self) -> None:
        match self.to_service.popleft():
            case OperationCompletion(adapter=adapter, number=number, outcome=outcome):
                self.ledger.change(lambda tx: completed(tx, adapter, number, outcome))
                self.to_trainer.append(Acknowledgement(adapter=adapter, number=number))
                self.windows.completed(adapter, number)
            case Expects(adapter=adapter, number=number):
                assert self.ledger.change(lambda tx: expected(tx, adapter, number)), "nothing covered is asked for"
                self.windows.expected(adapter, number)

    @rule()
    def service_is_killed(self) -> None:
        """Its file stays. What was on the way is lost in both directions."""
        self.windows = SendWindows()
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
            self.to_service.extend(self.trainer.carry_out(operation, fault == 0))

    @rule(told=st.booleans())
    def trainer_is_killed(self, told: bool) -> None:
        """The service connects to the next one, and greets it; it may also have received what that sent at once."""
        self.to_trainer, self.to_service = deque([ServiceHello()]), deque()
        begun = self.trainer.begin(self.adapter)
        self.to_service.extend(begun if told else [])
        self.windows = SendWindows() if not told else self.windows

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
            elif (due := self.windows.due(self.adapter)) and self.ledger.change(
                lambda tx: to_send(tx, self.adapter, *due)
            ):
                self.service_sends()
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
        made, window, spoiled, unsure, before = [], [], False, False, 0
        for seq in sorted(self.script):
            action, answer = self.script[seq], self.answers[seq]
            spoiled, before = spoiled or seq != before + 1, seq
            match action:
                case Train(what=Pass(settings=marked)):
                    lost = isinstance(answer, OperationFailure) and answer.reason.startswith(LOST)
                    spoiled = spoiled or (isinstance(answer, OperationFailure) and not lost)
                    # The trainer died with the outcome, or a pass that was answered failed when it was repeated after
                    # a crash: the step may fail, and then makes no version.
                    unsure = unsure or lost or marked.beta in self.trainer.faulted
                    window.append(marked.beta or 0.0)
                    if isinstance(answer, PassResult):
                        assert answer.loss == marked.beta
                case Train(what=Poison(of_step=True)):
                    assert isinstance(answer, OperationFailure)
                    window, spoiled, unsure = [], False, False
                case Train(what=Poison()):
                    assert isinstance(answer, OperationFailure)
                    spoiled = True
                case Train(what=OptimStep()):
                    failed = isinstance(answer, OperationFailure)
                    assert failed == (spoiled or not window) or (unsure and failed), (seq, answer)
                    if isinstance(answer, StepResult):
                        made.append(tuple(window))
                        assert answer.step == len(made)
                    window, spoiled, unsure = [], False, False
        assert self.trainer.checkpoint[0] == tuple(made), "each step once, in order, with its passes"

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
    """Its client has heard of it, so the step of its window must not be made."""
    it = Exchange()
    it.send(skip=0, kind="pass")
    it.all_work(n=20, fault=0)
    it.answers_stay()
    assert isinstance(it.answers[1], OperationFailure)
    it.trainer_is_killed(told=True)
    it.teardown()
    assert isinstance(it.answers[3], OperationFailure)
