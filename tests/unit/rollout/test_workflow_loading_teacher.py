"""A teacher behind a stub of an OpenAI-compatible server: what it scores, and what becomes of groups while it fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from areal_lora.config.sections.section import ServedModel
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.network.api_client import ApiLimits
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, SingleTurnWorkflow
from areal_lora.rollout.workflow_loading import Teacher, TrainingWorkflow
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Outcome
from tests.support.clocks import seen
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import MAX_MODEL_LEN, V1, CharTokenizer, Graded, prompt_of, served
from tests.support.tasks.judge_stub import JudgeStub

QUICK = ApiLimits(attempt_s=60.0, attempts=2, backoff_s=0.01, concurrency=2)
Behave = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], Any]]
T = TypeVar("T")


class Sized(CharTokenizer):
    def __len__(self) -> int:
        return 1000


def scored(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    """As vLLM answers: no log-probability of the first token, and fields that are not needed."""
    ids = body["prompt"]
    logprobs = {"token_logprobs": [None, *(-token / 1000 for token in ids[1:])], "top_logprobs": [None, {"a": -1.0}]}
    text = CharTokenizer().decode(ids, skip_special_tokens=False)
    return 200, {}, {"id": "x", "choices": [{"index": 0, "text": text, "logprobs": logprobs, "prompt_logprobs": None}]}


def teach(
    behave: Behave, use: Callable[[Teacher], Coroutine[Any, Any, T]], **keys: Any
) -> tuple[T, JudgeStub, list[str]]:
    reports: list[str] = []
    limits = ApiLimits(**{name: getattr(QUICK, name) for name in QUICK.__struct_fields__} | keys)

    async def main(url: str) -> T:
        teacher = Teacher(ServedModel(url=url, model="large"), reports.append, limits)
        try:
            return await use(teacher)
        finally:
            await teacher.close()

    with JudgeStub(behave) as stub:
        return asyncio.run(main(stub.url)), stub, reports


def answered(teacher: Teacher, scorer: Graded | None = None, hold_s: float = 600.0) -> Coroutine[Any, Any, Episode]:
    async def main() -> Episode:
        async with served(FakeServer(models={str(V1)}), scorer or Graded()) as context:
            workflow = TrainingWorkflow(answers=SingleTurnWorkflow(context=context), teacher=teacher, hold_s=hold_s)
            return await workflow.run(prompt_of("1+1="), V1, seed=1)

    return main()


def test_every_token_of_a_group_has_the_teachers_log_probability() -> None:
    episode, stub, reports = teach(scored, answered)
    for made in episode.group.trajectories:
        want = [0.0, *(-token / 1000 for token in made.token_ids[1:])]
        assert memoryview(made.columns.teacher).cast("f").tolist() == pytest.approx(want), made.uid
    sent = sorted(body["prompt"] for body in stub.bodies)
    assert sent == sorted(made.token_ids for made in episode.group.trajectories)
    assert all((b["model"], b["echo"], b["max_tokens"]) == ("large", True, 0) for b in stub.bodies)
    assert reports == []


def test_an_answer_that_cannot_be_trained_on_is_not_sent() -> None:
    late = Graded(lambda text: Score(reward=float("nan"), outcome=Outcome.TIMEOUT))
    episode, stub, _ = teach(scored, lambda teacher: answered(teacher, late))
    assert {made.outcome for made in episode.group.trajectories} == {Outcome.TIMEOUT}
    assert stub.bodies == []


def test_a_group_is_held_while_the_teacher_fails_and_the_status_names_it() -> None:
    def behave(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return (503, {}, b"loading") if number <= 12 else scored(number, body)

    episode, stub, reports = teach(behave, answered)
    assert all(made.columns.teacher for made in episode.group.trajectories)
    assert len(stub.bodies) == 14, "the same answers, scored once each"
    line = f"the teacher large at {stub.url} does not answer, groups are held: "
    assert {*reports} == {f"{line}no answer in 2 attempts, the last: HTTP 503", "serving"}
    assert reports[0] != reports[-1] == "serving"


def test_a_slow_teacher_has_its_time_and_then_another_attempt() -> None:
    def measure() -> int:
        def behave(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
            if number == 1:
                time.sleep(8.0)
            return scored(number, body)

        episode, stub, _ = teach(behave, answered, attempt_s=1.0)
        assert all(made.columns.teacher for made in episode.group.trajectories)
        return len(stub.bodies)

    assert seen(measure, lambda requests: requests == 3) == 3


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        ((400, {}, b"context of 4096 tokens"), FaultKind.REJECTED, "HTTP 400: context of 4096 tokens"),
        ((200, {}, {"choices": [{"logprobs": {"token_logprobs": [0.0]}}]}), FaultKind.TEACHER, "1 log-probabilities"),
        ((200, {}, {"choices": [{"text": "a"}]}), FaultKind.TEACHER, "0 log-probabilities"),
        ((200, {}, b"<html>"), FaultKind.TEACHER, "unreadable reply"),
    ],
)
def test_a_group_that_is_not_scored_is_a_fault_that_names_the_teacher(
    reply: tuple[int, dict[str, str], Any], kind: FaultKind, words: str
) -> None:
    with pytest.raises(GenerationFault, match="the teacher large at http://127") as raised:
        teach(lambda number, body: reply, lambda teacher: answered(teacher, hold_s=0.0))
    assert raised.value.kind is kind
    assert words in str(raised.value)


def test_no_more_requests_are_open_than_allowed() -> None:
    async def many(teacher: Teacher) -> None:
        await asyncio.gather(*(teacher.check(Sized(), MAX_MODEL_LEN) for _ in range(8)))

    _, stub, _ = teach(scored, many)
    assert len(stub.bodies) == 8
    assert stub.most_open <= 2


@pytest.mark.parametrize("skip", [True, False])
def test_the_same_vocabulary_passes_with_a_sequence_as_long_as_any(skip: bool) -> None:
    def behave(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        status, headers, made = scored(number, body)
        made["choices"][0]["text"] = CharTokenizer().decode(body["prompt"], skip_special_tokens=skip)
        return status, headers, made

    _, stub, _ = teach(behave, lambda teacher: teacher.check(Sized(), 4096))
    [body] = stub.bodies
    assert set(body["prompt"]) == set(range(1000))
    assert len(body["prompt"]) == 4096


def test_a_teacher_that_cannot_be_the_reference_is_one_line() -> None:
    def other(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return scored(number, {**body, "prompt": [token + 1 for token in body["prompt"]]})

    for behave, kind, words in (
        (other, ConfigError, "another vocabulary than model.path"),
        (lambda number, body: (404, {}, b"no model large"), ConfigError, "HTTP 404: no model large"),
        (lambda number, body: (500, {}, b""), EnvironmentError_, "HTTP 500 (fix: start it, or correct url)"),
    ):
        with pytest.raises(kind) as raised:
            teach(behave, lambda teacher: teacher.check(Sized(), MAX_MODEL_LEN))
        assert str(raised.value).startswith("algorithm.reference: the teacher large at http://127.0.0.1:")
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
