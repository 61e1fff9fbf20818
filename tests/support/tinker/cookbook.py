"""The unmodified cookbook from its wheel, in a folder of its own, with what its recipes look up by name.

Nothing is fetched: a folder ``ORG/MODEL`` below the program's own takes the place of the hub's model, and one of a data
set's name that of the data set.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.tinker.sdk import VERSIONS, environment
from tests.support.wheels import installed

BESIDE = ("blobfile", "chz", "lxml", "pycryptodomex", "pylatexenc", "pyrage", "termcolor")
MODEL = "Qwen/Qwen3-8B-Base"
"""A name that recipes know: a base that is no chat model."""


def cookbook_environment(folder: Path) -> dict[str, str]:
    """Of a program in ``folder``."""
    found = environment(VERSIONS[-1])
    paths = (installed("tinker-cookbook==0.6.1"), installed(*BESIDE), found["PYTHONPATH"])
    return found | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "cookbook"),
        "HF_HOME": str(folder / "hub"),
    }


def data_sets(folder: Path) -> None:
    """GSM8K by its hub name, and conversations: sums."""
    sums = [(1, 1), (2, 3), (4, 4), (3, 4)]
    gsm8k = folder / "openai" / "gsm8k"
    gsm8k.mkdir(parents=True)
    (gsm8k / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")
    rows = [{"question": f"{x} + {y}", "answer": f"#### {x + y}"} for x, y in sums]
    (gsm8k / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [[{"role": "user", "content": f"{x} + {y}"}, {"role": "assistant", "content": str(x + y)}] for x, y in sums]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def metrics(folder: Path, recipe: str) -> list[dict[str, float]]:
    """Of each step of the only run of ``recipe``."""
    [file] = (folder / "cookbook" / recipe).rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
