"""Environments of the packages that users have: verifiers, MCP servers, OpenEnv servers; and their interpreter."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PACKAGES = ("verifiers==0.4.0", "openenv-core==0.3.0")
TASKSET = """
import verifiers.v1 as vf


class Problem(vf.Task):
    @vf.reward
    async def equations(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.count("="))


class Problems(vf.Taskset[Problem, vf.TasksetConfig]):
    def load(self):
        prompts = (f"Q: Tom has {i % 9 + 1} cups, gets 2 and loses 1. How many now?\\nA:" for i in range(50))
        return [Problem(vf.TaskData(prompt=prompt), self.config.task) for prompt in prompts]


__all__ = ["Problems"]
"""
TOOLS = r'''
import re

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """Calculate with two whole numbers."""
    a, operation, b = re.fullmatch(r"(\d+)([-+*])(\d+)", expression).groups()
    return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation])


server.run("stdio")
'''
APPS = '''
from typing import Any

from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Line(Action):
    line: str


class Pair(Action):
    a: int
    b: int


class Seen(Observation):
    text: str = ""


class Letters(Environment):
    """Rewards upper-case letters of two answers."""

    turns = 0

    def reset(self, answer: str, greeting: str = "") -> Seen:
        return Seen(text=f"{greeting}{answer}")

    def step(self, action: Line) -> Seen:
        self.turns += 1
        return Seen(text="more", reward=sum(map(str.isupper, action.line)), done=self.turns == 2)

    @property
    def state(self) -> State:
        return State()


class Problem(Letters):
    """The row\'s problem, twice; an answer earns a point for every ``=``."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, prompt: str) -> Seen:
        self.problem = prompt
        return Seen(text=prompt)

    def step(self, action: Line) -> Seen:
        self.turns += 1
        return Seen(text=f"\\n{self.problem}", reward=action.line.count("="), done=self.turns == 2)


class Sums(Letters):
    def reset(self) -> Observation:
        return Observation()

    def step(self, action: Pair) -> Seen:
        return Seen(text="", reward=action.a + action.b, done=True)


calculator = FastMCP("calculator")


@calculator.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


class Tools(MCPEnvironment):
    def __init__(self) -> None:
        super().__init__(calculator)

    def reset(self, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


app = FastAPI()
app.mount("/letters", create_fastapi_app(Letters, Line, Seen))
app.mount("/problem", create_fastapi_app(Problem, Line, Seen, max_concurrent_envs=100))
app.mount("/sums", create_fastapi_app(Sums, Pair, Seen))
app.mount("/tools", create_fastapi_app(Tools, CallToolAction, CallToolObservation))
'''
"""OpenEnv servers; all but ``/problem`` have one session at a time."""
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Settings of verifiers' only seat: its plain chat program, on this machine."""


@cache
def environments_python() -> Path:
    """The interpreter of a new virtual environment with `PACKAGES` from the package index."""
    folder = Path(tempfile.mkdtemp(prefix="environments-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    uv = Path(sys.executable).parent / "uv"
    for command in (
        ["venv", "--python", sys.executable, folder],
        ["pip", "install", "--prefix", folder, *PACKAGES, "uv"],
    ):
        subprocess.run([uv, *command, "--quiet"], check=True, timeout=240)
    return folder / "bin" / "python"


@contextmanager
def openenv_server(folder: Path) -> Iterator[str]:
    """URL of a server of `APPS`; ``folder`` gets its module and its log."""
    (folder / "apps.py").write_text(APPS)
    with socket.create_server(("127.0.0.1", 0)) as listening, (folder / "apps.log").open("w") as log:
        listening.listen()
        command = [environments_python(), "-m", "uvicorn", "apps:app", "--fd", str(listening.fileno())]
        with subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            env=os.environ | {"PYTHONPATH": ""},
        ) as server:
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                server.kill()
