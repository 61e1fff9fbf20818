"""What the job is asked to do from outside: signals of the batch script, and of users to its steps."""

from __future__ import annotations

import os
import select
import time

from areal_lora.run_folder.paths import RunFolder

USR1, TERM = "USR1", "TERM"
REPLACED = "another session"
LOOK_S = 2.0


class Words:
    """``first`` is the first thing that was asked, empty before.

    The batch script writes a line for each signal to the pipe ``fd``, whose end means that the script is over. A task
    creates ``RunFolder.asked`` for a USR1 to the steps. A session that the run folder no longer names was replaced:
    this job was cut off, and Slurm has started it elsewhere.
    """

    def __init__(self, fd: int, run_folder: RunFolder) -> None:
        self.first = ""
        self._fd, self._folder = fd, run_folder
        self._next_look = 0.0

    def any(self) -> bool:
        """Look whether something was asked; never waits."""
        now = time.monotonic()
        if not self.first:
            self._read()
        if not self.first and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look()
        return bool(self.first)

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0)[0]:
            words = os.read(self._fd, 4096).decode("ascii", "replace").split()
            self.first = words[0] if words else TERM

    def _look(self) -> None:
        try:
            if self._folder.session_name.read_text(encoding="ascii").strip() != self._folder.session:
                self.first = REPLACED
            elif self._folder.asked.exists():
                self.first = USR1
        except OSError:
            return  # looked at again soon
