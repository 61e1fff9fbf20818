"""Run a notebook's code cells as Jupyter's kernel does, for tests without Jupyter.

The cells run in ``__main__``, which has no file, inside a running event loop. Sources are in linecache, under one name
for each cell. Usage: python notebook.py FILE
"""

from __future__ import annotations

import asyncio
import json
import linecache
import sys
from pathlib import Path


async def run(cells: list[str]) -> None:
    for number, cell in enumerate(cells):
        name = f"<notebook cell {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        exec(compile(cell, name, "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    notebook = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    del __file__, annotations
    asyncio.run(run(["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]))
