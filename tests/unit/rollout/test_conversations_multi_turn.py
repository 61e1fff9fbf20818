"""Episodes of a model and an environment, against a loop written by hand."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.packed_groups import check_alignment
from areal_lora.data.prompts import Formatter
from areal_lora.rollout.completion_client import GenerationFault
from areal_lora.rollout.conversations import MultiTurnWorkflow, Reply
from areal_lora.rollout.workflow import Episode
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Outcome, Sample
from tests.support.clocks import seen
from tests.support.rollout.environments_here import played_here
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import EOS, MAX_MODEL_LEN, SAMPLING, V1, V2, Graded, prompt_of, served

PROMPT = prompt_of("1+1=")


@dataclass
class Scripted:
    """Says ``first``, then ``replies`` in turn."""

    replies: list[Reply]
    first: str | None = None
    heard: list[str] = field(default_factory=list)

    def reset(self, sample: Sample) -> str | None:
        assert (sample.uid, sample.prompt, sample.answer) == ("s", "1+1=", "42")
        return self.first

    def step(self, text: str) -> Reply:
        self.heard.append(text)
        return self.replies[len(self.heard) - 1]


class ScriptedAsync(Scripted):
    async def reset(self, sample: Sample) -> str | None:  # type: ignore[override]
        return super().reset(sample)

    async def step(self, text: str) -> Reply:  # type: ignore[override]
        return super().step(text)


def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
    """1 to 4 characters and the end of sequence, by the prompt."""
    text = "".join(chr(97 + (sum(prompt) + i) % 26) for i in range(1 + sum(prompt) % 4))
    return [*map(ord, text), EOS], text


def run(
    environment: Callable[..., Any],
    *,
    server: FakeServer | None = None,
    scorer: Graded | None = None,
    max_turns: int = 8,
    timeout_s: float = 120.0,
    stop: Sequence[str] = (),
    cut: bool = False,
    **arguments: Any,
) -> Episode:
    async def main() -> Episode:
        fake = server or FakeServer(models={str(V1)}, answer=answer)
        sampling = SAMPLING.model_copy(update={"timeout_s": timeout_s, "stop": list(stop)})
        async with served(fake, scorer or Graded(), sampling) as context:
            played = played_here(environment, **arguments)
            workflow = MultiTurnWorkflow(context=context, played=played, max_turns=max_turns, cut=cut)
            return await workflow.run(PROMPT, V1, seed=7)

    return asyncio.run(main())


def cut_off(body: dict[str, Any]) -> None:
    body["choices"][0]["finish_reason"] = "length"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [Scripted, ScriptedAsync])
def test_episodes_equal_a_loop_written_by_hand(seed: int, kind: type[Scripted]) -> None:
    rng = random.Random(seed)
    turns = rng.randint(1, 4)
    texts = ["".join(rng.choices("XYZ", k=rng.randint(0, 3))) for _ in range(turns)]
    first = rng.choice([None, "", "hello"])
    replies = [Reply(text=t, done=i == turns - 1) for i, t in enumerate(texts)]
    episode = run(lambda: kind(replies=replies, first=first))

    ids = list(PROMPT.token_ids) + [ord(c) for c in first or ""]
    want = [(i, 0, 0.0, -1) for i in ids]
    for turn in range(turns):
        tokens, last = answer(ids, 0)
        want += [(token, 1, -0.5 * (t + 1), 1) for t, token in enumerate(tokens)]
        ids += tokens
        if turn < turns - 1:
            want += [(ord(c), 0, 0.0, -1) for c in texts[turn]]
            ids += [ord(c) for c in texts[turn]]
    assert [t.sample for t in episode.group.trajectories] == [0, 1]
    for made in episode.group.trajectories:
        rows = list(zip(made.token_ids, made.loss_mask, made.rollout_logprobs, made.versions, strict=True))
        assert rows == want, f"seed {seed}"
        assert (made.reward, made.finish_reason, made.adapter) == (float(len(last)), "stop", V1)
        check_alignment(made)


def test_every_trajectory_has_an_environment_of_its_own_with_the_arguments() -> None:
    made: list[Scripted] = []

    def factory(*, greeting: str) -> Scripted:
        made.append(Scripted(replies=[Reply(text="x"), Reply(done=True)], first=greeting))
        return made[-1]

    episode = run(factory, greeting="hi")
    assert len(made) == SAMPLING.n_samples
    assert all(len(environment.heard) == 2 for environment in made)
    assert all(text.startswith("hi") for text in episode.texts)


def test_each_turn_asks_for_the_newest_version() -> None:
    models, both = {str(V1)}, threading.Barrier(2)  # the version is published when both have their first answer
    fake = FakeServer(models=models, answer=answer)

    async def main() -> Episode:
        async with served(fake, Graded()) as context:

            @dataclass
            class Publishing(Scripted):
                def step(self, text: str) -> Reply:
                    both.wait(120.0)
                    models.add(str(V2))
                    context.client.router.announce(V2, {"server-0": fake.url})
                    return super().step(text)

            workflow = MultiTurnWorkflow(
                context=context,
                played=played_here(lambda: Publishing([Reply(text="x"), Reply(done=True)])),
                max_turns=8,
            )
            return await workflow.run(PROMPT, V1, seed=7)

    for made in asyncio.run(main()).group.trajectories:
        versions = [v for v in made.versions if v >= 0]
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        assert made.adapter == V1


def test_seeds_differ_between_samples_and_turns() -> None:
    fake = FakeServer(models={str(V1)}, answer=answer)
    run(lambda: Scripted([Reply(), Reply(), Reply(done=True)]), server=fake)
    assert len({body["seed"] for body in fake.requests}) == 6


@pytest.mark.parametrize(
    ("replies", "max_turns", "edit", "turns", "finish"),
    [
        ([Reply(), Reply(done=True)], 8, None, 2, "stop"),
        ([Reply(text="x")] * 3, 3, None, 3, "max_turns"),
        ([Reply(text="x")] * 3, 8, cut_off, 1, "length"),
        ([Reply(text="x" * MAX_MODEL_LEN)], 8, None, 1, "length"),
    ],
)
def test_how_an_episode_ends(
    replies: list[Reply], max_turns: int, edit: Callable[[dict[str, Any]], None] | None, turns: int, finish: str
) -> None:
    made: list[Scripted] = []

    def factory() -> Scripted:
        made.append(Scripted(replies))
        return made[-1]

    fake = FakeServer(models={str(V1)}, answer=answer, fault=lambda _: Fault(edit=edit) if edit else None)
    episode = run(factory, server=fake, max_turns=max_turns)
    assert [len(environment.heard) for environment in made] == [turns] * 2
    for trajectory in episode.group.trajectories:
        assert trajectory.finish_reason == finish
        assert trajectory.loss_mask[-1] == 1  # no reply without an answer to it
        assert len(trajectory.token_ids) <= MAX_MODEL_LEN


def test_the_server_is_told_what_ends_an_answer() -> None:
    fake = FakeServer(models={str(V1)}, answer=answer)
    run(lambda: Scripted([Reply(done=True)]), server=fake, stop=["</tool>", "!"])
    assert [(body["stop"], body["stop_token_ids"]) for body in fake.requests] == [(["</tool>", "!"], [EOS])] * 2


def test_a_reply_continues_the_turn_of_the_assistant() -> None:
    """A tool's result between two parts of one answer: no marks, and the prefill once."""

    async def main() -> tuple[Episode, Graded]:
        scorer, answers = Graded(), iter(("<s>q", "4"))
        fake = FakeServer(models={str(V1)}, answer=lambda *_: ([*map(ord, text := next(answers))], text))
        how = PromptFormat(kind="chat", prefill="So ")
        async with served(fake, scorer, SAMPLING.model_copy(update={"n_samples": 1})) as context:
            chat = replace(context, formatter=Formatter(tokenizer=context.tokenizer, how=how))
            made = Scripted([Reply(text="=2;", role="assistant"), Reply(done=True)])
            workflow = MultiTurnWorkflow(context=chat, played=played_here(lambda: made), max_turns=8)
            return await workflow.run(PROMPT, V1, seed=7), scorer

    episode, scorer = asyncio.run(main())
    (made,) = episode.group.trajectories
    assert "".join(map(chr, made.token_ids)) == "1+1=<s>q=2;4"
    assert made.loss_mask == [0] * 4 + [1] * 4 + [0] * 3 + [1]
    parts = ("So <s>q", "=2;", "4")
    assert scorer.asked[0].messages[1:] == [{"role": "assistant", "content": each} for each in parts]


def test_an_answer_gets_no_more_tokens_than_fit() -> None:
    fake = FakeServer(models={str(V1)}, answer=lambda *_: ([EOS], ""))
    run(lambda: Scripted([Reply(done=True)], first="x" * (MAX_MODEL_LEN - len(PROMPT.token_ids) - 3)), server=fake)
    assert {body["max_tokens"] for body in fake.requests} == {3}


def test_rewards_of_turns_are_added_and_nothing_else_is_scored() -> None:
    scorer = Graded()
    replies = [Reply(reward=1), Reply(), Reply(reward=-0.25, done=True)]
    episode = run(lambda: Scripted(replies), scorer=scorer)
    assert [t.reward for t in episode.group.trajectories] == [0.75, 0.75]
    assert scorer.asked == []
    ids, ends = list(PROMPT.token_ids), []
    for _ in replies:
        ids += answer(ids, 0)[0]
        ends.append(len(ids) - 1)
    for made in episode.group.trajectories:
        assert made.turn_rewards == ((ends[0], 1.0), (ends[2], -0.25))
        assert (made.token_ids, ends[2]) == (ids, len(made.columns) - 1)


def test_metrics_of_replies_are_parts_of_the_score_without_changing_the_reward() -> None:
    replies = [Reply(reward=1, metrics={"moves": 1.0, "legal": 1.0}), Reply(metrics={"moves": 2.0}, done=True)]
    episode = run(lambda: Scripted(replies))
    for made in episode.group.trajectories:
        assert (made.reward, made.components) == (1.0, {"moves": 2.0, "legal": 1.0})


def test_without_a_reward_of_its_own_the_last_answer_is_scored() -> None:
    scorer = Graded(lambda text: Score(reward=0.5, outcome=Outcome.OK))
    environments: list[Scripted] = []

    def factory() -> Scripted:
        environments.append(Scripted([Reply(text="x"), Reply(done=True)]))
        return environments[-1]

    run(factory, scorer=scorer)
    assert [item.completion for item in scorer.asked] == [e.heard[-1] for e in environments]
    assert {item.answer for item in scorer.asked} == {PROMPT.sample.answer}


@pytest.mark.parametrize("first", ["", "hello"])
def test_a_reward_gets_each_turn_that_the_model_saw(first: str) -> None:
    scorer, replies = Graded(), [Reply(text="7", role="tool"), Reply(), Reply(text="unseen", done=True)]
    run(lambda: Scripted(list(replies), first=first), scorer=scorer)

    ids = [ord(c) for c in "1+1=" + first]
    want = [("user", "1+1=")] + [("user", first)] * bool(first)
    for reply in replies:
        tokens, text = answer(ids, 0)
        want += [("assistant", text), (reply.role, reply.text)]
        ids += [*tokens, *map(ord, reply.text)]
    for item in scorer.asked:
        assert [(message["role"], message["content"]) for message in item.messages] == want[:-1]
        assert (item.completion, item.n_tokens) == (text, len(tokens)), "those of the last answer alone"


@pytest.mark.parametrize("rewards", [[float("nan")], [0.5, 10**400]])
def test_a_reward_that_is_not_finite_is_no_reward(rewards: list[float]) -> None:
    replies = [Reply(reward=reward, text="x", done=i == len(rewards) - 1) for i, reward in enumerate(rewards)]
    episode = run(lambda: Scripted(list(replies)))
    assert {t.outcome for t in episode.group.trajectories} == {Outcome.ERROR}


class Broken(Scripted):
    def step(self, text: str) -> Reply:
        raise SystemExit("the tool is gone")


class WrongReply(Scripted):
    def step(self, text: str) -> Reply:
        return "text"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("environment", "detail"),
    [
        (
            lambda: Broken([]),
            r"environment: RuntimeError: SystemExit: the tool is gone \(test_conversations_multi_turn\.py, line \d+\)",
        ),
        (lambda: WrongReply([]), "environment: TypeError: step returned str, not a Reply"),
        (lambda: Scripted([Reply(text=5)]), "environment: TypeError: the reply's text is of type int"),  # type: ignore[arg-type]
        (lambda: Scripted([Reply(reward="1")]), "environment: TypeError: the reply's reward is of type str"),  # type: ignore[arg-type]
        (lambda: Scripted([], first=3), "environment: TypeError: reset returned int, not a text"),  # type: ignore[arg-type]
        (lambda: Scripted([]), "environment: IndexError"),
        (lambda: 1 / 0, "environment: ZeroDivisionError"),
        (lambda: None, "environment: AttributeError: 'NoneType' object has no attribute 'reset'"),
        (lambda: Scripted([Reply(text="\ud800")]), "environment: UnicodeEncodeError"),
        (lambda: Scripted([], first="x" * MAX_MODEL_LEN), "rejected: .* leaves no room"),
    ],
)
def test_what_an_environment_does_wrong_is_a_fault_of_its_group(environment: Any, detail: str) -> None:
    with pytest.raises(GenerationFault, match=detail) as caught:
        run(environment)
    assert caught.value.outcome is Outcome.ERROR


def test_one_failing_trajectory_fails_the_group() -> None:
    fine = iter([True, False, False])
    with pytest.raises(GenerationFault, match="the tool is gone"):
        run(lambda: Scripted([Reply(done=True)]) if next(fine) else Broken([]))


class Slow(Scripted):
    async def step(self, text: str) -> Reply:  # type: ignore[override]
        await asyncio.sleep(600)
        return Reply()


def test_the_deadline_is_one_for_the_whole_episode() -> None:
    with pytest.raises(GenerationFault, match=r"episode took longer than 0\.4 s") as caught:
        run(lambda: Slow([]), timeout_s=0.4)
    assert caught.value.outcome is Outcome.TIMEOUT


@pytest.mark.parametrize("reward", [None, 0.25])
def test_an_episode_whose_time_is_over_is_scored_as_far_as_it_came(reward: float | None) -> None:
    fake = FakeServer(models={str(V1)}, answer=answer, delay_s=lambda k: 600.0 if k >= 2 else 0.0)
    scorer = Graded(lambda text: Score(reward=0.5, outcome=Outcome.OK))
    replies = [Reply(text="x", reward=reward), Reply(done=True, reward=9.0)]

    def attempt() -> Episode | GenerationFault:
        fake.requests.clear()
        try:
            return run(lambda: Scripted(list(replies)), server=fake, scorer=scorer, timeout_s=1.0, cut=True)
        except GenerationFault as fault:  # no first answer within the time
            return fault

    episode = seen(attempt, lambda found: isinstance(found, Episode))
    assert isinstance(episode, Episode)
    for made in episode.group.trajectories:
        assert (made.reward, made.outcome, made.finish_reason) == (reward or 0.5, Outcome.OK, "timeout")
        tokens, _ = answer(list(PROMPT.token_ids), 0)
        assert made.token_ids == [*PROMPT.token_ids, *tokens], "no reply without an answer to it"
    for item in scorer.asked:
        assert [message["role"] for message in item.messages] == ["user", "assistant"]
    with pytest.raises(GenerationFault, match="episode took longer"):
        run(lambda: Scripted([]), server=FakeServer(models={str(V1)}, delay_s=lambda _: 9.0), timeout_s=0.3, cut=True)


def test_many_quick_turns_cannot_outlast_the_deadline() -> None:
    fake = FakeServer(models={str(V1)}, answer=lambda *_: ([EOS], ""), delay_s=lambda _: 0.15)
    with pytest.raises(GenerationFault, match="episode took longer"):
        run(lambda: Scripted([Reply()] * 40), server=fake, timeout_s=0.5, max_turns=40)


def test_the_text_of_a_chat_marks_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the special tokens of the chat template, which a plain text does not have."""
    replies = [Reply(text="more"), Reply(done=True, reward=1.0)]
    [plain, _] = run(lambda: Scripted(list(replies))).texts
    message = {"role": "user", "content": "1+1="}
    monkeypatch.setitem(globals(), "PROMPT", replace(PROMPT, sample=replace(PROMPT.sample, messages=(message,))))
    [chat, _] = run(lambda: Scripted(list(replies))).texts
    assert chr(EOS) not in plain
    assert chat.replace(chr(EOS), "") == plain
    assert chat.count(chr(EOS)) == 2
