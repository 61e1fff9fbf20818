from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from areal_lora.data.prompts import Formatter, prompts_of
from areal_lora.errors import ConfigError, RolloutError
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.rollout import routing
from areal_lora.rollout.channel.channel_messages import EvalResult
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.controller.eval_sets import HeldOut, fitting
from areal_lora.rollout.controller.evaluation import MAX_TRIES, EvalPlaces, Evaluator
from areal_lora.rollout.routing import Router
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.types import AdapterRef, Outcome, Sample
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.helpers import CharTokenizer, eval_set, samples, single_turn_workflows

V2 = AdapterRef(name="math", version=2)
PROBLEMS = samples(100)


class ExactMatch:
    """``!`` cannot be scored. The reward is shaped as in docs/en/tasks.md: a right answer has a little less than 1.

    Without ``rule`` nothing says what is correct; "no" is left without where ``rule`` is "some".
    """

    def __init__(self, rule: str = "all") -> None:
        self._rule = rule

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def _score(self, item: ScoreItem) -> Score:
        if item.completion == "!":
            return Score(reward=float("nan"), outcome=Outcome.ERROR, detail="broken")
        right = item.completion == item.answer
        ruled = self._rule == "all" or (self._rule == "some" and item.completion != "no")
        return Score(reward=right - 0.01, outcome=Outcome.OK, correct=right if ruled else None)


def solve(prompt: list[int], _: int) -> tuple[list[int], str]:
    """Right below 30, unscorable from 90 on, wrong between: 30 of 100 are right."""
    number = int("".join(map(chr, prompt)).partition("+")[0])
    return [7, 2], str(number + 1) if number < 30 else "!" if number >= 90 else "no"


def evaluated(
    server: FakeServer, places: int = 64, scorer: ExactMatch | None = None, held_out: HeldOut | None = None
) -> EvalResult:
    async def main() -> EvalResult:
        async with server:
            router = Router()
            router.announce(V2, {"server-0": server.url})
            async with CompletionClient(router, "") as client:
                sets = [eval_set(held_out or held_out_of(PROBLEMS, 64), n_samples=1)]
                evaluator = Evaluator(
                    reward_kind="function",
                    sets=sets,
                    workflows=single_turn_workflows(sets, client.pinned(), scorer or ExactMatch()),
                    places=EvalPlaces(places),
                )
                return await evaluator.run(V2, "after")

    result = asyncio.run(main())
    assert (result.adapter, result.version, result.tag) == ("math", 2, "after")
    return result


def evaluate(server: FakeServer, **settings: Any) -> EvalRecord:
    result = evaluated(server, **settings)
    (found,) = result.sets
    assert (found.adapter, found.version, found.order, found.tag, result.failed) == ("math", 2, 0, "after", {})
    return found


def reason(server: FakeServer, **settings: Any) -> str:
    """Why the set has no record."""
    result = evaluated(server, **settings)
    assert (result.sets, result.retired) == ((), False)
    return result.failed["held-out"]


def held_out_of(problems: Sequence[Sample], max_prompt_tokens: int) -> HeldOut:
    return fitting(prompts_of(problems, Formatter(tokenizer=CharTokenizer())), max_prompt_tokens)


def test_accuracy_is_the_tasks_own_and_what_could_not_be_scored_counts_as_not_correct() -> None:
    server = FakeServer(models={str(V2)}, answer=solve)
    result = evaluate(server)
    assert (result.accuracy, result.n, result.unscored) == (30 / 100, 100, 10)
    assert result.reward_mean == pytest.approx(30 / 90 - 0.01), "over those that have a reward"
    assert (result.name, result.left_out) == ("held-out", 0)
    assert (result.answer_tokens, result.truncated, result.pass_at, result.majority) == (2.0, 0.0, {}, None)
    assert (result.interval, result.accuracy_95) == ("wilson", pytest.approx((0.2189, 0.3958), abs=1e-4))
    assert [s.completion for s in result.samples] == ["1", "2", "3", "4"]
    assert len(server.requests) == 100
    assert all(r["pin_version"] and (r["temperature"], r.get("n", 1)) == (0, 1) for r in server.requests)


def test_without_a_rule_there_is_a_mean_reward_and_no_accuracy(caplog: pytest.LogCaptureFixture) -> None:
    result = evaluate(FakeServer(models={str(V2)}, answer=solve), scorer=ExactMatch(rule=""))
    assert (result.accuracy, result.n, result.unscored) == (None, 100, 10)
    assert result.reward_mean == pytest.approx(30 / 90 - 0.01)
    assert not caplog.records, "a plain reward is nothing to warn of"
    result = evaluate(FakeServer(models={str(V2)}, answer=solve), scorer=ExactMatch(rule="some"))
    assert result.accuracy is None
    assert "60 of 90 answers" in caplog.text
    assert "correct_threshold" in caplog.text


def test_an_example_that_could_not_be_scored_has_no_reward() -> None:
    server = FakeServer(models={str(V2)}, answer=lambda p, _: ([7], "!" if p[0] == ord("0") else "2"))
    result = evaluate(server)
    assert [s.reward for s in result.samples[:2]] == [None, 0.99]


def test_prompts_that_leave_no_room_for_an_answer_are_left_out_and_named() -> None:
    long = [Sample(uid=f"long{i}", prompt="9" * 40, answer="1") for i in range(2)]
    held_out = held_out_of([long[0], *PROBLEMS[:70], long[1]], 39)
    assert held_out.left_out == ("long0", "long1")
    server = FakeServer(models={str(V2)}, answer=solve)
    result = evaluate(server, held_out=held_out)
    assert (result.accuracy, result.n, result.left_out) == (30 / 70, 70, 2)
    assert result.left_out_first == ["long0", "long1"]
    assert held_out.note() == "2 of 72 held-out prompts are too long and left out: long0, long1"
    assert max(len(r["prompt"]) for r in server.requests) <= 39
    with pytest.raises(ConfigError, match="all 2 held-out prompts are longer than the 39 tokens"):
        held_out_of(long, 39)


def test_it_leaves_room_for_training_rollouts() -> None:
    busiest = 0

    def watch(_: int) -> float:
        nonlocal busiest
        busiest = max(busiest, server.open_requests)
        return 0.05

    server = FakeServer(models={str(V2)}, answer=solve, delay_s=watch)
    evaluate(server, places=20)
    assert busiest == 20


def test_a_passing_fault_is_asked_again() -> None:
    server = FakeServer(models={str(V2)}, answer=solve, fault=lambda k: Fault(status=503) if k == 1 else None)
    assert evaluate(server).n == 100


def test_a_server_that_is_gone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "COOL_DOWN_S", 0.01)
    gone = MAX_TRIES + 3
    server = FakeServer(models={str(V2)}, answer=solve, fault=lambda k: Fault(disconnect=True) if k < gone else None)
    assert evaluate(server, places=1).n == 100


def test_a_retired_version_is_an_error_and_not_accuracy_zero() -> None:
    result = evaluated(FakeServer())
    assert (result.sets, result.retired) == ((), True)
    assert "version_retired" in result.failed["held-out"]


def test_no_scorable_answer_is_an_error() -> None:
    assert "broken" in reason(FakeServer(models={str(V2)}, answer=lambda *_: ([7], "!")))


class Broken(ExactMatch):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"), [(RolloutError("16 calls hang"), "16 calls hang"), (KeyError("gold"), "KeyError: 'gold'")]
)
def test_what_a_reward_or_workflow_raises_is_the_sets_error_and_does_not_end_the_controller(
    error: Exception, said: str
) -> None:
    """The evaluations of all adapters run in the controller's task group, which the first error would end."""
    assert reason(FakeServer(models={str(V2)}, answer=solve), scorer=Broken(error)) == said
