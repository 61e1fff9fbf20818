"""The file ``service.sqlite``: what was acknowledged survives any end of the process. One connection, one thread.

Every change is one transaction, synced before it is acknowledged; any exception rolls it back. A full disk, a lock
or an input/output error is `Unavailable`, and the file is used again afterwards.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from areal_lora.errors import ConfigError, RecordError, RequestError, Unavailable, undo_on_error
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.run_folder.sqlite import connect
from areal_lora.service.queue import queue_rows

R = TypeVar("R")
T = TypeVar("T")
_PASSING = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)


class Table(Generic[R]):
    """Rows of one table as dataclasses of ``kind``, whose fields are columns. Structs are msgpack, dicts JSON.

    ``keys`` are constraints of the table.
    """

    def __init__(self, name: str, kind: type[R], keys: str) -> None:
        self._name, self._kind, self._hints = name, kind, get_type_hints(kind)
        self._columns = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # R is a dataclass
        columns = [each + " NOT NULL" * (type(None) not in get_args(self._hints[each])) for each in self._columns]
        owner = "FOREIGN KEY (tenant) REFERENCES tenants"
        self.schema = f"CREATE TABLE {name} ({', '.join([*columns, keys, owner])})"
        # Made once: threads that decode a type for the first time, all at once, end the process.
        self._decode: dict[str, Callable[[bytes], Any]] = {}
        for column, hint in self._hints.items():
            if get_origin(hint) is dict:
                self._decode[column] = msgspec.json.Decoder(hint).decode
            elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
                self._decode[column] = msgspec.msgpack.Decoder(hint).decode

    def select(self, db: sqlite3.Connection, where: str, *values: object) -> list[R]:
        """In the order in which the rows were made."""
        found = db.execute(f"SELECT {', '.join(self._columns)} FROM {self._name} WHERE {where} ORDER BY rowid", values)
        return [
            self._kind(**{name: self._read(name, value) for name, value in zip(self._columns, row, strict=True)})
            for row in found
        ]

    def insert(self, db: sqlite3.Connection, row: R, conflict: str = "") -> None:
        _insert(db, self._name, {name: _stored(getattr(row, name)) for name in self._columns}, conflict)

    def _read(self, name: str, value: Any) -> Any:
        if name in self._decode:
            return self._decode[name](value)
        hint = self._hints[name]
        return hint(value) if hint is bool or (isinstance(hint, type) and issubclass(hint, StrEnum)) else value


def _insert(db: sqlite3.Connection, table: str, values: Mapping[str, object], conflict: str = "") -> None:
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) {conflict}", [*values.values()])


def _stored(value: object) -> object:
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    return msgspec.msgpack.encode(value) if isinstance(value, msgspec.Struct) else value


KEYS = Table("keys", queue_rows.Key, "PRIMARY KEY (digest), UNIQUE (tenant, label)")
ADAPTERS = Table("adapters", queue_rows.AdapterRow, "PRIMARY KEY (tenant, name)")
SESSIONS = Table("sessions", queue_rows.ClientSession, "PRIMARY KEY (session)")
MODELS = Table("models", queue_rows.Model, "PRIMARY KEY (model), UNIQUE (adapter)")
STATES = Table("saved_states", queue_rows.SavedState, "PRIMARY KEY (model, kind, name)")
SAMPLERS = Table("samplers", queue_rows.SamplingSession, "PRIMARY KEY (sampler)")
SAMPLES = Table("samples", queue_rows.PendingSample, "PRIMARY KEY (sample)")
_quota = msgspec.json.Decoder(queue_rows.Quota).decode


@dataclass(slots=True, kw_only=True)
class Transaction:
    """Rows in and out, and what changed for callers that wait. ``tables`` are the service's, as this one leaves them.

    ``answered`` requests have their answer, ``moved`` adapters new operations. ``ended`` sessions and the saved states
    at ``forgotten`` paths are no longer there.
    """

    db: sqlite3.Connection
    now_s: float
    tables: queue_rows.Tables
    answered: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)

    def quota(self, tenant: str) -> queue_rows.Quota:
        return self.tables.quotas[tenant]

    def do(self, sql: str, *values: object) -> None:
        self.db.execute(sql, values)

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self.db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        return next(iter(self.rows(sql, *values)), None)

    def count(self, sql: str, *values: object) -> int:
        return int(self.db.execute(f"SELECT COUNT(*) FROM {sql}", values).fetchone()[0])

    def insert(self, table: str, **values: object) -> None:
        _insert(self.db, table, values)

    def session(self, tenant: str, session: str, *, ended: bool = False) -> queue_rows.ClientSession:
        """Raises RequestError for one that is not the tenant's, and for one that has ended unless ``ended``."""
        found = SESSIONS.select(self.db, "session = ? AND tenant = ?", session, tenant)
        if not found:
            raise unknown("session_id", "session", session)
        if found[0].ended and not ended:
            raise RequestError("session_id", f"session {session!r} has ended", "open another one", status=410)
        return found[0]

    def model(self, tenant: str, model: str, *, removed: bool = False) -> queue_rows.Model:
        """Raises RequestError for one that is not the tenant's, and for one that has left unless ``removed``."""
        found = self.models("model = ? AND tenant = ? AND of_state IS NULL", model, tenant)
        if not found or (found[0].removed and not removed):
            raise unknown("model_id", "model", model)
        return found[0]

    def sampler(self, tenant: str, sampler: str) -> queue_rows.SamplingSession:
        found = SAMPLERS.select(self.db, "sampler = ? AND tenant = ?", sampler, tenant)
        if not found:
            reason = f"there is no sampling session {sampler[:128]!r}, or its weights were not sampled for long"
            raise RequestError("sampling_session_id", reason, "save the weights again for another one", status=404)
        return found[0]

    def state(self, tenant: str, path: str) -> queue_rows.SavedState:
        """The saved state at ``path``, unless it has expired."""
        parts = path.removeprefix(queue_rows.SCHEME).split("/") if path.startswith(queue_rows.SCHEME) else []
        where = "tenant = ? AND model = ? AND kind = ? AND name = ?"
        found = self.states(where, tenant, *parts) if len(parts) == 3 else []
        if not found or (found[0].expires_s is not None and found[0].expires_s <= self.now_s):
            raise unknown("path", "saved state", path)
        return found[0]

    def models(self, where: str, *values: object) -> list[queue_rows.Model]:
        return MODELS.select(self.db, where, *values)

    def states(self, where: str, *values: object) -> list[queue_rows.SavedState]:
        return STATES.select(self.db, where, *values)

    def of_adapter(self, adapter: str) -> queue_rows.Model | None:
        return next(iter(self.models("adapter = ?", adapter)), None)

    def record(self, row: queue_rows.AdapterRow) -> None:
        """Make the adapter ``row``: a new one, or one that is there in another phase."""
        one = "WHERE tenant = ? AND name = ?"
        if row.wanted is DesiredPhase.DELETED:
            self.do(f"DELETE FROM adapters {one}", row.tenant, row.name)
            self.do("UPDATE tenants SET deleted = MAX(deleted, ?) WHERE tenant = ?", row.incarnation, row.tenant)
        elif (row.tenant, row.name) in self.tables.adapters:
            self.do(f"UPDATE adapters SET wanted = ?, open = ? {one}", row.wanted, row.open, row.tenant, row.name)
        else:
            ADAPTERS.insert(self.db, row)
        reached("service.half_recorded")
        self.tables = read_tables(self.db)
        reached("service.recorded")

    def carried_out(self, rows: Iterable[queue_rows.AdapterRow]) -> None:
        """The run has carried out every operation of these adapters; losing this at a crash costs nothing."""
        for row in rows:
            self.do("UPDATE adapters SET open = 0 WHERE tenant = ? AND name = ?", row.tenant, row.name)
        self.tables = read_tables(self.db)


def put_tenant(tx: Transaction, tenant: str, quota: queue_rows.Quota) -> None:
    sql = "INSERT INTO tenants (tenant, quota) VALUES (?, ?) ON CONFLICT (tenant) DO UPDATE SET quota = excluded.quota"
    tx.do(sql, tenant, msgspec.json.encode(quota).decode())
    tx.tables = read_tables(tx.db)


def put_key(tx: Transaction, key: queue_rows.Key) -> None:
    """Admit the key; another one of the tenant with this label is no longer valid."""
    drop_key(tx, key.tenant, key.label)
    KEYS.insert(tx.db, key)
    tx.tables = read_tables(tx.db)


def drop_key(tx: Transaction, tenant: str, label: str) -> None:
    tx.do("DELETE FROM keys WHERE tenant = ? AND label = ?", tenant, label)
    tx.tables = read_tables(tx.db)


def make_tables(db: sqlite3.Connection, run: str) -> None:
    """Make the tables of ``run`` in an empty file."""
    tables = [each.schema for each in (KEYS, ADAPTERS, SESSIONS, MODELS, STATES, SAMPLERS, SAMPLES)]
    for statement in (*tables, *queue_rows.SCHEMA.split(";\n")):
        db.execute(statement)
    db.execute("INSERT INTO meta VALUES (?, ?)", (queue_rows.SCHEMA_VERSION, run))


def read_tables(db: sqlite3.Connection) -> queue_rows.Tables:
    tenants = db.execute("SELECT tenant, quota, deleted FROM tenants ORDER BY tenant").fetchall()
    return queue_rows.Tables(
        quotas={tenant: _quota(quota) for tenant, quota, _ in tenants},
        keys={key.digest: key for key in KEYS.select(db, "1")},
        adapters={(row.tenant, row.name): row for row in ADAPTERS.select(db, "1")},
        deleted={tenant: deleted for tenant, _, deleted in tenants},
    )


def unknown(path: str, what: str, name: str) -> RequestError:
    """Also for rows of another tenant: that they exist is not shown."""
    reason = f"there is no {what} {name[:128]!r}"
    return RequestError(path, reason, "use an id that the service gave to this key", status=404)


class Store:
    """The only connection to the file. ``tables`` are those of the last commit, readable from any thread.

    Raises ConfigError for the file of another run, RecordError for a damaged one, Unavailable where it cannot be read
    or written at present.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        with self._reading():
            self._db = connect(str(path), synchronous="FULL", autocommit=True)
            self._db.execute("PRAGMA foreign_keys=ON")
            self._begin(run)
            self.tables = read_tables(self._db)

    def _begin(self, run: str) -> None:
        self._db.execute("BEGIN EXCLUSIVE")
        if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
            make_tables(self._db, run)
        found = self._db.execute("SELECT schema_version, run FROM meta").fetchone()
        if is_ours := found == (queue_rows.SCHEMA_VERSION, run):
            for statement in queue_rows.INDICES.split(";\n"):
                self._db.execute(statement)
        self._db.execute("COMMIT")
        if not is_ours:
            wanted = f"{run!r} in schema {queue_rows.SCHEMA_VERSION}"
            reason = f"it is of run {found[1]!r} in schema {found[0]}, not of {wanted}"
            older = "end the run with the version of areal_lora that made the file, or start over with --fresh"
            self._db.close()
            raise ConfigError(str(self.path), reason, older if found[1] == run else "put the run's own file back")

    def close(self) -> None:
        self._db.close()

    def change(self, work: Callable[[Transaction], T], now_s: float) -> tuple[T, Transaction]:
        """``work``'s result and transaction once it is durable. An exception leaves the file as it was."""

        def roll_back() -> None:
            if self._db.in_transaction:  # SQLite rolls back by itself where the disk is full
                self._db.execute("ROLLBACK")

        with self._reading(), undo_on_error(roll_back):
            self._db.execute("BEGIN IMMEDIATE")
            tx = Transaction(db=self._db, now_s=now_s, tables=self.tables)
            result = work(tx)
            reached("queue.changed")
            self._db.execute("COMMIT")
        self.tables = tx.tables
        reached("queue.committed")
        return result, tx

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises RecordError for damage, Unavailable for what passes, else the fault of the statement."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the low byte names the class
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                reason = f"the service's file is damaged: {error} (fix: restore it from a copy)"
                raise RecordError(f"{self.path}: {reason}") from error
            if code in _PASSING:
                status = 507 if code == sqlite3.SQLITE_FULL else 503
                raise Unavailable(status, f"{self.path.name} cannot be read or written: {error}") from error
            raise
