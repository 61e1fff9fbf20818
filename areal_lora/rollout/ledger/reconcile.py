"""Reconcile an adapter's ledger with the version that a trainer has loaded (contract C9).

The newest valid checkpoint decides what was consumed. :func:`plan` is pure; :func:`apply` writes.

    row                            step < version   step >= version
    leased                         consumed         done again
    consumed                       consumed         rolled_back, issued again (trajectories are gone)
    done, leased, running with
    versions > version                              rolled_back, issued again
    issued, other running, done                     continue
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.file import LIVE, GroupState, Head, LedgerRow, LedgerSnapshot
from areal_lora.rollout.ledger.ledger import Ledger, rebuild

ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Rows by what happens to them. ``rebuild`` is the reason to rebuild from the snapshot, if any."""

    version: int
    rebuild: str = ""
    consumed: tuple[LedgerRow, ...] = ()  # leased before: their commit did not arrive
    again: tuple[LedgerRow, ...] = ()  # done again, with the trajectories they have
    reissued: tuple[LedgerRow, ...] = ()  # rolled back and issued again
    continuing: tuple[LedgerRow, ...] = ()

    def __str__(self) -> str:
        if self.rebuild:
            return f"rebuilt from the checkpoint's snapshot, because {self.rebuild}"
        ready = sum(row.state is GroupState.DONE for row in self.continuing)
        return (
            f"{len(self.consumed)} groups committed late, {len(self.again) + ready} ready with the trajectories "
            f"they have, {len(self.continuing) - ready} sampled on or again, {len(self.reissued)} rolled back and "
            "issued again"
        )


def plan(
    head: Head, rows: Sequence[LedgerRow], version: int, snapshot: LedgerSnapshot | None, *, known: bool = True
) -> Reconciliation:
    """Raises RolloutError where neither the ledger nor a snapshot states what was consumed before ``version``.

    ``rows`` are the live and the consumed ones; ``known``: the ledger file had this adapter before.
    """
    rebuild = ""
    if not known and version > 0:
        rebuild = "the ledger file has nothing of this adapter"
    elif head.next_version < version:
        rebuild = f"the ledger ends before step {head.next_version} and the checkpoint is of version {version}"
    elif version < head.known_from:
        rebuild = f"the ledger has forgotten the groups of steps before {head.known_from}"
    if rebuild:
        _check_snapshot(head, version, snapshot, rebuild)
        return Reconciliation(version=version, rebuild=rebuild)
    consumed, again, reissued, continuing = list[LedgerRow](), list[LedgerRow](), list[LedgerRow](), list[LedgerRow]()
    for row in rows:
        undone = row.step >= version and row.state in (GroupState.LEASED, GroupState.CONSUMED)
        if row.state is GroupState.CONSUMED:
            if undone:
                reissued.append(row)
        elif row.state is GroupState.LEASED and not undone:
            consumed.append(row)
        elif max(row.version, row.newest) > version and row.state is not GroupState.ISSUED:
            reissued.append(row)
        else:
            (again if undone else continuing).append(row)
    return Reconciliation(
        version=version,
        consumed=tuple(consumed),
        again=tuple(again),
        reissued=tuple(reissued),
        continuing=tuple(continuing),
    )


def _check_snapshot(head: Head, version: int, snapshot: LedgerSnapshot | None, rebuild: str) -> None:
    if version == 0 and snapshot is None:
        return
    if snapshot is None:
        raise RolloutError(
            f"version {version} cannot be resumed: {rebuild}, and its checkpoint carries no ledger snapshot "
            "(fix: resume from another checkpoint, or start a new run with --fresh)"
        )
    if (snapshot.version, snapshot.order) != (version, head.order):
        raise RolloutError(
            f"the ledger snapshot with version {version} is of version {snapshot.version} or of other prompts "
            "(fix: start with the task and run.seed of this run)"
        )


def apply(ledger: Ledger, made: Reconciliation, snapshot: LedgerSnapshot | None) -> None:
    """Carry out ``made``. Nothing is durable before the ledger is flushed."""
    ledger.known = True
    if made.rebuild:
        rebuild(ledger, snapshot)
        return
    ledger.head.next_version = made.version
    ledger.consume(made.version - 1)
    ledger.unlease(row.seq for row in made.again)
    for row in made.reissued:
        if row.state is GroupState.CONSUMED:
            ledger.undo(row.seq, ROLLED_BACK)
        else:
            ledger.drop(row.seq, ROLLED_BACK)
        ledger.issue(row.position, row.issue + 1, row.stale)


def plan_for(ledger: Ledger, version: int, snapshot: LedgerSnapshot | None) -> Reconciliation:
    rows = ledger.table.rows(*LIVE, GroupState.CONSUMED)
    return plan(ledger.head, rows, version, snapshot, known=ledger.known)
