"""The file ``service.sqlite``: what was acknowledged survives any end of the process. One connection, one thread.

Every change is one transaction, synced before it is acknowledged; any exception rolls it back. A full disk, a lock
or an input/output error is `Unavailable`, and the file is used again afterwards.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from areal_lora.errors import ConfigError, RecordError
from areal_lora.processes.faults import reached
from areal_lora.run_folder.desired import DesiredPhase
from areal_lora.run_folder.sqlite import connect
from areal_lora.service.refused import Unavailable
from areal_lora.service.rows import AdapterRow, Key, Open, Operation, Quota, Tables
from areal_lora.service.schema import SCHEMA_VERSION, STEPS

MOST_DELETED, MOST_OPERATIONS = 1024, 1 << 14
"""Deleted adapters, and operations that were carried out, that are kept of a tenant."""
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


class Store:
    """The only connection to the file.

    Raises ConfigError for the file of another run, RecordError for a damaged one, Unavailable where it cannot be read
    or written at present.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        try:
            self._db = connect(str(path), synchronous="FULL", autocommit=True)
            self._db.execute("PRAGMA foreign_keys=ON")
            self._begin(run)
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _begin(self, run: str) -> None:
        self._db.execute("BEGIN EXCLUSIVE")
        if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
            self._create(STEPS[0])
            self._db.execute("INSERT INTO meta VALUES (1, ?, 0)", (run,))
        found = self._db.execute("SELECT schema_version, run FROM meta").fetchone()
        if found[1] == run and found[0] in range(1, SCHEMA_VERSION):
            for tables in STEPS[found[0] :]:
                self._create(tables)
            self._db.execute("UPDATE meta SET schema_version = ?", (SCHEMA_VERSION,))
            found = (SCHEMA_VERSION, run)
        self._db.execute("COMMIT")
        if found != (SCHEMA_VERSION, run):
            reason = f"it is of run {found[1]!r} in schema {found[0]}, not of {run!r} in schema {SCHEMA_VERSION}"
            self._db.close()
            raise ConfigError(str(self.path), reason, "put the run's own file back")

    def _create(self, tables: str) -> None:
        for statement in tables.split(";\n"):
            self._db.execute(statement)

    def close(self) -> None:
        self._db.close()

    def change(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """``work``'s result once its changes are durable. An exception leaves the file as it was."""
        with self._transaction():
            result = work(self._db)
            reached("desk.changed")
        reached("desk.committed")
        return result

    def load(self) -> Tables:
        """Everything that decisions need."""
        try:
            return Tables(
                quotas=MappingProxyType(
                    {
                        tenant: msgspec.json.decode(quota, type=Quota)
                        for tenant, quota in self._db.execute("SELECT tenant, quota FROM tenants ORDER BY tenant")
                    }
                ),
                keys=MappingProxyType(
                    {
                        digest: Key(digest=digest, tenant=tenant, label=label, operator=bool(operator))
                        for digest, tenant, label, operator in self._db.execute("SELECT * FROM keys ORDER BY rowid")
                    }
                ),
                adapters=MappingProxyType({(row.tenant, row.name): row for row in self._live()}),
                highest=MappingProxyType(
                    {
                        (tenant, name): highest
                        for tenant, name, highest in self._db.execute(
                            "SELECT tenant, name, MAX(incarnation) FROM adapters GROUP BY tenant, name"
                        )
                    }
                ),
                forgotten=MappingProxyType(dict(self._db.execute("SELECT tenant, incarnation FROM forgotten"))),
                open=tuple(
                    Open(number=number, tenant=tenant, name=name, incarnation=incarnation)
                    for number, tenant, name, incarnation in self._db.execute(
                        "SELECT number, tenant, name, incarnation FROM operations WHERE carried_out = 0 ORDER BY number"
                    )
                ),
                generation=self._db.execute("SELECT generation FROM meta").fetchone()[0],
            )
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _live(self) -> Iterable[AdapterRow]:
        found = self._db.execute(
            "SELECT tenant, name, incarnation, wanted, settings, created_s FROM adapters"
            " WHERE wanted != 'deleted' ORDER BY number"
        )
        for tenant, name, incarnation, wanted, settings, created_s in found:
            yield AdapterRow(
                tenant=tenant,
                name=name,
                incarnation=incarnation,
                wanted=DesiredPhase(wanted),
                settings=msgspec.json.decode(settings),
                created_s=created_s,
            )

    def answered(self, tenant: str, request: str) -> tuple[str, bytes] | None:
        """Fingerprint and answer of the operation that the tenant asked for under this idempotency key."""
        try:
            found = self._db.execute(
                "SELECT fingerprint, answer FROM operations WHERE tenant = ? AND request = ?", (tenant, request)
            ).fetchone()
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return (found[0], found[1]) if found else None

    def record(
        self, row: AdapterRow, operation: Operation, also: Callable[[sqlite3.Connection], None] = lambda _: None
    ) -> int:
        """Make the adapter ``row``, remember the operation, and do ``also``; all or nothing. Returns the operation's
        number.
        """
        with self._transaction():
            self._db.execute(
                "INSERT INTO adapters (tenant, name, incarnation, wanted, settings, created_s)"
                " VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (tenant, name, incarnation) DO UPDATE SET wanted = excluded.wanted",
                (
                    row.tenant,
                    row.name,
                    row.incarnation,
                    row.wanted.value,
                    msgspec.json.encode(row.settings).decode(),
                    row.created_s,
                ),
            )
            reached("service.half_recorded")
            cursor = self._db.execute(
                "INSERT INTO operations (tenant, name, incarnation, verb, request, fingerprint, answer, at_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    operation.tenant,
                    operation.name,
                    operation.incarnation,
                    operation.verb.value,
                    operation.request or None,
                    operation.fingerprint,
                    operation.answer,
                    operation.at_s,
                ),
            )
            self._db.execute("UPDATE meta SET generation = generation + 1")
            also(self._db)
            reached("service.recorded")
        return int(cursor.lastrowid or 0)

    def carried_out(self, numbers: Iterable[int]) -> None:
        """Mark operations; losing this at a crash costs nothing."""
        self._write([("UPDATE operations SET carried_out = 1 WHERE number = ?", (n,)) for n in numbers])

    def prune(self) -> None:
        """Remove what is above `MOST_DELETED` and `MOST_OPERATIONS`, and operations that no request can name again."""
        adapters = _oldest("adapters", "wanted = 'deleted'")
        operations = _oldest("operations", "carried_out = 1")
        with self._transaction():
            self._db.execute("UPDATE adapters SET settings = '{}' WHERE wanted = 'deleted' AND settings != '{}'")
            self._db.execute("DELETE FROM operations WHERE carried_out = 1 AND request IS NULL")
            for (tenant,) in self._db.execute("SELECT tenant FROM tenants").fetchall():
                old = (tenant, tenant, MOST_DELETED)
                self._db.execute(
                    "INSERT INTO forgotten SELECT tenant, MAX(incarnation) FROM adapters"
                    f" WHERE {adapters} GROUP BY tenant"
                    " ON CONFLICT (tenant) DO UPDATE SET incarnation = MAX(incarnation, excluded.incarnation)",
                    old,
                )
                self._db.execute(f"DELETE FROM adapters WHERE {adapters}", old)
                self._db.execute(f"DELETE FROM operations WHERE {operations}", (tenant, tenant, MOST_OPERATIONS))

    def put_tenant(self, tenant: str, quota: Quota) -> None:
        sql = "INSERT INTO tenants VALUES (?, ?) ON CONFLICT (tenant) DO UPDATE SET quota = excluded.quota"
        self._write([(sql, (tenant, msgspec.json.encode(quota).decode()))])

    def put_key(self, key: Key) -> None:
        """Admit the key; another one of the tenant with this label is no longer valid."""
        self._write(
            [
                ("DELETE FROM keys WHERE tenant = ? AND label = ?", (key.tenant, key.label)),
                ("INSERT INTO keys VALUES (?, ?, ?, ?)", (key.digest, key.tenant, key.label, int(key.operator))),
            ]
        )

    def drop_key(self, tenant: str, label: str) -> None:
        self._write([("DELETE FROM keys WHERE tenant = ? AND label = ?", (tenant, label))])

    def set_generation(self, generation: int) -> None:
        self._write([("UPDATE meta SET generation = ?", (generation,))])

    def _write(self, statements: list[tuple[str, tuple[object, ...]]]) -> None:
        with self._transaction():
            for sql, arguments in statements:
                self._db.execute(sql, arguments)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls back by itself where the disk is full
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: sqlite3.Error) -> Exception:
        """The error to raise: RecordError for damage, Unavailable for what passes, else a fault of the statement."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the low byte names the class
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return RecordError(f"{self.path}: the service's file is damaged: {error} (fix: restore it from a copy)")
        if code in _PASSING:
            status = 507 if code == sqlite3.SQLITE_FULL else 503
            return Unavailable(status, f"{self.path.name} cannot be read or written: {error}")
        return error


def _oldest(table: str, where: str) -> str:
    """The condition of a tenant's rows but the newest; its arguments are the tenant, again, and how many stay."""
    newest = f"SELECT number FROM {table} WHERE tenant = ? AND {where} ORDER BY number DESC LIMIT 1 OFFSET ?"
    return f"tenant = ? AND {where} AND number <= ({newest})"
