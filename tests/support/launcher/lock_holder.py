"""Hold the lock of a run folder until SIGTERM: ``python -m tests.support.launcher.lock_holder FOLDER [flock ENOSYS]``.

The first line of output is ``held``, or ``refused: `` and why. With two more words on a file system without locks.
"""

from __future__ import annotations

import errno
import signal
import sys
from contextlib import suppress

from areal_lora.errors import ConfigError
from areal_lora.launcher.start import run_lock
from areal_lora.run_folder.paths import RunFolder
from tests.support.no_locks import refuse


def main(folder: str, lacks: list[str]) -> None:
    if lacks:
        refuse(lacks[0], getattr(errno, lacks[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with run_lock(RunFolder.of(folder)), suppress(SystemExit):
            print("held", flush=True)
            while True:
                signal.pause()
    except ConfigError as error:
        print("refused:", error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
