"""Each field of a request over real HTTP; a fake server samples."""

from __future__ import annotations

import re
from typing import Any

import pytest

from areal_lora.rollout.agent_api.refusals import warn_once
from areal_lora.rollout.agents import AgentTask
from tests.support.rollout.agent_endpoint import FUNCTION, MESSAGES, TOOL, asked, episode, find_calls, saying
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import EOS, MAX_MODEL_LEN, V1

RESPONSES, CHAT, TEXT = "/responses", "/chat/completions", "/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, RESPONSES: {"input": "hi"}, TEXT: {"prompt": "hi"}}


def ask(path: str, **body: Any) -> tuple[int, Any, dict[str, Any]]:
    """Status and body of one request, and what the server was asked."""
    [(status, reply)], request = ask_each((path, body))
    return status, reply, request


def ask_each(*bodies: tuple[str, dict[str, Any]]) -> tuple[list[tuple[int, Any]], dict[str, Any]]:
    """Status and body of each request of one run, and what the server was asked first."""
    got: list[tuple[int, Any]] = []

    async def agent(task: AgentTask) -> float:
        for path, body in bodies:
            got.append(await asked(task, path, **(BODIES[path] | body)))
        if all(status != 200 for status, _ in got):
            await asked(task, **BODIES[CHAT])
        return 1.0

    server = saying(["hey"] * 9)
    episode(agent, server)
    return got, server.requests[0]


CHANGES: list[tuple[str, Any]] = [
    ("temperature", 0.3),
    ("top_p", 0.5),
    ("top_k", 3),
    ("min_p", 0.1),
    ("min_tokens", 4),
    ("frequency_penalty", 0.5),
    ("presence_penalty", -0.5),
    ("repetition_penalty", 1.2),
    ("logit_bias", {"5": 2.0}),
    ("bad_words", ["x"]),
    ("stop_token_ids", [5]),
    ("ignore_eos", True),
    ("best_of", 4),
    ("prediction", {"type": "content", "content": "x"}),
    ("response_format", {"type": "grammar"}),
    ("guided_json", {"type": "object"}),
    ("structured_outputs", {"json": {}}),
    ("chat_template", "{{ messages }}"),
    ("functions", [FUNCTION]),
    ("modalities", ["text", "audio"]),
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, TEXT])
def test_what_would_change_the_policy_is_refused_by_name(path: str) -> None:
    changes = [change for change in CHANGES if path != RESPONSES or change[0] != "response_format"]  # it has `text`
    replies, _ = ask_each(*((path, {field: value}) for field, value in changes))
    for (field, value), (status, reply) in zip(changes, replies, strict=True):
        assert status == 400, (field, value)
        assert reply["error"]["param"] == field
        assert reply["error"]["type"] == "invalid_request_error"
        assert field in reply["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, TEXT])
def test_what_asks_for_nothing_is_ignored(path: str) -> None:
    nothing = {
        "temperature": 1.0,
        "top_p": 1,
        "top_k": -1,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "no_such_field": 5,
    }
    plain = ask(path)
    status, _, request = ask(path, **nothing)
    assert (plain[0], status) == (200, 200)
    assert request == plain[2]


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    (RESPONSES, {"previous_response_id": "resp_7"}, "previous_response_id"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"input": [{"type": "web_search_call"}]}, "input[0]"),
    (RESPONSES, {"tools": [{"type": "computer_use_preview"}]}, "tools[0]"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "m", "tools": [{"type": "custom"}]}]}, "type custom"),
    (RESPONSES, {"prompt": {"id": "x"}}, "prompt"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    (CHAT, {"n": 129}, "n is 1 to 128"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    (CHAT, {"messages": [{"content": "no role"}]}, "role"),
    (CHAT, {"messages": []}, "messages"),
    (TEXT, {"prompt": ["a", "b"]}, "one prompt"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"suffix": "x"}, "suffix"),
]


def test_what_cannot_be_done_is_refused() -> None:
    replies, _ = ask_each(*((path, body) for path, body, _ in IMPOSSIBLE))
    for (_, body, words), (status, reply) in zip(IMPOSSIBLE, replies, strict=True):
        assert status == 400, body
        assert words in reply["error"]["message"]


LIMIT = 32 * MAX_MODEL_LEN
LONG = "x" * (LIMIT - len("<user:>"))  # one token more than what leaves room for an answer


@pytest.mark.parametrize("path", [CHAT, RESPONSES, TEXT])
def test_clients_recognise_that_the_context_is_full(path: str) -> None:
    """By what LiteLLM and others look for; its count and limit are numbers that they read."""
    (field,) = BODIES[path]
    body = {field: [{"role": "user", "content": LONG}] if path == CHAT else LONG.ljust(LIMIT, "x")}
    status, reply, _ = ask(path, **body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert reply["error"]["type"] == "invalid_request_error"
    found = re.search(
        r"This model's maximum context length is (\d+) tokens\. However, your messages have (\d+) tokens",
        reply["error"]["message"],
    )
    assert found is not None
    assert int(found[1]) == LIMIT
    assert int(found[2]) == {CHAT: LIMIT, RESPONSES: LIMIT + len("<user:>"), TEXT: LIMIT + 1}[path]


def test_other_errors_have_their_status_as_code() -> None:
    _, reply, _ = ask(CHAT, temperature=0.3)
    assert reply["error"]["code"] == 400
    _, reply, _ = ask(TEXT, prompt=[7] * (LIMIT - 1))
    assert "choices" in reply, "it leaves room for one token"


PROVIDERS: list[Any] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": "x"},
    {"type": "file_search"},
    {"type": "local_shell"},
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_tools_that_only_a_provider_runs_are_omitted_with_a_line_of_the_log(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    _, _, request = ask(path, tools=[*PROVIDERS, TOOL])
    assert "".join(map(chr, request["prompt"])) == "[add]<user:hi>"
    ask(path, tools=PROVIDERS)
    omitted = [line.split()[3] for line in caplog.messages if "only a provider" in line]
    assert omitted == [tool["type"] for tool in PROVIDERS]


def test_functions_of_a_namespace_are_called_with_it() -> None:
    tool = {"type": "namespace", "name": "math", "tools": [{"type": "function"} | FUNCTION]}
    other = {"type": "function", "name": "sub"}
    replies: list[Any] = []

    async def agent(task: AgentTask) -> float:
        _, first = await asked(task, RESPONSES, input="hi", tools=[tool, other])
        given = [{"role": "user", "content": "hi"}, *first["output"]]
        results = [{"type": "function_call_output", "call_id": c["call_id"], "output": "3"} for c in first["output"]]
        await asked(task, RESPONSES, input=[*given, *results], tools=[tool, other])
        replies.extend(first["output"])
        return 1.0

    made = episode(agent, saying(['{add {"a": 1}}{sub {"a": 1}}', "hey"]))
    assert [(call["name"], call.get("namespace")) for call in replies] == [("add", "math"), ("sub", None)]
    (trajectory,) = made.group.trajectories
    assert "".join(map(chr, trajectory.token_ids)).startswith("[add][sub]<user:hi>")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_format_beside_tools_is_sampled_freely_and_trained_on(path: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    form: dict[str, Any] = {"type": "json_object"}
    body = {"tools": [TOOL]} | ({"response_format": form} if path == CHAT else {"text": {"format": form}})
    made: list[Any] = []

    async def agent(task: AgentTask) -> float:
        for _ in range(2):
            made.append(await asked(task, path, **(BODIES[path] | body)))
        made.append(await asked(task, path, **(BODIES[path] | body | {"tool_choice": "required"})))
        return 1.0

    server = saying(["{}", "{}", '[{"name": "add", "parameters": {}}]'])
    trajectories = episode(agent, server).group.trajectories
    assert [status for status, _ in made] == [200] * 3
    assert [each.loss_mask[-3:] for each in trajectories] == [[1, 1, 1]] * 2, "a forced call is not trained on"
    assert ["structured_outputs" in request for request in server.requests] == [False, False, True]
    assert len([line for line in caplog.messages if "response_format" in line]) == 1


def test_the_log_counts_the_answers_that_a_grammar_keeps_from_training(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    n_samples, forced = 5, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}

    async def agent(task: AgentTask) -> float:
        await asked(task, CHAT, **forced)
        await asked(task, CHAT, messages=MESSAGES)
        return 1.0

    server = FakeServer(models={str(V1)}, answer=lambda *_: ([*map(ord, "[]"), EOS], "[]"), parse=find_calls)
    made = episode(agent, server, n_samples=n_samples).group.trajectories
    assert len(made) == n_samples, "the others have nothing to train"
    counted = [int(line.split()[1]) for line in caplog.messages if "not trained on" in line]
    assert counted == [1, 2, 4], "each time that their number has doubled"


def test_tools_need_a_parser_and_a_template_that_writes_them() -> None:
    from areal_lora.data.prompts import Formatter
    from tests.support.rollout.texts import CharTokenizer

    replies: list[Any] = []

    async def agent(task: AgentTask) -> float:
        replies.append(await asked(task, messages=MESSAGES, tools=[TOOL]))
        await asked(task, messages=MESSAGES)
        return 1.0

    episode(agent, saying(["hey"]), parser=None)
    episode(agent, saying(["hey"]), formatter=Formatter(tokenizer=CharTokenizer()))
    assert [status for status, _ in replies] == [400, 400]
    assert "workflow.tool_parser" in replies[0][1]["error"]["message"]
    assert "chat template does not write tools" in replies[1][1]["error"]["message"]


def test_limits_and_stop_texts_reach_the_server() -> None:
    _, _, request = ask(CHAT, max_tokens=7, max_completion_tokens=3, stop=["x", "y"], n=1)
    assert (request["max_tokens"], request["stop"]) == (3, ["x", "y"])
    _, reply, request = ask(RESPONSES, max_output_tokens=5)
    assert request["max_tokens"] == 5
    assert reply["max_output_tokens"] == 5


def test_content_parts_names_and_roles_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "name": "Ann", "content": parts}]
    _, _, request = ask(CHAT, messages=messages)
    assert "".join(map(chr, request["prompt"])) == "<system:be brief><user(Ann):ab>"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}]
    _, _, request = ask(RESPONSES, input=items, instructions="be brief")
    assert "".join(map(chr, request["prompt"])) == "<system:be brief><user:ab>"


def test_a_seed_repeats_an_answer_within_a_run_of_the_agent() -> None:
    async def agent(task: AgentTask) -> float:
        for seed in (5, 5, 6, None, None):
            await asked(task, messages=MESSAGES, seed=seed)
        return 1.0

    server = saying(["hey"] * 5)
    episode(agent, server)
    seeds = [request["seed"] for request in server.requests]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4


def test_log_probabilities_are_those_of_the_server() -> None:
    _, reply, request = ask(CHAT, logprobs=True, top_logprobs=1)
    rows = reply["choices"][0]["logprobs"]["content"]
    assert request["logprobs"] == 1
    assert [(row["token"], row["logprob"]) for row in rows] == [("h", -0.5), ("e", -1.0), ("y", -1.5), (chr(EOS), -2.0)]
    assert rows[0]["bytes"] == [ord("h")]
    assert [row["top_logprobs"] for row in rows][:1] == [[{"token": "h", "bytes": [104], "logprob": -0.5}]]
    _, reply, _ = ask(CHAT)
    assert reply["choices"][0]["logprobs"] is None
    _, reply, _ = ask(TEXT, logprobs=2)
    found = reply["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-0.5, -1.0, -1.5, -2.0]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["top_logprobs"][0] == {"h": -0.5, "A": -1.5}
    _, reply, _ = ask(RESPONSES, include=["message.output_text.logprobs"], top_logprobs=1)
    assert reply["output"][0]["content"][0]["logprobs"][1]["logprob"] == -1.0
