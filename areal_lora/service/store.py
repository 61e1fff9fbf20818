"""The file ``service.sqlite``: what was acknowledged survives any end of the process. One connection, one thread.

Every change is one transaction, synced before it is acknowledged. As with the run's ledger the connection is
exclusive, so that the write-ahead log needs no memory that connections share.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from areal_lora.errors import ConfigError, RecordError
from areal_lora.processes.faults import reached
from areal_lora.run_folder.desired import DesiredPhase
from areal_lora.service.refused import Refused
from areal_lora.service.rows import AdapterRow, Key, Open, Operation, Quota, Tables
from areal_lora.service.schema import SCHEMA_VERSION, STEPS

T = TypeVar("T")


class Store:
    """The only connection to the file. Raises ConfigError for the file of another run, RecordError where it fails."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)  # one thread after another
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
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
        """``work``'s result once its changes are durable. What it refuses leaves the file as it was."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._db)
            except Refused:
                self._db.execute("ROLLBACK")
                raise
            reached("desk.changed")
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._broken(error) from error
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
        try:
            self._db.execute("BEGIN IMMEDIATE")
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
            self._db.execute("COMMIT")
        except Refused:
            self._db.execute("ROLLBACK")
            raise
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return int(cursor.lastrowid or 0)

    def carried_out(self, numbers: Iterable[int]) -> None:
        """Mark operations; losing this at a crash costs nothing."""
        self._write([("UPDATE operations SET carried_out = 1 WHERE number = ?", (n,)) for n in numbers])

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
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for sql, arguments in statements:
                self._db.execute(sql, arguments)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: sqlite3.Error) -> RecordError:
        return RecordError(f"{self.path}: the service's file cannot be used: {error} (fix: free or repair the disk)")
