"""The controller's tasks, sockets and HTTP, whole: fake servers on one side, the trainer's client on the other."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from areal_lora.config.models import WorkerWorkflowConfig
from areal_lora.config.sections.task import FunctionReward
from areal_lora.data.collate import collate
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.errors import ExitCode, RolloutError
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.controller.groups import CODE_TRIES, MIN_LOST_IN_A_ROW
from areal_lora.rollout.main import adapter_data
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.tasks.datasets import load_samples
from areal_lora.types import AdapterRef, Outcome, Sample
from tests.support.clocks import wait_until
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.helpers import NAME, CharTokenizer, config
from tests.support.rollout.patient_client import PatientClient
from tests.support.rollout.running import Running


def test_a_run_with_faults_retired_versions_and_an_evaluation(controller: Callable[..., Running]) -> None:
    faults = {1: Fault(status=503), 3: Fault(disconnect=True), 5: Fault(status=500)}
    one = FakeServer(fault=faults.get, delay_s=lambda k: 0.01 * (k % 3))
    two = FakeServer(fault=faults.get, answer=lambda prompt, sample: ([65 + sample, 2], "0"))
    run = controller(one, two, eta=1, b=4, steps=6)
    run.client.request_eval(AdapterRef(name=NAME, version=0), "before")  # asked before the version is there
    seen: set[str] = set()
    lags: set[int] = set()
    events = []
    for step in range(6):
        run.activate(step)
        batch = run.batch(step)
        if step < 5:  # else a controller that stands still for a moment samples all groups by the next version
            wait_until(lambda: run.stats(NAME).ready > 0, what="a group of the next batch")
        events += batch.events
        assert len(batch.groups) == 4
        for group in batch.groups:
            assert group.uid not in seen
            seen.add(group.uid)
            assert len(group.trajectories) == 2
            for t in group.trajectories:
                prompt = t.loss_mask.index(1)
                answer = len(t.token_ids) - prompt
                assert t.outcome is Outcome.OK
                assert t.reward in (0.0, 1.0)
                assert t.loss_mask == [0] * prompt + [1] * answer
                assert t.rollout_logprobs == [0.0] * prompt + [-0.5, -1.0]
                assert t.versions[:prompt] == [-1] * prompt
                lags.add(step - min(t.versions[prompt:]))
                assert max(t.versions) <= step
        # A version goes away under the controller's feet: its requests are asked again of the newest.
        for server in (one, two):
            server.models.discard(f"{NAME}@v{step - 1}")
    stats = run.stats(NAME)
    assert stats.issued == stats.consumed + stats.leased + stats.ready + stats.running + sum(stats.dropped.values())
    assert sum(stats.retried.values()) >= 3
    assert lags == {0, 1}
    assert one.requests
    assert two.requests
    before = events[0] if events else run.client.wait_eval(AdapterRef(name=NAME, version=0), "before")
    assert [found.n for found in before.sets] == [40] or "version_retired" in before.failed["held-out"]
    run.client.request_eval(AdapterRef(name=NAME, version=5), "after")
    after = run.client.wait_eval(AdapterRef(name=NAME, version=5), "after")
    (found,) = after.sets
    assert (found.n, after.version, found.version) == (40, 5, 5)
    assert found.samples
    run.client.shutdown()
    assert run.ended.exception(10) is None


def test_the_same_step_asked_again_gives_the_same_groups(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), eta=0)
    run.activate(0)
    first = run.batch(0)
    assert run.batch(0).groups == first.groups
    assert [len(text.answers) for text in first.texts] == [len(group.trajectories) for group in first.groups]
    assert {(text.prompt != "", text.gold != "", text.tries) for text in first.texts} == {(True, True, 1)}
    assert run.stats(NAME).issued == 4


def test_texts_are_not_sent_where_no_rollout_is_kept(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), eta=0, keep_mib=0)
    run.activate(0)
    batch = run.batch(0)
    assert (len(batch.groups), batch.texts) == (4, ())
    assert (batch.sampled.groups, batch.sampled.samples) == (4, 8)


def test_announce_from_another_thread_while_a_batch_is_awaited(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer())
    timer = threading.Timer(0.3, run.activate, [0])
    timer.start()
    assert len(run.batch(0).groups) == 4
    timer.join()


def test_evaluations_belong_to_the_trainer_that_asked(controller: Callable[..., Running]) -> None:
    replaced = False
    server = FakeServer(delay_s=lambda k: 0.0 if replaced else 5.0)  # what the first requests is not ready before
    run = controller(server, steps=1, eta=0)
    ref = AdapterRef(name=NAME, version=0)
    run.client.request_eval(ref, "e")
    run.activate(0)
    while not any(request.get("pin_version") for request in server.requests):
        time.sleep(0.01)
    before = len(server.requests)
    other = PatientClient(lambda: run.endpoint, read_secret(RunFolder(run.folder)))
    try:
        other.hello({NAME: 0}, {})
        replaced = True
        other.announce(ref, {"server-0": server.url})
        other.request_eval(ref, "e")
        assert other.wait_eval(ref, "e").sets[0].n == 40
        assert (
            sum(r.get("pin_version", False) for r in server.requests[before:]) >= 40
        )  # not the result of what the other had asked
        for _ in range(2):
            other.request_eval(ref, "again")
            time.sleep(0.3)  # it is over, and its result has not been fetched
        assert other.wait_eval(ref, "again").sets[0].n == 40
        assert sum(r.get("pin_version", False) for r in server.requests) <= 3 * 40
    finally:
        other.close()


def test_evaluations_come_one_after_the_other_and_hold_up_no_rollouts(controller: Callable[..., Running]) -> None:
    """Each holds its version on the servers, which have room for one beside those that are rolled out."""
    trained, seen = threading.Event(), list[str]()

    class Held(FakeServer):
        """Answers no request of an evaluation before the training is over."""

        async def _serve(self, request: web.Request) -> web.StreamResponse:
            body = await request.json()
            if not body.get("pin_version"):
                return await FakeServer._serve(self, request)
            seen.append(f"{body['model']} begins")
            assert await asyncio.to_thread(trained.wait, 120.0), "training waited for evaluations"
            seen.append(f"{body['model']} ends")
            return await FakeServer._serve(self, request)

    server = Held()
    run = controller(server, steps=6, eta=0, evals=[{"name": "held-out", "n": 2}])
    for step in range(6):
        if step in (1, 2):  # asked before it is announced
            run.client.request_eval(AdapterRef(name=NAME, version=step), "e")
        run.activate(step)
        run.batch(step)
        run.client.commit(NAME, step)
        if step in (0, 5):
            run.client.request_eval(AdapterRef(name=NAME, version=step), "e")
    trained.set()
    results = [run.client.wait_eval(AdapterRef(name=NAME, version=v), "e") for v in (0, 1, 2, 5)]
    assert [[found.n for found in r.sets] for r in results] == [[2]] * 4
    of_one = {v: sorted(f"{NAME}@v{v} {word}" for word in ("begins", "ends") * 2) for v in (0, 1, 2, 5)}
    assert [sorted(seen[k : k + 4]) for k in range(0, len(seen), 4)] == list(of_one.values()), "one after the other"


def test_held_out_prompts_that_are_too_long_are_left_out_and_named_before_anything_is_trained(
    controller: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would refuse each request that has one of them, and with it the whole evaluation."""

    def samples(task: Any, split: str) -> list[Sample]:
        made = load_samples(task, split)
        if split == "eval":
            made[3:5] = [replace(sample, prompt="9" * 5000) for sample in made[3:5]]
        return made

    monkeypatch.setattr("areal_lora.rollout.controller.eval_sets.load_samples", samples)
    server = FakeServer()
    run = controller(server, steps=1, eta=0)
    named = [load_samples(config("m").adapters[0].task, "eval")[i].uid for i in (3, 4)]
    status = (run.folder / "status" / "controller-0.txt").read_text()
    assert f"2 of 40 held-out prompts are too long and left out: {', '.join(named)}" in status
    run.activate(0)
    run.client.request_eval(AdapterRef(name=NAME, version=0), "e")
    (result,) = run.client.wait_eval(AdapterRef(name=NAME, version=0), "e").sets
    assert (result.n, result.left_out, result.left_out_first) == (38, 2, named)
    assert max(len(r["prompt"]) for r in server.requests) < 4096


def test_a_wrong_secret_is_an_error_not_a_hang(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer())
    with pytest.raises(RolloutError, match="another run secret"):
        PatientClient(lambda: run.endpoint, "0" * 64).hello({NAME: 0}, {})
    run.activate(0)
    assert run.batch(0).groups


def test_an_unknown_adapter_is_refused(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer())
    with pytest.raises(RolloutError, match="'other' is not in this run"):
        run.client.announce(AdapterRef(name="other", version=0), {})


def test_a_prompt_whose_reward_always_fails_is_dropped_with_a_reason_and_the_run_goes_on(
    controller: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path_factory.mktemp("code") / "rewards.py"  # not in the run folder, which a scorer cannot read
    file.write_text("def reward(completion, answer):\n    return 1 / (sum(map(ord, answer)) % 4)\n")
    monkeypatch.setattr("areal_lora.rollout.controller.groups.MAX_BACK_OFF_S", 0.01)
    reward = FunctionReward(path=f"{file}:reward")
    run = controller(FakeServer(), reward=reward, eta=1, b=4, steps=6)
    made = config("none")
    prompts = adapter_data(made, made.adapters[0], CharTokenizer()).prompts
    fails = {p.uid for p in map(prompts.at, range(64)) if sum(map(ord, p.sample.answer)) % 4 == 0}
    assert 4 < len(fails) < 32
    for step in range(6):
        run.activate(step)
        batch = run.batch(step)
        run.client.commit(NAME, step)
        assert not {group.uid for group in batch.groups} & fails
        assert all(t.reward > 0 for group in batch.groups for t in group.trajectories)
    assert "scorer" in batch.stats.dropped
    assert set(batch.stats.dropped) <= {"scorer", "stale"}  # all its tries may take longer than a step
    assert batch.stats.retried["scorer"] >= (CODE_TRIES - 1) * batch.stats.dropped["scorer"] > 0


def test_a_part_of_the_reward_has_the_mean_of_the_samples_that_name_it(
    controller: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A mixture: problems with an answer like 12 are scored as mathematics, the others as code."""
    file = tmp_path_factory.mktemp("code") / "rewards.py"
    file.write_text(
        "def reward(completion, answer):\n    return {'math': 1} if '#### 1' in answer else {'code': 0.5}\n"
    )
    run = controller(FakeServer(), reward=FunctionReward(path=f"{file}:reward"), eta=0, b=8, steps=1)
    run.activate(0)
    assert run.batch(0).reward_components == {"math": 1.0, "code": 0.5}


def test_a_reward_that_fails_on_everything_ends_the_adapter_with_the_users_line(
    controller: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path_factory.mktemp("code") / "rewards.py"
    file.write_text("def reward(completion, answer):\n    found = None\n    return len(found)\n")
    caplog.set_level("INFO")
    run = controller(FakeServer(), reward=FunctionReward(path=f"{file}:reward"), eta=0, b=4, steps=1)
    run.activate(0)
    reply: object = None
    while not isinstance(reply, m.AdapterFailed):
        reply = run.client.poll((AdapterRef(name=NAME, version=0),))
    assert reply.exit_code == ExitCode.WRONG_INPUT, "a restart of the trainer would fail alike"
    assert f"TypeError: object of type 'NoneType' has no len() ({file}:3)" in reply.reason
    stats = run.stats(NAME)
    assert 0 <= stats.retried["scorer"] - (CODE_TRIES - 1) * MIN_LOST_IN_A_ROW <= 2 * 4, "those that still run"
    traces = [r.getMessage() for r in caplog.records if "return len(found)" in r.getMessage()]
    assert len(traces) == 1, "the traceback is logged once"


ENVIRONMENT = """
from areal_lora.rollout.conversations import Reply

class Twice:
    def __init__(self, said):
        self.said, self.turns = said, 0
    def reset(self, sample):
        return None
    def step(self, text):
        self.turns += 1
        return Reply(text=self.said, done=self.turns == 2, reward=0.5)
"""
AGENT = """
import aiohttp

async def agent(task):
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for text in ("first", "second"):
            body = {"model": task.model, "messages": [{"role": "user", "content": text}]}
            async with session.post(f"{task.base_url}/chat/completions", json=body) as response:
                assert response.status == 200
    return 0.25
"""


def test_a_run_with_an_environment(controller: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    workflow = WorkerWorkflowConfig(kind="multi_turn", env=f"{tmp_path}/environment.py:Twice", args={"said": "no"})
    run = controller(FakeServer(), workflow=workflow, eta=0)
    for step in range(2):
        run.activate(step)
        batch = collate(PackedGroups.of(run.batch(step).groups))
        assert batch.rewards.tolist() == [1.0] * 8
        assert set(batch.versions[batch.loss_mask].tolist()) == {step}
        assert int(batch.loss_mask.sum()) == 8 * 4  # two answers of two tokens
    assert set(run.endpoint.ports) == {"control"}


def test_a_run_with_agents_whose_samples_are_several_trajectories(
    controller: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    run = controller(
        FakeServer(), workflow=WorkerWorkflowConfig(kind="agent", path=f"{tmp_path}/agent.py:agent"), eta=0
    )
    assert set(run.endpoint.ports) == {"control", "agents"}
    for step in range(2):
        run.activate(step)
        batch = collate(PackedGroups.of(run.batch(step).groups))
        assert batch.n_sequences == 16
        assert batch.sample_ids.tolist() == [i // 2 for i in range(16)]
        assert batch.group_ids.tolist() == [i // 4 for i in range(16)]
        assert batch.rewards.tolist() == [0.25] * 16


def test_an_agents_server_that_starts_late_costs_no_group(
    controller: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_lora.rollout.controller.groups.MAX_BACK_OFF_S", 0.05)  # 8 tries are over in 0.4 s
    server = http.server.ThreadingHTTPServer(  # bound, so that no other process gets the port
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler, bind_and_activate=False
    )
    server.server_bind()
    port = server.server_port
    asks = f"    import urllib.request\n    urllib.request.urlopen('http://127.0.0.1:{port}', timeout=120)\n"
    head, _, body = AGENT.partition("):\n")
    (tmp_path / "agent.py").write_text(f"{head}):\n{asks}{body}")
    run = controller(
        FakeServer(), workflow=WorkerWorkflowConfig(kind="agent", path=f"{tmp_path}/agent.py:agent"), eta=0
    )
    run.activate(0)
    wait_until(lambda: run.stats(NAME).retried.get("agent", 0) > 16 * 4)
    assert run.stats(NAME).dropped == {}
    with server:
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        batch = run.batch(0)
        server.shutdown()
        thread.join()
    assert batch.stats.dropped == {}
    assert "Connection refused" in batch.stats.faults["agent"]


def test_what_runs_at_once_follows_the_announced_servers(controller: Callable[..., Running]) -> None:
    """16 groups of two samples fill the 32 sequences of a server."""
    servers = [FakeServer(delay_s=lambda _: 60.0) for _ in range(3)]
    running = controller(*servers, eta=10, b=64)
    for server in servers:
        server.models.add(f"{NAME}@v0")

    def announce(*indices: int, left: tuple[str, ...] = ()) -> int:
        urls = {f"server-{i}": servers[i].url for i in indices}
        running.client.announce(AdapterRef(name=NAME, version=0), urls, left=left)
        return running.stats(NAME).running

    assert announce(0) == 16
    assert announce(0, 1, 2) == 48
    assert announce(0, 1, left=("server-2",)) == 48, "groups that run are not cut off"
    wait_until(lambda: sum(s.open_requests for s in servers) == 48)
