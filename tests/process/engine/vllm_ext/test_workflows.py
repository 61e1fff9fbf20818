"""Workflows on a real server: what they pack is what the model sampled, says Hugging Face."""

from __future__ import annotations

import asyncio
import copy
import json
import string
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from areal_lora.config.models import SamplingConfig
from areal_lora.config.sections.section import ServedModel
from areal_lora.data.collate import collate
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.data.prompts import Formatter, Prompt
from areal_lora.errors import ConfigError
from areal_lora.network.http_server import ParsedCall, ParsedText, ToolCallsBody
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agents import AgentTask, AgentWorkflow
from areal_lora.rollout.completion_client import CompletionClient, GenerationFault
from areal_lora.rollout.conversations import MultiTurnWorkflow, Reply
from areal_lora.rollout.routing import Router
from areal_lora.rollout.workflow import Episode, SingleTurnWorkflow, WorkflowContext
from areal_lora.rollout.workflow_loading import Teacher, TrainingWorkflow
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.trainer.audit import audit, choose
from areal_lora.types import AdapterRef, Outcome, Sample
from tests.support.engine.vllm_ext.serving import RunningServer, Tensors, hf_logits
from tests.support.lazy import Lazy
from tests.support.rollout.agent_endpoint import rewarded
from tests.support.rollout.environments_here import played_here

openai = Lazy("openai")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLING = SamplingConfig(
    prompts_per_step=1, n_samples=3, max_new_tokens=40, temperature=1.3, top_p=0.9, top_k=40, timeout_s=240.0
)
QUESTION = "Ann has 3 apples and buys 4. How many?"
TOLERANCE = 1e-4  # fp32


class NoScorer:
    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [Score(reward=0.0, outcome=Outcome.OK) for _ in items]


@asynccontextmanager
async def context_of(
    server: RunningServer, ref: AdapterRef, sampling: SamplingConfig = SAMPLING
) -> AsyncIterator[WorkflowContext]:
    router = Router()
    router.announce(ref, {"server-0": f"http://127.0.0.1:{server.endpoint.ports['data']}"})
    async with CompletionClient(router, "no secret") as client:
        yield WorkflowContext(
            client=client,
            scorer=NoScorer(),
            sampling=sampling,
            formatter=Formatter(tokenizer=AutoTokenizer.from_pretrained(server.model)),
            max_model_len=server.config.rollout.max_model_len,
        )


def prompt_of(context: WorkflowContext) -> Prompt:
    return Prompt(
        uid="0:s",
        position=0,
        sample=Sample(uid="s", prompt=QUESTION, answer="7"),
        text=QUESTION,
        token_ids=context.encode(QUESTION),
    )


def assert_sampled_by(server: RunningServer, episode: Episode, adapters: Mapping[int, Tensors]) -> None:
    """Each token on the mask has the log-probability that its version's model gives it here, and no other token."""
    batch = collate(PackedGroups.of([episode.group]))
    assert batch.n_sequences == len(episode.group.trajectories)
    for made in episode.group.trajectories:
        scored = {v: server.logprobs(t, made.token_ids, SAMPLING.temperature) for v, t in adapters.items()}
        for t, version in enumerate(made.versions):
            if version < 0:
                assert (made.loss_mask[t], made.rollout_logprobs[t]) == (0, 0.0)
            else:
                assert made.loss_mask[t] == 1
                whole = made.rollout_logprobs[t] + made.columns.masses[t]
                assert whole == pytest.approx(scored[version][t], abs=TOLERANCE), (made.uid, t)
                assert made.columns.masses[t] < 0


def assert_confirmed_by(server: RunningServer, episode: Episode) -> None:
    """The server itself confirms the batch, each token under its version, and contradicts a shifted one."""

    def score(ref: AdapterRef, rows: list[list[int]]) -> list[list[float]]:
        return server.admin.score(str(ref), rows, 120.0, SAMPLING.temperature)

    batch = collate(PackedGroups.of([episode.group]))
    right = audit(choose(batch, "math", 1), score, limit=1e-3)
    assert (right.error, right.missing) == ("", "")
    assert right.tokens > 20
    assert right.gap is not None
    assert right.gap < TOLERANCE
    shifted = batch.rollout_logprobs.clone()
    shifted[batch.loss_mask] = batch.rollout_logprobs[batch.loss_mask].roll(1)
    for wrong in (shifted, batch.rollout_logprobs * SAMPLING.temperature):
        assert audit(choose(replace(batch, rollout_logprobs=wrong), "math", 1), score, limit=1e-3).error


def test_a_teacher_scores_like_hugging_face_and_refuses_another_vocabulary(server: RunningServer) -> None:
    """The base, on the same server, is the teacher of an adapter's answers."""
    ref = server.publish(server.adapter(11, b_scale=0.3))
    teacher = Teacher(ServedModel(url=server.url("/v1"), model="base"), print)

    async def main() -> Episode:
        async with context_of(server, ref) as context:
            await teacher.check(context.tokenizer, context.max_model_len)
            other = copy.deepcopy(context.tokenizer)
            other.decode = lambda ids, **how: context.tokenizer.decode(ids, **how).swapcase()  # type: ignore[method-assign]
            with pytest.raises(ConfigError, match="another vocabulary"):
                await teacher.check(other, context.max_model_len)
            with pytest.raises(ConfigError, match=r"HTTP 400: .*context"):
                await teacher.check(context.tokenizer, context.max_model_len + 1)
            workflow = TrainingWorkflow(answers=SingleTurnWorkflow(context=context), teacher=teacher, hold_s=60.0)
            episode = await workflow.run(prompt_of(context), ref, seed=5)
            await teacher.close()
            return episode

    group = asyncio.run(main()).group
    batch = collate(PackedGroups.of([group]))
    assert batch.ref_logprobs is not None
    want = [value for made in group.trajectories for value in server.logprobs(None, made.token_ids)]
    assert batch.ref_logprobs.tolist() == pytest.approx(want, abs=TOLERANCE)
    mask = batch.loss_mask
    assert (batch.ref_logprobs - batch.rollout_logprobs)[mask].abs().mean() > 0.1, "the adapter must show"


def test_a_packed_episode_has_the_log_probabilities_of_its_versions(server: RunningServer) -> None:
    first, second = server.adapter(11, b_scale=0.3), server.adapter(12, b_scale=0.3)
    begun = server.publish(first)
    newest: list[AdapterRef] = []
    publishing = asyncio.Lock()

    async def main() -> Episode:
        stops = SAMPLING.model_copy(update={"stop": list(string.ascii_letters)})
        async with context_of(server, begun, stops) as context:

            class Tool:
                turns = 0

                def reset(self, sample: Sample) -> str:
                    return "\nTool: ready\n"

                async def step(self, text: str) -> Reply:
                    """A new version comes between the first two turns."""
                    async with publishing:
                        if not newest:
                            newest.append(await asyncio.to_thread(server.publish, second))
                            url = context.client.router.servers["server-0"].url
                            context.client.router.announce(newest[0], {"server-0": url})
                    self.turns += 1
                    return Reply(text=f"\nTool: {len(text)}\n", done=self.turns == 3, reward=0.1)

            workflow = MultiTurnWorkflow(context=context, played=played_here(Tool), max_turns=5)
            return await workflow.run(prompt_of(context), begun, seed=5)

    episode = asyncio.run(main())
    assert_sampled_by(server, episode, {begun.version: first, newest[0].version: second})
    assert_confirmed_by(server, episode)
    assert {v for t in episode.group.trajectories for v in t.versions} == {-1, begun.version, newest[0].version}
    for made in episode.group.trajectories:
        assert made.adapter == begun


def test_an_agents_conversation_is_packed_from_the_tokens_it_sampled(server: RunningServer) -> None:
    tensors = server.adapter(13, b_scale=0.3)
    ref = server.publish(tensors)
    finished: list[str] = []

    async def agent(task: AgentTask) -> float:
        messages = [{"role": "user", "content": task.sample.prompt}]
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for reply in ("Are you sure?", "Then go on."):
                body: dict[str, Any] = {"model": task.model, "messages": messages}
                async with session.post(f"{task.base_url}/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    (choice,) = (await response.json())["choices"]
                finished.append(choice["finish_reason"])
                messages += [choice["message"], {"role": "user", "content": reply}]
        return 1.0

    async def main() -> Episode:
        async with context_of(server, ref) as context, agent_gateway() as sessions:
            workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent))
            return await workflow.run(prompt_of(context), ref, seed=6)

    episode = asyncio.run(main())
    assert_sampled_by(server, episode, {ref.version: tensors})
    assert_confirmed_by(server, episode)
    assert len(episode.group.trajectories) == SAMPLING.n_samples
    trained = sum(sum(t.loss_mask) for t in episode.group.trajectories)
    assert trained > 2 * SAMPLING.n_samples
    if set(finished) == {"length"}:
        assert trained == 2 * SAMPLING.n_samples * SAMPLING.max_new_tokens


def test_an_agent_gets_log_probabilities_and_parsed_tool_calls(server: RunningServer) -> None:
    """Top log-probabilities are Hugging Face's; vLLM's hermes parser sees what the server samples."""
    tensors = server.adapter(14, b_scale=0.3)
    ref = server.publish(tensors)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    async def agent(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": task.sample.prompt}]
            reply = await client.chat.completions.create(
                model=task.model, messages=messages, tools=tools, logprobs=True, top_logprobs=3
            )
            rows = reply.choices[0].logprobs.content
            assert all(len(row.top_logprobs) == 3 and row.top_logprobs[0].logprob >= row.logprob for row in rows)
            assert reply.choices[0].message.tool_calls is None
        return rows[0].top_logprobs[2].logprob

    async def main() -> tuple[Episode, list[ParsedText]]:
        async with context_of(server, ref) as context, agent_gateway() as sessions:
            workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent), tool_parser="hermes")
            text = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
            request = ToolCallsBody(parser="hermes", tools=tools, texts=[text, "no call", "<tool_call>{broken"])
            parsed = await context.client.tool_calls(ref, request, timeout_s=120.0)
            other = ToolCallsBody(parser="pythonic", tools=tools, texts=[text])
            with pytest.raises(GenerationFault, match="does not name 'pythonic'"):
                await context.client.tool_calls(ref, other, timeout_s=120.0)
            return await workflow.run(prompt_of(context), ref, seed=7), parsed

    episode, parsed = asyncio.run(main())
    call = ParsedCall(name="add", arguments='{"a": [1, "é"]}')
    assert parsed == [
        ParsedText(content="So:\n", calls=[call]),
        ParsedText(content="no call", calls=[]),
        ParsedText(content="<tool_call>{broken", calls=[]),
    ]
    made = episode.group.trajectories[0]
    begin = made.loss_mask.index(1)
    logits = hf_logits(server.model, tensors, made.token_ids[:begin])[-1] / SAMPLING.temperature
    assert made.reward == pytest.approx(logits.log_softmax(-1).topk(3).values[2].item(), abs=TOLERANCE)


def test_an_agents_stream_has_the_tokens_of_its_answer_and_a_grammar_its_form(server: RunningServer) -> None:
    ref = server.publish(server.adapter(15, b_scale=0.3))
    # An object could have spaces between its tokens, and this model has no reason to end them.
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    texts: list[list[str]] = []

    async def agent(task: AgentTask) -> float:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": task.sample.prompt}]
            body: dict[str, Any] = {"model": task.model, "messages": messages, "seed": 3, "logprobs": True}
            whole = (await client.chat.completions.create(**body)).choices[0]
            chunks = [c.choices[0] async for c in await client.chat.completions.create(**body, stream=True)]
            texts.append([c.delta.content for c in chunks if c.delta.content])
            # Of bytes that are no characters a decoder of parts makes other replacements than one of the whole.
            assert "".join(texts[-1]).replace("\ufffd", "") == whole.message.content.replace("\ufffd", "")
            rows = [row for c in chunks if c.logprobs for row in c.logprobs.content]
            assert [row.token for row in rows] == [row.token for row in whole.logprobs.content]
            streamed = [row.logprob for row in rows]
            assert streamed == pytest.approx([row.logprob for row in whole.logprobs.content], abs=TOLERANCE)
            shaped = await client.chat.completions.create(model=task.model, messages=messages, response_format=form)
            assert json.loads(shaped.choices[0].message.content) in ("yes", "no")
        return 1.0

    async def main() -> Episode:
        async with context_of(server, ref) as context, agent_gateway() as sessions:
            workflow = AgentWorkflow(context=context, sessions=sessions, agent=rewarded(agent))
            return await workflow.run(prompt_of(context), ref, seed=8)

    episode = asyncio.run(main())
    assert any(len(each) > 1 for each in texts)
    assert_confirmed_by(server, episode)
    assert len(episode.group.trajectories) == 2 * SAMPLING.n_samples
