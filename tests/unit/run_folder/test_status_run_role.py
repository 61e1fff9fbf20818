"""The main function of a process that a run has one of: each case is a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.errors import ExitCode
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses

PROCESS = """
import asyncio, os, signal, sys
from areal_lora.errors import ConfigError
from areal_lora.run_folder.status import run_role, signalled

async def until_signalled():
    stop = signalled()
    os.kill(os.getpid(), signal.{sig})
    await asyncio.wait_for(stop.wait(), 120)

def serve(folder):
    print(folder)
    {body}

sys.exit(run_role("service", serve))
"""


def run(folder: Path, body: str, sig: str = "SIGTERM") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROCESS.format(body=body, sig=sig), "--run-folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("sig", ["SIGTERM", "SIGINT"])
def test_it_serves_until_a_signal(tmp_path: Path, sig: str) -> None:
    done = run(tmp_path, "asyncio.run(until_signalled())", sig)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path)), done.stderr
    assert read_statuses(RunFolder(tmp_path)) == {"service-0": "stopped"}
    assert RunFolder(tmp_path).stack_dump("service-0").exists()


@pytest.mark.parametrize(
    ("error", "code", "logged"),
    [
        ('ConfigError("run.name", "it is taken", "choose another")', ExitCode.WRONG_INPUT, "ConfigError: run.name"),
        ('OSError(28, "No space left on device")', ExitCode.DISK, "Traceback"),
    ],
)
def test_an_error_is_logged_and_is_the_exit_code(tmp_path: Path, error: str, code: int, logged: str) -> None:
    failed = run(tmp_path, f"raise {error}")
    assert failed.returncode == code, failed.stderr
    assert logged in failed.stderr
    assert read_statuses(RunFolder(tmp_path)) == {}
