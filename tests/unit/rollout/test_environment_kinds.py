"""An MCP server whose list of tools has pages and whose tool draws: a real session over pipes."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import pytest

from areal_lora.rollout.environment_kinds import _mcp_session, _mcp_tools, _tool_text

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
