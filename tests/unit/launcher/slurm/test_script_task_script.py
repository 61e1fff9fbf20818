"""The task script, run by bash: which process runs, what is recorded, who hears which signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.slurm.script import task_script
from areal_lora.run_folder.paths import RunFolder
from tests.support.clocks import wait_until


def specs(*codes: str) -> tuple[ProcessSpec, ...]:
    return tuple(
        ProcessSpec(role="trainer", index=i, argv=("bash", "-c", code), env={"RANK": str(i), "TEXT": "it's"})
        for i, code in enumerate(codes)
    )


class Folder:
    def __init__(self, path: Path) -> None:
        self.run = RunFolder(path / "a run", "17-0")
        self.exits = self.run.steps / "trainer.1"
        self.exits.mkdir(parents=True)

    def start(self, processes: Sequence[ProcessSpec], number: int, *setup: str) -> subprocess.Popen[str]:
        script = self.exits / "task.sh"
        script.write_text(task_script(processes, setup, self.run, self.exits))
        environment = os.environ | {"SLURM_PROCID": str(number)}
        return subprocess.Popen(
            ["bash", str(script)], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def names(self) -> list[str]:
        return sorted(path.name for path in self.exits.iterdir() if path.name != "task.sh")


def ended(pid: int, timeout_s: float = 120.0) -> bool:
    """Whether ``pid`` ends soon: SIGKILL takes effect a moment after it was sent."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_each_task_runs_its_process_and_records_its_code(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in (0, 1):
        task = folder.start(specs('echo "$RANK $TEXT"; exit 0', 'echo "$RANK $TEXT"; exit 65'), number)
        assert task.communicate(timeout=120)[0] == f"{number} it's\n"
        assert task.returncode == (0, 65)[number]
    assert folder.names() == ["first", "trainer-0.0", "trainer-0.started", "trainer-1.65", "trainer-1.started"]
    assert (folder.exits / "first").readlink() == Path("trainer-1.65")


def test_the_link_names_the_first_failure(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in (1, 0):
        folder.start(specs("exit 64", "kill -9 $$"), number).wait(120)
    assert (folder.exits / "first").readlink() == Path("trainer-1.137")


def test_a_signal_to_all_of_the_task_stops_the_process_and_its_code_is_recorded(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    hears = "trap 'echo stopped in order; exit 3' TERM; echo up; while true; do sleep 0.05; done"
    task = folder.start(specs(hears), 0)
    assert task.stdout is not None
    assert task.stdout.readline() == "up\n"
    os.killpg(task.pid, signal.SIGTERM)
    assert "stopped in order" in task.communicate(timeout=120)[0]
    assert "trainer-0.3" in folder.names()


def test_usr1_to_the_task_is_a_wish_and_ends_no_shell(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    task = folder.start(specs(f"trap '' USR1; echo up; until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 4"), 0)
    assert task.stdout is not None
    assert task.stdout.readline() == "up\n"
    for _ in range(3):
        os.kill(task.pid, signal.SIGUSR1)
        time.sleep(0.05)
    wait_until(folder.run.requeue_request.exists)
    (tmp_path / "go").touch()
    assert task.wait(120) == 4
    assert "trainer-0.4" in folder.names()


def test_what_a_killed_process_leaves_is_ended_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    left = specs("sleep 600 & echo $!; kill -9 $$", "echo up; sleep 1; exit 0")
    other = folder.start(left, 1)
    task = folder.start(left, 0)
    orphan = int(task.communicate(timeout=120)[0])
    assert task.returncode == 137
    assert ended(orphan), "it would sleep for ten minutes"
    assert other.wait(120) == 0, "a task of the same step is not touched"


@pytest.mark.parametrize("line", ["false", "module load cuda", "cd /nowhere", "source /nowhere/bin/activate"])
def test_a_setup_line_that_fails_is_named_and_nothing_is_started(tmp_path: Path, line: str) -> None:
    folder = Folder(tmp_path)
    task = folder.start(specs("echo started"), 0, "export A=1", line, "echo later")
    output, _ = task.communicate(timeout=120)
    assert task.returncode == 69
    assert f"error: cluster.slurm.setup: {line} ended with code " in output
    assert "started" not in output
    assert "later" not in output
    assert "trainer-0.69" in folder.names()


def test_a_file_that_setup_sources_may_have_commands_that_fail(tmp_path: Path) -> None:
    (tmp_path / "site.sh").write_text("test -f /nowhere\n[ -n \"$UNSET_HERE\" ]\nexport A='it works'\n")
    task = Folder(tmp_path).start(specs('echo "$A"'), 0, f"source {tmp_path}/site.sh")
    assert task.communicate(timeout=120)[0] == "it works\n"
    (tmp_path / "site.sh").write_text("export A=1\nfalse\n")
    task = Folder(tmp_path / "second").start(specs('echo "$A"'), 0, f"source {tmp_path}/site.sh")
    task.communicate(timeout=120)
    assert task.returncode == 69, "its last command is the line's own result"


def test_setup_lines_prepare_the_process(tmp_path: Path) -> None:
    lines = ("if true; then", "  export A='it works'", "fi", "false || true")
    task = Folder(tmp_path).start(specs('echo "$A"; false; exit 0'), 0, *lines)
    assert task.communicate(timeout=120)[0] == "it works\n"
    assert task.returncode == 0


def test_shared_memory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """And nothing else: not what a living process holds, mapped or open, nor a user's own file, nor an older one."""
    shared, unique = Path("/dev/shm"), f"areal-task-{os.getpid()}"
    older, mapped, opened, own, left = (
        shared / name.format(unique) for name in ("sem.{}-0", "sem.{}-1", "psm_{}-2", "model-{}", "sem.{}-3")
    )
    hold = (
        "import mmap, sys, time\n"
        f"f = open('{mapped}', 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.close()\n"
        f"g = open('{opened}', 'wb+'); print(flush=True); time.sleep(600)"
    )
    older.touch()
    os.utime(older, (time.time() - 60, time.time() - 60))
    holder: subprocess.Popen[str] | None = None
    try:
        folder = Folder(tmp_path)
        task = folder.start(specs(f"touch {left} {own}; echo up; sleep 600 & wait; kill -9 $$"), 0)
        assert task.stdout is not None
        assert task.stdout.readline() == "up\n"
        holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        holder.stdout.readline()
        for child in psutil.Process(task.pid).children(recursive=True):
            child.kill()
        assert task.wait(120) == 137
        assert [path.exists() for path in (older, mapped, opened, own, left)] == [True, True, True, True, False]
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()
        for path in (older, mapped, opened, own, left):
            path.unlink(missing_ok=True)
