from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from areal_lora.rollout import routing
from areal_lora.rollout.client import CompletionClient
from areal_lora.rollout.evaluation import CHUNK, MAX_TRIES, Evaluator
from areal_lora.rollout.messages import EvalResult
from areal_lora.rollout.prompts import tokenize
from areal_lora.rollout.routing import Router
from areal_lora.rollout.testing import FakeServer, Fault
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef, Outcome
from tests.rollout.helpers import SAMPLING, CharTokenizer, samples

V2 = AdapterRef(name="math", version=2)
PROBLEMS = samples(100)


class ExactMatch:
    """``!`` cannot be scored."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [
            Score(reward=float("nan"), outcome=Outcome.ERROR, detail="broken") if item.completion == "!"
            else Score(reward=float(item.completion == item.gold), outcome=Outcome.OK)
            for item in items
        ]


def solve(prompt: list[int], _: int) -> tuple[list[int], str]:
    """Right below 30, unscorable from 90 on, wrong between: 30 of 90 are right."""
    number = int("".join(map(chr, prompt)).partition("+")[0])
    return [7, 2], str(number + 1) if number < 30 else "!" if number >= 90 else "no"


def evaluate(server: FakeServer, max_chunks: int = 2) -> EvalResult:
    async def main() -> EvalResult:
        async with server:
            router = Router()
            router.announce(V2, {"server-0": server.url})
            async with CompletionClient(router, "") as client:
                evaluator = Evaluator(
                    client=client, scorer=ExactMatch(), sampling=SAMPLING, samples=PROBLEMS,
                    token_ids=tokenize(PROBLEMS, CharTokenizer()), max_chunks=max_chunks,
                )
                return await evaluator.run(V2, "after")

    return asyncio.run(main())


def test_accuracy_over_all_problems_that_could_be_scored() -> None:
    server = FakeServer(models={str(V2)}, answer=solve)
    result = evaluate(server)
    assert (result.accuracy, result.n, result.error) == (30 / 90, 90, "")
    assert (result.adapter, result.version, result.tag) == ("math", 2, "after")
    assert [s.completion for s in result.samples] == ["1", "2", "3", "4"]
    assert [len(r["prompt"]) for r in server.requests] == [CHUNK, CHUNK, CHUNK, 100 - 3 * CHUNK]


def test_it_leaves_room_for_training_rollouts() -> None:
    busiest = 0

    def watch(_: int) -> float:
        nonlocal busiest
        busiest = max(busiest, server.open_requests)
        return 0.05

    server = FakeServer(models={str(V2)}, answer=solve, delay_s=watch)
    evaluate(server, max_chunks=2)
    assert busiest == 2


def test_a_passing_fault_is_asked_again() -> None:
    server = FakeServer(models={str(V2)}, answer=solve, fault=lambda k: Fault(status=503) if k == 1 else None)
    assert evaluate(server).n == 90


def test_a_server_that_is_gone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "COOL_DOWN_S", 0.01)
    gone = MAX_TRIES + 3
    server = FakeServer(models={str(V2)}, answer=solve, fault=lambda k: Fault(disconnect=True) if k < gone else None)
    assert evaluate(server, max_chunks=1).n == 90


def test_a_retired_version_is_an_error_and_not_accuracy_zero() -> None:
    result = evaluate(FakeServer())
    assert result.n == 0
    assert "version_retired" in result.error


def test_no_scorable_answer_is_an_error() -> None:
    result = evaluate(FakeServer(models={str(V2)}, answer=lambda *_: ([7], "!")))
    assert "broken" in result.error
