"""Source of a script's or notebook's objects: it means the same in another process, or is refused."""

from __future__ import annotations

import linecache
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from areal_lora.errors import ConfigError
from areal_lora.library.objects import saved_source

CELLS = [
    """
import math
import os.path
import re
import xml.etree.ElementTree
from collections import Counter
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path
from typing import Any

MARK = "####"
NUMBER = re.compile(r"(\\d+)", re.IGNORECASE)
HERE = Path("/some/where")
unused = object()
""",
    """
@remembered
def number(text: str) -> float:
    found = NUMBER.search(text)
    return float(found[1]) if found else math.nan

def even(n: int) -> bool:
    return n == 0 or odd(n - 1)

def odd(n: int) -> bool:
    return n != 0 and even(n - 1)

@dataclass
class Base:
    scale: float = 1.0

class Judge(Base):
    words: dict[str, int] = Counter(a=1)

    def judge(self, text: Any) -> float:
        unused = [MARK for MARK in text]
        return self.scale * number(text) * len(unused)
""",
    """
def reward(completion, answer, factor=len(MARK)):
    tree = xml.etree.ElementTree.fromstring("<a/>")
    right = number(completion.rpartition(MARK)[2]) == number(answer)
    return {"right": float(right), "even": float(even(4)), "tag": tree.tag, "factor": factor,
            "judged": Judge(2.0).judge("ab3"), "base": os.path.basename(HERE)}
""",
]
VALUE = {"right": 1.0, "even": 1.0, "tag": "a", "factor": 4, "judged": 18.0, "base": "where"}


def notebook(*cells: str) -> types.ModuleType:
    """Cells run one after the other as Jupyter's kernel does: no file, sources in linecache."""
    main = types.ModuleType("__main__")
    for number, cell in enumerate(cells):
        name = f"<cell {id(cells)} {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        exec(compile(cell, name, "exec"), vars(main))
    return main


def elsewhere(text: str, expression: str, folder: Path) -> str:
    """What another interpreter, without the script, prints for ``expression``."""
    (folder / "saved.py").write_text(text)
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.append({str(folder)!r}); import saved; {expression}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def test_a_reward_of_notebook_cells_means_the_same_elsewhere(tmp_path: Path) -> None:
    main = notebook(*CELLS)
    assert vars(main)["reward"]("so #### 12", "12") == VALUE
    text = saved_source(vars(main)["reward"], "reward", main)
    printed = elsewhere(text, "print(saved.reward('so #### 12', '12'))", tmp_path)
    assert printed == f"{VALUE}\n"
    assert "object()" not in text, "a name that only a local variable has is not followed"


def test_a_class_without_a_constructor_and_one_defined_twice(tmp_path: Path) -> None:
    main = notebook("class Env:\n    def step(self, text): return 1\n", "class Env:\n    def step(self, t): return 2\n")
    printed = elsewhere(saved_source(vars(main)["Env"], "Env", main), "print(saved.Env().step(''))", tmp_path)
    assert printed == "2\n", "the newest definition"


def test_annotations_of_names_that_do_not_exist(tmp_path: Path) -> None:
    cell = "from __future__ import annotations\ndef reward(completion: Nowhere, answer) -> float:\n    return 1.0\n"
    main = notebook(cell)
    assert elsewhere(saved_source(vars(main)["reward"], "reward", main), "print(1)", tmp_path) == "1\n"


def made(cell: str) -> Any:
    main = notebook(cell)
    return saved_source(vars(main)["reward"], "reward", main)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("reward = lambda completion, answer: 1.0", "lambda: it has no name"),
        ("def make():\n    def reward(c, a): return 1.0\n    return reward\nreward = make()", "inside a function"),
        ("model = object()\ndef reward(c, a): return model", "model: it is a object, which the run's processes"),
        ("x = float('nan')\ndef reward(c, a): return x", "x: it is a float"),
        ("def reward(c, a): return missing", "reward: it uses 'missing', which is not defined"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(cell: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(cell)
    assert words in str(caught.value)


def test_a_function_typed_at_a_prompt_is_refused() -> None:
    main = types.ModuleType("__main__")
    exec(compile("def reward(c, a): return 1.0", "<stdin>", "exec"), vars(main))
    with pytest.raises(ConfigError, match="its source is not to be found"):
        saved_source(vars(main)["reward"], "reward", main)
