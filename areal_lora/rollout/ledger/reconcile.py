"""Reconcile an adapter's ledger with the version that a trainer has loaded (contract C9).

The newest valid checkpoint decides what was consumed. :func:`plan` is pure; :func:`apply` writes.

    row                            step < version   step >= version
    leased                         consumed         done again
    consumed                       consumed         rolled_back, issued again (trajectories are deleted)
    done, leased, running with
    versions > version                              rolled_back, issued again
    issued, other running, done                     continue
"""

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.curricula import Counts
from areal_lora.rollout.ledger.ledger import (
    LIVE,
    SCHEMA_VERSION,
    GroupState,
    Head,
    Ledger,
    LedgerFile,
    LedgerRow,
    counted,
)
from areal_lora.run_folder.paths import RunFolder, write_file

ROLLED_BACK = "rolled_back"
SNAPSHOT_FORMAT = 1
AS_ISSUED: dict[str, Any] = {"state": GroupState.ISSUED, "version": -1, "newest": -1, "step": -1}
TRIES, PAUSE_S = 20, 0.05  # of copying a ledger that is being written


class LedgerSnapshot(msgspec.Struct, kw_only=True, frozen=True):
    """An adapter's ledger once the steps before ``version`` are consumed; travels in the checkpoint."""

    format: int = SNAPSHOT_FORMAT
    adapter: str
    order: str
    version: int
    next_position: int
    issued: int
    consumed: int
    dropped: dict[str, int]
    open: list[LedgerRow]
    solved: Counts = {}
    stages: Sequence[int] = ()


def take_snapshot(ledger: Ledger, version: int, solved: Counts | None = None) -> bytes:
    """The ledger once every step before ``version`` is consumed, for :func:`rebuild`, with its `SolvedShares`."""
    still_open = ledger.table.rows(*LIVE, leased_from=version)
    live = sum(ledger.counts[state] for state in LIVE)
    return msgspec.msgpack.encode(
        LedgerSnapshot(
            adapter=ledger.adapter,
            order=ledger.head.order,
            version=version,
            next_position=ledger.head.next_position,
            issued=ledger.head.issued,
            consumed=ledger.counts[GroupState.CONSUMED] + live - len(still_open),
            dropped=dict(ledger.drop_reasons),
            open=[msgspec.structs.replace(row, **AS_ISSUED) for row in still_open],
            solved=solved or {},
            stages=ledger.head.stages,
        )
    )


def decode_snapshot(data: bytes, adapter: str) -> LedgerSnapshot | None:
    """None for no bytes. Raises RolloutError for bytes that are no snapshot of ``adapter``."""
    if not data:
        return None
    try:
        snapshot = msgspec.msgpack.decode(data, type=LedgerSnapshot)
    except msgspec.DecodeError as error:
        raise RolloutError(f"the checkpoint's ledger snapshot of {adapter} cannot be read: {error}") from None
    if (snapshot.format, snapshot.adapter) != (SNAPSHOT_FORMAT, adapter):
        raise RolloutError(
            f"the checkpoint's ledger snapshot is of {snapshot.adapter!r} in format {snapshot.format}, "
            f"not of {adapter!r} in format {SNAPSHOT_FORMAT}"
        )
    return snapshot


def rebuild(ledger: Ledger, snapshot: LedgerSnapshot | None) -> None:
    """Delete all rows and restore ``snapshot`` (None: nothing issued); its open groups are issued."""
    head = Head(order=ledger.head.order, sampled=ledger.sampled, counters=ledger.head.counters)
    if snapshot is not None:
        head.issued, head.next_position = snapshot.issued, snapshot.next_position
        head.next_version = head.known_from = snapshot.version
        head.folded_consumed, head.folded_dropped = snapshot.consumed, dict(snapshot.dropped)
        head.stages = list(snapshot.stages)
    ledger.reset(head, snapshot.open if snapshot is not None else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Rows by what happens to them. ``rebuild`` is the reason to rebuild from the snapshot, if any."""

    version: int
    rebuild: str = ""
    consumed: list[LedgerRow] = field(default_factory=list)  # leased before: their commit did not arrive
    again: list[LedgerRow] = field(default_factory=list)  # done again, with the trajectories they have
    reissued: list[LedgerRow] = field(default_factory=list)  # rolled back and issued again
    continuing: list[LedgerRow] = field(default_factory=list)

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
    head: Head,
    rows: Sequence[LedgerRow],
    version: int,
    snapshot: LedgerSnapshot | None,
    *,
    known: bool = True,
    sampled: str = "",
) -> Reconciliation:
    """Raises RolloutError where neither the ledger nor a snapshot states what was consumed before ``version``.

    ``rows`` are the live and the consumed ones; ``known``: the ledger file had this adapter before. ``sampled`` states
    how trajectories are sampled from now on; empty: as they were.
    """
    rebuild = ""
    if not known and version > 0:
        rebuild = "the ledger file has nothing of this adapter"
    elif head.next_version < version:
        rebuild = f"the ledger ends before step {head.next_version} and the checkpoint is of version {version}"
    elif version < head.known_from:
        rebuild = f"the ledger has forgotten the groups of steps before {head.known_from}"
    elif head.sampled and sampled and head.sampled != sampled:
        rebuild = f"its groups are sampled with {head.sampled}, and new ones with {sampled}"
    if rebuild:
        _check_snapshot(head, version, snapshot, rebuild)
        return Reconciliation(version=version, rebuild=rebuild)
    made = Reconciliation(version=version)
    for row in rows:
        undone = row.step >= version and row.state in (GroupState.LEASED, GroupState.CONSUMED)
        if row.state is GroupState.CONSUMED:
            if undone:
                made.reissued.append(row)
        elif row.state is GroupState.LEASED and not undone:
            made.consumed.append(row)
        elif max(row.version, row.newest) > version and row.state is not GroupState.ISSUED:
            made.reissued.append(row)
        else:
            (made.again if undone else made.continuing).append(row)
    return made


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
    ledger.head.next_version, ledger.head.sampled = made.version, ledger.sampled or ledger.head.sampled
    ledger.consume(made.version - 1)
    ledger.unlease(row.seq for row in made.again)
    for row in made.reissued:
        ledger.drop(row.seq, ROLLED_BACK, undone=row.state is GroupState.CONSUMED)
        ledger.issue(row.position, row.issue + 1, row.stale)


def plan_for(ledger: Ledger, version: int, snapshot: LedgerSnapshot | None) -> Reconciliation:
    rows = ledger.table.rows(*LIVE, GroupState.CONSUMED)
    return plan(ledger.head, rows, version, snapshot, known=ledger.known, sampled=ledger.sampled)


def reconciliations(
    run_folder: RunFolder,
    run: str,
    versions: Mapping[str, int],
    snapshots: Mapping[str, bytes],
    sampled: Mapping[str, str] | None = None,
) -> dict[str, Reconciliation]:
    """By adapter, for a trainer that resumes from ``versions`` with its checkpoints' ledger ``snapshots``.

    ``sampled`` is that of `plan`, by adapter. Raises RolloutError where neither the ledger nor a snapshot states what
    was consumed.
    """
    with _copied(run_folder.ledger) as copy, contextlib.closing(LedgerFile(copy, run)) as file:
        plans = {}
        for name, version in versions.items():
            snapshot = decode_snapshot(snapshots.get(name, b""), name)
            head = file.read_head(name)
            # With the prompt order that was written: the present prompts are not read.
            order = head.order if head is not None else snapshot.order if snapshot else ""
            plans[name] = plan_for(Ledger(file, name, order, (sampled or {}).get(name, "")), version, snapshot)
        return plans


class GroupCounts(msgspec.Struct, frozen=True):
    """An adapter's groups by state, and the dropped ones by reason."""

    states: dict[GroupState, int]
    dropped: dict[str, int]


def write_counts(run_folder: RunFolder, file: LedgerFile) -> None:
    """Write the counts of the adapters that have not left for `group_counts`, if the disk has room."""
    counts = {name: GroupCounts(ledger.counts, ledger.drop_reasons) for name, ledger in file.ledgers.items()}
    with contextlib.suppress(OSError):  # the ledger itself names a full disk
        write_file(run_folder.group_counts, msgspec.json.encode(counts))


def group_counts(run_folder: RunFolder, *, ended: bool) -> dict[str, GroupCounts]:
    """By adapter: of a running run as its controller wrote them last, else counted in a copy of the ledger.

    The ledger has adapters that have left, too, and all trajectories: it is copied only once the run has ``ended``.
    Raises RolloutError where the ledger is of another version or cannot be copied.
    """
    if not ended:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(run_folder.group_counts.read_bytes(), type=dict[str, GroupCounts])
    if not ended or not run_folder.ledger.is_file():
        return {}
    with _copied(run_folder.ledger) as copy, contextlib.closing(sqlite3.connect(copy)) as db:
        try:
            [version] = db.execute("SELECT schema_version FROM meta").fetchone()
            if version != SCHEMA_VERSION:
                raise RolloutError(f"{run_folder.ledger} has schema {version}, not {SCHEMA_VERSION}")
            heads = db.execute("SELECT adapter, head FROM adapters ORDER BY adapter").fetchall()
            found = {name: counted(db.execute, name, msgspec.json.decode(h, type=Head)) for name, h in heads}
            return {name: GroupCounts(*counts) for name, counts in found.items()}
        except sqlite3.Error as error:
            raise RolloutError(f"{run_folder.ledger} cannot be read: {error}") from error


@contextlib.contextmanager
def _copied(ledger: Path) -> Iterator[Path]:
    """A copy of file and log as of one moment. A running controller has the file locked, so SQLite cannot copy it."""
    files = [ledger.with_name(ledger.name + suffix) for suffix in ("", "-wal")]
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory() as folder:
            before = _stats(files)
            for path in before:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy(path, folder)
            if _stats(files) == before:
                yield Path(folder) / ledger.name
                return
        time.sleep(PAUSE_S)
    raise RolloutError(f"{ledger} is being written: the run has not ended (fix: retry when it has)")


def _stats(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    stats = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            stats[path] = (stat.st_size, stat.st_mtime_ns)
    return stats
