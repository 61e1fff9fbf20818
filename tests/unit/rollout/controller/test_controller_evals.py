"""Evaluations with several sets through the whole controller: single turns, environments and agents, one version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.config.models import WorkerWorkflowConfig
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.channel.channel_messages import NotReady
from areal_lora.rollout.controller.controller import Controller
from areal_lora.rollout.controller.evaluation import EvalPlaces
from areal_lora.rollout.controller.runtime import Claim
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.tasks.datasets import load_samples
from areal_lora.types import AdapterRef
from tests.support.clocks import in_virtual_time, wait_until
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, config
from tests.support.rollout.patient_client import PatientClient
from tests.support.rollout.running import Running

GOLD = {s.prompt: s.answer for s in load_samples(config("m").adapters[0].task, "eval")}
ORDER = list(GOLD)
REF = AdapterRef(name=NAME, version=0)
Start = Callable[..., Running]

ENVIRONMENT = """
from areal_lora.rollout.conversations import Reply

class Twice:
    def __init__(self):
        self.turns = 0
    def reset(self, sample):
        self.bad = int(sample.uid.rpartition("/")[2]) % 2
    def step(self, text):
        self.turns += 1
        return Reply(text="again", done=self.turns == 2, reward=0.0 if self.bad else 0.5)
"""
AGENT = """
import aiohttp

async def agent(task):
    headers = {"Authorization": f"Bearer {task.api_key}"}
    if task.sample.prompt == BROKEN:
        raise RuntimeError("no tool")
    async with aiohttp.ClientSession(headers=headers) as session:
        body = {"model": task.model, "temperature": 1.0, "prompt": task.sample.prompt}
        async with session.post(f"{task.base_url}/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["choices"][0]["text"] == "yes"
"""


def solve(prompt: list[int], sample: int) -> tuple[list[int], str]:
    """Of four answers 0 and 1 are right where the problem's place is even; 2 and 3 state two other numbers."""
    text = "".join(map(chr, prompt))
    right = ORDER.index(text) % 2 == 0 and sample < 2 if text in GOLD else False
    return [65] * (1 + sample) + [2], GOLD[text] if right else f"#### {-1000 - sample}"


def pinned(server: FakeServer) -> list[dict[str, Any]]:
    return [request for request in server.requests if request.get("pin_version")]


def evaluate(run: Running) -> tuple[EvalRecord, ...]:
    run.client.request_eval(REF, "e")
    result = run.client.wait_eval(REF, "e")
    assert result.failed == {}
    return result.sets


def test_a_greedy_set_and_one_of_four_samples(controller: Start) -> None:
    server = FakeServer(answer=solve)
    sets = [{"name": "greedy"}, {"name": "sampled", "n_samples": 4, "temperature": 0.8, "n": 11}]
    run = controller(server, evals=sets, steps=1, eta=0)
    run.activate(0)
    greedy, sampled = evaluate(run)
    assert (greedy.name, greedy.n, greedy.n_samples, greedy.accuracy, greedy.pass_at) == ("greedy", 40, 1, 0.5, {})
    assert greedy.interval == "wilson"
    assert (sampled.name, sampled.n, sampled.n_samples, sampled.unscored) == ("sampled", 11, 4, 0)
    assert sampled.accuracy == pytest.approx(6 * 2 / 44), "even places 0 to 10"
    assert sampled.pass_at == {k: pytest.approx(v) for k, v in ((1, 6 / 22), (2, 6 / 11 * 5 / 6), (4, 6 / 11))}
    assert sampled.majority == pytest.approx(6 / 11), "two of four agree on the right one"
    assert sampled.answer_tokens == pytest.approx(3.5)
    assert sampled.interval == "wilson"
    assert sampled.accuracy_95 is not None
    assert sampled.accuracy_95[0] < 6 * 2 / 44 < sampled.accuracy_95[1]
    many = [r for r in pinned(server) if r.get("n") == 4]
    assert len(many) == 11
    assert {(r["temperature"], r["top_p"]) for r in many} == {(0.8, 1.0)}
    assert len({r["seed"] for r in many}) == 11, "problems have seeds of their own"


def test_an_environment_is_evaluated_in_episodes_of_one_version(controller: Start, tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    workflow = WorkerWorkflowConfig(kind="multi_turn", env=f"{tmp_path}/environment.py:Twice")
    sets = [{"name": "once", "workflow": "single_turn"}, {"name": "episodes", "n": 6, "correct_threshold": 0.9}]
    server = FakeServer(delay_s=lambda k: 0.1 if server.requests[k].get("pin_version") else 0.0)
    run = controller(server, workflow=workflow, evals=sets, steps=3, eta=1)
    run.activate(0)
    run.batch(0)
    run.client.request_eval(REF, "e")
    wait_until(lambda: len(pinned(server)) > 40)
    run.activate(1)  # between the first and the second turn
    once, episodes = run.client.wait_eval(REF, "e").sets
    assert (once.n, episodes.n) == (40, 6)
    assert (episodes.accuracy, episodes.reward_mean) == (0.5, 0.5)
    assert episodes.answer_tokens == 4, "two turns of two tokens"
    turns = pinned(server)[40:]
    assert len(turns) == 12
    assert {(r["model"], r["temperature"]) for r in turns} == {(str(REF), 0.0)}


def test_an_agent_is_evaluated_as_an_agent_at_the_sets_temperature(controller: Start, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT.replace("BROKEN", repr(ORDER[3])))
    server = FakeServer(answer=lambda prompt, _: ([65, 2], "yes" if sum(prompt[-40:]) % 2 else "no"))
    sets = [{"name": "agent", "n": 8, "temperature": 0.5, "n_samples": 2}]
    run = controller(
        server, workflow=WorkerWorkflowConfig(kind="agent", path=f"{tmp_path}/agent.py:agent"), evals=sets, eta=0
    )
    run.activate(0)
    (found,) = evaluate(run)
    right = [sum(map(ord, prompt[-40:])) % 2 for i, prompt in enumerate(ORDER[:8]) if i != 3]
    assert 0 < sum(right) < 7
    assert (found.n, found.unscored) == (8, 2), "one agent fails, and costs its own answers only"
    assert found.accuracy == pytest.approx(sum(right) / 8), "a bool that an agent returns says what is correct"
    assert found.pass_at == {1: pytest.approx(sum(right) / 8), 2: pytest.approx(sum(right) / 8)}
    asked = pinned(server)
    assert {(r["model"], r["temperature"]) for r in asked} == {(str(REF), 0.5)}
    assert len(asked) == 14


def test_an_evaluation_that_is_cut_off_in_its_second_set_is_repeated_whole(controller: Start) -> None:
    server = FakeServer(answer=solve, delay_s=lambda k: 0.3 if server.requests[k].get("n") == 2 else 0.0)
    sets = [{"name": "greedy", "n": 8}, {"name": "sampled", "n_samples": 2, "temperature": 1.0, "n": 4}]
    run = controller(server, evals=sets, steps=1, eta=0)
    run.activate(0)
    run.client.request_eval(REF, "e")
    wait_until(lambda: any(r.get("n") == 2 for r in pinned(server)))
    other = PatientClient(lambda: run.endpoint, read_secret(RunFolder(run.folder)))
    try:  # as a resumed trainer does, which has the evaluation as pending
        other.hello({NAME: 0}, {})
        other.announce(REF, {"server-0": server.url})
        other.request_eval(REF, "e")
        found = other.wait_eval(REF, "e").sets
        assert [(s.name, s.order, s.n) for s in found] == [("greedy", 0, 8), ("sampled", 1, 4)]
        time.sleep(0.4)
        other.poll((), 0.0)
        assert other.take_events() == (), "the first one's results are not delivered"
    finally:
        other.close()


def test_evaluations_give_way_while_the_trainer_waits_and_only_then(
    controller: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(EvalPlaces, "trainer_waits", lambda _, waits: given.append(waits))
    run = controller(FakeServer(answer=solve), evals=[{"name": "greedy"}], steps=3, eta=0)
    assert given == [False], "a trainer that greets does not wait"
    assert isinstance(run.client.poll([AdapterRef(name=NAME, version=0)], 0.0), NotReady)
    assert given[1:] == [True], "no version is on the servers: it will ask again"
    run.client.poll([], 0.0)
    assert given[2:] == [False], "it waits for no batch, but for the end of an evaluation"
    run.activate(0)
    run.batch(0)
    assert set(given[3:-1]) == {True}
    assert not given[-1], "until the batch is handed over"
    assert evaluate(run)


def test_while_another_version_is_measured_every_reply_has_it() -> None:
    """The trainer keeps the checkpoint of what it will have the figures of."""

    async def run() -> None:
        done, newest = asyncio.Event(), AdapterRef(name=NAME, version=23)

        async def evaluate(ref: AdapterRef, tag: str, newer: Callable[[AdapterRef], AdapterRef]) -> m.EvalResult:
            assert newer(ref) == (ref if ref == newest else newest)
            await done.wait()
            return m.EvalResult(adapter=NAME, version=ref.version, tag=tag, sets=())

        places = SimpleNamespace(trainer_waits=lambda _: None)
        runtime: Any = SimpleNamespace(
            feed=SimpleNamespace(newest=23),
            events=[],
            ended=[],
            running=0,
            places=1,
            start_one=lambda: False,
            evaluator=SimpleNamespace(run=evaluate, places=places),
            hello=lambda *_, **__: None,
            claim=Claim(sequences=1, groups=1, weight=1.0),
        )
        router: Any = SimpleNamespace(newest=lambda _: newest)
        async with asyncio.TaskGroup() as tasks:
            unused: Any = None
            one = Controller({NAME: runtime}, router, tasks=tasks, stop=unused, open_adapter=unused)

            async def greet(trainer: str) -> str:
                return (await one.handle(m.Hello(trainer=trainer, versions={NAME: 25}, snapshots={}))).session  # type: ignore[union-attr]

            async def poll(session: str) -> NotReady:
                await asyncio.sleep(1)
                reply = await one.handle(m.GetBatch(session=session, wanted=(), timeout_s=0.0))
                assert isinstance(reply, NotReady)
                return reply

            session = await greet("first")
            assert (await poll(session)).moved == {}
            await one.handle(m.Evaluate(session=session, adapter=NAME, version=10, tag="e"))
            for _ in range(2):
                assert (await poll(session)).moved == {NAME: (10, 23)}
            done.set()
            last = await poll(session)
            assert ([event.version for event in last.events], last.moved) == ([10], {})
            done.clear()
            await one.handle(m.Evaluate(session=session, adapter=NAME, version=11, tag="e"))
            assert (await poll(session)).moved == {NAME: (11, 23)}
            session = await greet("second")
            assert (await poll(session)).moved == {}, "that evaluation was cut off"

    in_virtual_time(run())
