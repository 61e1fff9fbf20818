"""Plan what a resume does with the run ledger, on a copy: the run's own files are not touched."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.file import LedgerFile
from areal_lora.rollout.ledger.ledger import Ledger
from areal_lora.rollout.ledger.reconcile import Reconciliation, plan_for
from areal_lora.rollout.ledger.records import LedgerSnapshot
from areal_lora.rollout.ledger.snapshot import decode_snapshot
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
                plans[name] = plan_for(_ledger(file, name, snapshot), version, snapshot)
            return plans
        finally:
            file.close()


def _copy(ledger: Path, copy: Path) -> None:
    """Copy file and log as of one moment. A running controller has the file locked, so SQLite cannot copy it."""
    copies = {ledger: copy, _wal(ledger): _wal(copy)}
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


def _wal(ledger: Path) -> Path:
    """SQLite's write-ahead log of ``ledger``."""
    return ledger.with_name(f"{ledger.name}-wal")


def _stats(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    stats = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            stats[path] = (stat.st_size, stat.st_mtime_ns)
    return stats


def _ledger(file: LedgerFile, adapter: str, snapshot: LedgerSnapshot | None) -> Ledger:
    """Open the adapter's ledger with the prompt order that was written: the present prompts are not read."""
    head = file.read_head(adapter)
    if head is not None:
        return Ledger(file, adapter, head.order)
    return Ledger(file, adapter, snapshot.order if snapshot else "")
