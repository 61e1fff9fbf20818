"""What rank 0 hands out, what it refuses, and what the service hears of it, over a real link."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_lora.checkpoint.checkpoint_store import CheckpointSave
from areal_lora.operations.link import TrainerEnd
from areal_lora.operations.protocol import (
    DropState,
    LoadState,
    Loss,
    Operation,
    OperationCompletion,
    OperationFailure,
    OptimStep,
    Pass,
    PassResult,
    Poison,
    Publish,
    PublishResult,
    SaveState,
    StateResult,
    StepResult,
    What,
)
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.trainer.adapter import ControllerState
from areal_lora.trainer.clients.client_operations import Clients, _decode
from areal_lora.trainer.clients.client_passes import Limits
from areal_lora.trainer.work import Operate
from areal_lora.types import AdapterRef
from tests.support.operations.client import Client, datum
from tests.support.operations.side import client_adapter, service_config

PASS = Pass(data=(datum([1, 2], [1.0]),), loss=Loss.CROSS_ENTROPY)
BAD = Pass(data=(datum([1, 99], [1.0]),), loss=Loss.CROSS_ENTROPY)
SCORED = PassResult(logprobs=(b"",), loss=1.0)
STEPPED = StepResult(step=1, grad_norm=1.0, skipped=False)


@dataclass
class Link:
    folder: RunFolder
    clients: Clients
    client: Client

    def join(self, name: str = "a", version: int = 0, kept: ControllerState | None = None) -> None:
        adapter = client_adapter(service_config(), name)
        assert self.clients.join(adapter, version, kept or ControllerState()) == ""
        self.until(lambda: adapter.name in self.client.expects)

    def until(self, ready: Callable[[], bool]) -> None:
        """Take in what the service sends, until ``ready``."""
        for _ in range(600):
            if ready():
                return
            self.clients.listen(0.1)
        raise AssertionError(f"heard {self.client.heard[-5:]}")

    def next(self, *adapters: str) -> Operate:
        """The next operation, once it has arrived."""
        for _ in range(600):
            if (found := next(self.clients.ready(adapters or ("a.1",), lambda *_: True), None)) is not None:
                return found
            self.clients.listen(0.1)
        raise AssertionError("no operation has arrived")

    def hears(self, number: int, adapter: str = "a.1") -> object:
        self.client.wait(lambda: number in self.client.outcomes(adapter))
        return self.client.outcomes(adapter)[number]


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    folder = RunFolder(tmp_path / "a run")
    folder.path.mkdir()
    create_secret(folder)
    clients = Clients(folder, TrainerEnd(folder), Limits(vocabulary=50, longest=8), "base")
    made = Link(folder, clients, Client(folder))
    try:
        yield made
    finally:
        made.client.close()
        clients.close()


def operation(number: int, what: What, adapter: str = "a.1") -> Operation:
    return Operation(adapter=adapter, number=number, what=what)


def test_operations_are_handed_out_in_turn_and_skip_what_may_not_begin(link: Link) -> None:
    link.join("a")
    link.join("b")
    link.client.begin("a.1", OptimStep(lr=1.0))
    link.client.begin("b.1", PASS)
    assert link.next("b.1").operation == operation(1, PASS, "b.1")
    assert link.next("a.1").adapter == "a.1"
    assert [link.next("b.1", "a.1").adapter, link.next("a.1", "b.1").adapter] == ["b.1", "a.1"]
    assert [each.adapter for each in link.clients.ready(["a.1", "b.1"], lambda *_: True)] == ["a.1", "b.1"]
    found = link.clients.ready(["a.1", "b.1"], lambda each, _: isinstance(each.what, Pass))
    assert [each.adapter for each in found] == ["b.1"]
    assert next(link.clients.ready(["a.1"], lambda each, _: isinstance(each.what, Pass)), None) is None


BAD_STEPS = [
    {"lr": -1.0},
    {"lr": math.nan},
    {"lr": 1.0, "beta1": 1.0},
    {"lr": 1.0, "beta2": 1.5},
    {"lr": 1.0, "eps": math.inf},
]


@pytest.mark.parametrize("values", BAD_STEPS, ids=str)
def test_a_step_that_adamw_cannot_take_is_the_clients_fault(link: Link, values: dict[str, float]) -> None:
    """All ranks hear of it, as it ends the window."""
    link.join()
    link.client.begin("a.1", PASS, OptimStep(**values))
    link.clients.complete(link.next().operation, SCORED)
    refused = link.next().refused
    assert refused is not None
    assert refused.by_client


def test_what_is_wrong_with_the_operation_ends_here(link: Link) -> None:
    link.join()
    link.client.begin("a.1", BAD, SaveState(label="../x"), LoadState(adapter="a.1", label="x", optimizer=True))
    work = link.next()
    assert isinstance(work.operation.what, LoadState), "a load ends a window, so all ranks hear of it"
    assert work.refused == OperationFailure(reason="a.1 has no saved state 'x'", by_client=True)
    bad, save = (link.hears(n) for n in (1, 2))
    assert isinstance(bad, OperationFailure)
    assert "token 99 is not in the vocabulary" in bad.reason
    assert isinstance(save, OperationFailure)
    assert "is no name" in save.reason


def test_a_poison_of_a_step_is_for_all_ranks_and_one_of_a_pass_is_not(link: Link) -> None:
    link.join()
    link.client.begin("a.1", Poison(reason="lost"), Poison(reason="no such rate", by_client=True, of_step=True))
    work = link.next()
    assert link.hears(1) == OperationFailure(reason="lost", by_client=False)
    assert (work.operation.number, work.refused) == (2, OperationFailure(reason="no such rate", by_client=True))


def test_dropped_states_are_gone_and_dropping_nothing_is_no_fault(link: Link) -> None:
    link.join()
    folder = link.folder.saved_state("a.1", "x")
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"")
    link.client.begin("a.1", DropState(label="x"), DropState(label="x"), PASS)
    assert link.next().operation.number == 3
    assert [link.hears(n) for n in (1, 2)] == [StateResult(step=0, n_bytes=0)] * 2
    assert not folder.exists()


def test_a_step_is_answered_at_once_and_its_checkpoint_has_what_is_not_acknowledged(link: Link) -> None:
    link.join()
    assert link.clients._backlog.ahead("a.1") == math.inf
    link.clients.durable(AdapterRef(name="a.1", version=0))
    link.client.begin("a.1", PASS, OptimStep(lr=1.0), PASS)
    link.clients.complete(link.next().operation, SCORED)
    link.clients.windows["a.1"].targets = 5
    link.clients.settle(link.next().operation, STEPPED)
    assert link.clients.windows["a.1"].targets == 0, "the next window"
    kept = _decode(link.clients.state("a.1").ledger)
    assert kept[-1] == OperationCompletion(adapter="a.1", number=2, outcome=STEPPED)
    assert link.hears(2) == STEPPED
    assert link.clients._backlog.ahead("a.1") == 1
    link.until(lambda: _decode(link.clients.state("a.1").ledger) == ())
    link.clients.complete(link.next().operation, SCORED)
    link.clients.durable(AdapterRef(name="b.1", version=2))
    assert link.clients._backlog.ahead("a.1") == 1
    link.clients.durable(AdapterRef(name="a.1", version=2))
    link.client.wait(lambda: link.client.durable("a.1") == [2])
    assert link.clients._backlog.ahead("a.1") == 0
    assert [m.number for m in link.client.heard if isinstance(m, OperationCompletion)] == [1, 2, 3]


def test_a_load_is_answered_when_its_checkpoint_is_durable(link: Link) -> None:
    link.join()
    link.client.begin("a.1", LoadState(adapter="a.1", label="x", optimizer=True), PASS)
    link.clients.settle(link.next().operation, StateResult(step=3, n_bytes=1))
    link.clients.complete(link.next().operation, SCORED)
    assert not link.client.outcomes("a.1")
    link.clients.durable(AdapterRef(name="a.1", version=1))
    assert [link.hears(n) for n in (1, 2)] == [StateResult(step=3, n_bytes=1), SCORED]


@pytest.mark.parametrize("failed", [False, True])
def test_a_saved_state_is_said_when_it_is_on_the_disk_or_is_not(link: Link, failed: bool) -> None:
    link.join()
    link.client.begin("a.1", SaveState(label="x"))
    link.clients.start(link.next().operation, 0)
    reason = "/run/states/a.1/.x: No space left on device"
    ref = AdapterRef(name="a.1", version=0)
    link.clients.kept(
        CheckpointSave(ref=ref, step=4, label="x", failed=failed, reason=reason if failed else "", nbytes=70)
    )
    fix = "free disk space or repair the disk, then save again"
    lost = OperationFailure(reason=f"{reason} (fix: {fix})", by_client=False)
    assert link.hears(1) == (lost if failed else StateResult(step=4, n_bytes=70))


def test_a_publish_is_said_when_its_version_is_active(link: Link) -> None:
    link.join()
    link.client.begin("a.1", Publish())
    link.clients.start(link.next().operation, 7)
    link.clients.active(AdapterRef(name="a.1", version=6))
    link.clients.active(AdapterRef(name="b.1", version=7))
    assert not link.client.outcomes("a.1")
    link.clients.active(AdapterRef(name="a.1", version=7))
    assert link.hears(1) == PublishResult(version=7)


def test_one_that_resumes_has_its_last_outcome_and_expects_the_next(link: Link) -> None:
    link.join()
    link.client.begin("a.1", PASS, OptimStep(lr=1.0))
    link.clients.complete(link.next().operation, SCORED)
    link.clients.settle(link.next().operation, STEPPED)
    kept = link.clients.state("a.1")
    link.client.expects.clear()
    link.join(version=2, kept=kept)
    link.until(lambda: link.client.expects == {"a.1": 3})  # an earlier one may arrive in between
    assert link.hears(2) == STEPPED


def test_one_that_leaves_fails_what_has_no_final_outcome_and_what_comes(link: Link) -> None:
    link.join()
    link.client.begin("a.1", PASS, OptimStep(lr=1.0), PASS, Publish())
    link.clients.complete(link.next().operation, SCORED)
    link.clients.settle(link.next().operation, STEPPED)
    link.clients.complete(link.next().operation, SCORED)
    assert link.next().operation.number == 4, "all have arrived"
    link.clients.end("a.1", "it has failed")
    gone = OperationFailure(reason="it has failed", by_client=False)
    assert [link.hears(n) for n in (1, 2, 3, 4)] == [SCORED, STEPPED, SCORED, gone]
    link.clients.durable(AdapterRef(name="a.1", version=2))
    link.clients.kept(CheckpointSave(ref=AdapterRef(name="a.1", version=2), label="x"))
    link.clients.active(AdapterRef(name="a.1", version=2))
    link.client.begin("a.1", PASS)
    link.until(lambda: 5 in link.client.outcomes("a.1"))
    assert link.hears(5) == gone
    assert "a.1" in link.clients.known, "what the controller has nothing of"
