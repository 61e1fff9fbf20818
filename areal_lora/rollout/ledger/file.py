"""The ledger file ``ledger.sqlite``: opening, damage, one transaction between two flushes."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.errors import ConfigError, ExitCode, RolloutError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.sqlite import connect

log = get_logger(__name__)

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE meta (schema_version INTEGER NOT NULL, run TEXT NOT NULL);
CREATE TABLE adapters (
    adapter TEXT PRIMARY KEY,
    head TEXT NOT NULL               -- JSON of Head: counts, next position, what was folded
);
CREATE TABLE groups (
    adapter TEXT NOT NULL,
    seq INTEGER NOT NULL,            -- numbers the issues of an adapter
    position INTEGER NOT NULL,       -- of the prompt in the stream
    issue INTEGER NOT NULL,          -- of this prompt, from 1
    stale INTEGER NOT NULL,          -- earlier issues that came too late
    state INTEGER NOT NULL,
    failed INTEGER NOT NULL DEFAULT 0,      -- tries that count
    resampled INTEGER NOT NULL DEFAULT 0,   -- tries after which another seed is used
    version INTEGER NOT NULL DEFAULT -1,    -- requested; once done, of the oldest token
    newest INTEGER NOT NULL DEFAULT -1,     -- once done, version of the newest token
    server TEXT NOT NULL DEFAULT '',        -- not used
    deadline_s REAL NOT NULL DEFAULT 0,     -- of the running request, on this boot's monotonic clock
    step INTEGER NOT NULL DEFAULT -1,       -- leased or consumed at; dropped before
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (adapter, seq)
) WITHOUT ROWID;
CREATE TABLE trajectories (adapter TEXT NOT NULL, seq INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (adapter, seq));
"""


class GroupState(IntEnum):
    ISSUED = 0
    RUNNING = 1
    DONE = 2
    LEASED = 3
    CONSUMED = 4
    DROPPED = 5


LIVE = (GroupState.ISSUED, GroupState.RUNNING, GroupState.DONE, GroupState.LEASED)


class LedgerRow(msgspec.Struct, kw_only=True, frozen=True):
    seq: int
    position: int
    issue: int
    stale: int
    state: GroupState
    failed: int
    resampled: int
    version: int
    newest: int
    step: int


class LedgerCounters(msgspec.Struct):
    """Figures that rows do not hold, as of the last flush."""

    tokens: int = 0
    late: int = 0
    idle_s: float = 0.0
    generation_s: float = 0.0
    retried: dict[str, int] = msgspec.field(default_factory=dict)
    staleness: dict[int, int] = msgspec.field(default_factory=dict)


class Head(msgspec.Struct, kw_only=True):
    """State of an adapter beside its rows. ``known_from``: steps before it have no rows any more."""

    order: str  # digest of the prompt stream
    trainer: str = ""
    issued: int = 0
    next_position: int = 0
    next_version: int = 0
    known_from: int = 0
    folded_consumed: int = 0
    folded_dropped: dict[str, int] = msgspec.field(default_factory=dict)
    counters: LedgerCounters = msgspec.field(default_factory=LedgerCounters)


class LedgerError(RolloutError):
    """The ledger file cannot be written or does not add up: the controller must not continue."""


class LedgerDiskError(LedgerError):
    """The disk of the ledger is full or read-only: a restart would fail alike."""

    exit_code = ExitCode.DISK


class LedgerFile:
    """The only connection to the ledger file (or ``:memory:``), used by one thread of the controller.

    ``heads`` are written with each flush, by adapter.
    """

    def __init__(self, path: Path | str, run: str) -> None:
        """Open or create.

        A damaged file is moved aside, with a warning; the trainer's greeting then brings the snapshot to
        rebuild from. Raises ConfigError for the ledger of another run or another schema.
        """
        self.path = str(path)
        self.heads: dict[str, Head] = {}
        try:
            self._db = _open(self.path, run)
        except sqlite3.OperationalError as error:
            fix = "end the process that has it open; the lock of a machine that died is released when it is up again"
            raise _kind(error)(f"{path}: the run ledger cannot be opened: {error} (fix: {fix})") from error
        except sqlite3.DatabaseError as error:
            aside = _move_aside(Path(path))
            log.warning(
                "%s is damaged (%s): moved to %s, to be rebuilt from the checkpoint's snapshot", path, error, aside.name
            )
            self._db = _open(self.path, run)

    def read_head(self, adapter: str) -> Head | None:
        """The head of the last flush; None where the file does not have ``adapter``."""
        found = self.execute("SELECT head FROM adapters WHERE adapter = ?", (adapter,)).fetchone()
        return msgspec.json.decode(found[0], type=Head) if found else None

    def execute(self, sql: str, arguments: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, arguments)
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def flush(self) -> None:
        """Make everything written so far durable against the end of this process, in one transaction."""
        try:
            for adapter, head in self.heads.items():
                self._db.execute(
                    "INSERT OR REPLACE INTO adapters VALUES (?, ?)", (adapter, msgspec.json.encode(head).decode())
                )
            self._db.commit()
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def close(self) -> None:
        self.flush()
        self._db.close()

    def _broken(self, error: sqlite3.Error) -> LedgerError:
        fix = "free or repair the disk"
        return _kind(error)(f"{self.path}: the run ledger cannot be written: {error} (fix: {fix})")


def _kind(error: sqlite3.Error) -> type[LedgerError]:
    full = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)  # the low byte of an extended code is the primary one
    known = isinstance(error, sqlite3.OperationalError)  # others may come from Python, without a code
    return LedgerDiskError if known and error.sqlite_errorcode & 0xFF in full else LedgerError


def _open(path: str, run: str) -> sqlite3.Connection:
    db = connect(path, synchronous="NORMAL")
    try:
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.executescript("BEGIN;" + SCHEMA)  # all of it or nothing, if this process ends here
            db.execute("INSERT INTO meta VALUES (?, ?)", (SCHEMA_VERSION, run))
            db.commit()
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            raise ConfigError(path, "is a database, but no run ledger", "remove it")
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        version, owner = db.execute("SELECT schema_version, run FROM meta").fetchone() or (None, None)
    except (sqlite3.Error, ConfigError):
        db.close()
        raise
    if (version, owner) != (SCHEMA_VERSION, run):
        db.close()
        raise ConfigError(
            path,
            f"is the ledger of run {owner!r} in schema {version}, not of {run!r} in schema {SCHEMA_VERSION}",
            "put the run's own ledger back, or remove the file: it is rebuilt from the checkpoint",
        )
    return db


def _move_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside
