"""What a commit of the run ledger costs by journal mode: ``python benchmarks/ledger_commit.py [FOLDER]``; seconds.

FOLDER is where the files are made, for example on a network file system; a temporary folder without it. One commit
writes what the ledger writes when a group is done: a row, its trajectories, the head. Variants are interleaved.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

COMMITS, PAYLOAD_BYTES = 400, 4096
VARIANTS = (
    ("WAL", "NORMAL", "NORMAL"),
    ("WAL", "EXCLUSIVE", "NORMAL"),
    ("WAL", "EXCLUSIVE", "FULL"),
    ("DELETE", "NORMAL", "FULL"),
    ("TRUNCATE", "EXCLUSIVE", "NORMAL"),
)


def opened(folder: Path, journal: str, locking: str, synchronous: str) -> sqlite3.Connection:
    db = sqlite3.connect(folder / f"{journal}-{locking}-{synchronous}.sqlite")
    db.execute(f"PRAGMA locking_mode={locking}")
    db.execute(f"PRAGMA journal_mode={journal}")
    db.execute(f"PRAGMA synchronous={synchronous}")
    db.execute("CREATE TABLE groups (seq INTEGER, payload BLOB, PRIMARY KEY (seq)) WITHOUT ROWID")
    db.execute("CREATE TABLE adapters (adapter TEXT PRIMARY KEY, head TEXT)")
    db.commit()
    return db


def main(folder: Path) -> None:
    databases = {variant: opened(folder, *variant) for variant in VARIANTS}
    took_ms: dict[tuple[str, str, str], list[float]] = {variant: [] for variant in VARIANTS}
    payload = os.urandom(PAYLOAD_BYTES)
    for seq in range(COMMITS):
        for variant, db in databases.items():
            start = time.perf_counter()
            db.execute("INSERT INTO groups VALUES (?, ?)", (seq, payload))
            db.execute("INSERT OR REPLACE INTO adapters VALUES ('math', ?)", (str(seq),))
            db.commit()
            took_ms[variant].append((time.perf_counter() - start) * 1e3)
    print(f"SQLite {sqlite3.sqlite_version}, {COMMITS} commits each in {folder}")
    print(f"{'journal':10}{'locking_mode':14}{'synchronous':13}{'p50 ms':>8}{'p99 ms':>8}")
    for (journal, locking, synchronous), times in took_ms.items():
        times.sort()
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        print(f"{journal:10}{locking:14}{synchronous:13}{p50:8.2f}{p99:8.2f}")
    for db in databases.values():
        db.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        main(Path(made))
