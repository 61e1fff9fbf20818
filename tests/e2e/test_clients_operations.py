"""A run that begins without adapters, with a real server: some join, pause and leave, a client drives others.

The client trains, publishes, samples, saves and loads over the link, through kills. An adapter that trains on a data
set beside them has the numbers of a run alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.report.page import write_report
from areal_lora.operations.protocol import (
    DropState,
    LoadState,
    Loss,
    OperationFailure,
    OptimStep,
    Pass,
    Poison,
    Publish,
    PublishResult,
    SaveState,
    StateResult,
    StepResult,
    What,
)
from areal_lora.run_folder.paths import DesiredAdapter
from areal_lora.run_folder.rendezvous import read_endpoint, read_secret
from tests.support.e2e.desired_run import Service, wanted
from tests.support.e2e.several_adapters import Ended, entries, states_of
from tests.support.operations.client import Client, datum, floats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECTION: dict[str, Any] = {
    "workflow": {"kind": "client"},
    "rank": 4,
    "alpha": 8,
    "target_modules": ["all-linear"],
    "seed": 3,
}
TEXT = [5, 9, 12, 7, 30, 22, 11, 5, 9, 14]
OTHER = [8, 8, 3, 17, 25]
SFT = Pass(data=(datum(TEXT, [1.0] * 9), datum(OTHER, [0.0, 0.0, 1.0, 0.5])), loss=Loss.CROSS_ENTROPY)
STEP = OptimStep(lr=0.01)
BAD = Pass(data=(datum([1, 999_999], [1.0]),), loss=Loss.CROSS_ENTROPY)


MOUNTS = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


class Run:
    """A run of clients' adapters, and their client. What ``full.1`` saves is on a disk of 64 KiB, given the rights."""

    def __init__(self, root: Path) -> None:
        small = "../states/full.1" if MOUNTS else ""
        self.service = Service(root, "clients", [], small_disk=small, overrides="run.max_restarts=5")
        self.wanted: list[DesiredAdapter] = []
        self.service.wait(self.service.folder.secret.exists, "the run's secret")
        self.client = Client(self.service.folder)

    def add(self, *names: str) -> None:
        self.wanted += [wanted(SECTION, name) for name in names]
        self.service.want(*self.wanted)
        for name in names:
            self.client.wait(lambda name=name: f"{name}.1" in self.client.expects)  # type: ignore[misc]

    def sample(self, model: str, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Greedy tokens with their log-probabilities, from the server's data plane."""
        folder = self.service.folder
        endpoint = read_endpoint(folder, "server", 0)
        assert endpoint is not None
        secret = read_secret(folder)
        tls = "data" in endpoint.tls
        url = f"http{'s' if tls else ''}://{endpoint.host}:{endpoint.ports['data']}/v1/completions"
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
        }
        verify = client_context(secret, Plane.DATA) if tls else True
        answer = httpx.post(url, json=body, headers=authorization(secret, Plane.DATA), verify=verify, timeout=150)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        found = choice["logprobs"]
        return choice["token_ids"], found["token_logprobs"]

    def want_deleted(self, *names: str) -> None:
        self.wanted = [each for each in self.wanted if each.name not in names]
        self.service.want(*self.wanted)

    def states(self, key: str) -> dict[int, list[str]]:
        self.client.settle(key)
        while True:  # old ones are removed after the newest one was said
            with contextlib.suppress(FileNotFoundError):
                return states_of(self.service.folder, [key])[key]

    def kill_rank_0(self) -> None:
        endpoint = read_endpoint(self.service.folder, "operations", 0)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = Run(tmp_path_factory.mktemp("of clients"))
    try:
        yield made
    finally:
        made.client.close()
        made.service.process.terminate()
        made.service.process.wait(150)
        print(made.service.output[-6000:])


def test_a_client_trains_publishes_samples_saves_and_loads(run: Run) -> None:
    run.add("a")
    key, do = "a.1", run.client.do
    first, again, step, published = do(key, SFT, SFT, STEP, Publish())
    assert [len(floats(row)) for row in first.logprobs] == [9, 4]
    assert again == first, "the same bytes, and gradients change no score"
    last = floats(first.logprobs[1])
    assert first.loss == pytest.approx(-sum(floats(first.logprobs[0])) - last[2] - 0.5 * last[3], abs=1e-4)
    assert (step.step, step.skipped, published) == (1, False, PublishResult(version=3))
    agrees(run, key, 3)

    # A window with a fault changes nothing, whether the fault is the client's or one of the way.
    before = run.states(key)[published.version]
    bad, poisoned, other, lost = do(key, SFT, BAD, STEP, Poison(reason="it was lost"), STEP)[1:]
    assert bad.by_client
    assert "999999" in bad.reason
    assert poisoned == OperationFailure(reason=f"its window has failed: {bad.reason}", by_client=True)
    assert (other.reason, lost.by_client) == ("it was lost", False)
    assert {tuple(files) for files in list(run.states(key).values())[1:]} == {tuple(before)}, "no byte differs"
    assert run.client.do(key, STEP)[0].by_client, "a step without gradients"

    # A saved state, into another adapter: with the optimizer it continues like the first one, without it not.
    kept, _, moved, newest = do(key, SaveState(label="mine"), SFT, STEP, Publish())
    assert (kept.step, moved.step) == (1, 2)
    agrees(run, key, newest.version)
    run.add("b")
    load, bare = (LoadState(adapter=key, label="mine", optimizer=optimizer) for optimizer in (True, False))
    loaded, _, stepped = do("b.1", load, SFT, STEP)
    assert (loaded, stepped) == (kept, moved)
    assert run.states("b.1")[3] == run.states(key)[newest.version], "weights and both moments, bit for bit"
    fresh, _, stepped, published = do("b.1", bare, SFT, STEP, Publish())
    assert (fresh.step, stepped.step, published.version) == (0, 1, 6)
    assert run.states("b.1")[6] != run.states(key)[newest.version]
    agrees(run, "b.1", 6)

    # What cannot be loaded fails, and poisons the window that it begins.
    assert do(key, DropState(label="mine"), DropState(label="mine")) == [StateResult(step=0, n_bytes=0)] * 2
    missing, _, step = do("b.1", load, SFT, STEP)
    assert (missing.reason, step.by_client) == ("a.1 has no saved state 'mine'", True)
    assert run.states("b.1").keys() == {0, 1, 3, 4, 6, 9, 11}, "what fails has a checkpoint as well"
    assert run.states("b.1")[11] == run.states("b.1")[9] == run.states("b.1")[6]
    assert "is no name" in do(key, SaveState(label="../x"))[0].reason


def agrees(run: Run, key: str, version: int) -> None:
    """The servers and the trainer score what the newest version samples alike."""
    tokens, sampled = run.sample(f"{key}@v{version}", TEXT[:4])
    row = TEXT[:4] + tokens
    score = Pass(data=(datum(row, [1.0] * (len(row) - 1)),), loss=Loss.CROSS_ENTROPY, backward=False)
    [scored] = run.client.do(key, score)
    assert floats(scored.logprobs[0])[3:] == pytest.approx(sampled, abs=1e-3)


def test_an_adapter_has_its_own_numbers_whoever_comes_and_goes(run: Run, alone: Ended) -> None:
    """Weights and both moments of all steps, bit for bit; one joins at step 2 and is deleted at step 4.

    A name that is used again, an adapter that cannot be trained, and one more than servers hold, change nothing either.
    """
    run.wanted = []
    [attention, experts, shared] = entries(
        "attention", "experts", "shared", experts={"steps": 50}, shared={"steps": 50}
    )
    service, first, bad = run.service, wanted(attention), experts | {"rank": 64}
    service.want(first, wanted(shared))
    service.wait(lambda: 1 in service.steps("attention.1"), "step 2")
    late = [wanted(shared, name) for name in ("late", "later")]  # the first has a place if the test is slow
    service.want(first, wanted(shared), wanted(bad, "bad"), wanted(experts), *late)
    service.wait_state("experts.1", "active")
    service.wait_state("bad.1", "failed")
    service.wait_state("later.1", "pending")
    [(state, reason)] = service.states("bad.1")
    assert (state, "rank: rank 64 is above the servers' rollout.max_lora_rank = 8" in reason) == ("failed", True)
    assert "rollout.max_adapters = 3" in service.states("later.1")[0][1]
    service.wait(lambda: 3 in service.steps("attention.1") and service.steps("experts.1") != [], "step 4")
    again = wanted(experts | {"steps": 2}, incarnation=2)
    service.want(first, wanted(shared), wanted(experts, phase="deleted"), again)
    service.wait_state("experts.1", "deleted")
    service.wait_state("experts.2", "active")
    service.want(first, wanted(shared, phase="deleted"), again)
    service.wait_state("attention.1", "done")
    service.wait_state("experts.2", "done")
    assert [state for state, _ in service.states("experts.2")] == ["pending", "active", "draining", "done"]
    service.want()
    assert service.steps("experts.2") == [0, 1], "a name that is used again begins anew"
    found = states_of(service.folder, ["attention.1", "experts.1", "experts.2"])
    for version in (0, 1):
        assert found["experts.2"][version] == found["experts.1"][version], "as its seed has it begin"
    assert (service.folder.adapter_export("experts.2") / "adapter_model.safetensors").exists()
    assert alone.states["attention"] == found["attention.1"]


LOOP: tuple[What, ...] = (SFT, OptimStep(lr=0.001), SaveState(label="loop", moments=False), Publish())


def test_beside_a_data_set_both_have_the_numbers_of_a_run_alone(run: Run, alone: Ended) -> None:
    """All steps, weights and both moments bit for bit, while the client steps, saves and publishes in a loop."""
    run.want_deleted("a", "b")
    [attention] = entries("attention")
    run.wanted = [wanted(attention, "beside")]
    run.add("loop")
    loops = 0
    while loops < 3 or "done" not in [state for state, _ in run.service.states("beside.1")]:
        assert run.client.do("loop.1", *LOOP)[3] == PublishResult(version=4 * loops + 2)
        loops += 1
    assert run.states("beside.1") == alone.states["attention"]
    run.want_deleted("loop")
    run.add("quiet")
    for _ in range(3):
        run.client.do("quiet.1", *LOOP)
    assert [run.states("quiet.1")[v] for v in (2, 6, 10)] == [run.states("loop.1")[v] for v in (2, 6, 10)]

    # What the run says of it.
    run.service.wait(lambda: len(run.service.steps("quiet.1")) == 3, "the records")
    records = [record for record in read_metrics(run.service.folder).steps if record.adapter == "loop.1"]
    assert [record.step for record in records] == list(range(loops))
    assert {record.n_targets for record in records} == {11}
    for metrics in (record.metrics for record in records):
        assert (metrics["train/n_tokens"], metrics["train/n_sequences"], metrics["train/lr"]) == (15, 2, 0.001)
        assert metrics["train/loss"]
        assert metrics["train/grad_norm"]
    assert f"loop.1: step {loops}  loss" in run.service.output
    assert "active after 3 steps · seed 3 · weight 1 · driven by a client" in write_report(
        run.service.folder
    ).read_text(encoding="utf-8")
    run.wanted = []
    run.service.want()


@pytest.mark.skipif(not MOUNTS, reason="mounts need privileges")
def test_a_full_disk_fails_the_state_that_is_saved_and_nothing_else(run: Run) -> None:
    run.want_deleted("a", "b")
    run.add("full", "fine")
    whats = (SFT, STEP, SaveState(label="x"), SFT, STEP)
    answers, others = (run.client.do(f"{name}.1", *whats) for name in ("full", "fine"))
    assert isinstance(answers[2], OperationFailure)
    assert "/states/full.1/.x." in answers[2].reason
    assert "No space left on device (fix: free disk space" in answers[2].reason
    assert isinstance(others[2], StateResult)
    assert isinstance(answers[4], StepResult)
    assert answers[3:] == others[3:]
    full, fine = run.states("full.1"), run.states("fine.1")
    assert [full[v] for v in (2, 5)] == [fine[v] for v in (2, 5)], "the first version is removed after the answer"
    run.want_deleted("full", "fine")


SCRIPT: list[What] = [
    SFT,
    STEP,
    SFT,
    BAD,
    STEP,
    SFT,
    SaveState(label="n7"),
    SFT,
    OptimStep(lr=0.02, grad_clip_norm=0.1),
]


def test_killed_in_a_window_and_after_a_step_it_ends_as_if_undisturbed(run: Run) -> None:
    """Both have one seed: their checkpoints have the same bytes."""
    run.want_deleted("a", "b")
    run.add("calm", "shaken")
    calm = run.client.do("calm.1", *SCRIPT)
    run.client.do("shaken.1", *SCRIPT[:3])
    restarted(run)  # in a window
    run.client.do("shaken.1", *SCRIPT[3:5])
    restarted(run)  # after a step
    run.client.do("shaken.1", *SCRIPT[5:8])
    last = run.client.begin("shaken.1", SCRIPT[8])  # perhaps in the middle of it
    restarted(run)
    run.client.wait(lambda: last in run.client.outcomes("shaken.1"))
    assert list(run.client.outcomes("shaken.1").values()) == calm
    assert run.client.do("shaken.1", Publish()) == [PublishResult(version=9)]
    mine, theirs = run.states("shaken.1"), run.states("calm.1")
    assert mine.keys() == theirs.keys() == {0, 2, 5, 9}
    assert mine == theirs
    agrees(run, "shaken.1", 9)


def restarted(run: Run) -> None:
    run.client.expects.clear()
    run.kill_rank_0()
    run.client.wait(lambda: {"calm.1", "shaken.1"} <= run.client.expects.keys())


def test_a_deleted_adapter_fails_what_it_is_asked(run: Run) -> None:
    run.want_deleted("calm")
    run.add("short")
    run.client.do("short.1", SFT)
    run.want_deleted("short")
    run.service.wait_state("short.1", "deleted")
    [failed] = run.client.do("short.1", STEP)
    assert (failed.reason, failed.by_client) == ("the adapter was deleted", False)
