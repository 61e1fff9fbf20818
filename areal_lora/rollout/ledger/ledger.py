"""The run ledger: what became of every issued group, in one SQLite file of the run (contract C8).

    issued -> running -> done -> leased(step) -> consumed(step)
       ^________| retry    ^________|  rolled back      every state but consumed may become dropped(reason)

A row is one issue of one prompt; ``(position, issue)`` is unique and identifies a request. At all times
``issued = consumed + dropped + live``. A rollback turns consumed rows into dropped ones; a prompt that is issued
again after a drop gets a new row. Where an adapter leaves, its done and leased rows become issued.

Writes collect in one transaction until :meth:`Ledger.flush`. A controller that dies before loses them, which is
harmless while no other process has seen them: see `controller.groups`.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.errors import ConfigError, ExitCode, RolloutError, undo_on_error
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.sqlite import connect

log = get_logger(__name__)

REBUILT = "remove the file: it is rebuilt from the checkpoint"
SCHEMA_VERSION = 3  # 1: trajectories with lists of tokens; 2: starts of stages in a table
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
_S = GroupState
KEEP_STEPS = 64  # steps whose closed rows are kept, for a trainer that falls back so far
FOLD_EVERY = 16  # committed steps


class LedgerRow(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """One issue. Snapshots have live ones as if they were issued, without trajectories."""

    seq: int
    position: int
    issue: int
    stale: int
    failed: int = 0
    resampled: int = 0
    state: GroupState = GroupState.ISSUED
    version: int = -1
    newest: int = -1
    step: int = -1


class LedgerCounters(msgspec.Struct):
    """Figures that rows do not hold, as of the last flush."""

    tokens: int = 0
    late: int = 0
    idle_s: float = 0.0
    retried: dict[str, int] = msgspec.field(default_factory=dict)


class Head(msgspec.Struct, kw_only=True):
    """State of an adapter beside its rows. ``known_from``: steps before it have no rows any more.

    ``stages`` are the `starts` of a `Curriculum`.
    """

    order: str  # digest of the prompt stream
    sampled: str = ""  # `sampled_as` of the trajectories
    trainer: str = ""
    issued: int = 0
    next_position: int = 0
    next_version: int = 0
    known_from: int = 0
    folded_consumed: int = 0
    folded_dropped: dict[str, int] = msgspec.field(default_factory=dict)
    stages: list[int] = msgspec.field(default_factory=list)
    counters: LedgerCounters = msgspec.field(default_factory=LedgerCounters)


class LedgerError(RolloutError):
    """The ledger file cannot be written or does not add up: the controller must not continue."""


class LedgerDiskError(LedgerError):
    """The disk of the ledger is full or read-only: a restart would fail alike."""

    exit_code = ExitCode.DISK


class LedgerFile:
    """The only connection to the ledger file (or ``:memory:``), used by one thread of the controller.

    ``ledgers`` by adapter; a flush writes the heads of those that have ``changed`` since the last one.
    """

    def __init__(self, path: Path | str, run: str, *, page_bytes: int = 4096) -> None:
        """Open, or create with pages of ``page_bytes``.

        A damaged file is moved aside, with a warning; the trainer's greeting then brings the snapshot to
        rebuild from. Raises ConfigError for another schema. ``run`` is not compared: a run folder may be renamed.
        """
        self.path = str(path)
        self.ledgers: dict[str, Ledger] = {}
        self.changed = set[str]()
        self.broken = False
        try:
            self._db = _open(self.path, run, page_bytes)
        except sqlite3.OperationalError as error:
            fix = "end the process that has it open; the lock of a machine that died is released when it is up again"
            raise _kind(error)(f"{path}: the run ledger cannot be opened: {error} (fix: {fix})") from error
        except sqlite3.DatabaseError as error:
            aside = _move_aside(Path(path))
            log.warning(
                "%s is damaged (%s): moved to %s, to be rebuilt from the checkpoint's snapshot", path, error, aside.name
            )
            self._db = _open(self.path, run, page_bytes)

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
            for adapter in self.changed:
                head = msgspec.json.encode(self.ledgers[adapter].head).decode()
                self._db.execute("INSERT OR REPLACE INTO adapters VALUES (?, ?)", (adapter, head))
            self._db.commit()
        except sqlite3.Error as error:
            raise self._broken(error) from error
        self.changed.clear()

    def close(self) -> None:
        if not self.broken:
            self.changed |= self.ledgers.keys()
            self.flush()
        self._db.close()

    def _broken(self, error: sqlite3.Error) -> LedgerError:
        """Write nothing more: SQLite may have rolled back rows that the heads in memory count."""
        self.broken = True
        self._db.close()
        return _kind(error)(f"{self.path}: the run ledger cannot be written: {error} (fix: free or repair the disk)")


def _kind(error: sqlite3.Error) -> type[LedgerError]:
    code = error.sqlite_errorcode if isinstance(error, sqlite3.OperationalError) else 0  # Python's own have none
    # The low byte is the primary code. A quota is an error of a write.
    full = code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY) or code == sqlite3.SQLITE_IOERR_WRITE
    return LedgerDiskError if full else LedgerError


def _open(path: str, run: str, page_bytes: int) -> sqlite3.Connection:
    db = connect(path, synchronous="NORMAL", page_bytes=page_bytes)
    with undo_on_error(db.close):
        # Debian's SQLite overwrites deleted rows with zeros: a commit would write its trajectories a second time.
        db.execute("PRAGMA secure_delete=OFF")
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.executescript("BEGIN;" + SCHEMA)  # all of it or nothing, if this process ends here
            db.execute("INSERT INTO meta VALUES (?, ?)", (SCHEMA_VERSION, run))
            db.commit()
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            raise ConfigError(path, "is a database, but no run ledger", "remove it")
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        [version] = db.execute("SELECT schema_version FROM meta").fetchone() or (None,)
        if version != SCHEMA_VERSION:
            raise ConfigError(path, f"is a ledger in schema {version}, not in {SCHEMA_VERSION}", REBUILT)
    return db


def _move_aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside


def counted(
    execute: Callable[..., sqlite3.Cursor], adapter: str, head: Head
) -> tuple[Counter[GroupState], Counter[str]]:
    """Groups by state and dropped groups by reason, folded ones included."""
    reasons = Counter(head.folded_dropped)
    counts = Counter({_S.CONSUMED: head.folded_consumed, _S.DROPPED: reasons.total()})
    rows = execute("SELECT state, reason, COUNT(*) FROM groups WHERE adapter = ? GROUP BY state, reason", (adapter,))
    for state, reason, n in rows:
        counts[_S(state)] += n
        if state == _S.DROPPED:
            reasons[reason] += n
    return counts, reasons


class GroupTable:
    """One row per issue, and the trajectories (``payload``) of finished groups."""

    def __init__(self, file: LedgerFile, adapter: str) -> None:
        self._file, self._adapter = file, adapter

    def insert(self, group: LedgerRow) -> None:
        """As issued: its trajectories, if it had any, are lost."""
        self._file.execute(
            "INSERT INTO groups (adapter, seq, position, issue, stale, state, failed, resampled) "
            "VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
            (self._adapter, group.seq, group.position, group.issue, group.stale, group.failed, group.resampled),
        )

    def rows(self, *states: GroupState, leased_from: int = 0) -> list[LedgerRow]:
        """Those in ``states``, of leased ones those of step ``leased_from`` and later."""
        marks = ", ".join(str(int(state)) for state in states)
        chosen = f"state IN ({marks}) AND (state != {GroupState.LEASED:d} OR step >= ?)"
        names = ", ".join(LedgerRow.__struct_fields__)
        query = f"SELECT {names} FROM groups WHERE adapter = ? AND {chosen} ORDER BY seq"
        return msgspec.convert(self._file.execute(query, (self._adapter, leased_from)).fetchall(), list[LedgerRow])

    def payload(self, seq: int) -> bytes:
        row = self._file.execute(
            "SELECT payload FROM trajectories WHERE adapter = ? AND seq = ?", (self._adapter, seq)
        ).fetchone()
        if row is None:
            raise LedgerError(f"{self._file.path}: issue {seq} of {self._adapter} has no trajectories (fix: {REBUILT})")
        payload: bytes = row[0]
        return payload

    def delete_payload(self, seq: int) -> None:
        self._file.execute("DELETE FROM trajectories WHERE adapter = ? AND seq = ?", (self._adapter, seq))


class Ledger:
    """One adapter's groups. Methods raise LedgerError for a move the diagram does not show.

    ``known``: the file had this adapter when it was opened. ``counts`` by state and ``drop_reasons`` include folded
    rows.
    """

    def __init__(self, file: LedgerFile, adapter: str, order: str, sampled: str = "") -> None:
        """``order`` is the digest of the adapter's prompt stream; raises ConfigError if the rows are of another."""
        self._file, self.adapter, self.sampled = file, adapter, sampled
        self.table = GroupTable(file, adapter)
        head = file.read_head(adapter)
        self.known = head is not None
        self.head = head or Head(order=order, sampled=sampled)
        if self.head.order != order:
            raise ConfigError(
                file.path,
                f"its prompts of {adapter} are of another task, size or seed",
                "start with the task and run.seed of this run, or a new run with --fresh",
            )
        self._load()

    def reset(self, head: Head, groups: Iterable[LedgerRow]) -> None:
        """Replace everything by ``head`` and ``groups``, which are issued."""
        for table in ("groups", "trajectories"):
            self._file.execute(f"DELETE FROM {table} WHERE adapter = ?", (self.adapter,))
        self.head = head
        for group in groups:
            self.table.insert(group)
        self._load()

    def _load(self) -> None:
        self._file.ledgers[self.adapter] = self
        self._file.changed.add(self.adapter)
        self.counts, self.drop_reasons = counted(self._file.execute, self.adapter, self.head)
        self._states = {row.seq: row.state for row in self.table.rows(*LIVE)}

    # ------------------------------------------------------------ moves of a group

    def issue(self, position: int, issue: int, stale: int = 0) -> int:
        seq = self.head.issued
        self.table.insert(LedgerRow(seq=seq, position=position, issue=issue, stale=stale))
        self.head.issued += 1
        self._file.changed.add(self.adapter)
        self.counts[_S.ISSUED] += 1
        self._states[seq] = _S.ISSUED
        return seq

    def run(self, seq: int, version: int) -> None:
        self._move(seq, (_S.ISSUED,), _S.RUNNING, version=version)

    def requeue(self, seq: int, failed: int, resampled: int) -> None:
        self._move(seq, LIVE[1:], _S.ISSUED, failed=failed, resampled=resampled, newest=-1, step=-1)

    def finish(self, seq: int, oldest: int, newest: int, payload: bytes) -> None:
        """A late answer may arrive while the group waits for its next try."""
        self._move(seq, (_S.RUNNING, _S.ISSUED), _S.DONE, version=oldest, newest=newest)
        self._file.execute("INSERT INTO trajectories VALUES (?, ?, ?)", (self.adapter, seq, payload))

    def lease(self, seqs: Iterable[int], step: int) -> None:
        for seq in seqs:
            self._move(seq, (_S.DONE,), _S.LEASED, step=step)

    def unlease(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self._move(seq, (_S.LEASED,), _S.DONE, step=-1)

    def consume(self, step: int) -> None:
        """Every group leased at ``step`` or before is consumed; its trajectories are deleted."""
        self._file.changed.add(self.adapter)
        for row in self.table.rows(_S.LEASED):
            if row.step <= step:
                self._move(row.seq, (_S.LEASED,), _S.CONSUMED, reason="")
                self.table.delete_payload(row.seq)
                del self._states[row.seq]
        before = step + 1 - KEEP_STEPS
        if before - self.head.known_from < FOLD_EVERY:
            return
        # Rows closed at steps before ``before`` become counts in the head.
        self._file.execute(
            "DELETE FROM groups WHERE adapter = ? AND state IN (?, ?) AND step < ?",
            (self.adapter, int(_S.CONSUMED), int(_S.DROPPED), before),
        )
        kept, reasons = counted(self._file.execute, self.adapter, Head(order=self.head.order))
        self.head.folded_consumed = self.counts[_S.CONSUMED] - kept[_S.CONSUMED]
        self.head.folded_dropped, self.head.known_from = dict(self.drop_reasons - reasons), before

    def drop(self, seq: int, reason: str, *, undone: bool = False) -> None:
        """``undone``: the group was consumed, by a step that is undone."""
        if undone:
            self._states[seq] = _S.CONSUMED
        self._move(seq, (_S.CONSUMED,) if undone else LIVE, _S.DROPPED, reason=reason, step=self.head.next_version)
        self.table.delete_payload(seq)
        self.drop_reasons[reason] += 1

    def _move(self, seq: int, allowed: Sequence[GroupState], state: GroupState, **columns: Any) -> None:
        before = self._states.get(seq)
        if before is None or before not in allowed:
            found = f"is {before.name.lower()}" if before is not None else "is not live"
            raise LedgerError(
                f"{self._file.path}: issue {seq} of {self.adapter} {found} and cannot become {state.name.lower()}"
            )
        changes = ", ".join(f"{name} = ?" for name in ("state", *columns))
        self._file.execute(
            f"UPDATE groups SET {changes} WHERE adapter = ? AND seq = ?",
            (int(state), *columns.values(), self.adapter, seq),
        )
        self._file.changed.add(self.adapter)
        self.counts[before] -= 1
        self.counts[state] += 1
        if state is _S.DROPPED:
            del self._states[seq]
        else:
            self._states[seq] = state

    # ------------------------------------------------------------ the whole

    def flush(self) -> None:
        """Also what other adapters have changed: the file has one transaction."""
        self._file.changed.add(self.adapter)
        self._file.flush()

    def close(self) -> None:
        """No group of the adapter moves after this."""
        self.flush()
        del self._file.ledgers[self.adapter]

    def check(self, live: int) -> None:
        """Raise LedgerError unless the file's rows add up and ``live`` is the caller's count of live groups."""
        counts, _ = counted(self._file.execute, self.adapter, self.head)
        booked = sum(counts[state] for state in LIVE)
        total = counts[_S.CONSUMED] + counts[_S.DROPPED] + booked
        if self.head.issued != total or booked != live or counts != self.counts:
            shown = {state.name.lower(): n for state, n in counts.items()}
            raise LedgerError(
                f"{self._file.path} does not add up: {self.head.issued} issued of {self.adapter}, {shown}, "
                f"{live} groups held (fix: {REBUILT})"
            )
