"""Two launchers in one folder, with flock and on file systems that have none: real processes."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_lora.errors import ConfigError
from areal_lora.launcher.start import Owner, holder, run_lock
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import command_starter
from tests.support.clocks import wait_until
from tests.support.forks.starter import Fork
from tests.support.launcher import lock_holder
from tests.support.launcher.other_host import look_from_elsewhere
from tests.support.sizes import sample

LACKS = [["flock", "ENOSYS"], ["flock", "EOPNOTSUPP"], ["flock", "ENOLCK"]]


class Launchers:
    """Forks that hold the lock of a run, or are refused."""

    def __init__(self, folder: Path, lacks: list[str]) -> None:
        self.folder, self.lacks = folder, lacks
        self._all: dict[Fork, Path] = {}

    def start(self) -> Fork:
        said = self.folder.with_name(f"said {len(self._all)}")
        with said.open("wb") as output:
            words = [str(self.folder), *self.lacks]
            launcher = command_starter().start(lock_holder.__name__, words, os.environ, output)
        self._all[launcher] = said
        return launcher

    def says(self, launcher: Fork) -> str:
        """The line that starts so; what is logged may come before."""
        lines: list[str] = []

        def printed() -> list[str]:
            lines[:] = [s for s in self.output(launcher).splitlines(True) if s.startswith(("held\n", "refused:"))]
            return lines

        wait_until(printed)
        return lines[0].rstrip()

    def output(self, launcher: Fork) -> str:
        return self._all[launcher].read_text()

    def end(self) -> None:
        for launcher in self._all:
            launcher.kill()
            launcher.wait()


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
    assert (f"process {first.pid} on {os.uname().nodename}" in refused) == bool(launchers.lacks)
    first.terminate()
    assert first.wait(120) == 0
    second = launchers.start()
    assert launchers.says(second) == "held"
    second.kill()
    second.wait()
    assert launchers.says(launchers.start()) == "held", "a launcher that died is in the way of the same command"


@pytest.mark.parametrize("launchers", [[]], indirect=True, ids=["flock"])
def test_a_launcher_of_another_host_is_found_until_its_lock_is_free(
    launchers: Launchers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is the server's of a shared file system; the table of the kernel has those of this host alone."""
    first, folder = launchers.start(), RunFolder(launchers.folder)
    assert launchers.says(first) == "held"
    look_from_elsewhere(monkeypatch, tmp_path)
    found = holder(folder)
    assert found is not None
    assert (found.pid, found.host, found.here) == (first.pid, os.uname().nodename, False)
    first.kill()
    first.wait()
    assert holder(folder) is None
    assert folder.lock.read_bytes(), "nothing has released it"
    second = launchers.start()
    assert launchers.says(second) == "held"
    assert (found := holder(folder)) is not None
    assert found.pid == second.pid
    second.terminate()
    assert second.wait(120) == 0
    assert folder.lock.read_bytes() == b"", "so nobody tries the lock of a run that has ended"


@pytest.mark.parametrize("launchers", [["flock", "ENOSYS"]], indirect=True, ids=["ENOSYS"])
def test_the_console_says_in_one_line_that_there_is_no_flock(launchers: Launchers) -> None:
    first = launchers.start()
    assert launchers.says(first) == "held"
    first.terminate()
    assert first.wait(120) == 0
    said = launchers.output(first)
    assert "has no flock (Function not implemented): .run.owner marks the run as started here instead" in said
    assert said.count("\n") == 2, "and that it is held"
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


@pytest.mark.parametrize(
    ("content", "here"),
    [(mark(), True), (mark(namespace="pid:[1]"), False), (mark(host="elsewhere"), False)],
    ids=["of this container", "of another container", "of another host"],
)
def test_only_a_launcher_of_this_container_can_be_signalled(tmp_path: Path, content: bytes, here: bool) -> None:
    """In another one the number is that of another process."""
    folder = RunFolder(tmp_path / "run")
    folder.owner.write_bytes(content)
    found = holder(folder)
    assert found is not None
    assert found.here == here


def test_a_launcher_that_no_one_has_waited_for_is_over(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        process = Path(f"/proc/{dead.pid}/stat")
        wait_until(lambda: process.read_text().rpartition(")")[2].split()[0] == "Z")
        started = int(process.read_text().rpartition(")")[2].split()[19])
        folder = RunFolder(tmp_path / "run")
        folder.owner.write_bytes(mark(pid=dead.pid, started=started))
        assert holder(folder) is None


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError], ids=["hidepid=2", "hidepid=1"])
def test_a_launcher_that_the_system_hides_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Of another user, where /proc shows own processes alone: its number is still taken."""
    folder, read = RunFolder(tmp_path / "run"), Path.read_text
    with subprocess.Popen(["sleep", "60"]) as alive:
        folder.owner.write_bytes(mark(pid=alive.pid, started=7))

        def hidden(path: Path, *args: str, **options: str) -> str:
            if path == Path(f"/proc/{alive.pid}/stat"):
                raise error(path)
            return read(path, *args, **options)

        monkeypatch.setattr(Path, "read_text", hidden)
        found = holder(folder)
        alive.kill()
    assert found is not None
    assert found.pid == alive.pid
    assert holder(folder) is None, "now there is no such process"
