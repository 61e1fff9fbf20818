"""An MCP server whose list of tools has pages and whose tool draws, a real session over pipes; bounds of turns."""

from __future__ import annotations

import asyncio
import io
import math
import shlex
import statistics
import sys
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_lora.config.models import WorkerWorkflowConfig
from areal_lora.rollout.conversations import Reply
from areal_lora.rollout.environment_child import plain, turn
from areal_lora.rollout.environment_kinds import (
    AgentFunction,
    Chat,
    Gym,
    Mcp,
    _mcp_session,
    _mcp_tools,
    _tool_text,
    called,
    load,
)


def test_a_file_neither_hides_an_installed_module_nor_is_there_twice_for_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "statistics", statistics)
    (tmp_path / "statistics.py").write_text("from statistics import mean\ndef make():\n    return mean([1, 3])\n")
    (tmp_path / "my_world.py").write_text("import my_tools\nclass World:\n    tools = my_tools\n")
    (tmp_path / "my_tools.py").write_text("def world():\n    from my_world import World\n    return World\n")
    (tmp_path / "my-world.v2.py").write_text("def make():\n    return 2\n")
    assert load(f"{tmp_path}/statistics.py:make")() == 2
    world = load(f"{tmp_path}/my_world.py:World")
    assert vars(world)["tools"].world() is world
    assert load(f"{tmp_path}/my-world.v2.py:make")() == 2


PAGED = """
import asyncio
import sys

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server


END = {"none": None, "empty": "", "repeated": "3"}[sys.argv[1]]


async def listed(_, params):
    page = int(params.cursor or 0) if params else 0
    tool = types.Tool(name=f"tool-{page}", input_schema={"type": "object"})
    return types.ListToolsResult(tools=[tool] * (page != 1), next_cursor=str(page + 1) if page < 3 else END)


async def drawn(_, params):
    image = types.ImageContent(type="image", data="aGk=", mime_type="image/png")
    return types.CallToolResult(content=[types.TextContent(type="text", text=f"{params.arguments}"), image])


async def main():
    server = Server("pages", on_list_tools=listed, on_call_tool=drawn)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "1.0"),
        (torch.tensor(0.25), "0.25"),
        (10**400, "inf"),
        (math.nan, "nan"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_reward_is_any_number(given: Any, text: str) -> None:
    assert turn(Reply(reward=given))["reward"] == turn({"reward": given})["reward"] == plain(given) == text
    assert plain({"part": given, "correct": False}) == {"part": text, "correct": False}


@pytest.mark.parametrize("given", ["1", b"1", [1.0]])
def test_a_text_and_a_list_are_no_reward(given: Any) -> None:
    for refuse in (plain, lambda reward: turn(Reply(reward=reward))):
        with pytest.raises(TypeError, match=f"reward is of type {type(given).__name__}"):
            refuse(given)


def test_a_field_that_a_reply_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="step returned info, rewards, fields of a reply are text, done, reward, role"):
        turn({"text": "on", "rewards": 1.0, "info": {}})


def test_metrics_of_a_reply_are_its_finite_numbers() -> None:
    given = {"steps": np.int64(3), "loss": math.nan, "share": torch.tensor(0.5), "none": None}
    assert turn({"metrics": given})["metrics"] == {"steps": 3.0, "share": 0.5}
    with pytest.raises(TypeError, match="metric name is of type str"):
        turn(Reply(metrics={"name": "first"}))  # type: ignore[dict-item]


@pytest.mark.parametrize("end", ["none", "empty", "repeated"])
def test_the_tools_of_all_pages_are_the_models_and_it_reads_what_they_return(end: str, tmp_path: Path) -> None:
    """The second page is empty: only the cursor tells whether one follows."""
    script = tmp_path / "pages.py"
    script.write_text(PAGED)

    async def names() -> list[str]:
        async with _mcp_session(shlex.join([sys.executable, str(script), end])) as session:
            tools = [tool.name async for tool in _mcp_tools(session)]
            return [*tools, await _tool_text({"draw": session}, {"name": "draw", "arguments": '{"a": 1}'})]

    assert asyncio.run(names()) == ["tool-0", "tool-2", "tool-3", "{'a': 1}\n[image]"], "an image is named, not dropped"


class Endless:
    """With gymnasium's methods: each action has reward 1, none is the last."""

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"after {action}", 1.0, False, False, {}


def endless(max_turns: int | None) -> dict[str, Any]:
    return {"path": "", "env": f"{__name__}:Endless", "args": {}, "max_turns": max_turns}


@pytest.mark.parametrize("kind", ["gym", "mcp"])
def test_an_episode_has_at_most_the_configured_turns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model calls a tool in each answer, and the environment never ends."""
    script = tmp_path / "pages.py"
    script.write_text(PAGED)
    call = {"id": "1", "function": {"name": "tool-0", "arguments": "{}"}}
    lengths = list[int]()

    def post(chat: Chat, settings: dict[str, Any]) -> Any:
        lengths.append(len(chat.messages))
        return {"choices": [{"message": {"role": "assistant", "content": "on", "tool_calls": [call]}}]}

    monkeypatch.setattr(Chat, "_post", post)
    command = shlex.join([sys.executable, str(script), "none"])
    setup = {"gym": endless(3), "mcp": {"env": [command], "max_turns": 3}}[kind]
    sample = SimpleNamespace(messages=None, prompt="go")
    played = {"gym": Gym, "mcp": Mcp}[kind](setup).play(SimpleNamespace(sample=sample, seed=1))
    earned = {"reward": 3.0, "turn_rewards": [(0, "1.0"), (1, "1.0"), (2, "1.0")]}
    assert asyncio.run(played) == {"finish_reason": "max_turns"} | (earned if kind == "gym" else {})
    assert lengths == [1, 3, 5], "one message of the model and one of the environment a turn"


@pytest.mark.parametrize(("code", "finish_reason"), [("context_length_exceeded", "length"), ("invalid_value", "")])
def test_a_conversation_that_its_context_has_no_room_for_is_cut_off(
    code: str, finish_reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another refusal ends it, too, and is no limit."""
    posts = list[int]()

    def post(chat: Chat, settings: dict[str, Any]) -> Any:
        posts.append(len(chat.messages))
        if len(posts) == 3:
            body = io.BytesIO(f'{{"error": {{"code": "{code}"}}}}'.encode())
            raise urllib.error.HTTPError("http://model", 400, "Bad Request", Message(), body)
        return {"choices": [{"message": {"role": "assistant", "content": "on"}}]}

    monkeypatch.setattr(Chat, "_post", post)
    played = asyncio.run(Gym(endless(None)).play(SimpleNamespace(sample=SimpleNamespace(), seed=1)))
    assert (played["reward"], played["finish_reason"]) == (2.0, finish_reason)


def test_an_episode_that_ends_with_its_last_turn_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(Endless):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 1.0, True, False, {}

    message = {"role": "assistant", "content": "on"}
    monkeypatch.setattr(Chat, "_post", lambda chat, settings: {"choices": [{"message": message}]})
    monkeypatch.setitem(globals(), "Endless", Once)
    played = asyncio.run(Gym(endless(1)).play(SimpleNamespace(sample=SimpleNamespace(), seed=1)))
    assert (played["reward"], played["finish_reason"]) == (1.0, "")


async def waiting(task: SimpleNamespace, *, factor: float = 1.0) -> float:
    await asyncio.sleep(0)
    return float(task.seed * factor)


def blocking(task: SimpleNamespace, *, factor: float = 1.0) -> float:
    return float(task.seed * factor)


@pytest.mark.parametrize("name", ["waiting", "blocking"])
def test_an_agent_gets_the_configured_arguments(name: str) -> None:
    agents = [
        AgentFunction({"path": f"{__name__}:{name}", "args": args, "max_turns": None}) for args in ({}, {"factor": 2.5})
    ]
    played = [asyncio.run(agent.play(SimpleNamespace(seed=2))) for agent in agents]
    assert played == [{"reward": 2.0}, {"reward": 5.0}]


def test_arguments_of_mcp_servers_are_refused() -> None:
    values = {"kind": "mcp", "env": ["python tools.py"], "args": {"depth": 2}}
    with pytest.raises(ValueError, match="kind mcp has no args"):
        WorkerWorkflowConfig.model_validate(values)


def test_cancelled_work_that_no_thread_has_started_is_not_waited_for() -> None:
    """Of work in a thread the end is waited for."""
    released, calls = threading.Event(), list[str]()

    def work(name: str) -> None:
        calls.append(name)
        released.wait()

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        tasks = [asyncio.create_task(called(work, name)) for name in ("in a thread", "queued")]
        while not calls:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
        done = [task.done() for task in tasks]
        released.set()
        await asyncio.wait(tasks)
        assert done == [False, True]
        assert all(task.cancelled() for task in tasks)

    asyncio.run(main())
    assert calls == ["in a thread"]
