"""The run ledger: what became of every issued group, in one SQLite file of the run (contract C8).

    issued -> running -> done -> leased(step) -> consumed(step)
       ^________| retry    ^________|  rolled back      every state but consumed may become dropped(reason)

A row is one issue of one prompt; ``(position, issue)`` never comes twice and is what a request is
known by. At all times ``issued = consumed + dropped + live``. A rollback turns consumed rows into
dropped ones; a prompt that goes on after a drop gets a new row.

Writes collect in one transaction until :meth:`LedgerFile.flush`. A controller that dies before
forgets them, which is harmless where nobody else has heard of them yet: see the feed.

The file lies in the run folder, often on a network file system. So its connection is the only one: SQLite's
write-ahead log needs memory that connections share, and with ``locking_mode=EXCLUSIVE`` it needs none.
"""

from __future__ import annotations

import fcntl
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from areal_lora.errors import ConfigError, RolloutError
from areal_lora.processes.log import get_logger
from areal_lora.rollout.ledger.records import LIVE, SCHEMA_VERSION, GroupState, Head, OpenGroup, Row, Snapshot

KEEP_STEPS = 64  # steps whose closed rows are kept, for a trainer that falls back so far
FOLD_EVERY = 16  # committed steps
LOCK_S, LOCK_WAIT_S = 10.0, 120.0  # NFS keeps the locks of a machine that died for about 90 s
MEMORY = ":memory:"
_SCHEMA = """
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
    stale INTEGER NOT NULL,          -- how many earlier issues came too late
    state INTEGER NOT NULL,
    failed INTEGER NOT NULL DEFAULT 0,      -- tries that count
    resampled INTEGER NOT NULL DEFAULT 0,   -- tries after which another seed is used
    version INTEGER NOT NULL DEFAULT -1,    -- asked for; once done, of the oldest token
    newest INTEGER NOT NULL DEFAULT -1,     -- once done, version of the newest token
    server TEXT NOT NULL DEFAULT '',
    deadline_s REAL NOT NULL DEFAULT 0,     -- of the running request, on this boot's monotonic clock
    step INTEGER NOT NULL DEFAULT -1,       -- leased or consumed at; dropped before
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (adapter, seq)
) WITHOUT ROWID;
CREATE TABLE trajectories (adapter TEXT NOT NULL, seq INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (adapter, seq));
"""

log = get_logger(__name__)
_S = GroupState


class LedgerError(RolloutError):
    """The ledger file cannot be written or does not add up: the controller must not go on."""


class LedgerFile:
    """The only connection to the run ledger's file (or ``:memory:``), used by one thread of the controller."""

    def __init__(self, path: Path | str, run: str) -> None:
        """Open or create.

        A damaged file is moved aside, with a warning; the trainer's greeting then brings the snapshot to
        rebuild from. Raises ConfigError for the ledger of another run or another schema.
        """
        self.path = str(path)
        self.ledgers: dict[str, Ledger] = {}
        try:
            self._db = _open(self.path, run)
        except sqlite3.OperationalError as error:
            fix = "end the process that has it open; a machine that died gives it back when it is up again"
            raise LedgerError(f"{path}: the run ledger cannot be opened: {error} (fix: {fix})") from error
        except sqlite3.DatabaseError as error:
            aside = _move_aside(Path(path))
            log.warning(
                "%s is damaged (%s): moved to %s, to be rebuilt from the checkpoint's snapshot", path, error, aside.name
            )
            self._db = _open(self.path, run)

    def adapter(self, name: str, order: str) -> Ledger:
        """``order`` is the digest of the adapter's prompt stream; raises ConfigError if the rows are of another."""
        ledger = Ledger(self, name, order)
        self.ledgers[name] = ledger
        return ledger

    def execute(self, sql: str, arguments: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, arguments)
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def flush(self) -> None:
        """Make everything written so far durable against the end of this process, in one transaction."""
        try:
            for ledger in self.ledgers.values():
                self._db.execute(
                    "INSERT OR REPLACE INTO adapters VALUES (?, ?)",
                    (ledger.adapter, msgspec.json.encode(ledger.head).decode()),
                )
            self._db.commit()
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def close(self) -> None:
        self.flush()
        self._db.close()

    def _broken(self, error: sqlite3.Error) -> LedgerError:
        return LedgerError(f"{self.path}: the run ledger cannot be written: {error} (fix: free or repair the disk)")


def _connect(path: str) -> sqlite3.Connection:
    """The only connection to ``path``, once nobody else has one. Raises sqlite3.OperationalError after LOCK_WAIT_S."""
    locks = path == MEMORY or _has_locks(Path(path).parent)
    if not locks:
        log.warning("%s lies on a file system without locks; it relies on the launcher's for the run folder", path)
    vfs = "" if locks else "?vfs=unix-none"
    waited_s = 0.0
    while True:
        db = sqlite3.connect(path if path == MEMORY else f"file:{quote(path)}{vfs}", timeout=LOCK_S, uri=path != MEMORY)
        try:
            # Before the first access: afterwards SQLite would use shared memory.
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
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
    """Whether the file system of ``folder`` has POSIX locks. SQLite takes a lack of them for another user or a broken
    disk, depending on the system's error."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def _open(path: str, run: str) -> sqlite3.Connection:
    db = _connect(path)
    try:
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.executescript("BEGIN;" + _SCHEMA)  # all of it or nothing, if this process ends here
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


class Ledger:
    """One adapter's rows. Methods raise LedgerError for a move the diagram does not show."""

    def __init__(self, file: LedgerFile, adapter: str, order: str) -> None:
        self._file, self.adapter = file, adapter
        found = file.execute("SELECT head FROM adapters WHERE adapter = ?", (adapter,)).fetchone()
        self.known = found is not None
        self.head = msgspec.json.decode(found[0], type=Head) if found else Head(order=order)
        if self.head.order != order:
            raise ConfigError(
                file.path,
                f"its prompts of {adapter} are of another task, size or seed",
                "start with the task and run.seed of this run, or anew with --fresh",
            )
        self._load()

    # ------------------------------------------------------------ a group's life

    def issue(self, position: int, issue: int, stale: int = 0) -> int:
        seq = self.head.issued
        self._file.execute(
            "INSERT INTO groups (adapter, seq, position, issue, stale, state) VALUES (?, ?, ?, ?, ?, 0)",
            (self.adapter, seq, position, issue, stale),
        )
        self.head.issued += 1
        self._counts[_S.ISSUED] += 1
        self._states[seq] = _S.ISSUED
        return seq

    def run(self, seq: int, version: int, deadline: float) -> None:
        self._move(seq, (_S.ISSUED,), _S.RUNNING, "version = ?, deadline_s = ?", (version, deadline))

    def served_by(self, seq: int, server: str) -> None:
        self._file.execute("UPDATE groups SET server = ? WHERE adapter = ? AND seq = ?", (server, self.adapter, seq))

    def requeue(self, seq: int, failed: int, resampled: int) -> None:
        self._move(seq, (_S.RUNNING,), _S.ISSUED, "failed = ?, resampled = ?", (failed, resampled))

    def finish(self, seq: int, oldest: int, newest: int, payload: bytes) -> None:
        """A late answer may come while the group waits for its next try."""
        self._move(seq, (_S.RUNNING, _S.ISSUED), _S.DONE, "version = ?, newest = ?", (oldest, newest))
        self._file.execute("INSERT INTO trajectories VALUES (?, ?, ?)", (self.adapter, seq, payload))

    def lease(self, seqs: Iterable[int], step: int) -> None:
        for seq in seqs:
            self._move(seq, (_S.DONE,), _S.LEASED, "step = ?", (step,))

    def unlease(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self._move(seq, (_S.LEASED,), _S.DONE, "step = -1", ())

    def consume(self, step: int) -> None:
        """Every group leased at ``step`` or before is consumed; its trajectories are forgotten."""
        for row in self.rows(_S.LEASED):
            if row.step <= step:
                self._move(row.seq, (_S.LEASED,), _S.CONSUMED, "reason = ''", ())
                self._file.execute("DELETE FROM trajectories WHERE adapter = ? AND seq = ?", (self.adapter, row.seq))
                del self._states[row.seq]
        if step + 1 - KEEP_STEPS - self.head.known_from >= FOLD_EVERY:
            self._fold(step + 1 - KEEP_STEPS)

    def drop(self, seq: int, reason: str) -> None:
        self._move(seq, LIVE, _S.DROPPED, "reason = ?, step = ?", (reason, self.head.next_version))
        self._file.execute("DELETE FROM trajectories WHERE adapter = ? AND seq = ?", (self.adapter, seq))
        self._reasons[reason] += 1

    def undo(self, seq: int, reason: str) -> None:
        """A consumed group whose step is undone."""
        self._states[seq] = _S.CONSUMED
        self._move(seq, (_S.CONSUMED,), _S.DROPPED, "reason = ?, step = ?", (reason, self.head.next_version))
        self._reasons[reason] += 1

    def _move(
        self, seq: int, allowed: Sequence[GroupState], state: GroupState, changes: str, arguments: tuple[Any, ...]
    ) -> None:
        before = self._states.get(seq)
        if before is None or before not in allowed:
            found = f"is {before.name.lower()}" if before is not None else "is not live"
            raise LedgerError(
                f"{self._file.path}: issue {seq} of {self.adapter} {found} and cannot become {state.name.lower()}"
            )
        self._file.execute(
            f"UPDATE groups SET state = ?, {changes} WHERE adapter = ? AND seq = ?",
            (int(state), *arguments, self.adapter, seq),
        )
        self._counts[before] -= 1
        self._counts[state] += 1
        if state is _S.DROPPED:
            del self._states[seq]
        else:
            self._states[seq] = state

    # ------------------------------------------------------------ the whole

    def flush(self) -> None:
        self._file.flush()

    def rows(self, *states: GroupState) -> list[Row]:
        marks = ", ".join(str(int(state)) for state in states)
        found = self._file.execute(
            "SELECT seq, position, issue, stale, state, failed, resampled, version, newest, step FROM groups "
            f"WHERE adapter = ? AND state IN ({marks}) ORDER BY seq",
            (self.adapter,),
        )
        return [
            Row(
                seq=r[0],
                position=r[1],
                issue=r[2],
                stale=r[3],
                state=_S(r[4]),
                failed=r[5],
                resampled=r[6],
                version=r[7],
                newest=r[8],
                step=r[9],
            )
            for r in found
        ]

    def payload(self, seq: int) -> bytes:
        row = self._file.execute(
            "SELECT payload FROM trajectories WHERE adapter = ? AND seq = ?", (self.adapter, seq)
        ).fetchone()
        if row is None:
            raise LedgerError(f"{self._file.path}: issue {seq} of {self.adapter} has no trajectories")
        payload: bytes = row[0]
        return payload

    def counts(self) -> Counter[GroupState]:
        return self._counts

    def drop_reasons(self) -> Counter[str]:
        return self._reasons

    def check(self, live: int) -> None:
        """Raise LedgerError unless the file's rows add up and ``live`` is the caller's count of live groups."""
        counts, _ = self._count()
        booked = sum(counts[state] for state in LIVE)
        total = counts[_S.CONSUMED] + counts[_S.DROPPED] + booked
        if self.head.issued != total or booked != live or counts != self._counts:
            shown = {state.name.lower(): n for state, n in counts.items()}
            raise LedgerError(
                f"{self._file.path} does not add up: {self.head.issued} issued of {self.adapter}, {shown}, "
                f"{live} groups held"
            )

    def snapshot(self, version: int) -> bytes:
        """The ledger once every step before ``version`` is consumed, for :meth:`rebuild`."""
        live = self.rows(*LIVE)
        still_open = [row for row in live if row.state is not _S.LEASED or row.step >= version]
        return msgspec.msgpack.encode(
            Snapshot(
                adapter=self.adapter,
                order=self.head.order,
                version=version,
                next_position=self.head.next_position,
                issued=self.head.issued,
                consumed=self._counts[_S.CONSUMED] + len(live) - len(still_open),
                dropped=dict(self._reasons),
                open=[OpenGroup(r.seq, r.position, r.issue, r.stale, r.failed, r.resampled) for r in still_open],
            )
        )

    def rebuild(self, snapshot: Snapshot | None) -> None:
        """Forget all rows and stand where ``snapshot`` stood (None: nothing issued); what was open is issued."""
        for table in ("groups", "trajectories"):
            self._file.execute(f"DELETE FROM {table} WHERE adapter = ?", (self.adapter,))
        self.head = Head(order=self.head.order, counters=self.head.counters)
        if snapshot is not None:
            self.head.issued, self.head.next_position = snapshot.issued, snapshot.next_position
            self.head.next_version = self.head.known_from = snapshot.version
            self.head.folded_consumed, self.head.folded_dropped = snapshot.consumed, dict(snapshot.dropped)
            for group in snapshot.open:
                self._file.execute(
                    "INSERT INTO groups (adapter, seq, position, issue, stale, state, failed, resampled) "
                    "VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
                    (self.adapter, group.seq, group.position, group.issue, group.stale, group.failed, group.resampled),
                )
        self._load()

    def _load(self) -> None:
        self._counts, self._reasons = self._count()
        self._states = {row.seq: row.state for row in self.rows(*LIVE)}

    def _fold(self, before: int) -> None:
        """Keep only counts of what was closed at steps before ``before``."""
        closed = "FROM groups WHERE adapter = ? AND state >= 4 AND step < ?"
        folded = Counter(self.head.folded_dropped)
        for state, reason, n in self._file.execute(
            f"SELECT state, reason, COUNT(*) {closed} GROUP BY state, reason", (self.adapter, before)
        ):
            if state == _S.DROPPED:
                folded[reason] += n
            else:
                self.head.folded_consumed += n
        self._file.execute(f"DELETE {closed}", (self.adapter, before))
        self.head.folded_dropped, self.head.known_from = dict(folded), before

    def _count(self) -> tuple[Counter[GroupState], Counter[str]]:
        counts, reasons = Counter[GroupState](), Counter(self.head.folded_dropped)
        counts[_S.CONSUMED] += self.head.folded_consumed
        counts[_S.DROPPED] += sum(self.head.folded_dropped.values())
        for state, reason, n in self._file.execute(
            "SELECT state, reason, COUNT(*) FROM groups WHERE adapter = ? GROUP BY state, reason", (self.adapter,)
        ):
            counts[_S(state)] += n
            if state == _S.DROPPED:
                reasons[reason] += n
        return counts, reasons
