"""Two launchers in one folder, with flock and on file systems that have none: real processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_lora.errors import ConfigError
from areal_lora.launcher.start import Owner, run_lock
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import SUPPORT
from tests.support.sizes import sample

NO_LOCKS = SUPPORT / "no_locks.py"
LACKS = [["flock", "ENOSYS"], ["flock", "EOPNOTSUPP"], ["flock", "ENOLCK"]]
HOLD = """
import sys
from areal_lora.errors import ConfigError
from areal_lora.launcher.start import run_lock
from areal_lora.run_folder.paths import RunFolder
try:
    with run_lock(RunFolder.of(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print("refused:", error, flush=True)
"""


class Launchers:
    def __init__(self, folder: Path, lacks: list[str]) -> None:
        self.folder = folder
        self._command = [sys.executable, str(NO_LOCKS), *lacks] if lacks else []
        self._all: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        command = [*self._command, sys.executable, "-c", HOLD, str(self.folder)]
        pipe = subprocess.PIPE
        self._all.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return self._all[-1]

    def says(self, launcher: subprocess.Popen[str]) -> str:
        assert launcher.stdout is not None
        return launcher.stdout.readline().rstrip()

    def end(self) -> None:
        for launcher in self._all:
            launcher.kill()
            launcher.communicate()


@pytest.fixture(params=[[], *sample(LACKS, 1)], ids=lambda lacks: lacks[-1] if lacks else "flock")
def launchers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launchers]:
    made = Launchers(tmp_path / "run", request.param)
    yield made
    made.end()


def test_the_second_launcher_is_refused_until_the_first_one_ends_or_dies(launchers: Launchers) -> None:
    first = launchers.start()
    assert launchers.says(first) == "held"
    refused = launchers.says(launchers.start())
    assert "is still going" in refused
    assert (f"process {first.pid} on {os.uname().nodename}" in refused) == bool(launchers._command)
    first.communicate("\n")
    second = launchers.start()
    assert launchers.says(second) == "held"
    second.kill()
    second.wait()
    assert launchers.says(launchers.start()) == "held", "a launcher that died is in the way of the same command"


@pytest.mark.parametrize("launchers", [["flock", "ENOSYS"]], indirect=True, ids=["ENOSYS"])
def test_the_console_says_in_one_line_that_there_is_no_flock(launchers: Launchers) -> None:
    first = launchers.start()
    assert launchers.says(first) == "held"
    _, said = first.communicate("\n")
    assert "has no flock (Function not implemented): .run.owner marks the run as started here instead" in said
    assert said.count("\n") == 1
    assert not (launchers.folder.parent / ".run.owner").exists()


@pytest.mark.parametrize("launchers", [["flock", "ENOSYS"]], indirect=True, ids=["ENOSYS"])
def test_of_many_launchers_that_find_the_mark_of_a_dead_one_only_one_starts(launchers: Launchers) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    mark = msgspec.structs.replace(Owner.me(), pid=dead.pid)
    (launchers.folder.parent / ".run.owner").write_bytes(msgspec.json.encode(mark))
    said = [launchers.says(launcher) for launcher in [launchers.start() for _ in range(4)]]
    assert sorted(line.split(":")[0] for line in said) == ["held", "refused", "refused", "refused"], said


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> RunFolder:
    def no_flock(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_flock)
    folder = RunFolder(tmp_path / "run")
    folder.owner.write_bytes(content)
    return folder


def mark(**changes: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(Owner.me(), **changes))


@pytest.mark.parametrize(
    "content",
    [mark(), mark(host="elsewhere"), mark(host="elsewhere", boot="another"), mark(namespace="pid:[1]"), b"", b"torn"],
    ids=["alive", "another host", "another host, booted since", "another container", "empty", "torn"],
)
def test_a_mark_that_may_be_of_a_living_launcher_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    folder = written(tmp_path, monkeypatch, content)
    refusal = r"is still going.*remove .*/\.run\.owner if that process is over"
    with pytest.raises(ConfigError, match=refusal), run_lock(folder):
        pass
    assert folder.owner.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [mark(boot="before the reboot"), mark(started=1), mark(pid=random.SystemRandom().randrange(2**22, 2**23))],
    ids=["booted since", "its number was given again", "no such process"],
)
def test_a_mark_of_a_dead_launcher_of_this_host_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    folder = written(tmp_path, monkeypatch, content)
    with run_lock(folder):
        assert msgspec.json.decode(folder.owner.read_bytes(), type=Owner) == Owner.me()
    assert not folder.owner.exists()
