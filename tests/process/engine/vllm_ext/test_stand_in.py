"""The server without vLLM, as a process beside the real one's protocols."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from areal_lora.data.prompts import Prompt
from areal_lora.errors import PublishError
from areal_lora.processes.watched import VARIABLE
from areal_lora.rollout.channel.channel_messages import EvalResult
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.controller.eval_sets import HeldOut
from areal_lora.rollout.controller.evaluation import EvalPlaces, Evaluator
from areal_lora.rollout.routing import Router
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.rewards import numeric_match
from areal_lora.tasks.word_problems import word_problem
from areal_lora.types import AdapterRef, Outcome, Sample
from tests.support.clocks import seen
from tests.support.engine.vllm_ext.serving import HIDDEN, PROMPT, RunningServer, connect, start
from tests.support.engine.vllm_ext.stand_in import TOKEN_S, base_modules, dice, solution
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES
from tests.support.rollout.helpers import eval_set, single_turn_workflows

pytestmark = pytest.mark.timeout(600)
PLACES = 32
MODULE = "tests.support.engine.vllm_ext.stand_in"


def forks(folder: Path, module: str = "", env: dict[str, str] | None = None) -> Path:
    """An interpreter for the server of ``folder`` whose processes are forks."""
    return starter_of(ROLES["trainer.python"]).interpreter(folder.with_name(f"python of {folder.name}"), module, env)


@contextmanager
def stand_in(folder: Path, model: Path, env: dict[str, str] | None = None, **rollout: Any) -> Iterator[RunningServer]:
    process = start(folder, model, (str(forks(folder)), "-m", MODULE), env, **rollout)
    try:
        running = connect(folder, model, process)
        yield running
        running.source.close()
    finally:
        process.kill()
        process.wait(120)


def ask(server: RunningServer, **body: Any) -> tuple[int, Any]:
    async def post() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            want = {"model": "math", "prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
            return await server.post(session, **want | body)

    return asyncio.run(post())


def test_modules_are_those_of_the_checkpoint(tiny_model: Path) -> None:
    modules = base_modules(tiny_model)
    assert modules["model.layers.1.mlp.experts.7.down_proj"] == (64, HIDDEN)
    assert modules["model.layers.0.self_attn.k_proj"] == (HIDDEN, 64)
    assert len(modules) == 2 * (4 + 8 * 3)


def test_a_third_of_the_solutions_is_right() -> None:
    rewards = []
    for index in range(300):
        sample = word_problem(3, "train", index)
        rewards.append(numeric_match(solution(sample.prompt, dice([index], 1, 0)), sample.answer))
    assert 0.25 < sum(rewards) / len(rewards) < 0.42


@pytest.mark.slow
def test_it_serves_versions_and_answers_purely(tiny_model: Path, tmp_path: Path) -> None:
    with stand_in(tmp_path / "a", tiny_model) as one, stand_in(tmp_path / "b", tiny_model) as other:
        pids = [read_endpoint(RunFolder(server.folder), "server", 0).pid for server in (one, other)]
        mapped = [{m.path for m in psutil.Process(pid).memory_maps()} for pid in pids]
        assert any("/torch/" in path for path in mapped[0]), "they are the servers"
        assert not any("/vllm/" in path for paths in mapped for path in paths), "its start takes a second"
        assert ask(one)[0] == 404
        for server in (one, other):
            for seed in (1, 2):
                ref = server.publish(server.adapter(seed))
        assert one.admin.info(120.0).refs == ["math@v0", "math@v1"]
        answers = [ask(s, seed=5, n=3) for s in (one, other, one)]
        assert [status for status, _ in answers] == [200] * 3
        choices = [a["choices"] for _, a in answers]
        assert choices[0] == choices[1] == choices[2], "the same question has the same answer, on another server too"
        assert answers[0][1]["model"] == str(ref)
        assert len({tuple(c["token_ids"]) for c in choices[0]}) > 1
        assert ask(one, seed=5, n=3, model="math@v0")[1]["choices"] != choices[0]
        assert [c["token_ids"] for c in ask(one, seed=6, n=2)[1]["choices"]] == [c["token_ids"] for c in choices[0][1:]]
        assert one.score(ref) == other.score(ref) != one.score(None)
        for status, model in ((404, "math@v7"), (404, "nobody")):
            assert ask(one, model=model)[0] == status
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(120) == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", ["server.receiving", "server.activated", "server.generating"])
def test_it_can_be_killed_where_the_real_one_can(tiny_model: Path, tmp_path: Path, point: str) -> None:
    python = forks(tmp_path / "run", MODULE, {VARIABLE: f"{point}:2:kill", TOKEN_S: "0.01"})
    process = start(tmp_path / "run", tiny_model, (str(python), "-m", "areal_lora.engine.vllm_ext.server.main"))
    try:
        server = connect(tmp_path / "run", tiny_model, process)
        server.publish(server.adapter(1))
        assert ask(server, seed=1)[0] == 200
        if point == "server.generating":
            with pytest.raises(aiohttp.ClientError):
                ask(server, seed=2)
        else:
            with pytest.raises(PublishError):
                server.publish(server.adapter(2), timeout_s=3.0)
        assert process.wait(120) == -signal.SIGKILL
        server.source.close()
    finally:
        process.kill()
        process.wait(120)


@pytest.mark.slow
def test_running_answers_go_on_with_a_new_version_where_the_policy_says_so(tiny_model: Path, tmp_path: Path) -> None:
    with stand_in(tmp_path / "run", tiny_model, {TOKEN_S: "0.1"}, in_flight="interrupt") as server:

        async def run() -> tuple[AdapterRef, AdapterRef, list[Any]]:
            old = await asyncio.to_thread(server.publish, server.adapter(1))
            async with aiohttp.ClientSession() as session:
                body = {"model": str(old), "prompt": PROMPT, "seed": 3, "max_tokens": 12}
                asked = [
                    asyncio.create_task(server.post(session, **body, pin_version=pinned)) for pinned in (False, True)
                ]
                await asyncio.sleep(0.2)
                new = await asyncio.to_thread(server.publish, server.adapter(2))
                return old, new, [(await task)[1] for task in asked]

        old, new, (cut, pinned) = seen(
            lambda: asyncio.run(run()), lambda found: len(set(found[2][0]["choices"][0]["versions"])) > 1
        )
        assert set(cut["choices"][0]["versions"]) == {old.version, new.version}
        assert set(pinned["choices"][0]["versions"]) == {old.version}
        assert (cut["model"], pinned["model"]) == (str(new), str(old))


@pytest.mark.slow
def test_answers_on_a_lost_version_end_and_later_ones_are_of_the_next(tiny_model: Path, tmp_path: Path) -> None:
    """The next session of the trainer resumes from an older version, and first makes one of the lost one's number."""
    with stand_in(tmp_path / "run", tiny_model, {TOKEN_S: "0.1"}, in_flight="keep") as server:
        server.publish(server.adapter(1))

        async def run() -> tuple[AdapterRef, int, Any]:
            lost = await asyncio.to_thread(server.publish, server.adapter(2))
            async with aiohttp.ClientSession() as session:
                body = {"model": str(lost), "prompt": PROMPT, "seed": 3, "max_tokens": 12}
                asked = asyncio.create_task(server.post(session, **body))
                await asyncio.sleep(0.2)
                server.source.session += 1
                await asyncio.to_thread(server.publish, server.adapter(3), lost.version)
                return lost, *await asked

        lost, _, answer = seen(lambda: asyncio.run(run()), lambda found: found[1] == 404)
        assert f"{lost} is lost" in answer["error"]["message"]
        (choice,) = ask(server, model="math@v0", return_columns=False)[1]["choices"]
        assert set(choice["versions"]) == {lost.version}


def errors(results: list[EvalResult]) -> list[str]:
    return [reason for result in results for reason in result.failed.values()]


class Counting:
    """Every answer is right."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [Score(reward=0.5, outcome=Outcome.OK, correct=True) for _ in items]


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0, 2])
def test_slow_evaluations_one_after_the_other_find_their_version_and_hold_up_no_publish(
    tiny_model: Path, tmp_path: Path, eta: int
) -> None:
    """Three rounds of requests one after the other each, while versions come faster than evaluations end."""
    samples = [Sample(uid=str(i), prompt="", answer="") for i in range(2 * PLACES + 1)]
    problems = [Prompt(uid=s.uid, position=i, sample=s, text="", token_ids=PROMPT) for i, s in enumerate(samples)]
    held_out = HeldOut(prompts=problems)
    with stand_in(tmp_path / "run", tiny_model, {TOKEN_S: "0.03"}, max_staleness=eta) as server:

        async def run() -> tuple[list[EvalResult], list[float]]:
            router, took, results = Router(), list[float](), list[EvalResult]()
            weights = server.adapter(1)

            async def publish() -> AdapterRef:
                began = time.monotonic()
                ref = await asyncio.to_thread(server.publish, weights)
                took.append(time.monotonic() - began)
                router.announce(ref, {"server-0": f"http://{server.endpoint.host}:{server.endpoint.ports['data']}"})
                return ref

            async with CompletionClient(router, "") as client:
                sets = [eval_set(held_out, server.config.adapters[0].sampling)]
                evaluator = Evaluator(
                    reward_kind="numeric_match",
                    sets=sets,
                    workflows=single_turn_workflows(sets, client.pinned(), Counting()),
                    places=EvalPlaces(PLACES),
                )
                for _ in range(2):
                    evaluation = asyncio.create_task(evaluator.run(await publish(), "held-out"))
                    await asyncio.sleep(0.4)  # its first request is there: from then on it keeps its version
                    while not evaluation.done():
                        await publish()
                    results.append(evaluation.result())
            return results, took

        # More versions than would fill all slots; an evaluation whose first request is late finds its version replaced.
        # A publish that waits for a slot waits for most of its time.
        most_s = 0.4 * server.config.weight_sync.attempt_s
        results, _ = seen(
            lambda: asyncio.run(run()),
            lambda found: len(found[1]) > 2 * (eta + 3) and not errors(found[0]) and max(found[1][1:]) < most_s,
        )
        assert [(found.n, found.accuracy) for r in results for found in r.sets] == [(len(problems), 1.0)] * 2
