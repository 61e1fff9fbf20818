"""What SDK programs import beside the SDK; as a main program, ``PROGRAM WORDS ...`` in a fork of a process that has it.

Torch and transformers take most of a program's start. The SDK itself is imported by each program from its own
``PYTHONPATH``: versions, clients and settings stay apart. How a program starts in an interpreter of its own is shown by
the page's program and the command line in `tests.e2e.test_tinker_run`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.tinker.sdk import BESIDE, OFFLINE
from tests.support.wheels import installed

os.environ |= OFFLINE
sys.path.insert(0, str(installed(*BESIDE)))  # httpx looks for zstandard at its import

import google.protobuf.message  # noqa: F401
import httpx  # noqa: F401
import numpy  # noqa: F401
import pydantic  # noqa: F401
import rich.console  # noqa: F401
import torch  # noqa: F401
from transformers.models.auto.tokenization_auto import AutoTokenizer  # noqa: F401

assert "tinker" not in sys.modules


def main() -> None:
    program, *words = sys.argv[1:]
    own = [str(Path(program).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    sys.path[:] = own + [each for each in sys.path if each not in (*own, str(ROOT))]
    sys.argv[:] = [program, *words]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
