"""A reward that may start processes: inside bubblewrap where it works, and with seccomp and Landlock alone."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading

import psutil

from areal_lora.config.sections.task import FunctionReward
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.sandbox import fence
from areal_lora.tasks.scorer import ScorerPool
from areal_lora.types import Outcome
from tests.support.clocks import wait_until

SOURCE = """
import os, signal, subprocess, sys, time

def reward(completion, answer):
    if completion == "run":
        made = subprocess.run(["/bin/sh", "-c", "cat | wc -c; echo x > $TMPDIR/f"], input=b"abcd", capture_output=True)
        return float(made.stdout)
    if completion == "time-out":
        try:
            subprocess.run([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], timeout=0.2)
        except subprocess.TimeoutExpired:
            return 1.0
    if completion == "leave":
        subprocess.Popen(["/bin/sleep", "613"])
        return 1.0
    if completion == "session":
        os.setsid()
    if completion == "cat":
        subprocess.run(["/bin/cat", answer], check=True, capture_output=True)
    if completion == "write":
        subprocess.run(["/bin/sh", "-c", f"echo x > {answer}"], check=True, capture_output=True)
    if completion == "kill":
        os.kill(int(answer), signal.SIGTERM)
    if completion == "kill by another":
        subprocess.run(["/bin/sh", "-c", f"kill -TERM {answer}"], check=True, capture_output=True)
    if completion == "connect":
        code = f"import socket; socket.create_connection(('127.0.0.1', {answer}))"
        subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True)
    if completion == "many":
        for made in range(300):  # at most so many, should the limit not hold
            try:
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
            except OSError:
                return made
        return 300
    return 0.0
"""


def running(argument: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline", "status"]) if argument in (p.info["cmdline"] or [])]


def test_processes_are_started_and_stay_in_the_fence(fence, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "secret").write_text("s")
    (tmp_path / "own.py").write_text(SOURCE)
    reward = FunctionReward(path=f"{tmp_path / 'own.py'}:reward", allow_subprocess=True, timeout_s=120)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    allowed = ["run", "time-out", "leave"]
    refused = [("session", ""), ("cat", run / "secret"), ("write", tmp_path / "new"), ("kill", os.getpid())]
    refused += [("kill by another", os.getpid()), ("connect", server.server_address[1])]

    async def score() -> list[Score]:
        items = [ScoreItem(completion=text) for text in allowed]
        items += [ScoreItem(completion=text, answer=str(value)) for text, value in refused]
        async with ScorerPool(reward, hidden=run) as pool:
            scores = await pool.score(items)
            assert len(running("613")) == 1
            return scores

    scores = asyncio.run(score())
    server.shutdown()
    server.server_close()
    assert [s.reward for s in scores[:3]] == [4.0, 1.0, 1.0], scores[:3]
    assert {text: s.outcome for (text, _), s in zip(refused, scores[3:], strict=True)} == {
        text: Outcome.ERROR for text, _ in refused
    }
    assert not (tmp_path / "new").exists()
    wait_until(lambda: not running("613"))
    assert running("613") == [], "what the reward left behind ends with the scorer"


def test_a_reward_of_the_run_folders_code_is_found(fence, tmp_path):
    """`areal_lora.train` saves rewards that are Python objects there."""
    code = RunFolder(tmp_path / "run").code
    code.mkdir(parents=True)
    (code / "own.py").write_text(SOURCE)
    reward = FunctionReward(path=f"{code / 'own.py'}:reward", allow_subprocess=True, timeout_s=120)

    async def score() -> list[Score]:
        async with ScorerPool(reward, hidden=tmp_path / "run") as pool:
            return await pool.score([ScoreItem(completion="run")])

    [found] = asyncio.run(score())
    assert found.reward == 4.0, found


def test_the_number_of_processes_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(fence.shutil, "which", lambda _: None)
    (tmp_path / "own.py").write_text(SOURCE)
    reward = FunctionReward(path=f"{tmp_path / 'own.py'}:reward", allow_subprocess=True, timeout_s=120)

    async def score() -> list[Score]:
        async with ScorerPool(reward) as pool:
            return await pool.score([ScoreItem(completion="many")])

    [many] = asyncio.run(score())
    assert 10 < many.reward <= fence.MORE_PROCESSES


def test_the_command_line_and_what_is_not_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "is_root", lambda: False)
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(fence.shutil, "which", lambda _: str(tool))
    assert fence.boxed(["x"], network=False, hidden=None, scratch=None) is None
    tool = tmp_path / "other"
    tool.write_text("#!/bin/sh\nexit 0\n")
    tool.chmod(0o755)
    argv = fence.boxed(["x", "-y"], network=True, hidden=str(tmp_path), scratch=None)
    assert argv is not None
    code = str(tmp_path / "code")
    assert argv[-8:] == ["--tmpfs", str(tmp_path), "--ro-bind-try", code, code, "--", "x", "-y"]
    assert "--unshare-net" not in argv
    assert "--unshare-net" in (fence.boxed(["x"], network=False, hidden=None, scratch=None) or [])


AS_ANOTHER = """
import asyncio, pathlib, sys, tempfile, threading
from areal_lora.config.sections.task import CodeReward, FunctionReward
from areal_lora.tasks.reward_calls import ScoreItem
from areal_lora.tasks.sandbox import fence
from areal_lora.tasks.scorer import ScorerPool

PROGRAM = '''```python
import contextlib, resource, threading, time
with contextlib.suppress(ValueError):
    resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
threading.stack_size(1 << 16)
started = 0
with contextlib.suppress(RuntimeError):
    while started < 300:
        threading.Thread(target=time.sleep, args=(1,)).start()
        started += 1
print(0 < started <= 64)
```'''

async def scores(reward, item):
    async with ScorerPool(reward) as pool:
        before = await pool.score([item])
        for _ in range(2 * fence.MORE_PROCESSES):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return [before + await pool.score([item])]

fence.shutil.which = lambda _: None
own = pathlib.Path(tempfile.mkdtemp()) / "own.py"
own.write_text(sys.stdin.read())
for reward, item in (
    (CodeReward(inputs="i", outputs="o", timeout_s=120), ScoreItem(completion=PROGRAM, columns={"i": "", "o": "True"})),
    (FunctionReward(path=f"{own}:reward", allow_subprocess=True, timeout_s=120), ScoreItem(completion="run")),
):
    for found in asyncio.run(scores(reward, item)):
        print([score.reward for score in found], [score.detail for score in found if score.detail])
"""


def test_threads_that_other_processes_of_the_user_start_later_take_no_place():
    """As a user without privileges: those of root are not counted."""
    argv = [sys.executable, "-P", "-c", AS_ANOTHER]
    if os.getuid() == 0:
        user = str(63000 + os.getpid() % 900)
        reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # the interpreter
        argv = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", *reads, *argv]
    done = subprocess.run(argv, input=SOURCE, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[1.0, 1.0] []", "[4.0, 4.0] []"], done.stderr
