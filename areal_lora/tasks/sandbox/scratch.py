"""Folders that scorer processes may write, one each. Those of an owner that was killed are removed by a later one.

An owner holds a lock on its folder for as long as the folder has its name: one without a lock is of a dead process.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = f"areal-lora-reward-{os.getuid()}-{os.uname().nodename}-"
"""With the host: where several share a folder of temporary files, a lock may exclude only processes of its own host."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder of this process, which is removed at the end of the block."""
    path = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    lock = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # without locks it keeps the name that `remove_abandoned` ignores
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = path.rename(path.with_name(path.name[1:]))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners have ended on this host."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, or removed meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
