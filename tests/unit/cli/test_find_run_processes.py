"""Which process holds a run folder, as the kernel shows it; which work for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.cli.find_run import local_processes
from areal_lora.launcher.plan import MODULES
from areal_lora.launcher.start import holder, is_free, lock_holders, run_lock
from areal_lora.run_folder.paths import RunFolder
from tests.support.clocks import wait_until

LOCKS = """\
1: POSIX  ADVISORY  WRITE 9004 fe:00:2148212 1073741824 1073742335
2: FLOCK  ADVISORY  WRITE 3782 fe:00:2148182 0 EOF
2: -> FLOCK  ADVISORY  WRITE 3790 fe:00:2148182 0 EOF
3: FLOCK  ADVISORY  READ  3783 fe:00:77 0 EOF
"""


def test_the_holder_of_a_lock_is_read_from_the_kernels_table() -> None:
    assert lock_holders(LOCKS, 2148182) == [3782], "one that waits holds nothing"
    assert lock_holders(LOCKS, 77) == [], "readers do not hold a run folder"
    assert lock_holders(LOCKS, 2148212) == [9004]


def test_the_launcher_that_holds_a_folder_is_found_and_not_disturbed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    assert holder(folder) is None
    with run_lock(folder):
        held = holder(folder)
        assert held is not None
        assert (held.pid, held.here) == (os.getpid(), True)
        assert not is_free(folder)
    assert holder(folder) is None
    assert is_free(folder)


@pytest.mark.parametrize(("role", "module"), MODULES.items())
def test_a_process_of_each_role_is_found_by_its_command_line(tmp_path: Path, role: str, module: str) -> None:
    words = [sys.executable, "-c", "input()", "-m", module, "--run-folder", str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        wait_until(lambda: local_processes(RunFolder(tmp_path)) == {f"{role}-0": process.pid})
        process.kill()
