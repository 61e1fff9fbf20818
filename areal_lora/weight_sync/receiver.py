"""Worker side of a publish: receive in the background, verify all, then write into an inactive slot.

The thread may run while the same process generates, so it uses numpy and hashlib only:
OpenMP work in a second thread takes the cores from the model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from areal_lora.errors import ManifestError, PublishError
from areal_lora.types import AdapterRef, AdapterSpec, ShardManifest
from areal_lora.weight_sync.buckets import StagingBuffer, as_float32, read_shard, verify_shard
from areal_lora.weight_sync.digests import manifest_digest
from areal_lora.weight_sync.groups import BroadcastGroup, join_group
from areal_lora.weight_sync.manifest import Refusal, check_cover, check_successor
from areal_lora.weight_sync.transport import SourceEndpoint, StageResult

_Groups = Mapping[int, BroadcastGroup]  # by source rank


class SlotWriter(Protocol):
    """What an engine provides. Called from the receiver's thread; must not use OpenMP (numpy is fine)."""

    def expected(self, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Every full name the model serves with its shape at ``spec.rank``, the same on all workers.

        A worker that holds a part (tensor or expert parallel) lists all names too and takes
        its part in ``write``. Raises ManifestError (``rank``, ``targets``) for a specification
        the engine cannot serve.
        """
        ...

    def write(self, slot: int, name: str, tensor: np.ndarray, scale: float) -> None:
        """Store ``tensor * scale`` in ``slot``.

        ``name`` is a full name (aliases are expanded). ``tensor`` is float32, C-contiguous,
        read-only by convention and valid only during the call (bfloat16 is widened exactly
        before). ``scale`` is ``alpha / rank`` for lora_B and 1.0 for lora_A: this is the one
        place where it is folded in.
        """
        ...

    def zero(self, slot: int) -> None:
        """Clear an inactive slot."""
        ...


class AdapterReceiver:
    """Takes part in every source's group and stages versions, one at a time.

    ``declared`` holds the adapters of the configuration by name: a publish that differs from
    its declaration is refused. Without a declaration the first accepted version declares.
    ``bind`` is this machine's address towards the sources.
    """

    def __init__(
        self, writer: SlotWriter, *, run: str, base_digest: str, on_staged: Callable[[StageResult], None],
        declared: Mapping[str, AdapterSpec] | None = None, bind: str = "127.0.0.1",
    ) -> None:
        self._writer, self._on_staged = writer, on_staged
        self._run, self._base_digest, self._bind = run, base_digest, bind
        self._specs: dict[str, AdapterSpec] = dict(declared or {})
        self._current: dict[str, AdapterRef] = {}
        self._previous: dict[str, AdapterRef | None] = {}
        self._groups: dict[int, BroadcastGroup] = {}
        self._staging: dict[int, StagingBuffer] = {}
        self._thread: threading.Thread | None = None

    def join(self, endpoints: Sequence[SourceEndpoint], rank: int, timeout_s: float) -> None:
        """Become member ``rank`` of every source's group, leaving earlier groups. Blocks.

        Raises PublishError if a group is not complete in time.
        """
        deadline = time.monotonic() + timeout_s
        self._leave(timeout_s)
        try:
            for e in sorted(endpoints, key=lambda e: e.source):
                self._groups[e.source] = join_group(e, rank, self._bind, deadline - time.monotonic())
        except PublishError:
            self._leave(0.0)
            raise

    def begin(self, manifest: ShardManifest, slot: int | None, deadline_s: float) -> None:
        """Start staging ``manifest`` into ``slot``; returns at once, ``on_staged`` is called exactly once.

        Without a slot (none is free) the transfer is taken off the wire and refused.
        Raises PublishError if the last ``begin`` is still under way or no group was joined.
        """
        if self._thread is not None and self._thread.is_alive():
            raise PublishError(f"{manifest.ref}: the receiver is still busy with the version before")
        if not self._groups:
            raise PublishError(f"{manifest.ref}: the receiver is in no group; the trainer must call /admin/join first")
        self._thread = threading.Thread(
            target=self._stage, args=(manifest, slot, self._groups, time.monotonic() + deadline_s),
            name=f"stage-{manifest.ref}", daemon=True,
        )
        self._thread.start()

    def discard(self, ref: AdapterRef) -> None:
        """Forget a staged version that the server did not activate, so that it may be published again."""
        if self._current.get(ref.name) == ref:
            previous = self._previous.get(ref.name)
            if previous is None:
                del self._current[ref.name]
            else:
                self._current[ref.name] = previous

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave all groups; a transfer under way fails and is reported."""
        self._leave(timeout_s)

    def _leave(self, timeout_s: float) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise PublishError("the receiver's transfer under way did not end; restart the server")

    def _stage(
        self, manifest: ShardManifest, slot: int | None, groups: _Groups, deadline: float
    ) -> None:
        clock = _Clock()
        try:
            place = self._receive(manifest, slot, groups, deadline, clock)
            self._write(manifest, place, clock)
            self._accept(manifest)
            result = clock.result(manifest.ref, slot, digest=manifest_digest(manifest))
        except ManifestError as e:
            result = clock.result(manifest.ref, slot, reason=e.reason, detail=e.detail)
        except PublishError as e:
            self._staging = {}  # a late operation may still write into the old buffers
            for group in groups.values():
                group.close()  # tells the other members at once; the trainer joins anew
            result = clock.result(manifest.ref, slot, reason=Refusal.WIRE, detail=str(e))
        except Exception as e:  # fault boundary: an engine's writer must not leave the publish unanswered
            result = clock.result(manifest.ref, slot, reason=Refusal.WRITE, detail=repr(e))
        self._on_staged(result)

    def _receive(
        self, manifest: ShardManifest, slot: int | None, groups: _Groups, deadline: float, clock: _Clock
    ) -> int:
        """All shards into staging, each verified while the later ones travel; the slot they may go to."""
        shards = {s.source: s for s in manifest.shards}
        try:
            with clock.phase("verify"):
                place = self._check(manifest, slot, groups)
        except ManifestError:
            with clock.phase("wire"):
                for source in sorted(groups.keys() & shards.keys()):
                    groups[source].drain(shards[source].nbytes, deadline)
            raise
        transfers = {}
        for source in sorted(shards):
            flat = self._staging.setdefault(source, StagingBuffer()).sized(shards[source].nbytes)
            transfers[source] = groups[source].start(torch.from_numpy(flat), deadline)
        refused: ManifestError | None = None
        for source, transfer in transfers.items():
            with clock.phase("wire"):
                transfer.wait()
            try:
                with clock.phase("verify"):
                    verify_shard(self._staging[source].sized(shards[source].nbytes), shards[source])
            except ManifestError as e:
                refused = refused or e  # the later shards must still be taken off the wire
        if refused is not None:
            raise refused
        return place

    def _check(self, manifest: ShardManifest, slot: int | None, groups: _Groups) -> int:
        name = manifest.ref.name
        check_successor(manifest, self._current.get(name), self._run, self._base_digest, self._specs.get(name))
        check_cover(manifest, self._writer.expected(manifest.spec))
        sources = {s.source for s in manifest.shards}
        if sources != groups.keys():
            raise ManifestError(
                Refusal.MALFORMED, f"shards of source ranks {sorted(sources)}, joined groups {sorted(groups)}"
            )
        if slot is None:
            raise ManifestError(Refusal.SLOT, f"no free adapter slot for {manifest.ref}")
        return slot

    def _write(self, manifest: ShardManifest, slot: int, clock: _Clock) -> None:
        """Only reached when every byte was verified."""
        names: dict[str, list[str]] = {}
        for full, wire in manifest.aliases.items():
            names.setdefault(wire, []).append(full)
        with clock.phase("write"):
            self._writer.zero(slot)
            try:
                for shard in manifest.shards:
                    for meta, view in read_shard(self._staging[shard.source].sized(shard.nbytes), shard):
                        tensor = as_float32(view)
                        for name in (meta.name, *names.get(meta.name, ())):
                            self._writer.write(slot, name, tensor, manifest.spec.scale if ".lora_B." in name else 1.0)
            except Exception:  # fault boundary: leave no half-written slot, whatever the engine raised
                self._writer.zero(slot)
                raise

    def _accept(self, manifest: ShardManifest) -> None:
        name = manifest.ref.name
        self._previous[name] = self._current.get(name)
        self._current[name] = manifest.ref
        self._specs.setdefault(name, manifest.spec)


class _Clock:
    """Seconds per phase of one staging."""

    def __init__(self) -> None:
        self._spent = {"wire": 0.0, "verify": 0.0, "write": 0.0}
        self._name, self._since = "", 0.0

    def phase(self, name: str) -> _Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._spent[self._name] += time.perf_counter() - self._since

    def result(
        self, ref: AdapterRef, slot: int | None, *, digest: str = "", reason: str = "", detail: str = ""
    ) -> StageResult:
        return StageResult(
            ref=str(ref), slot=-1 if slot is None else slot, ok=not reason, reason=reason, detail=detail, digest=digest,
            wire_s=self._spent["wire"], verify_s=self._spent["verify"], write_s=self._spent["write"],
        )
