"""The service's file: what it gives back is what was recorded, after any sequence of operations."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from areal_lora.errors import ConfigError, RecordError, RequestError, Unavailable
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.service.queue.client_sessions import AdapterRequest, changed, create
from areal_lora.service.queue.queue_rows import AdapterRow, Key, Quota, Tables, Verb, digest_of
from areal_lora.service.queue.queue_store import Store

QUOTA = Quota(adapters=9, rank=8, weight=1.0, operations=99, body_kib=1, sequences=64, problems=9, workers=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return opened(tmp_path)


def opened(folder: Path) -> Store:
    store = Store(folder / "a service.sqlite", "run")
    for tenant in ("acme", "bolt"):
        store.put_tenant(tenant, QUOTA)
    return store


def operation(verb: Verb, request: str = "", fingerprint: str = "f") -> dict[str, object]:
    answer = b"answer " + request.encode()
    return {"verb": verb, "request": request or None, "fingerprint": fingerprint, "answer": answer, "at_s": 1.5}


def new(tables: Tables, name: str = "math", tenant: str = "acme") -> AdapterRow:
    asked = AdapterRequest(name=name, rank=4, weight=1.0, settings={"rank": 4, "text": "ä\u2028", "list": [1.5, None]})
    return create(tables, tenant, asked, now_s=12.5)


def test_what_was_loaded_is_what_the_operations_made(tmp_path: Path) -> None:
    """At least 120 random operations, and as many as change each name once; the file is opened again now and then."""
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"AREAL_LORA_SEED={seed}")
    draw, store = random.Random(seed), opened(tmp_path)
    tables = store.load()
    for n in itertools.count():
        if n >= 120 and len(tables.highest) == 6:
            break
        tenant, name, verb = draw.choice(["acme", "bolt"]), draw.choice("abc"), draw.choice(list(Verb))
        try:
            row = new(tables, name, tenant) if verb is Verb.CREATE else changed(tables, {}, tenant, name, verb)
        except RequestError:
            continue
        number = store.record(row, **operation(verb, request=f"r{n}"))
        tables = tables.after(row, number)
        if draw.random() < 0.1:
            store.close()
            store = opened(tmp_path)
        assert store.load() == tables
        assert store.load().desired() == tables.desired()
    store.close()


def test_an_answer_is_found_by_tenant_and_request(store: Store) -> None:
    row = new(store.load())
    store.record(row, **operation(Verb.CREATE, "key", "print"))
    assert store.answered("acme", "key") == ("print", b"answer key")
    assert store.answered("bolt", "key") is None
    assert store.answered("acme", "other") is None


def test_a_name_has_one_bearer_and_a_request_one_operation(store: Store) -> None:
    tables = store.load()
    row = new(tables)
    tables = tables.after(row, store.record(row, **operation(Verb.CREATE, "key")))
    second = AdapterRow(
        tenant="acme", name="math", incarnation=2, wanted=DesiredPhase.ACTIVE, settings={}, created_s=0.0
    )
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        store.record(second, **operation(Verb.CREATE, "another"))


def test_a_label_has_one_key(store: Store) -> None:
    for text in ("first", "second"):
        store.put_key(Key(digest=digest_of(text), tenant="acme", label="laptop"))
    assert list(store.load().keys) == [digest_of("second")]
    store.drop_key("acme", "laptop")
    assert not store.load().keys


def test_operations_that_were_carried_out_are_not_open(store: Store) -> None:
    row = new(store.load())
    first = store.record(row, **operation(Verb.CREATE))
    second = store.record(row, **operation(Verb.RESUME))
    store.carried_out([first])
    assert [each.number for each in store.load().open] == [second]


def test_commits_are_synced_and_the_plain_key_is_nowhere(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.put_key(Key(digest=digest_of("tml-secret"), tenant="acme", label="laptop"))
    store.close()
    assert all(b"tml-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_deleted_adapters_and_their_operations_stay_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lora.service.queue.queue_store.MAX_DELETED", 8)
    monkeypatch.setattr("areal_lora.service.queue.queue_store.MAX_OPERATIONS", 16)
    sizes, keys, tables = [], set[str](), store.load()
    kept = new(tables, "kept", "bolt")
    store.record(kept, **operation(Verb.CREATE, "kept"))
    for n in range(3):
        for k in range(40):
            for verb in (Verb.CREATE, Verb.DELETE):
                tables = store.load()
                name = f"name{k}-{n if k else 0}"  # one of them is used again and again
                row = new(tables, name) if verb is Verb.CREATE else changed(tables, {}, "acme", name, verb)
                if verb is Verb.CREATE:
                    assert row.key not in keys, "what the run knows by this name has it for ever"
                    keys.add(row.key)
                number = store.record(row, **operation(verb, f"{n} {k} {verb}" if k % 2 else ""))
                store.carried_out([number])
        store.prune()
        sizes.append([*store.change(_counts), len(store.load().highest)])
    assert sizes == [[9, 17, 9]] * 3
    tables = store.load()
    assert list(tables.adapters.values()) == [kept], "another tenant's, and what is there, stays"
    assert store.answered("bolt", "kept") == ("f", b"answer kept")
    assert store.answered("acme", "2 39 delete") is not None


def _counts(db: sqlite3.Connection) -> list[int]:
    return [db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in ("adapters", "operations")]


def test_any_exception_rolls_back_and_the_file_is_used_again(store: Store) -> None:
    before = store.load()
    row = new(before)

    def fails(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO tenants VALUES ('third', '{}')")
        raise OverflowError("too large")

    with pytest.raises(OverflowError):
        store.change(fails)
    with pytest.raises(OverflowError):
        store.record(row, fails, **operation(Verb.CREATE))
    assert store.load() == before
    store.record(row, **operation(Verb.CREATE))
    assert [each.name for each in store.load().adapters.values()] == ["math"]


def test_a_full_disk_passes(store: Store) -> None:
    before = store.load()
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = Key(digest="d" * (1 << 16), tenant="acme", label="laptop")
    with pytest.raises(Unavailable, match="full") as refused:
        store.put_key(big)
    assert refused.value.status == 507
    assert store.load() == before
    store._db.execute("PRAGMA max_page_count = 1073741823")
    store.put_key(big)
    assert list(store.load().keys) == [big.digest]


def test_the_file_of_another_run_or_of_something_else_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(ConfigError, match="of run 'run'"):
        Store(tmp_path / "a service.sqlite", "another")
    (tmp_path / "text").write_text("no database, but some text that is long enough to be taken for one")
    with pytest.raises(RecordError, match="not a database"):
        Store(tmp_path / "text", "run")
    with closing(sqlite3.connect(tmp_path / "a service.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE meta SET schema_version = 99")
    with pytest.raises(ConfigError, match="schema 99"):
        Store(tmp_path / "a service.sqlite", "run")
