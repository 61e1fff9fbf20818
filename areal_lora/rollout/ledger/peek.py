"""Read the run ledger from a copy: what a resume does with it, and its groups. The run's own files are not touched."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.file import SCHEMA_VERSION, GroupState, Head, LedgerFile
from areal_lora.rollout.ledger.ledger import Ledger, Reconciliation, counted, decode_snapshot, plan_for
from areal_lora.run_folder.paths import RunFolder

TRIES, PAUSE_S = 20, 0.05


def reconciliations(
    run_folder: RunFolder, run: str, versions: Mapping[str, int], snapshots: Mapping[str, bytes]
) -> dict[str, Reconciliation]:
    """By adapter, for a trainer that resumes from ``versions`` with its checkpoints' ledger ``snapshots``.

    Raises RolloutError where neither the ledger nor a snapshot states what was consumed.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / run_folder.ledger.name
        _copy(run_folder.ledger, copy)
        file = LedgerFile(copy, run)
        try:
            plans = {}
            for name, version in versions.items():
                snapshot = decode_snapshot(snapshots.get(name, b""), name)
                head = file.read_head(name)
                # With the prompt order that was written: the present prompts are not read.
                order = head.order if head is not None else snapshot.order if snapshot else ""
                plans[name] = plan_for(Ledger(file, name, order), version, snapshot)
            return plans
        finally:
            file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Prompt groups of one adapter by state, those that the ledger has folded in among them; drops by reason."""

    adapter: str
    states: Mapping[GroupState, int]
    dropped: Mapping[str, int]


def group_counts(run_folder: RunFolder) -> list[GroupCounts]:
    """The groups of every adapter in the ledger, read from a copy, so that the run may work; none without a ledger.

    Raises RolloutError where the ledger is of another version or cannot be copied.
    """
    if not run_folder.ledger.is_file():
        return []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / run_folder.ledger.name
        _copy(run_folder.ledger, copy)
        with contextlib.closing(sqlite3.connect(copy)) as db:
            try:
                [version] = db.execute("SELECT schema_version FROM meta").fetchone()
                if version != SCHEMA_VERSION:
                    raise RolloutError(f"{run_folder.ledger} has schema {version}, not {SCHEMA_VERSION}")
                heads = {name: msgspec.json.decode(head, type=Head) for name, head in db.execute(_HEADS)}
                return [_counts(db, name, head) for name, head in heads.items()]
            except sqlite3.Error as error:
                raise RolloutError(f"{run_folder.ledger} cannot be read: {error}") from error


_HEADS = "SELECT adapter, head FROM adapters ORDER BY adapter"


def _counts(db: sqlite3.Connection, adapter: str, head: Head) -> GroupCounts:
    states, dropped = counted(db.execute, adapter, head)
    return GroupCounts(
        adapter=adapter, states={s: states[s] for s in GroupState}, dropped=dict(sorted(dropped.items()))
    )


def _copy(ledger: Path, copy: Path) -> None:
    """Copy file and log as of one moment. A running controller has the file locked, so SQLite cannot copy it."""
    copies = {ledger.with_name(ledger.name + suffix): copy.with_name(copy.name + suffix) for suffix in ("", "-wal")}
    for _ in range(TRIES):
        before = _stats(copies)
        for path in before:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(path, copies[path])
        if _stats(copies) == before:
            return
        for path in copies.values():
            path.unlink(missing_ok=True)
        time.sleep(PAUSE_S)
    raise RolloutError(f"{ledger} is being written: the run has not ended (fix: retry when it has)")


def _stats(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    stats = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            stats[path] = (stat.st_size, stat.st_mtime_ns)
    return stats
