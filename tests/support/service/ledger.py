"""The queue's tables in memory, with two tenants, for tests of its transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

import msgspec

from areal_lora.errors import RequestError
from areal_lora.service.queue.client_sessions import AdapterRequest, insert_model, open_session
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.service.queue.queue_store import Transaction, make_tables, read_tables
from areal_lora.service.queue.requests import CreateModel, Lora

QUOTA = Quota(
    adapters=4,
    rank=8,
    weight=1.0,
    operations=9,
    body_kib=1,
    sequences=64,
    problems=9,
    workers=1,
    queued=8,
    saved=3,
    queued_mib=16,
)
LORA = Lora(rank=4, alpha=32.0, target_modules=("linear_qkv",))
T = TypeVar("T")


class Ledger:
    """``change`` is one transaction. ``now_s`` is the clock."""

    def __init__(self, quota: Quota = QUOTA) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.now_s = 1000.0
        self.last: Transaction
        make_tables(self.db, "run")
        for tenant in ("acme", "bolt"):
            row = (tenant, msgspec.json.encode(quota).decode())
            self.db.execute("INSERT INTO tenants (tenant, quota) VALUES (?, ?)", row)
        self.tables = read_tables(self.db)

    def change(self, work: Callable[[Transaction], T]) -> T:
        tx = self.last = Transaction(db=self.db, now_s=self.now_s, tables=self.tables)
        self.db.execute("BEGIN")
        try:
            result = work(tx)
        except RequestError:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
        self.tables = tx.tables
        return result

    def model(self, tenant: str = "acme", model_seq: int = 0, action: CreateModel | None = None) -> tuple[str, str]:
        """A new session with a model; returns the model and its adapter."""
        session = self.change(lambda tx: open_session(tx, tenant, b""))
        action = action or CreateModel(lora=LORA)
        name, model = f"{session}-{model_seq}", f"{session}:train:{model_seq}"
        adapter = AdapterRequest(name=name, rank=LORA.rank, weight=1.0, settings={})
        self.change(lambda tx: insert_model(tx, tenant, adapter, session, model_seq, "f", action, LORA))
        return model, self.tables.adapters[tenant, name].key
