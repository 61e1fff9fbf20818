"""Environments of the packages that users have: a taskset of verifiers, a server of tools, and their interpreter."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

VERIFIERS = "verifiers==0.4.0"
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
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Settings of verifiers' only seat: its plain chat program, on this machine."""


@cache
def verifiers_python() -> Path:
    """The interpreter of a new virtual environment with `VERIFIERS` from the package index."""
    folder = Path(tempfile.mkdtemp(prefix="verifiers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    uv = Path(sys.executable).parent / "uv"
    for command in (
        ["venv", "--python", sys.executable, folder],
        ["pip", "install", "--prefix", folder, VERIFIERS, "uv"],
    ):
        subprocess.run([uv, *command, "--quiet"], check=True, timeout=240)
    return folder / "bin" / "python"
