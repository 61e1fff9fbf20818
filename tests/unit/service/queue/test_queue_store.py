"""The service's file: what it gives back is what was recorded, after any sequence of operations."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from areal_lora.errors import ConfigError, RecordError, RequestError, Unavailable
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.service.queue.client_sessions import AdapterRequest, answered, carried_out, changed, create, operate
from areal_lora.service.queue.queue_rows import AdapterRow, Key, Model, Quota, Tables, Verb, digest_of
from areal_lora.service.queue.queue_store import (
    ADAPTERS,
    MODELS,
    Store,
    Transaction,
    drop_key,
    put_key,
    put_tenant,
    read_tables,
)
from areal_lora.service.queue.queue_writer import forget
from areal_lora.service.queue.sequencer import insert, promote, waiting
from areal_lora.types import AdapterPhase
from tests.support.service.ledger import LORA
from tests.support.service.tables import after

T = TypeVar("T")
QUOTA = Quota(adapters=9, rank=8, weight=1.0, operations=99, body_kib=1, sequences=64, problems=9, workers=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return opened(tmp_path)


def opened(folder: Path) -> Store:
    store = Store(folder / "a service.sqlite", "run")
    for tenant in ("acme", "bolt"):
        change(store, lambda tx, tenant=tenant: put_tenant(tx, tenant, QUOTA))
    return store


def change(store: Store, work: Callable[[Transaction], T]) -> T:
    result, _ = store.change(work, 1.5)
    return result


def operated(store: Store, row: AdapterRow, verb: Verb = Verb.CREATE, request: str = "", mark: str = "f") -> bytes:
    return change(store, lambda tx: operate(tx, row.tenant, verb, lambda _: row, request, mark))


def new(tables: Tables, name: str = "math", tenant: str = "acme") -> AdapterRow:
    asked = AdapterRequest(name=name, rank=4, weight=1.0, settings={"rank": 4, "text": "ä\u2028", "list": [1.5, None]})
    return create(tables, tenant, asked, now_s=12.5)


def test_what_was_loaded_is_what_the_operations_made(tmp_path: Path) -> None:
    """At least 120 random operations, and as many as change each name once; the file is opened again now and then."""
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")
    draw, store = random.Random(seed), opened(tmp_path)
    tables, used = store.tables, set[tuple[str, str]]()
    for n in itertools.count():
        if n >= 120 and len(used) == 6:
            break
        tenant, name, verb = draw.choice(["acme", "bolt"]), draw.choice("abc"), draw.choice(list(Verb))
        try:
            row = new(tables, name, tenant) if verb is Verb.CREATE else changed(tables, {}, tenant, name, verb)
        except RequestError:
            continue
        used.add((tenant, name))
        operated(store, row, verb, f"r{n}")
        tables = after(tables, row)
        if draw.random() < 0.1:
            store.close()
            store = opened(tmp_path)
        assert change(store, lambda tx: read_tables(tx.db)) == store.tables == tables
        assert list(store.tables.adapters) == list(tables.adapters)
    store.close()


def test_an_answer_is_found_by_tenant_and_request(store: Store) -> None:
    made = operated(store, new(store.tables), Verb.CREATE, "key", "print")
    assert b'"name":"math"' in made
    assert change(store, lambda tx: answered(tx, "acme", "key", "print")) == made
    assert change(store, lambda tx: answered(tx, "bolt", "key", "print")) is None
    assert change(store, lambda tx: answered(tx, "acme", "other", "print")) is None
    with pytest.raises(RequestError, match="another request"):
        change(store, lambda tx: answered(tx, "acme", "key", "another print"))


def test_a_name_has_one_bearer_and_a_request_one_operation(store: Store) -> None:
    row = new(store.tables)
    first = operated(store, row, Verb.CREATE, "key")
    second = AdapterRow(
        tenant="acme", name="math", incarnation=2, wanted=DesiredPhase.ACTIVE, settings={}, created_s=0.0
    )
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        change(store, lambda tx: ADAPTERS.insert(tx.db, second))
    adapters = store.tables.adapters
    assert operated(store, row, Verb.CREATE, "key") == first
    assert store.tables.adapters is adapters, "nothing is made twice"


def test_a_label_has_one_key(store: Store) -> None:
    for text in ("first", "second"):
        key = Key(digest=digest_of(text), tenant="acme", label="laptop")
        change(store, lambda tx, key=key: put_key(tx, key))
    assert list(store.tables.keys) == [digest_of("second")]
    change(store, lambda tx: drop_key(tx, "acme", "laptop"))
    assert not store.tables.keys


def test_operations_that_were_carried_out_are_not_open(store: Store) -> None:
    operated(store, new(store.tables))
    operated(store, new(store.tables, "other"))
    operated(store, changed(store.tables, {}, "acme", "math", Verb.PAUSE), Verb.PAUSE)
    assert [row.open for row in store.tables.of("acme")] == [2, 1]
    done = carried_out(store.tables, {"acme-math.1": AdapterPhase.PAUSED})
    change(store, lambda tx: tx.carried_out(done))
    assert [row.open for row in store.tables.of("acme")] == [0, 1]
    assert change(store, lambda tx: read_tables(tx.db)) == store.tables


def test_commits_are_synced_and_the_plain_key_is_nowhere(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    key = Key(digest=digest_of("tml-secret"), tenant="acme", label="laptop")
    change(store, lambda tx: put_key(tx, key))
    store.close()
    assert all(b"tml-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_deleted_adapters_and_answers_stay_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lora.service.queue.client_sessions.MAX_ANSWERS", 16)
    sizes, keys = [], set[str]()
    kept = new(store.tables, "kept", "bolt")
    answer = operated(store, kept, Verb.CREATE, "kept")
    for n in range(3):
        for k in range(40):
            for verb in (Verb.CREATE, Verb.DELETE):
                name = f"name{k}-{n if k else 0}"  # one of them is used again and again
                make = verb is Verb.CREATE
                row = new(store.tables, name) if make else changed(store.tables, {}, "acme", name, verb)
                if make:
                    assert row.key not in keys, "what the run knows by this name has it for ever"
                    keys.add(row.key)
                operated(store, row, verb, f"{n} {k} {verb}" if k % 2 else "")
        sizes.append(change(store, _counts))
    assert sizes == [[1, 17]] * 3
    assert list(store.tables.adapters.values()) == [kept], "another tenant's, and what is there, stays"
    assert change(store, lambda tx: answered(tx, "bolt", "kept", "f")) == answer
    assert change(store, lambda tx: answered(tx, "acme", "2 39 delete", "f")) is not None


def _counts(tx: Transaction) -> list[int]:
    return [tx.count(table) for table in ("adapters", "answers")]


def test_any_exception_rolls_back_and_the_file_is_used_again(store: Store) -> None:
    before = store.tables
    row = new(before)

    def fails(tx: Transaction) -> None:
        tx.record(row)
        put_tenant(tx, "third", QUOTA)
        raise OverflowError("too large")

    with pytest.raises(OverflowError):
        store.change(fails, 1.5)
    assert change(store, lambda tx: read_tables(tx.db)) == store.tables == before
    operated(store, row)
    assert [each.name for each in store.tables.adapters.values()] == ["math"]


def test_a_full_disk_passes(store: Store) -> None:
    before = store.tables
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = Key(digest="d" * (1 << 16), tenant="acme", label="laptop")
    with pytest.raises(Unavailable, match="full") as refused:
        change(store, lambda tx: put_key(tx, big))
    assert refused.value.status == 507
    assert change(store, lambda tx: read_tables(tx.db)) == store.tables == before
    store._db.execute("PRAGMA max_page_count = 1073741823")
    change(store, lambda tx: put_key(tx, big))
    assert list(store.tables.keys) == [big.digest]


def n_read(store: Store, work: Callable[[Transaction], object]) -> int:
    """Bytes that ``work`` reads from the file. Steps of SQLite's machine count no pages."""

    def rchar() -> int:
        return int(Path("/proc/thread-self/io").read_text().split()[1])

    store._db.execute("PRAGMA cache_size = 0")
    before = rchar()
    change(store, work)
    return rchar() - before


@pytest.mark.parametrize("is_older", [False, True])
def test_a_request_reads_no_data_of_those_that_wait(tmp_path: Path, is_older: bool) -> None:
    """32 MB of passes. A file may have the indices of an earlier commit."""
    store = opened(tmp_path)
    model = Model.of(new(store.tables), model="m", session="s", lora=LORA)
    change(store, lambda tx: MODELS.insert(tx.db, model))
    for seq in range(2, 10):
        change(store, lambda tx, seq=seq: insert(tx, "acme", f"m:{seq}", "m", seq, "f", bytes(4_000_000)))
    if is_older:
        for index in ("requests_usage", "requests_held", "requests_fetched"):
            store._db.execute(f"DROP INDEX {index}")
        store._db.execute("CREATE INDEX requests_kept ON requests (tenant) WHERE action IS NOT NULL")
        store._db.execute("CREATE INDEX requests_answered ON requests (answered_s) WHERE answer IS NOT NULL")
        store._db.execute("CREATE INDEX requests_open ON requests (owner, seq) WHERE answer IS NULL")
        store.close()
        store = opened(tmp_path)
    assert change(store, lambda tx: waiting(tx, "acme")) == (8, 32_000_000)
    assert n_read(store, lambda tx: tx.rows("SELECT at_s FROM requests")) > 32_000_000
    assert n_read(store, lambda tx: waiting(tx, "acme")) < 1_000_000
    assert n_read(store, lambda tx: promote(tx, model)) < 1_000_000, "the first one has not come"


def test_a_round_reads_no_answers(store: Store) -> None:
    """32 MB of answers that were fetched."""
    for seq in range(8):
        change(store, lambda tx, seq=seq: insert(tx, "acme", f"m:{seq}", "m", seq, "f", b""))
    answer = "action = NULL, answer = ZEROBLOB(4000000), answered_s = 1.5, fetched_s = 1.5"
    change(store, lambda tx: tx.do(f"UPDATE requests SET {answer}"))
    assert n_read(store, lambda tx: forget(tx, set())) < 1_000_000
    assert change(store, lambda tx: tx.count("requests")) == 8


def test_the_file_of_another_run_or_of_something_else_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(ConfigError, match=r"of run 'run' .*put the run's own file back"):
        Store(tmp_path / "a service.sqlite", "another")
    (tmp_path / "text").write_text("no database, but some text that is long enough to be taken for one")
    with pytest.raises(RecordError, match="not a database"):
        Store(tmp_path / "text", "run")
    with closing(sqlite3.connect(tmp_path / "a service.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE meta SET schema_version = 99")
    with pytest.raises(
        ConfigError, match=r"schema 99, .*end the run with the version of areal_lora that made the file"
    ):
        Store(tmp_path / "a service.sqlite", "run")
