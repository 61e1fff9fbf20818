"""A served sequence classifier as the reward, against a stub server, in its fenced scorer process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_lora.config.sections.task import ModelReward
from areal_lora.network.api_client import ApiLimits
from areal_lora.tasks import scorer_setup
from areal_lora.tasks.judge import class_score
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.scorer import RewardSum
from areal_lora.types import Outcome
from tests.support.tasks.judge_stub import JudgeStub

KEY = "sk-0123456789abcdef"
CLASSIFIED = b'{"object":"list","data":[{"index":0,"label":"B","probs":[0.2,0.75],"num_classes":2}],"usage":{}}'
SCORED = b'{"object":"list","data":[{"index":0,"object":"score","score":-3.5}],"usage":{}}'
POOLED = b'{"object":"list","data":[{"index":0,"object":"pooling","data":[0.1,0.6]}],"usage":{}}'
OF_TOKENS = b'{"object":"list","data":[{"index":0,"object":"pooling","data":[[0.1,0.9],[0.4,0.5]]}],"usage":{}}'
ITEM = ScoreItem(
    completion="{answer}",
    answer="7",
    prompt="3+4?",
    messages=[{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "{answer}"}],
    columns={"level": 2},
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ApiLimits(attempt_s=60.0, attempts=3, backoff_s=0.01, concurrency=16)
    monkeypatch.setattr(scorer_setup, "API_LIMITS", limits)


def score(*rewards: ModelReward) -> tuple[Score, dict[str, float]]:
    async def run() -> tuple[Score, dict[str, float]]:
        async with RewardSum(rewards, []) as pool:
            [found] = await pool.score([ITEM])
            return found, pool.take_costs()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "keys", "reply", "sent", "reward"),
    [
        ("classify", {"label": 1}, CLASSIFIED, {"messages": ITEM.messages}, 0.75),
        ("classify", {"input": "{prompt}|{completion}|{level}"}, CLASSIFIED, {"input": "3+4?|{answer}|2"}, 0.2),
        ("score", {}, SCORED, {"text_1": "3+4?", "text_2": "{answer}"}, -3.5),
        ("v1/score", {"input": "A: {completion}"}, SCORED, {"text_1": "3+4?", "text_2": "A: {answer}"}, -3.5),
        ("pooling", {}, POOLED, {"messages": ITEM.messages}, 0.1),
    ],
)
def test_each_endpoint_gets_its_request(
    path: str, keys: dict[str, Any], reply: bytes, sent: dict[str, Any], reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_KEY", KEY)
    with JudgeStub(lambda number, body: (200, {}, reply)) as stub:
        url = f"{stub.url.removesuffix('/v1')}/{path}"
        found, costs = score(ModelReward(url=url, model="rm", key_env="MODEL_KEY", **keys))
    assert stub.bodies == [{"model": "rm", **sent, "use_activation": False}]
    assert stub.keys == [f"Bearer {KEY}"]
    assert (found.outcome, found.reward, found.correct) == (Outcome.OK, reward, None)
    assert (costs["model/answers"], costs["model/calls"]) == (1, 1)


def test_what_passes_is_repeated_and_the_rest_is_an_error_of_the_answer() -> None:
    replies = [(503, {}, b"busy"), (200, {}, b"{}"), (200, {}, SCORED)]
    with JudgeStub(lambda number, body: replies[number - 1]) as stub:
        found, costs = score(ModelReward(url=f"{stub.url}/score", model="rm"))
    assert (found.reward, costs["model/retries"]) == (-3.5, 2)
    with JudgeStub(lambda number, body: (404, {}, b"no such model")) as stub:
        found, _ = score(ModelReward(url=f"{stub.url}/score", model="rm"))
    assert (found.outcome, len(stub.bodies)) == (Outcome.ERROR, 1)
    assert "HTTP 404: no such model" in found.detail
    with JudgeStub(lambda number, body: (200, {}, CLASSIFIED)) as stub:
        found, _ = score(ModelReward(url=f"{stub.url}/classify", model="rm", input="{lvl}"))
    assert "the columns are: answer, completion, conversation, level, prompt" in found.detail
    assert stub.bodies == []


def test_the_last_tokens_row_counts_of_a_model_of_tokens() -> None:
    assert class_score(OF_TOKENS, 1) == 0.5
    with pytest.raises(IndexError):
        class_score(OF_TOKENS, 2)
    for data in (b"[]", b"[{}]", b'[{"data":[]}]', b'[{"data":[[1.0],2.0]}]'):
        assert class_score(b'{"data":[{"data":[1.0,2.0]}]}', 1) == 2.0
        with pytest.raises((ValueError, TypeError)):
            class_score(b'{"data":' + data + b"}", 0)


def test_the_url_names_the_endpoint() -> None:
    for url in ("http://x/v1", "ftp://x/score", "http://model.example/score"):
        with pytest.raises(ValueError, match="url"):
            ModelReward(url=url, model="rm", key_env="K")
