"""The judge against a stub server, in its fenced scorer process."""

import asyncio
import math
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from areal_lora.config.sections import task
from areal_lora.config.sections.task import JudgeReward
from areal_lora.errors import ConfigError
from areal_lora.network.api_client import ApiLimits
from areal_lora.tasks import judge as judge_module, scorer_setup
from areal_lora.tasks.judge import FILE, READ_CHARACTERS, JudgeCache, fill, read_score
from areal_lora.tasks.reward_calls import ScoreItem
from areal_lora.tasks.scorer import RewardSum
from areal_lora.types import Outcome
from tests.support.clocks import seen
from tests.support.tasks.judge_stub import JudgeStub, hang, said

KEY = "sk-0123456789abcdef"


def judge(url: str, **keys) -> JudgeReward:
    first = {"model": "j", "prompt": "Q: {prompt} A: {completion} ({level})"}
    return JudgeReward(url=url, **{**first, **keys})


QUICK = {"attempt_s": 60.0, "attempts": 3, "backoff_s": 0.01, "concurrency": 16}


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Sets limits that no key sets; quick ones unless a test gives others."""

    def put(**keys):
        monkeypatch.setattr(scorer_setup, "API_LIMITS", ApiLimits(**QUICK | keys))

    put()
    return put


def item(completion: str) -> ScoreItem:
    return ScoreItem(completion=completion, answer="7", prompt="3+4?", columns={"level": 2})


def score(reward: JudgeReward, *batches: list[ScoreItem], hidden: Path | None = None):
    async def run():
        async with RewardSum([reward], [], hidden) as rewards:
            scores = [await rewards.score(batch) for batch in batches]
            costs = rewards.take_costs()
            assert costs.pop("seconds") > 0
            return scores, costs

    return asyncio.run(run())


def by_length(_: int, body: dict) -> tuple:
    text = body["messages"][-1]["content"]
    return said(f"Well. Score: 3. After all, score: {5 if 'good' in text else 0}")


def test_it_asks_with_the_columns_and_scales_what_it_reads(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\r\n")  # of a file with such lines
    with JudgeStub(by_length) as stub:
        reward = judge(stub.url, key_env="JUDGE_KEY")
        [[good, bad]], costs = score(reward, [item("good {answer}"), item("bad")])
    assert (good.reward, good.correct, bad.reward, bad.correct) == (0.5, None, 0.0, None)
    assert {tuple(m["role"] for m in body["messages"]) for body in stub.bodies} == {("user",)}
    assert "Q: 3+4? A: good {answer} (2)" in [body["messages"][0]["content"] for body in stub.bodies]
    assert set(stub.keys) == {f"Bearer {KEY}"}
    assert costs.pop("judge/ms") > 0
    counted = {"answers": 2, "calls": 2, "prompt_tokens": 200, "completion_tokens": 20, "cached_share": 0}
    assert costs == {f"judge/{name}": value for name, value in counted.items()}


def test_it_can_get_the_whole_conversation():
    messages = [
        {"role": "system", "content": "Calculate."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "content": "{answer}"},
        {"role": "assistant", "content": "7"},
    ]
    with JudgeStub(by_length) as stub:
        asked = ScoreItem(completion="7", answer="8", messages=messages)
        [[found]], _ = score(judge(stub.url, prompt="{conversation}\ngood"), [asked])
    assert found.reward == 0.5, found.detail
    calls = 'assistant: [{"function": {"name": "add", "arguments": "{}"}}]'
    want = ["system: Calculate.", calls, "tool: {answer}", "assistant: 7", "good"]
    assert [body["messages"][0]["content"] for body in stub.bodies] == ["\n".join(want)]


PASSING = [
    (429, {"Retry-After": "0"}, b"slow down"),
    (503, {}, b"busy"),
    (200, {}, b"<html>nonsense"),
    (200, {}, {"choices": []}),
    said("I would rather not say"),
    said("Score: 11"),
]


def test_it_asks_again_after_what_may_pass():
    asked = Counter()

    def behave(_: int, body: dict) -> tuple:
        which = int(body["messages"][0]["content"].split()[3])
        asked[which] += 1
        return PASSING[which] if asked[which] == 1 else said("Score: 10")

    with JudgeStub(behave) as stub:
        [scores], costs = score(judge(stub.url), [item(str(i)) for i in range(len(PASSING))])
    assert [(s.outcome, s.reward) for s in scores] == [(Outcome.OK, 1.0)] * len(PASSING)
    assert asked == dict.fromkeys(range(len(PASSING)), 2)
    assert (costs["judge/calls"], costs["judge/retries"]) == (2 * len(PASSING), len(PASSING))


FATAL = [
    (lambda: (500, {}, b"no"), 3, "no answer in 3 attempts, the last: HTTP 500"),
    (lambda: said("Score: high"), 3, "it states no score"),
    (lambda: (401, {}, f"wrong key {KEY}".encode()), 1, "HTTP 401: wrong key ***"),
    (lambda: (302, {"Location": "http://127.0.0.1:9/"}, b""), 1, "HTTP 302"),
    (lambda: (200, {}, b"x" * (2 << 20)), 3, "more than 1 MiB"),
    (lambda: hang(6.0), 3, "no reply within 1 s"),
]


def test_what_it_cannot_score_is_an_error_of_that_answer_and_never_reward_0(monkeypatch, limits):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    asked = Counter()

    def behave(_: int, body: dict) -> tuple:
        which = body["messages"][0]["content"].split()[3]
        asked[which] += 1
        return said("Score: 5") if which == "fine" else FATAL[int(which)][0]()

    with JudgeStub(behave) as stub:
        reward = judge(stub.url, key_env="JUDGE_KEY")
        [[fine, *scores]], _ = score(reward, [item("fine"), *(item(str(i)) for i in range(len(FATAL) - 1))])
        limits(attempt_s=1.0)  # of the one that hangs
        [last], _ = score(reward, [item(str(len(FATAL) - 1))])
    assert (fine.outcome, fine.reward) == (Outcome.OK, 0.5)
    for i, (scored, (_, calls, words)) in enumerate(zip([*scores, *last], FATAL, strict=True)):
        assert scored.outcome is Outcome.ERROR
        assert math.isnan(scored.reward)
        assert words in scored.detail
        assert KEY not in scored.detail
        assert asked[str(i)] == calls


def test_an_answer_out_of_time_is_a_timeout(monkeypatch):
    monkeypatch.setattr(task.ServedReward, "timeout_s", 1.0)

    def measure():
        with JudgeStub(lambda n, b: hang(5.0) if "slow" in str(b) else said("Score: 5")) as stub:
            [found], _ = score(judge(stub.url), [item("slow"), item("fine")])
        return found

    slow, fine = seen(measure, lambda found: found[1].outcome is Outcome.OK)
    assert (slow.outcome, fine.outcome) == (Outcome.TIMEOUT, Outcome.OK)


def test_equal_questions_are_asked_once_also_in_a_later_run(tmp_path):
    with JudgeStub(by_length) as stub:
        again = [item("good"), item("good"), item("bad")]
        first, costs = score(judge(stub.url), again, again, hidden=tmp_path)
        assert len(stub.bodies) == 2
        assert costs["judge/cached_share"] == pytest.approx(4 / 6)
        later, costs = score(judge(stub.url), again, hidden=tmp_path)
        assert [s.reward for s in later[0]] == [s.reward for s in first[0]] == [0.5, 0.5, 0.0]
        assert len(stub.bodies) == 2
        assert (costs["judge/cached_share"], costs.get("judge/calls")) == (1.0, None)
        # What was sent otherwise is asked again.
        score(judge(stub.url, parameters={"seed": 1, "max_tokens": None}), [item("good")], hidden=tmp_path)
        assert len(stub.bodies) == 3
        assert set(stub.bodies[2]) == {"model", "messages", "temperature", "seed"}, "null omits a field"
    assert KEY.encode() not in b"".join(path.read_bytes() for path in (tmp_path / "judge").iterdir())


def test_the_oldest_replies_make_room(tmp_path, monkeypatch):
    """Of two processes; the file is as large as what is kept, not in whole pages for each."""
    monkeypatch.setattr(judge_module, "KEPT", 3000)
    caches = [JudgeCache(tmp_path), JudgeCache(tmp_path)]
    for n in range(12_000):
        assert caches[n // 10 % 2].put(str(n), f"{n} " + "x" * 1100)
    known = [n for n in range(12_000) if caches[0].get(str(n)) == f"{n} " + "x" * 1100]
    assert known == list(range(12_000 - len(known), 12_000))
    assert 3000 <= len(known) < 3000 + judge_module.TRIM_EVERY
    assert (tmp_path / FILE).stat().st_size < 1.5 * 1200 * 4000


def test_replies_of_earlier_versions_are_kept(tmp_path):
    with closing(sqlite3.connect(tmp_path / FILE)) as file, file:
        file.execute("CREATE TABLE texts (question TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID")
        file.execute("INSERT INTO texts VALUES ('q', 'r')")
    for _ in range(2):
        assert JudgeCache(tmp_path).get("q") == "r"


@pytest.mark.parametrize("own", [False, True], ids=["with_a_key", "own_server"])
def test_no_more_requests_are_open_than_allowed(limits, monkeypatch, own):
    limits(concurrency=6)  # half of them in each process
    monkeypatch.setenv("JUDGE_KEY", KEY)
    assert scorer_setup.OWN_SERVER_OPEN == 128
    monkeypatch.setattr(scorer_setup, "OWN_SERVER_OPEN", 10)
    with JudgeStub(lambda n, _: hang(0.3)) as stub:
        score(judge(stub.url, key_env=None if own else "JUDGE_KEY"), [item(str(i)) for i in range(12)])
    assert (stub.most_open, len(stub.bodies)) == (5 if own else 3, 12)


def test_the_time_of_an_answer_starts_with_its_slot(monkeypatch):
    """Ten answers of 1 s each, one at a time, with 4 s each."""
    monkeypatch.setattr(task.ServedReward, "timeout_s", 4.0)
    monkeypatch.setattr(scorer_setup, "OWN_SERVER_OPEN", 2)  # one in each process

    def behave(*_):
        time.sleep(1.0)
        return said("Score: 5")

    def measure():
        with JudgeStub(behave) as stub:
            [found], _ = score(judge(stub.url), [item(str(i)) for i in range(10)])
        return [s.outcome for s in found]

    right = [Outcome.OK] * 10
    assert seen(measure, lambda found: found == right) == right


def test_a_key_that_is_not_set_is_one_line(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        score(judge("http://127.0.0.1:9/v1", key_env="JUDGE_KEY"), [])


def test_a_key_is_not_sent_unencrypted():
    with pytest.raises(ValueError, match="unencrypted"):
        judge("http://judge.example/v1", key_env="K")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("score=1, no: Score: 2.5", 2.5),
        ('{"score": 4}', 4.0),
        ('bad {"score": 1} or {"why": "4", "score": "7"} }', 7.0),
        ('```{"score":0}```', 0),
        ("Correctness score: 2\n\n**Score:** 9", 9),
        ("score: 10 at most. **Final score:** 1/10", 1),
        ("**Score**: 8", 8),
        ("Score: **8.5**", 8.5),
        ("__Score:__\n\n`8`", 8),
        ("Score: [[8]]", 8),
        (r"Score: $\boxed{8}$", 8),
        ("Score：8", 8),
    ],
)
def test_a_score_is_read_as_text_and_as_json(text, score):
    assert read_score(text) == score


@pytest.mark.parametrize("run", ["score ", 'score"', "score: ", "score:*"])
def test_time_is_linear_in_a_reply_without_a_score(run):
    began = time.process_time()
    for text in (run * (READ_CHARACTERS // len(run)), run + run[-1] * READ_CHARACTERS):
        with pytest.raises(ValueError, match="states no score"):
            read_score(text)
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Score: high",
        "**Score:** high 5",
        "Score: [a](9)",
        "Score: -1",
        '{"score": true}',
        '{"score": 11}',
        '{"other": 3}',
        "{" * 5000,
        "[4]",
    ],
)
def test_no_score(text):
    with pytest.raises(ValueError, match="score"):
        read_score(text)


def test_a_template_is_filled_once():
    assert fill("{a}{b} {", {"a": "{b}", "b": [1]}) == "{b}[1] {"
    assert fill("{Task Id}-{a-b} {c d} {}", {"Task Id": "{a-b}", "a-b": 1, "": 2}) == "{a-b}-1 {c d} {}"
    with pytest.raises(ValueError, match=r"names \{c\}, the columns are: a"):
        fill("{c}", {"a": 1})
