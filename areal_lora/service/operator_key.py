"""The operator's own tenant and key. The key lies in the run folder: caller can read the folder is the operator."""

from __future__ import annotations

from pathlib import Path

from areal_lora.run_folder.atomic import write_file
from areal_lora.service.queue.queue_rows import LOCAL, Key, Quota, digest_of, new_key
from areal_lora.service.queue.queue_store import Store

LABEL = "operator"


def admit_operator(store: Store, path: Path, quota: Quota) -> None:
    """Make tenant and key where they are missing; the file alone decides which key is the operator's."""
    tables = store.load()
    if LOCAL not in tables.quotas:
        store.put_tenant(LOCAL, quota)
    digest = digest_of(_key_in(path))
    if (known := tables.keys.get(digest)) is None or not known.operator:
        store.put_key(Key(digest=digest, tenant=LOCAL, label=LABEL, operator=True))


def read_key(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _key_in(path: Path) -> str:
    try:
        return read_key(path)
    except FileNotFoundError:
        pass
    key = new_key()
    write_file(path, f"{key}\n", mode=0o600, durable=True)
    return key
