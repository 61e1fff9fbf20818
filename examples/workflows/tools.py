"""A server of tools for models (``pip install mcp``); see mcp.yaml, which starts it for each sample."""

import re

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """Calculate with two whole numbers, such as 3*4."""
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if found is None:
        return "error: write two whole numbers with +, - or * between them"
    a, operation, b = int(found[1]), found[2], int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[operation])


server.run("stdio")
