"""One transaction of the desk: rows in and out, and what changed for those who wait."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

import msgspec

from areal_lora.service.desk.asks import Lora
from areal_lora.service.desk.rows import Kind, Model, Sampler, Saved, Session, parse_path
from areal_lora.service.refused import Refused
from areal_lora.service.rows import Quota, Tables

_lora = msgspec.msgpack.Decoder(Lora).decode
_notes = msgspec.json.Decoder(dict[str, str]).decode
_SESSION = "session, tenant, about, created_s, ended"
_MODEL = (
    "model, tenant, session, name, incarnation, adapter, lora, created_s, of_state, gone, joined, next_seq,"
    " next_number, closed, published, broken, notes"
)
_SAVED = "model, tenant, adapter, kind, name, label, named, version, step, n_bytes, lora, created_s, expires_s, notes"
_SAMPLER = "sampler, tenant, session, path, model, created_s"


@dataclass(slots=True, kw_only=True)
class Books:
    """``tables`` are the service's. ``answered`` requests have their answer, ``moved`` adapters new operations.
    ``ended`` sessions and the saved states at ``forgotten``
    paths are no longer there.
    """

    db: sqlite3.Connection
    now_s: float
    tables: Tables
    answered: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)

    def quota(self, tenant: str) -> Quota:
        return self.tables.quotas[tenant]

    def do(self, sql: str, *values: object) -> None:
        self.db.execute(sql, values)

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self.db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self.db.execute(sql, values).fetchone()
        return found

    def insert(self, table: str, **values: object) -> None:
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        self.do(f"INSERT INTO {table} ({names}) VALUES ({marks})", *values.values())

    # ------------------------------------------------------------ a tenant's own; others' are unknown

    def session(self, tenant: str, session: str) -> Session:
        """Raises Refused for one that is not the tenant's, or has ended."""
        found = self.sessions("session = ? AND tenant = ?", session, tenant)
        if not found:
            raise unknown("session_id", "session", session)
        if found[0].ended:
            raise Refused(410, "session_id", f"session {session!r} has ended", "open another one")
        return found[0]

    def model(self, tenant: str, model: str) -> Model:
        """Raises Refused for one that is not the tenant's, or has left."""
        found = self.models("model = ? AND tenant = ? AND gone = 0 AND of_state IS NULL", model, tenant)
        if not found:
            raise unknown("model_id", "model", model)
        return found[0]

    def sampler(self, tenant: str, sampler: str) -> Sampler:
        row = self.row(f"SELECT {_SAMPLER} FROM samplers WHERE sampler = ? AND tenant = ?", sampler, tenant)
        if row is None:
            raise unknown("sampling_session_id", "sampling session", sampler)
        return Sampler(sampler=row[0], tenant=row[1], session=row[2], path=row[3], model=row[4], created_s=row[5])

    def state(self, tenant: str, path: str) -> Saved:
        """The saved state at ``path``, unless it has expired."""
        parts = parse_path(path)
        found = parts and self.states("tenant = ? AND model = ? AND kind = ? AND name = ?", tenant, *parts)
        if not found or (found[0].expires_s is not None and found[0].expires_s <= self.now_s):
            raise unknown("path", "saved state", path)
        return found[0]

    # ------------------------------------------------------------ lists

    def sessions(self, where: str, *values: object) -> list[Session]:
        found = self.rows(f"SELECT {_SESSION} FROM sessions WHERE {where} ORDER BY rowid", *values)
        return [
            Session(session=name, tenant=tenant, about=about, created_s=created_s, ended=bool(ended))
            for name, tenant, about, created_s, ended in found
        ]

    def models(self, where: str, *values: object) -> list[Model]:
        return [_model(row) for row in self.rows(f"SELECT {_MODEL} FROM models WHERE {where} ORDER BY rowid", *values)]

    def states(self, where: str, *values: object) -> list[Saved]:
        found = self.rows(f"SELECT {_SAVED} FROM saved_states WHERE {where} ORDER BY rowid", *values)
        return [_saved(row) for row in found]

    def of_adapter(self, adapter: str) -> Model | None:
        return next(iter(self.models("adapter = ?", adapter)), None)


def unknown(path: str, what: str, name: str) -> Refused:
    """Also for what is another tenant's: that it exists is not said."""
    return Refused(404, path, f"there is no {what} {name[:128]!r}", "use an id that the service gave to this key")


def _model(row: tuple[Any, ...]) -> Model:
    return Model(
        model=row[0],
        tenant=row[1],
        session=row[2],
        name=row[3],
        incarnation=row[4],
        adapter=row[5],
        lora=_lora(row[6]),
        created_s=row[7],
        of_state=row[8],
        gone=bool(row[9]),
        joined=bool(row[10]),
        next_seq=row[11],
        next_number=row[12],
        closed=row[13],
        published=row[14],
        broken=row[15],
        notes=_notes(row[16]),
    )


def _saved(row: tuple[Any, ...]) -> Saved:
    return Saved(
        model=row[0],
        tenant=row[1],
        adapter=row[2],
        kind=Kind(row[3]),
        name=row[4],
        label=row[5],
        named=bool(row[6]),
        version=row[7],
        step=row[8],
        n_bytes=row[9],
        lora=_lora(row[10]),
        created_s=row[11],
        expires_s=row[12],
        notes=_notes(row[13]),
    )
