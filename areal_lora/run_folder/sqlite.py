"""Connect to a SQLite file of the run folder, which is often on a network file system.

The connection is the only one: SQLite's write-ahead log needs memory that connections share, and with
``locking_mode=EXCLUSIVE`` it needs none.
"""

import fcntl
import sqlite3
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from areal_lora.processes.log import get_logger

LOCK_S, LOCK_WAIT_S = 10.0, 120.0  # NFS keeps the locks of a machine that died for about 90 s
MEMORY = ":memory:"

log = get_logger(__name__)


def connect(
    path: str, synchronous: Literal["NORMAL", "FULL"], *, autocommit: bool = False, page_bytes: int = 4096
) -> sqlite3.Connection:
    """Connect once no other process is connected. Raises sqlite3.OperationalError after ``LOCK_WAIT_S``.

    A new file has pages of ``page_bytes``: large ones take half the time with large rows, and thrice with small ones.
    With ``autocommit`` the caller starts transactions itself, and may use the connection in one thread after another.
    """
    locks = path == MEMORY or _has_locks(Path(path).parent)
    if not locks:
        log.warning("%s lies on a file system without locks; it relies on the launcher's for the run folder", path)
    name = path if path == MEMORY else f"file:{quote(path)}{'' if locks else '?vfs=unix-none'}"
    waited_s = 0.0
    while True:
        db = sqlite3.connect(
            name,
            timeout=LOCK_S,
            uri=path != MEMORY,
            isolation_level=None if autocommit else "DEFERRED",
            check_same_thread=not autocommit,
        )
        try:
            # Before the first access: afterwards SQLite would use shared memory.
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute(f"PRAGMA page_size={page_bytes}")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={synchronous}")
        except sqlite3.Error as error:
            db.close()
            waited_s += LOCK_S
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or waited_s >= LOCK_WAIT_S:
                raise
            log.warning(
                "waiting for %s since %.0f s: another process has it open, or a machine died that had", path, waited_s
            )
        else:
            return db


def _has_locks(folder: Path) -> bool:
    """Whether the file system has POSIX locks: SQLite reports missing ones as another user or as a broken disk."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
