"""The work of a turn does not grow with the conversation before it, and what was sampled stays as it was."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter
from areal_lora.rollout import agent_api
from areal_lora.rollout.agent_api.refusals import warn_once
from areal_lora.rollout.agents import AgentTask
from tests.support.rollout.agent_endpoint import MESSAGES, TOOL, ToolTokenizer, asked, episode, saying
from tests.support.rollout.texts import EOS

TURNS = 12


class Counting(ToolTokenizer):
    """Counts texts that the template writes, and letters that are tokenized."""

    rendered = encoded = 0

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        self.rendered += 1
        return super().apply_chat_template(*arguments, **options)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_request_is_written_once_and_only_new_messages_are_tokenized(tools: list[Any]) -> None:
    async def agent(task: AgentTask) -> float:
        messages: list[Any] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": "hi"})
            status, body = await asked(task, messages=messages, **({"tools": tools} if tools else {}))
            assert status == 200
            messages.append(body["choices"][0]["message"])
        return 1.0

    tokenizer = Counting()
    formatter = Formatter(tokenizer=tokenizer)
    assert formatter.ends == [EOS]  # it is looked for once
    tokenizer.rendered = tokenizer.encoded = 0
    made = episode(agent, saying(["hey"] * TURNS), formatter=formatter)
    (trajectory,) = made.group.trajectories
    assert tokenizer.rendered == TURNS + len(tools), "once more for the first request with tools"
    assert tokenizer.encoded == trajectory.loss_mask.count(0)


def test_the_collector_visits_no_more_objects_in_a_longer_conversation() -> None:
    """It stops the event loop: 2,000 conversations of 100 turns took 0.6 s."""
    visited = list[int]()

    async def agent(task: AgentTask) -> float:
        messages: list[Any] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": "hi"})
            _, body = await asked(task, messages=messages)
            messages.append(body["choices"][0]["message"])
            if turn in (0, TURNS - 1):
                gc.collect()
                ours = [each for each in gc.get_objects() if str(type(each).__module__).startswith(agent_api.__name__)]
                visited.append(len(ours))
        return 1.0

    episode(agent, saying(["hey"] * TURNS), formatter=Formatter(tokenizer=ToolTokenizer()))
    first, last = visited
    assert last < first + TURNS


class Thoughtful(ToolTokenizer):
    """As Qwen3's: answers before the last user's message lose their thoughts, ``~thought~``, and with
    ``enable_thinking: false`` the model's turn starts with an empty one. ``strict``: no result without a call."""

    strict = False

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        empty = "" if kwargs.pop("enable_thinking", True) else "~~"
        last = max(i for i, message in enumerate(conversation) if message["role"] == "user")
        written = list[dict[str, Any]]()
        for i, message in enumerate(conversation):
            content = message["content"]
            if message["role"] == "assistant":
                content = "A:" + (content.rpartition("~")[2] if i < last else content)
            elif self.strict and message["role"] == "tool" and not conversation[i - 1].get("tool_calls"):
                raise ValueError("a result without a call")
            written.append(message | {"content": content})
        text = super().apply_chat_template(written, tokenize=False, add_generation_prompt=False, **kwargs)
        return f"{text}A:{empty}" if add_generation_prompt else text


CALL = '~why~ok{add {"a":1}}'  # spelt otherwise than the template does
SAID = [CALL, "~so~yes", CALL, "~end~no"]


async def observing(task: AgentTask) -> float:
    """Calls have two results, other answers a user's message."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in SAID:
        status, body = await asked(task, messages=messages, tools=[TOOL])
        assert status == 200, body
        messages.append(message := body["choices"][0]["message"])
        for call in message.get("tool_calls", ()):
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for result in "34"]
        if "tool_calls" not in message:
            messages.append({"role": "user", "content": "and? areal answer"})
    return 1.0


def formatter(kind: str, thinking: bool, tokenizer: Thoughtful | None = None) -> Formatter:
    how = PromptFormat.model_validate({"kind": kind, "chat_template_kwargs": {"enable_thinking": thinking}})
    return Formatter(tokenizer=tokenizer or Thoughtful(), how=how)


@pytest.mark.parametrize("thinking", [True, False])
def test_with_chat_append_earlier_turns_stay_as_they_were_sampled(thinking: bool) -> None:
    start = "A:" if thinking else "A:~~"
    parts = ["[add]<user:hi>", "<tool:3><tool:4>", "<user:and? areal answer>", "<tool:3><tool:4>"]
    ids, mask = list[int](), list[int]()
    for told, said in zip(parts, SAID, strict=True):
        ids += [*map(ord, told + start + said), EOS]
        mask += [0] * len(told + start) + [1] * (len(said) + 1)
    server = saying(SAID)
    (made,) = episode(observing, server, formatter=formatter("chat_append", thinking)).group.trajectories
    assert (made.token_ids, made.loss_mask) == (ids, mask)
    ends = [i for i, (a, b) in enumerate(pairwise(mask), 1) if (a, b) == (0, 1)]
    assert [request["prompt"] for request in server.requests] == [ids[:end] for end in ends]


def test_an_answer_that_was_cut_off_gets_its_end_of_turn() -> None:
    async def agent(task: AgentTask) -> float:
        _, body = await asked(task, messages=MESSAGES, max_tokens=len(SAID[1]))
        given = [*MESSAGES, body["choices"][0]["message"], {"role": "user", "content": "so?"}]
        await asked(task, messages=given)
        return 1.0

    server = saying([SAID[1], "c"])
    episode(agent, server, formatter=formatter("chat_append", True))
    assert "".join(map(chr, server.requests[1]["prompt"])) == f"<user:hi>A:{SAID[1]}\2<user:so?>A:"


@pytest.mark.parametrize("appended", [False, True])
def test_what_a_template_refuses_after_any_answer_is_written_as_a_whole(appended: bool) -> None:
    """Also after turns that were ``appended``, without the text of those before."""
    strict = Thoughtful()
    strict.strict = True
    said = [SAID[1]] * appended + [CALL, SAID[1]]

    async def agent(task: AgentTask) -> float:
        messages: list[Any] = list(MESSAGES)
        for text in said:
            status, body = await asked(task, messages=messages, tools=[TOOL])
            assert status == 200, body
            messages.append(message := body["choices"][0]["message"])
            if text == CALL:
                (call,) = message["tool_calls"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
            else:
                messages.append({"role": "user", "content": "so?"})
        return 1.0

    (made,) = episode(agent, saying(said), formatter=formatter("chat_append", True, strict)).group.trajectories
    first = f"{SAID[1]}\2<user:so?>A:" * appended
    told = f"[add]<user:hi>A:{first}{CALL}\2<tool:3>A:{SAID[1]}\2"
    assert made.token_ids == [*map(ord, told)]


def test_a_template_that_writes_earlier_turns_differently_is_one_warning_with_its_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        assert len(episode(observing, saying(SAID), formatter=formatter("chat", False)).group.trajectories) > 1
    (line,) = caplog.messages
    assert "task.format.kind=chat_append" in line
    episode(observing, saying(SAID), formatter=formatter("chat_append", False))
    assert len(caplog.messages) == 1


THOUGHTS = ["<think>one</think>\n\nfour", "<think>two</think>\n\nfour", "<think>three</think>\n\nfour"]


def said(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


@pytest.mark.parametrize("kind", ["chat", "chat_append"])
def test_an_answer_without_its_thought_continues_the_conversation(kind: str) -> None:
    """As litellm gives it back: the thought is a field of its own, and the content what follows it."""

    async def agent(task: AgentTask) -> float:
        messages: list[Any] = list(MESSAGES)
        for thought in THOUGHTS:
            _, body = await asked(task, messages=messages)
            content = body["choices"][0]["message"]["content"]
            assert content == thought
            messages.append({"role": "assistant", "content": said(content), "reasoning_content": "one"})
            messages.append({"role": "user", "content": "and?"})
        return 1.0

    how = PromptFormat.model_validate({"kind": kind})
    (made,) = episode(
        agent, saying(THOUGHTS), formatter=Formatter(tokenizer=ToolTokenizer(), how=how)
    ).group.trajectories
    assert "".join(map(chr, made.token_ids)) == "<user:hi>" + "\2<user:and?>".join(THOUGHTS) + "\2"
    assert made.loss_mask.count(1) == sum(len(thought) + 1 for thought in THOUGHTS)


@pytest.mark.parametrize("chosen", range(3))
def test_of_equal_answers_the_one_with_the_given_thought_is_continued(chosen: int) -> None:
    server = saying([*THOUGHTS, "end", "end"])

    async def agent(task: AgentTask) -> float:
        _, body = await asked(task, messages=MESSAGES, n=3)
        content = body["choices"][chosen]["message"]["content"]
        for given in (content, said(content)):
            message = {"role": "assistant", "content": given}
            await asked(task, messages=[*MESSAGES, message, {"role": "user", "content": "and?"}])
        return 1.0

    episode(agent, server)
    whole, short = ("".join(map(chr, request["prompt"])) for request in server.requests[1:])
    assert whole == f"<user:hi>{THOUGHTS[chosen]}\2<user:and?>"
    assert short in {f"<user:hi>{thought}\2<user:and?>" for thought in THOUGHTS}


QUOTED = "A thought ends with </think> in Qwen3; the key is sk-123. </think> ok"


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (QUOTED, QUOTED.replace("sk-123", "[removed]")),
        (QUOTED, "the key is removed. </think> ok"),
        ("<think>one two three</think> ok", "<think>one</think> ok"),
        ("<think>one</think> see sk-123 <think>two</think> ok", "<think>one</think> see <think>two</think> ok"),
        ("ok", "<think>added</think> ok"),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "chat_append"])
def test_an_answer_that_was_edited_before_the_end_of_a_thought_starts_a_new_sequence(
    kind: str, answer: str, given: str
) -> None:
    """The model reads what the agent sent, after what is known of the turns before; it can be continued, too."""

    async def agent(task: AgentTask) -> float:
        messages: list[Any] = list(MESSAGES)
        for content in ("first", given, "last"):
            await asked(task, messages=messages)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
        await asked(task, messages=messages)
        return 1.0

    server, how = saying(["first", answer, "last", "end"]), PromptFormat.model_validate({"kind": kind})
    made = episode(agent, server, formatter=Formatter(tokenizer=ToolTokenizer(), how=how))
    assert len(made.group.trajectories) == 2
    *_, edited, continued = ("".join(map(chr, request["prompt"])) for request in server.requests)
    assert edited == f"<user:hi>first\2<user:and?>{given}\2<user:and?>"
    assert continued == f"{edited}last\2<user:and?>"
