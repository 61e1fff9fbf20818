"""Which tool parsers a server has, and what a wrong name says. What they find: tests/process/engine/vllm_ext."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.config.models import WorkerWorkflowConfig
from areal_lora.errors import ConfigError
from areal_lora.network.http_server import ParsedCall, ParsedText, ToolCallsBody
from tests.support.lazy import Lazy
from tests.support.obs.fake_run import make_config
from tests.support.paths import ROOT

tool_calls = Lazy("areal_lora.engine.vllm_ext.server.tool_calls")

OWN = f"{ROOT / 'tests' / 'support' / 'agents' / 'own_format.py'}:CalculationParser"
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]


def test_the_configured_parsers_are_those_of_the_agents() -> None:
    config = make_config()
    assert tool_calls.configured_parsers(config) == []
    agent = WorkerWorkflowConfig(kind="agent", path="a.py:agent", tool_parser="hermes")
    adapters = [config.adapters[0].model_copy(update={"workflow": agent})] * 2
    assert tool_calls.configured_parsers(config.model_copy(update={"adapters": adapters})) == ["hermes"]


def test_a_parser_of_the_users_own_reads_an_answer() -> None:
    found = tool_calls.ToolCallParsers(None, [OWN]).parse(
        ToolCallsBody(parser=OWN, tools=TOOLS, texts=[" 3*4", " #### 7", r"\ud83d"])
    )
    assert found == [
        ParsedText(content=" ", calls=[ParsedCall(name="calculator", arguments='{"expression": "3*4"}')]),
        ParsedText(content=" #### 7"),
        ParsedText(content="", calls=[ParsedCall(name="calculator", arguments='{"expression": "?"}')]),
    ]


def hermes(command: str) -> str:
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("content", "call"),
    [
        ("<think>\nI answer inside <tool_call> tags.\n</think>\n\n", "ls"),
        (f"\n<think>I could {hermes('rm')}, but see.</think>", "ls"),
        (f"<think>I could {hermes('rm')}, but no.</think>4", None),
        (f"<think>I could {hermes('rm')}", None),
        ("<think>See.</think>", "grep '</think>' a"),
        ("", "grep '</think>' a"),
        ("See <think>.", "ls"),
    ],
)
def test_a_call_in_a_thought_is_none(content: str, call: str | None) -> None:
    """And what a call after it, or of a model without thoughts, has in its arguments ends none."""
    text = content + (hermes(call) if call else "")
    tools = [{"type": "function", "function": {"name": "bash"}}]
    (found,) = tool_calls.ToolCallParsers(object(), ["hermes"]).parse(
        ToolCallsBody(parser="hermes", tools=tools, texts=[text])
    )
    assert [json.loads(each.arguments) for each in found.calls] == ([{"command": call}] if call else [])
    assert found.content == content


@pytest.mark.parametrize("text", ["<|action_start|><|plugin|>1", "<|action_start|><|plugin|>{"])
def test_a_text_in_which_a_parser_fails_has_no_calls(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own raises a TypeError, and json's error, for what is no call."""
    parsers = tool_calls.ToolCallParsers(None, ["internlm"])
    found = parsers.parse(ToolCallsBody(parser="internlm", tools=TOOLS, texts=[text, "x", text]))
    assert found == [ParsedText(content=text), ParsedText(content="x"), ParsedText(content=text)]
    assert caplog.text.count("the tool parser Internlm2ToolParser fails") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hermess", r"vLLM has no tool parser 'hermess' \(fix: use one of .*hermes, "),
        ("openai", "openai reads no answer of this model: NotImplementedError: .*stub"),
        (f"{Path(__file__)}:TOOLS", "is no subclass of vllm.tool_parsers.ToolParser"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_configuration(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tool_calls.ToolCallParsers(object(), [name])


@pytest.mark.parametrize(("parser", "tools"), [("pythonic", TOOLS), (OWN, [{"type": "function"}])])
def test_an_unknown_parser_and_broken_tools_are_errors_of_the_request(parser: str, tools: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match=r"does not name 'pythonic'|function"):
        tool_calls.ToolCallParsers(None, [OWN]).parse(ToolCallsBody(parser=parser, tools=tools, texts=["x"]))
