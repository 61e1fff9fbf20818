"""What a resume would do with the run ledger, found out on a copy: the run's own files are not touched."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_lora.rollout.ledger import LEDGER_FILE, Ledger, LedgerFile
from areal_lora.rollout.reconcile import Reconciliation, plan_for
from areal_lora.rollout.records import Head, Snapshot, decode_snapshot


def reconciliations(
    run_folder: Path, run: str, versions: Mapping[str, int], snapshots: Mapping[str, bytes]
) -> dict[str, Reconciliation]:
    """By adapter, for a trainer that goes on from ``versions`` with its checkpoints' ledger ``snapshots``.

    Raises RolloutError where neither the ledger nor a snapshot says what was consumed.
    """
    with tempfile.TemporaryDirectory() as folder:
        for path in run_folder.glob(f"{LEDGER_FILE}*"):
            if path.name in (LEDGER_FILE, f"{LEDGER_FILE}-wal"):
                shutil.copy(path, folder)
        file = LedgerFile(Path(folder) / LEDGER_FILE, run)
        try:
            plans = {}
            for name, version in versions.items():
                snapshot = decode_snapshot(snapshots.get(name, b""), name)
                plans[name] = plan_for(_ledger(file, name, snapshot), version, snapshot)
            return plans
        finally:
            file.close()


def _ledger(file: LedgerFile, adapter: str, snapshot: Snapshot | None) -> Ledger:
    """Which prompts there are now is not asked: their order is taken from what was written."""
    found = file.execute("SELECT head FROM adapters WHERE adapter = ?", (adapter,)).fetchone()
    if found is not None:
        return file.adapter(adapter, msgspec.json.decode(found[0], type=Head).order)
    return file.adapter(adapter, snapshot.order if snapshot else "")
