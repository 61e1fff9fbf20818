"""What a process that a fatal signal ends leaves in its log."""

import signal
import subprocess
import sys
from pathlib import Path


def test_a_fatal_signal_leaves_the_stacks_of_all_threads(tmp_path: Path) -> None:
    code = (
        "import faulthandler, pathlib, sys, threading\n"
        "from areal_lora.processes import stacks\n"
        "stacks.install(pathlib.Path(sys.argv[1]))\n"
        "def other(): threading.Event().wait()\n"
        "threading.Thread(target=other, daemon=True).start()\n"
        "def here(): faulthandler._sigsegv()\n"
        "here()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "stacks" / "trainer-0")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert "in here" in done.stderr
    assert "in other" in done.stderr
