"""Agents over real HTTP against the gateway, the gateway against a fake server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from areal_lora.algorithms.advantages import ADVANTAGES, Discount, Shaping, token_credit
from areal_lora.algorithms.losses import k1
from areal_lora.data.collate import collate
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.rollout.agent_api import session as agent_session
from areal_lora.rollout.agent_api.endpoint import MAX_BODY_BYTES, agent_gateway
from areal_lora.rollout.agents import AgentResult, AgentTask, AgentWorkflow
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, WorkerLost, WorkflowContext
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Cause, Outcome
from tests.support.clocks import seen
from tests.support.rollout.agent_endpoint import rewarded
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import EOS, MAX_MODEL_LEN, SAMPLING, V1, V2, Graded, prompt_of, served

PROMPT = prompt_of("1+1=")
SECRET = "the run secret"
PLAIN = Shaping(
    kl=k1, kl_coef=0.0, overlong_from=8, overlong_penalty=0.0, max_new_tokens=8, discount=Discount(gamma=1, lam=1)
)
Agent = Callable[[AgentTask], Any]


def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
    """One letter by the prompt, one by the sample, and the end of sequence."""
    text = chr(97 + sum(prompt) % 26) + chr(65 + sample)
    return [*map(ord, text), EOS], text


def run(
    agent: Agent,
    *,
    server: FakeServer | None = None,
    scorer: Graded | None = None,
    timeout_s: float = 120.0,
    n_samples: int = 2,
    cut: bool = False,
    has_reward: bool = True,
) -> Episode:
    async def main() -> Episode:
        fake = server or FakeServer(models={str(V1)}, answer=answer)
        sampling = SAMPLING.model_copy(update={"timeout_s": timeout_s, "n_samples": n_samples})
        async with served(fake, scorer or Graded(), sampling, SECRET) as context, agent_gateway() as sessions:
            context: WorkflowContext = replace(context, has_reward=has_reward)
            workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent), cut=cut)
            return await workflow.run(PROMPT, V1, seed=7)

    return asyncio.run(main())


async def post(task: AgentTask, path: str = "/chat/completions", *, key: str = "", **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key or task.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(task.base_url + path, json={"model": task.model} | body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def say(task: AgentTask, messages: list[dict[str, str]], **body: Any) -> str:
    status, reply = await post(task, messages=messages, **body)
    assert status == 200, reply
    return reply["choices"][0]["message"]["content"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def rows(trajectory: Any) -> list[tuple[int, int, float, int]]:
    return list(
        zip(trajectory.token_ids, trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.versions, strict=True)
    )


def sampled(tokens: list[int], version: int = 1) -> list[tuple[int, int, float, int]]:
    return [(token, 1, -0.5 * (t + 1), version) for t, token in enumerate(tokens)]


def told(text: str) -> list[tuple[int, int, float, int]]:
    return [(ord(c), 0, 0.0, -1) for c in text]


def test_a_conversation_is_one_trajectory_of_the_tokens_that_were_sampled() -> None:
    async def agent(task: AgentTask) -> float:
        assert (task.sample, task.model) == (PROMPT.sample, "math")
        messages = [user("hi")]
        for text in ("more", "last"):
            messages += [{"role": "assistant", "content": await say(task, messages)}, user(text)]
        await say(task, messages)
        return 0.5

    want, ids = [], []
    for text in ("<user:hi>", "<user:more>", "<user:last>"):
        want += told(text)
        ids += [ord(c) for c in text]
        tokens, _ = answer(ids, 0)
        want += sampled(tokens)
        ids += tokens
    episode = run(agent)
    assert [t.sample for t in episode.group.trajectories] == [0, 1]
    for made in episode.group.trajectories:
        assert rows(made) == want
        assert (made.reward, made.outcome, made.finish_reason) == (0.5, Outcome.OK, "stop")
    assert len({t.uid for t in episode.group.trajectories}) == 2


def test_tokens_that_the_tokenizer_would_not_choose_are_kept() -> None:
    fake = FakeServer(models={str(V1)}, answer=lambda *_: ([1005, EOS], "ff"))

    async def agent(task: AgentTask) -> float:
        text = await say(task, [user("hi")])
        await say(task, [user("hi"), {"role": "assistant", "content": text}, user("more")])
        return 1.0

    for made in run(agent, server=fake).group.trajectories:
        assert rows(made) == told("<user:hi>") + sampled([1005, EOS]) + told("<user:more>") + sampled([1005, EOS])


def test_other_prompts_are_trajectories_of_their_own_with_the_same_reward() -> None:
    samples = iter(range(2))

    async def agent(task: AgentTask) -> float:
        number = next(samples)
        first = await say(task, [user("hi")])
        if number == 0:
            await say(task, [user("something else")])
            # The answer is not repeated as it was given: its tokens are not in this prompt.
            await say(task, [user("hi"), {"role": "assistant", "content": first.lower()}, user("go on")])
        return float(number)

    episode = run(agent)
    of_sample = [(t.sample, t.reward) for t in episode.group.trajectories]
    assert sorted(of_sample) == [(0, 0.0)] * 3 + [(1, 1.0)]
    assert all(sum(t.loss_mask) == 3 for t in episode.group.trajectories)
    assert len(episode.texts) == 4
    turns = [[turn["content"] for turn in json.loads(text)] for text in episode.turns]
    assert sorted(len(each) for each in turns) == [2, 2, 2, 4]
    assert [each[-1].lower() for each in turns if "go on" in each] != []
    batch = collate(PackedGroups.of([episode.group]))
    assert batch.sample_ids.tolist() == [0, 0, 0, 1]


def test_a_later_conversation_has_nothing_of_what_earlier_turns_earned() -> None:
    """The second and the fourth request change an earlier message. A critic's returns are the rewards from there on."""
    earned = (1.0, 0.5, 0.25, 0.125)

    async def agent(task: AgentTask) -> AgentResult:
        await say(task, [user("a")])
        messages = [user("b")]
        messages += [{"role": "assistant", "content": await say(task, messages)}, user("c")]
        await say(task, messages)
        await say(task, [user("d")])
        return AgentResult(reward=sum(earned), turn_rewards=tuple(enumerate(earned)))

    batch = collate(PackedGroups.of([run(agent, n_samples=1).group]))
    assert (batch.n_sequences, batch.rewards.tolist()) == (3, [1.875] * 3)
    credit = token_credit(
        replace(ADVANTAGES["gae"], whitened=False), PLAIN, replace(batch, values=torch.zeros(batch.n_tokens))
    )
    assert credit.returns is not None
    to_go = [credit.returns[a:b][batch.loss_mask[a:b]].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    assert to_go == [[1.875] * 3, [0.875] * 3 + [0.375] * 3, [0.125] * 3]


def test_the_turns_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_session, "TURN_LETTERS", 5)
    monkeypatch.setattr(agent_session, "TURNS_BYTES", 120)

    async def agent(task: AgentTask) -> float:
        await say(task, [user("0123456789"), *map(user, "abc")])
        return 1.0

    [text] = run(agent, n_samples=1).turns
    turns = json.loads(text)
    assert turns == [user("01234 [10 letters]"), user("a"), user("b"), {"role": "2 more turns"}]
    assert len(msgspec.json.encode(turns[:-1])) <= 120 + len(turns)


def test_samples_with_different_numbers_of_trajectories_weigh_the_same() -> None:
    samples = iter(range(3))

    async def agent(task: AgentTask) -> float:
        number = next(samples)
        for i in range(1 + 2 * number):
            await say(task, [user(f"question {i}")])
        return float(number)

    batch = collate(PackedGroups.of([run(agent, n_samples=3).group]))
    assert batch.n_sequences == 1 + 3 + 5
    got = token_credit(ADVANTAGES["rloo"], PLAIN, batch).advantages
    firsts = [int(batch.loss_mask[a:b].nonzero()[0]) + a for a, b in pairwise(batch.cu_seqlens.tolist())]
    by_reward = {0.0: -1.5, 1.0: 0.0, 2.0: 1.5}  # reward minus the mean of the two others
    assert got[firsts].tolist() == [by_reward[r] for r in batch.rewards.tolist()]


def test_completions_of_text_and_of_tokens() -> None:
    async def agent(task: AgentTask) -> float:
        status, first = await post(task, "/completions", prompt="ab")
        assert (status, first["object"]) == (200, "text_completion")
        assert first["choices"][0]["text"] == answer([1, 97, 98], 0)[1]
        assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        ids = [1, 97, 98, *answer([1, 97, 98], 0)[0]]
        status, _ = await post(task, "/completions", prompt=[*ids, 99])
        assert status == 200
        return 1.0

    for made in run(agent).group.trajectories:  # the text got its begin of sequence, and its tokens were extended
        assert made.token_ids[:3] == [1, 97, 98]
        assert made.loss_mask == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]


def test_several_answers_and_what_the_server_is_asked() -> None:
    fake = FakeServer(models={str(V1)}, answer=answer)

    async def agent(task: AgentTask) -> float:
        status, reply = await post(task, messages=[user("a")], n=3, stop="x", max_completion_tokens=5, temperature=1.0)
        assert status == 200
        assert [c["message"]["content"][1] for c in reply["choices"]] == ["A", "B", "C"]
        await say(task, [user("b")], max_tokens=10**6)
        return 1.0

    episode = run(agent, server=fake, n_samples=1)
    assert len(episode.group.trajectories) == 4
    first, second = fake.requests
    assert (first["n"], first["stop"], first["max_tokens"]) == (3, ["x"], 5)
    assert second["max_tokens"] == SAMPLING.max_new_tokens
    assert first["seed"] != second["seed"]
    assert (first["temperature"], first["model"]) == (SAMPLING.temperature, str(V1))


def test_each_completion_is_of_the_newest_version() -> None:
    models = {str(V1)}
    fake = FakeServer(models=models, answer=answer)

    async def main() -> Episode:
        async with served(fake, Graded(), SAMPLING) as context, agent_gateway() as sessions:

            async def agent(task: AgentTask) -> float:
                first = await say(task, [user("hi")])
                models.add(str(V2))
                context.client.router.announce(V2, {"server-0": fake.url})
                await say(task, [user("hi"), {"role": "assistant", "content": first}, user("go on")])
                return 1.0

            workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent))
            return await workflow.run(PROMPT, V1, seed=7)

    for made in asyncio.run(main()).group.trajectories:
        assert [v for v in made.versions if v >= 0][-3:] == [2, 2, 2]


# ------------------------------------------------------------ keys


def test_a_key_is_for_one_session_and_ends_with_it() -> None:
    tasks: list[AgentTask] = []
    statuses: list[int] = []
    fake = FakeServer(models={str(V1)}, answer=answer)

    async def agent(task: AgentTask) -> float:
        tasks.append(task)
        assert SECRET not in repr(task)
        for key in ("wrong", SECRET, task.api_key + "x"):
            statuses.append((await post(task, key=key, messages=[user("hi")]))[0])
        await say(task, [user("hi")])
        return 1.0

    async def main() -> None:
        async with served(fake, Graded(), SAMPLING, SECRET) as context, agent_gateway() as sessions:
            workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent))
            await workflow.run(PROMPT, V1, seed=7)
            for task in tasks:
                statuses.append((await post(task, messages=[user("late")]))[0])
            async with aiohttp.ClientSession() as session, session.post(f"{task.base_url}/completions") as response:
                statuses.append(response.status)

    asyncio.run(main())
    assert statuses == [401] * (2 * 3 + 2 + 1)
    assert len({task.api_key for task in tasks}) == 2
    assert len(fake.requests) == 2


def test_a_connection_is_open_to_a_client_that_was_idle_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(task: AgentTask) -> float:
        loop, headers = asyncio.get_running_loop(), {"Authorization": f"Bearer {task.api_key}"}
        reader, writer = await asyncio.open_connection("127.0.0.1", int(task.base_url.split(":")[2].split("/")[0]))
        now, request = loop.time, "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        for wait_s in (0, 60):  # a sample has 120
            monkeypatch.setattr(loop, "time", lambda wait_s=wait_s: now() + wait_s)
            await asyncio.sleep(0.1)  # timers that are due, and what they close
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{request}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = (int(row[15:]) for row in head.split(b"\r\n") if row.lower().startswith(b"content-length:"))
            assert json.loads(await reader.readexactly(length))["data"][0]["id"] == "math"
        writer.close()
        await say(task, [user("hi")])
        return 1.0

    run(agent, n_samples=1)


def test_a_body_beyond_the_limit_is_413() -> None:
    statuses: list[int] = []

    async def agent(task: AgentTask) -> float:
        statuses.append((await post(task, messages=[user("x" * MAX_BODY_BYTES)]))[0])
        await say(task, [user("hi")])
        return 1.0

    async def main() -> None:
        fake = FakeServer(models={str(V1)}, answer=answer)
        async with served(fake, Graded(), SAMPLING, SECRET) as context, agent_gateway() as sessions:
            await AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent)).run(PROMPT, V1, seed=7)

    asyncio.run(main())
    assert statuses == [413, 413]


def test_what_a_session_still_asks_ends_with_it() -> None:
    fake = FakeServer(models={str(V1)}, answer=answer, delay_s=lambda k: 300.0 if k else 0.0)
    late: list[asyncio.Task[Any]] = []

    async def agent(task: AgentTask) -> float:
        await say(task, [user("hi")])
        late.append(asyncio.create_task(post(task, messages=[user("late")])))
        while fake.open_requests == 0:
            await asyncio.sleep(0.01)
        return 1.0

    async def main() -> None:
        async with served(fake, Graded(), SAMPLING.model_copy(update={"n_samples": 1})) as context:
            async with agent_gateway() as sessions:
                workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent))
                await workflow.run(PROMPT, V1, seed=7)
                async with asyncio.timeout(60.0):
                    while fake.open_requests:
                        await asyncio.sleep(0.01)
                    await asyncio.wait(late)
                late[0].exception()

    asyncio.run(main())


@pytest.mark.parametrize("own", [None, 3, SAMPLING.max_new_tokens, 50])
def test_an_answer_cut_off_by_its_own_max_tokens_was_ended_by_no_limit_of_the_run(own: int | None) -> None:
    def cut(body: dict[str, Any]) -> None:
        body["choices"][0]["finish_reason"] = "length"

    async def agent(task: AgentTask) -> None:
        _, reply = await post(task, messages=[user("hi")], max_tokens=own)
        assert reply["choices"][0]["finish_reason"] == "length", "to the agent it is cut off in any case"

    fake, scorer = FakeServer(models={str(V1)}, answer=answer, fault=lambda _: Fault(edit=cut)), Graded()
    for made in run(agent, server=fake, scorer=scorer).group.trajectories:
        assert made.truncated is (own != 3)
    assert [item.finish_reason for item in scorer.asked] == ["length"] * 2


def test_an_answer_cut_off_by_the_context_was_ended_by_a_limit_of_the_run() -> None:
    def cut(body: dict[str, Any]) -> None:
        body["choices"][0]["finish_reason"] = "length"

    async def agent(task: AgentTask) -> float:
        await say(task, [user("x" * (MAX_MODEL_LEN - len("<user:>") - 4))], max_tokens=5)
        return 1.0

    fake = FakeServer(models={str(V1)}, answer=answer, fault=lambda _: Fault(edit=cut))
    assert all(made.truncated for made in run(agent, server=fake).group.trajectories)
    assert {body["max_tokens"] for body in fake.requests} == {4}


# ------------------------------------------------------------ refusals and faults


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"temperature": 0.2}, 400, "temperature 0.2 is not the run's 1"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "0 to 20"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "workflow.tool_parser"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, 400, "repetition_penalty"),
        ({"logit_bias": {"5": 2.0}}, 400, "logit_bias"),
        ({"min_p": 0.1}, 400, "min_p"),
        ({"top_k": 5}, 400, "top_k"),
        ({"model": "other"}, 404, "only 'math'"),
        ({"n": 0}, 400, "n is 1"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": None, "prompt": "x"}, 400, "give messages"),
        ({"messages": [user("x" * MAX_MODEL_LEN)]}, 400, "prompt is too long"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_the_agent_goes_on(
    body: dict[str, Any], status: int, words: str
) -> None:
    async def agent(task: AgentTask) -> float:
        got, reply = await post(task, **({"messages": [user("hi")]} | body))
        assert got == status, reply
        assert words in reply["error"]["message"]
        await say(task, [user("hi")])
        return 1.0

    assert len(run(agent).group.trajectories) == 2


def test_a_request_that_the_server_rejects_is_the_agents_mistake() -> None:
    fake = FakeServer(models={str(V1)}, answer=answer, fault=lambda k: Fault(status=400) if k == 0 else None)

    async def agent(task: AgentTask) -> float:
        status, _ = await post(task, "/completions", prompt=[10**9])
        assert status == 400
        await say(task, [user("hi")])
        return 1.0

    assert len(run(agent, server=fake, n_samples=1).group.trajectories) == 1


def test_a_completion_that_could_not_be_had_fails_the_group_at_once() -> None:
    fake = FakeServer(models={str(V1)}, answer=answer, fault=lambda k: Fault(status=500) if k else None)
    cancelled: list[bool] = []

    async def agent(task: AgentTask) -> float:
        try:
            await post(task, messages=[user("hi")])
            await post(task, messages=[user("ho")])
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return 0.0

    start = time.monotonic()
    with pytest.raises(GenerationFault, match=r"server_error: .*500"):
        run(agent, server=fake)
    assert time.monotonic() - start < 60  # an episode may take 120 s
    assert len(cancelled) >= 2


@pytest.mark.parametrize(
    ("kind", "cause", "seeds"),
    [
        (FaultKind.AGENT, Cause.OTHER, 5),
        (FaultKind.AGENT, Cause.UNREACHABLE, 5),
        (FaultKind.SERVER_ERROR, Cause.OTHER, 4),
        (FaultKind.AGENT, Cause.CODE, 0),
        (FaultKind.REJECTED, Cause.OTHER, 0),
        (FaultKind.RETIRED, Cause.OTHER, 0),
    ],
)
def test_a_sample_that_fails_once_is_repeated_alone(kind: FaultKind, cause: Cause, seeds: int) -> None:
    """With another seed where its answers may be at fault; where it would fail again, the group fails."""
    fake = FakeServer(models={str(V1)}, answer=answer)
    left = [GenerationFault(kind, "the sandbox closed its connection", cause)]

    async def agent(task: AgentTask) -> float:
        await say(task, [user("hi")])
        if left:
            raise left.pop()
        return 1.0

    if not seeds:
        with pytest.raises(GenerationFault, match="sandbox"):
            run(agent, server=fake, n_samples=4)
        return
    assert [made.reward for made in run(agent, server=fake, n_samples=4).group.trajectories] == [1.0] * 4
    assert len(fake.requests) == 5
    assert len({request["seed"] for request in fake.requests}) == seeds


async def no_completion(task: AgentTask) -> float:
    return 1.0


async def never_ends(task: AgentTask) -> float:
    await say(task, [user("hi")])
    await asyncio.sleep(600)
    return 1.0


@pytest.mark.parametrize(
    ("agent", "detail", "outcome"),
    [
        (no_completion, "agent: the agent ended without a completion", Outcome.ERROR),
        (never_ends, r"timeout: the agent took longer than 0\.5 s", Outcome.TIMEOUT),
    ],
)
def test_what_an_agent_does_wrong_is_a_fault_of_its_group(
    agent: Callable[[AgentTask], Awaitable[Any]], detail: str, outcome: Outcome
) -> None:
    with pytest.raises(GenerationFault, match=detail) as caught:
        run(agent, timeout_s=0.5 if outcome is Outcome.TIMEOUT else 120.0)
    assert caught.value.outcome is outcome


def test_a_sample_whose_time_is_over_is_repeated_alone_with_another_seed() -> None:
    async def agent(task: AgentTask) -> float:
        await say(task, [user("hi")])
        started.append(task.api_key)
        if len(started) == 2:  # the second sample to have its answer
            await asyncio.sleep(600)
        return 1.0

    def attempt() -> Episode | GenerationFault:
        started.clear()
        fake.requests.clear()
        try:
            return run(agent, server=fake, timeout_s=1.5, n_samples=4)
        except GenerationFault as fault:  # a stall of the machine
            return fault

    started = list[str]()
    fake = FakeServer(models={str(V1)}, answer=answer)
    episode = seen(attempt, lambda found: isinstance(found, Episode) and len(started) == 5)
    assert isinstance(episode, Episode)
    assert [made.reward for made in episode.group.trajectories] == [1.0] * 4
    assert len({request["seed"] for request in fake.requests}) == len(fake.requests) == 5


def test_an_agent_whose_time_is_over_is_scored_by_its_last_answer() -> None:
    """The answer that it still waits for is not part of it, and one without an answer is a fault all the same."""
    fake = FakeServer(models={str(V1)}, answer=answer, delay_s=lambda k: 600.0 if k >= 2 else 0.0)
    scorer = Graded(lambda text: Score(reward=0.25, outcome=Outcome.OK))

    async def agent(task: AgentTask) -> float:
        first = await say(task, [user("hi")])
        await say(task, [user("hi"), {"role": "assistant", "content": first}, user("more")])
        return 1.0

    def attempt() -> Episode | GenerationFault:
        fake.requests.clear()
        scorer.asked.clear()
        try:
            return run(agent, server=fake, scorer=scorer, timeout_s=1.0, cut=True)
        except GenerationFault as fault:  # no first answer within the time
            return fault

    episode = seen(attempt, lambda found: isinstance(found, Episode))
    assert isinstance(episode, Episode)
    tokens, text = answer([ord(c) for c in "<user:hi>"], 0)
    for made in episode.group.trajectories:
        assert rows(made) == told("<user:hi>") + sampled(tokens)
        assert (made.reward, made.outcome, made.finish_reason) == (0.25, Outcome.OK, "timeout")
    assert [item.completion for item in scorer.asked] == [text, text]
    with pytest.raises(GenerationFault, match="took longer"):
        run(agent, server=FakeServer(models={str(V1)}, delay_s=lambda _: 600.0), timeout_s=0.5, cut=True)


@pytest.mark.parametrize("kind", [FaultKind.AGENT, FaultKind.ENVIRONMENT])
@pytest.mark.parametrize("goes_on", [False, True])
def test_an_agent_that_fails_on_its_full_context_was_ended_by_a_limit_of_the_run(
    kind: FaultKind, goes_on: bool
) -> None:
    """Its answers are trained on. One that is answered again, with fewer messages, fails by itself."""
    fake = FakeServer(models={str(V1)}, answer=answer)
    scorer = Graded(lambda text: Score(reward=0.25, outcome=Outcome.OK))

    async def agent(task: AgentTask) -> float:
        messages = [user("hi")]
        for _ in range(2 * MAX_MODEL_LEN):
            messages += [user("more")]
            status, reply = await post(task, messages=messages)
            if status != 200:
                assert reply["error"]["code"] == "context_length_exceeded"
                break
            messages += [reply["choices"][0]["message"]]
        if goes_on:
            await say(task, [user("hi")])
        raise GenerationFault(kind, f"BadRequestError: {reply['error']['message']}", Cause.CODE)

    if goes_on:
        with pytest.raises(GenerationFault, match="BadRequestError"):
            run(agent, server=fake, n_samples=1)
        return
    episode = run(agent, server=fake, scorer=scorer)
    assert len(episode.group.trajectories) == 2
    for made in episode.group.trajectories:
        assert (made.reward, made.outcome, made.finish_reason) == (0.25, Outcome.OK, "length")
        assert made.truncated
        assert sum(made.loss_mask) == 3 * len(fake.requests) // 2, "each answer has three tokens"


TOO_LONG = GenerationFault(FaultKind.AGENT, "BadRequestError: too long")


@pytest.mark.parametrize(
    ("fault", "path", "has_reward"),
    [
        (WorkerLost("its process ended"), "/chat/completions", True),
        (GenerationFault(FaultKind.ENVIRONMENT, "refused", Cause.UNREACHABLE), "/chat/completions", True),
        (TOO_LONG, "/messages/count_tokens", True),
        (TOO_LONG, "/chat/completions", False),
    ],
)
def test_a_failure_that_is_not_of_the_context_or_has_no_reward_is_repeated(
    fault: GenerationFault, path: str, has_reward: bool
) -> None:
    runs = list[AgentTask]()

    async def agent(task: AgentTask) -> float:
        runs.append(task)
        await say(task, [user("hi")])
        if len(runs) == 1:
            status, reply = await post(task, path, messages=[user("x" * MAX_MODEL_LEN)])
            assert status == (200 if "input_tokens" in reply else 400)
            assert reply.get("input_tokens", MAX_MODEL_LEN + 7) == MAX_MODEL_LEN + len("<user:>")
            raise fault
        return 0.5

    (made,) = run(agent, n_samples=1, has_reward=has_reward).group.trajectories
    assert (len(runs), made.reward, made.finish_reason) == (2, 0.5, "stop")


def test_an_agent_whose_first_request_is_too_long_fails() -> None:
    async def agent(task: AgentTask) -> float:
        status, _ = await post(task, messages=[user("x" * MAX_MODEL_LEN)])
        assert status == 400
        raise GenerationFault(FaultKind.AGENT, "BadRequestError: too long")

    with pytest.raises(GenerationFault, match="BadRequestError"):
        run(agent)


def test_without_a_reward_the_last_answer_is_scored() -> None:
    scorer = Graded(lambda text: Score(reward=0.25, outcome=Outcome.OK))

    async def agent(task: AgentTask) -> None:
        await say(task, [user("hi")])
        await say(task, [user("ho")])

    episode = run(agent, scorer=scorer)
    assert {t.reward for t in episode.group.trajectories} == {0.25}
    want = answer([ord(c) for c in "<user:ho>"], 0)[1]
    assert [(item.completion, item.answer) for item in scorer.asked] == [(want, "42")] * 2


def test_a_reward_that_is_not_finite_is_an_error_of_all_its_trajectories() -> None:
    async def agent(task: AgentTask) -> float:
        await say(task, [user("hi")])
        await say(task, [user("ho")])
        return float("nan")

    outcomes = [t.outcome for t in run(agent, n_samples=1).group.trajectories]
    assert outcomes == [Outcome.ERROR] * 2


def test_openais_own_client_works() -> None:
    openai = pytest.importorskip("openai")

    async def agent(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            messages: list[Any] = [user("hi")]
            reply = await client.chat.completions.create(model=task.model, messages=messages, temperature=1.0)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, user("more")]
            await client.chat.completions.create(model=task.model, messages=messages, max_completion_tokens=4)
            text = await client.completions.create(model=task.model, prompt="ab", max_tokens=4, stop=["x"])
            assert text.usage.prompt_tokens == 3
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.completions.create(model=task.model, prompt="ab", temperature=0.0)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").completions.create(model=task.model, prompt="ab")
        return 1.0

    assert [sum(t.loss_mask) for t in run(agent, n_samples=1).group.trajectories] == [6, 3]
