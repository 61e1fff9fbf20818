"""Forks of `tests.support.forks` are seen as interpreters are, and all processes of a session share their parents."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.cli.command import forked_python
from tests.support.clocks import wait_until
from tests.support.forks.starter import FOLDER, starter_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
LANE = """
import os, subprocess, sys
from tests.support.forks.starter import session, starter_of
starter_of("json")
print(session(), flush=True)
if len(sys.argv) > 1:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
    sys.stdin.read()
"""


def test_a_fork_has_its_words_and_variables_in_proc() -> None:
    words = ["-m", "http.server", "--bind", "127.0.0.1", "0"]
    with subprocess.Popen([forked_python(), *words], env=os.environ | {"MINE": "1"}, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            [fork] = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == [sys.executable, *words]]
            assert fork.environ()["MINE"] == "1"
        finally:
            process.kill()
    wait_until(lambda: not fork.is_running())


def test_a_requester_that_is_killed_before_its_answer_does_not_end_the_parent() -> None:
    """With which all forks of the session would end: a launcher may be stopped as it starts a role."""
    starter = starter_of("json")
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(starter.address)
            request = json.dumps(["this", [], {}, os.getcwd()]).encode()
            socket.send_fds(link, [request], [0, 1, 2])
    assert "Namespaces are one honking great idea" in starter.output("this", [], 120.0)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("killed", [False, True])
def test_lanes_share_a_parent_that_ends_with_the_session(killed: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    command = [sys.executable, "-c", LANE, LANE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as first:
        assert first.stdout is not None
        folder, again = (first.stdout.readline().strip() for _ in range(2))
        assert folder == again
        [parent] = [p for p in psutil.process_iter(["cmdline"]) if f"{folder}/pipe" in (p.info["cmdline"] or [])]
        below = psutil.Process(first.pid).children(recursive=True)
        assert parent not in below, "a supervisor in a lane ends what is below it"
        if killed:
            first.kill()
    wait_until(lambda: has_ended(parent))
    assert Path(folder).exists() == killed
    shutil.rmtree(folder, ignore_errors=True)
