"""Roles that hold connections start with as many open files as their hard limit permits: each case is a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import resource, sys
def shown(*args, **options):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    sys.exit()
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))
"""
STOPPED = "from areal_lora.processes import stacks; stacks.install = shown; "
ENTRIES = {
    "one of its role": "from areal_lora.run_folder.status import run_role; run_role('service', shown)",
    "trainer": STOPPED + "from areal_lora.trainer import main; main.main()",
    "server": STOPPED + "from areal_lora.engine.vllm_ext.server import main; main.main()",
    "serve-remote": "from areal_lora.engine.vllm_ext.remote import remote_server; remote_server.run_remote = shown; "
    "from areal_lora.cli import serve; serve._token = str; serve.serve_remote('http://x')",
    "an unlimited number": "resource.getrlimit = lambda _: (1024, -1); resource.setrlimit = lambda _, to: print(*to); "
    "from areal_lora.processes.startup import raise_open_files; raise_open_files()",
    "no change permitted": "import areal_lora.processes.startup as s; real = resource.getrlimit\n"
    "def setrlimit(*_): raise PermissionError\n"
    "resource.setrlimit = setrlimit; s.raise_open_files(); shown()",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path, entry: str) -> None:
    words = ["--run-folder", str(tmp_path), *(["--index", "0"] * (entry == "server"))]
    command = [sys.executable, "-c", START + ENTRIES[entry], *words]
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    wanted = {"an unlimited number": f"{1 << 20} -1", "no change permitted": "256 2000"}.get(entry, "2000 2000")
    assert done.stdout.split("\n")[0] == wanted, done.stderr
