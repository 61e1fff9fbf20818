"""Write checkpoints: folders, order of the writes, deletion of old checkpoints.

    <run folder>/checkpoints/<adapter>/
        v000012/  rank-0000.safetensors  rank-0001.safetensors  manifest.json
                  critic-rank-0000.safetensors ...    where the adapter has a critic or a reference
        v000013/  ...
        newest                  the last complete version, so that the loss of its folder is detected
        .v000014.4f1c9a2b/      in progress, or a crash leftover: removed at the next start
        broken-v000013/         damaged; a start set it aside and used an older checkpoint

A checkpoint gets its name only when all its files are durable. It is never changed after its step is committed.

A ``Saver`` per trainer rank writes them in the background of training::

    main thread                     saver thread of every rank
    copy the state
    save ------------------------>  files -> fsync -> manifest -> rename -> fsync      `CheckpointStore`
    publish, next batch ...         rank 0: commit the step, delete old checkpoints
    join before a later learn <---  ended

What a client saves (``label``) is written in the same way and in the same order, and is no checkpoint.
"""

from __future__ import annotations

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from areal_lora.checkpoint import state as saved
from areal_lora.config.sections.run import CheckpointConfig
from areal_lora.errors import CheckpointError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached, watched_thread
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef

if TYPE_CHECKING:  # the launcher reads checkpoints without torch
    from areal_lora.distributed.store import Exchange

NEWEST_FILE = "newest"
BROKEN_PREFIX = "broken-"
_VERSION = re.compile(r"v(\d{6,})")

log = get_logger(__name__)


def version_folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def versions_in(root: Path) -> list[int]:
    """Return the versions with a folder below ``root``, complete or not, ascending."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)))


def newest_in(checkpoints: Path) -> dict[str, int]:
    """Return the newest version of each adapter with one in ``checkpoints``, complete or not."""
    roots = list(checkpoints.iterdir()) if checkpoints.is_dir() else []
    return {root.name: versions[-1] for root in roots if (versions := versions_in(root))}


def leftovers_in(root: Path) -> list[Path]:
    """Return the unfinished files and folders of processes that died."""
    return sorted(root.glob(".*")) if root.is_dir() else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's data of a checkpoint. ``manifest`` lacks files and random states; that of rank 0 is used.

    ``companions`` are by role.
    """

    ref: AdapterRef
    state: saved.AdapterState
    companions: Mapping[str, saved.AdapterState] = field(default_factory=dict)
    random: saved.RankRandom
    manifest: saved.Manifest


class _Outcome(msgspec.Struct, frozen=True):
    """Broadcast of rank 0 to all ranks: what an action returned, or the reason of its failure."""

    value: str = ""
    failure: str = ""


class _Part(msgspec.Struct, frozen=True):
    """The files that a rank has written, none for a rank without tensors."""

    entries: tuple[saved.FileEntry, ...]
    random: saved.RankRandom
    failure: str = ""


class CheckpointStore:
    """One rank's part in writing the checkpoints of a run. Not thread-safe."""

    def __init__(self, run_folder: RunFolder, exchange: Exchange, disk: saved.Disk) -> None:
        self._run_folder, self._exchange, self._disk = run_folder, exchange, disk

    def write(self, snapshot: Snapshot, label: str = "") -> int:
        """Write one durable checkpoint and return its size in bytes. Collective over all ranks.

        With ``label`` it is the saved state of that name of its adapter, in place of what is there.

        Raises CheckpointError on every rank, with path and reason, if a rank could not write; PublishError
        if a rank is lost.
        """
        name, version = snapshot.ref.name, snapshot.ref.version
        to = version_folder(self._run_folder.adapter_checkpoints(name), version)
        if label:
            to = self._run_folder.saved_state(name, label)
        scratch = Path(self._on_rank0(to, lambda: self._open(to)))
        parts = [
            msgspec.msgpack.decode(raw, type=_Part)
            for raw in self._exchange.all_gather_bytes(msgspec.msgpack.encode(self._write_own(snapshot, scratch)))
        ]
        self._on_rank0(scratch, lambda: self._close(snapshot, scratch, to, parts, label))
        return sum(entry.nbytes for part in parts for entry in part.entries)

    def _on_rank0(self, path: Path, act: Callable[[], str]) -> str:
        """What ``act`` returns on rank 0. Raises CheckpointError on every rank if it or the disk fails there."""
        mine = None
        if self._exchange.rank == 0:
            try:
                outcome = _Outcome(value=act())
            except (CheckpointError, OSError) as e:
                outcome = _Outcome(failure=_reason(e, path) if isinstance(e, OSError) else str(e))
            mine = msgspec.msgpack.encode(outcome)
        outcome = msgspec.msgpack.decode(self._exchange.broadcast_bytes(mine), type=_Outcome)
        if outcome.failure:
            raise CheckpointError(outcome.failure)
        return outcome.value

    def _open(self, to: Path) -> str:
        root = to.parent
        for folder in (root.parent, root):
            if not folder.is_dir():
                self._disk.make_folder(folder)
                self._disk.fsync_folder(folder.parent)
        scratch = root / f".{to.name}.{secrets.token_hex(4)}"
        self._disk.make_folder(scratch)
        return str(scratch)

    def _write_own(self, snapshot: Snapshot, scratch: Path) -> _Part:
        entries: list[saved.FileEntry] = []
        for role, state in {"": snapshot.state, **snapshot.companions}.items():
            if not state.shapes:
                continue
            path = scratch / saved.rank_file(self._exchange.rank, role)
            try:
                entries.append(self._disk.write(path, saved.file_parts(state)))
            except OSError as e:
                return _Part(entries=(), random=snapshot.random, failure=_reason(e, path))
        return _Part(entries=tuple(entries), random=snapshot.random)

    def _close(self, snapshot: Snapshot, scratch: Path, to: Path, parts: list[_Part], label: str) -> str:
        """Write the manifest, then rename the folder (rank 0)."""
        failures = "; ".join(part.failure for part in parts if part.failure)
        root = scratch.parent
        try:
            reached("trainer.checkpoint.files_written")
            if failures:
                raise CheckpointError(failures)
            manifest = msgspec.structs.replace(
                snapshot.manifest,
                files=tuple(entry for part in parts for entry in part.entries),
                random=tuple(part.random for part in parts),
                written_s=time.time(),
            )
            self._disk.write(scratch / saved.MANIFEST_FILE, [saved.encode_manifest(manifest)])
            self._disk.fsync_folder(scratch)
            reached("trainer.checkpoint.manifest_written")
            self._name(scratch, to)
            reached("trainer.checkpoint.renamed")
            if not label:
                newest = root / f".{NEWEST_FILE}.{secrets.token_hex(4)}"
                self._disk.write(newest, [f"{snapshot.ref.version}\n".encode()])
                self._disk.rename(newest, root / NEWEST_FILE)
        except (CheckpointError, OSError):
            self._clear(scratch)
            raise
        return ""

    def _name(self, scratch: Path, to: Path) -> None:
        """Give the finished folder its name. What had the name stays if that fails, and is beside it after a crash.

        A checkpoint has the name if it was written before, and what followed its renaming failed.
        """
        aside = scratch.with_name(f".{to.name}.{secrets.token_hex(4)}") if to.is_dir() else None
        if aside is not None:
            self._disk.rename(to, aside)
        try:
            reached("trainer.checkpoint.replacing")
            self._disk.rename(scratch, to)
        except OSError:
            if aside is not None:
                self._disk.rename(aside, to)
            raise
        self._disk.fsync_folder(to.parent)
        if aside is not None:
            self._clear(aside)

    def _clear(self, scratch: Path) -> None:
        with suppress(OSError):  # the next start removes it as a leftover
            self._disk.remove(scratch)

    def delete_old(self, snapshot: Snapshot, config: CheckpointConfig) -> list[int]:
        """Delete what `plan_deletions` selects, after ``snapshot`` is written (rank 0). Raises OSError."""
        root = self._run_folder.adapter_checkpoints(snapshot.ref.name)
        present = versions_in(root)
        whole = (version for version in reversed(present) if looks_whole(version_folder(root, version)))
        sound = list(islice(whole, config.keep_last))
        manifest = snapshot.manifest
        old = plan_deletions(present, sound, manifest.evaluations, manifest.awaited)
        for version in old:
            self._disk.remove(version_folder(root, version))
        return old


def plan_deletions(
    present: Collection[int],
    sound: Collection[int],
    evaluations: Mapping[int, saved.Evaluation],
    awaited: Collection[int],
) -> list[int]:
    """Select the versions of ``present`` to delete. ``sound`` are the newest that look complete, at most ``keep_last``.

    Kept in addition: the best of ``evaluations`` (see `best_version`), and the
    versions ``awaited``, because their evaluation is pending. While fewer than two are sound, nothing is deleted.
    No version from the second newest sound one on is deleted.
    """
    if len(sound) < 2:
        return []
    known = {version: evaluations[version] for version in present if version in evaluations}
    kept = {saved.best_version(known), *awaited, *sound}
    second_newest = sorted(sound)[-2]
    return [version for version in sorted(present) if version < second_newest and version not in kept]


def looks_whole(folder: Path) -> bool:
    """Whether the manifest is readable and all files have their sizes. `recover.verify` checks the contents."""
    try:
        manifest = saved.read_manifest(folder)
        return all((folder / entry.name).stat().st_size == entry.nbytes for entry in manifest.files)
    except (OSError, CheckpointError):
        return False


def _reason(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


WAIT_LINE_S = 10.0
MAX_FAILURES = 3
"""Failed checkpoints of an adapter in a row that a run survives: a full or absent disk for some steps."""


@dataclass(slots=True, kw_only=True)
class CheckpointSave:
    """One checkpoint in progress at one rank, of the adapter after ``step`` optimizer steps.

    ``label`` is that of a client's saved state, empty for a checkpoint. ``reason`` is that of a ``failed`` one.
    ``ended_s`` is time.monotonic.
    """

    ref: AdapterRef
    step: int = 0
    label: str = ""
    ended: threading.Event = field(default_factory=threading.Event)
    failed: bool = False
    reason: str = ""
    ended_s: float = 0.0
    write_s: float = 0.0
    nbytes: int = 0
    error: BaseException | None = None


class Saver:
    """Write one checkpoint at a time. Rank 0 passes ``committed``, which is called once a checkpoint is durable.

    ``kept``, of rank 0 as well, is called when a client's saved state is durable or has failed.

    Only the saver's thread uses the exchange of ``store``.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        config: CheckpointConfig,
        committed: Callable[[AdapterRef], None] | None,
        kept: Callable[[CheckpointSave], None] | None = None,
    ) -> None:
        self._store, self._config, self._committed, self._kept = store, config, committed, kept
        self._failures: dict[str, int] = {}
        self._pending: dict[str, CheckpointSave] = {}
        self._jobs: queue.SimpleQueue[tuple[CheckpointSave, Snapshot] | None] = queue.SimpleQueue()
        self._thread = watched_thread("saver", self._work)

    def start(self, snapshot: Snapshot, label: str = "") -> CheckpointSave:
        """Start a save, which `write` continues. At most one per adapter is in progress: call ``join`` first."""
        assert snapshot.ref.name not in self._pending, "join the save before"
        job = self._pending[snapshot.ref.name] = CheckpointSave(ref=snapshot.ref, step=snapshot.state.step, label=label)
        return job

    def write(self, job: CheckpointSave, snapshot: Snapshot) -> None:
        """Write ``snapshot``, whose copies are complete. Collective."""
        self._jobs.put((job, snapshot))

    def abandon(self, adapter: str) -> None:
        """Forget the adapter's save, of which nothing is written yet."""
        del self._pending[adapter]

    def pending(self, adapter: str) -> CheckpointSave | None:
        """The adapter's save that was not joined yet (not collective)."""
        return self._pending.get(adapter)

    def join(self, adapter: str) -> CheckpointSave | None:
        """Wait for the adapter's save in progress, if any, and return it.

        Raises CheckpointError on every rank when more than `MAX_FAILURES` saves in a row have failed. Raises the
        error of the saver thread otherwise: PublishError (a rank is lost), RolloutError (the controller is lost).
        """
        job = self._pending.pop(adapter, None)
        if job is None:
            return None
        waited_s = 0.0
        while not job.ended.wait(WAIT_LINE_S):
            waited_s += WAIT_LINE_S
            log.info("waiting for the checkpoint of %s to be written and committed since %.0f s", job.ref, waited_s)
        if job.error is not None:
            raise job.error
        if job.label:
            return job
        self._failures[adapter] = self._failures.get(adapter, 0) + 1 if job.failed else 0
        if self._failures[adapter] > MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures[adapter]} checkpoints of {adapter!r} in a row could not be written, "
                f"at most {MAX_FAILURES} may fail; the log has path and reason of each "
                "(fix: free disk space or repair the disk, then start the run again)"
            )
        return job

    def close(self) -> None:
        """End the thread after the save in progress."""
        self._jobs.put(None)
        self._thread.join()

    # ------------------------------------------------------------ saver thread

    def _work(self) -> None:
        while (next_one := self._jobs.get()) is not None:
            job, snapshot = next_one
            try:
                self._run(job, snapshot)
            except Exception as e:  # fault boundary: `join` raises it in the main thread  # noqa: BLE001
                job.error = e
            job.ended_s = time.monotonic()
            job.ended.set()
            del next_one, snapshot  # free the memory of an adapter state while the thread waits

    def _run(self, job: CheckpointSave, snapshot: Snapshot) -> None:
        began_s = time.monotonic()
        try:
            job.nbytes = self._store.write(snapshot, job.label)
        except CheckpointError as e:
            job.failed, job.reason = True, str(e)
            what = f"state {job.label!r}" if job.label else "checkpoint"
            log.warning("the %s of %s could not be written: %s; older ones are kept", what, job.ref, e)
        finally:
            job.write_s = time.monotonic() - began_s
        if job.label:
            if self._kept is not None:
                self._kept(job)
            return
        if job.failed or self._committed is None:
            return
        self._committed(job.ref)
        try:
            if deleted := self._store.delete_old(snapshot, self._config):
                log.debug("deleted checkpoints of %s: %s", job.ref.name, deleted)
        except OSError as e:
            log.warning("old checkpoints of %s could not be deleted: %s: %s", job.ref.name, e.filename, e.strerror)
