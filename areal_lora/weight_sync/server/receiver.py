"""Stage a version on one worker: receive in the background, write into an inactive slot, verify, report.

    wire     bucket 0 | bucket 1 | bucket 2 | trailer
    thread            `-> fingerprint 0, write 0 | fingerprint 1, write 1 | ... | compare -> staged

No request uses a slot that is being written, so buckets are written as they arrive, directly from the group's memory: a
small ring of staging buffers, or the source's own memory on the same machine. A version is reported as staged only if
every fingerprint equals the source's. The thread runs while the same process generates: it uses compiled loops without
the GIL and no OpenMP, which would take the cores from the model.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from areal_lora.errors import ManifestError, PublishError, RefusalReason, undo_on_error
from areal_lora.obs.trace import Spans
from areal_lora.platforms.device import select_device
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, AdapterSpec, AdapterStructure, ShardManifest
from areal_lora.weight_sync.kernels import Marks
from areal_lora.weight_sync.layout import AdapterLayout, Shape
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup, close_all, join_group
from areal_lora.weight_sync.link.inbox import BucketBytes
from areal_lora.weight_sync.manifest import ShardKeys, check_layout, check_successor, shard_keys
from areal_lora.weight_sync.messages import SourceEndpoint, StageResult
from areal_lora.weight_sync.server.reception import GroupLinks, Reception

Plan = TypeVar("Plan")


class SlotWriter(Protocol[Plan]):
    """Write into the slots of an engine. Runs in the receiver's thread; must not use OpenMP.

    ``on_device``: buckets that arrive on the device are read there; else they come to the host.
    """

    on_device: bool

    def expected(self, structure: AdapterStructure) -> dict[str, Shape]:
        """Map every full name the model serves to its shape in an adapter of ``structure``, the same on all workers.

        A worker that holds a part (tensor or expert parallel) lists all names and selects its part in ``plan``. Raises
        ManifestError (``rank``, ``targets``) for a structure the engine cannot serve.
        """

    def plan(self, layout: AdapterLayout) -> Sequence[Plan]:
        """Plan, per shard, which part of each tensor this worker copies where in slot 0; once per layout.

        In `TensorBlocks` ``src`` counts bytes from the shard's start; aliases are further blocks of a wire tensor;
        ``scale`` is ``alpha / rank`` on lora_B and 1 on lora_A; no other code folds it in.
        """

    def prepare(self, slot: int, layout: AdapterLayout) -> None:
        """Clear the part of an inactive slot that ``layout`` does not overwrite."""

    def write(self, plan: Plan, slot: int, arrived: BucketBytes, first: int, last: int, marks: Marks) -> None:
        """Store tensors [first, last) of a shard, with which ``arrived`` starts, and measure them."""

    def flush(self, slot: int) -> None:
        """Complete all writes: after this the slot can be activated."""

    def zero(self, slot: int) -> None:
        """Clear an inactive slot."""


@dataclass(slots=True)
class _KnownLayout:
    """A layout this worker has received. ``plans`` is None until the layout is checked against the engine."""

    layout: AdapterLayout
    plans: Sequence[Any] | None = None


class AdapterReceiver:
    """Join every source's group and stage versions, one at a time.

    ``declared`` are the adapters of the configuration by name: a publish that differs is refused. Any other adapter is
    declared by its first accepted version. ``secret`` is the run's, ``bind`` this machine's address towards the
    sources, ``device`` the worker's compute device. The ``layouts`` used last are kept, a few megabytes each. ``keys``
    are those of the run's shards, and follow from ``secret`` except on a remote server.
    """

    def __init__(
        self,
        writer: SlotWriter[Any],
        *,
        run: str,
        secret: str,
        base_digest: str,
        on_staged: Callable[[StageResult], None],
        declared: Mapping[str, AdapterSpec] | None = None,
        bind: str = "127.0.0.1",
        device: torch.device = CPU,
        layouts: int = 1,
        keys: ShardKeys | None = None,
    ) -> None:
        self._writer, self._on_staged, self._secret = writer, on_staged, secret
        self._keys = keys or shard_keys(secret)
        self._run, self._base_digest, self._bind, self._device = run, base_digest, bind, device
        self._declared: dict[str, AdapterStructure] = {n: s.bare() for n, s in (declared or {}).items()}
        self._current: dict[str, ShardManifest] = {}
        self._previous: dict[str, ShardManifest | None] = {}
        self._links = GroupLinks()
        self._known: dict[str, _KnownLayout] = {}  # the last used one last
        self._layouts = layouts
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()

    def join(
        self,
        endpoints: Sequence[SourceEndpoint] | None,
        rank: int,
        timeout_s: float,
        below: Sequence[SourceEndpoint] | None = None,
    ) -> None:
        """Leave the previous groups and join every source's group as ``rank``, all at once. Blocks.

        Likewise the groups ``below``, to which this worker sends on what arrives. None keeps the groups as they are.
        Raises PublishError if a group is not complete in time.
        """
        deadline = time.monotonic() + timeout_s
        old = self._links
        kept = self._links = GroupLinks(
            {} if endpoints is not None else old.above, {} if below is not None else old.below
        )
        close_all([group for group in old.groups if group not in kept.groups])
        self._await_idle(timeout_s)

        def join(e: SourceEndpoint, rank: int) -> BroadcastGroup:
            select_device(self._device)
            return join_group(e, rank, self._bind, deadline - time.monotonic(), self._secret, self._device)

        with ThreadPoolExecutor(max(1, len(endpoints or ()) + len(below or ())), thread_name_prefix="join") as pool:
            joins = {e.source: pool.submit(join, e, rank) for e in endpoints or ()}
            sends = {e.source: pool.submit(join, e, 0) for e in below or ()}
        self._links = GroupLinks(kept.above | _made(joins), kept.below | _made(sends))
        with undo_on_error(partial(self._leave, 0.0)):
            for made in (*joins.values(), *sends.values()):
                made.result()

    def start(self, manifest: ShardManifest, layout: AdapterLayout | None, slot: int | None, timeout_s: float) -> None:
        """Start staging ``manifest`` into ``slot`` and return; ``on_staged`` is called exactly once.

        The first receives are posted before this returns: the sources send only after that. The staging thread shares
        the cores and priority of the first caller's thread. ``layout`` may be None if this worker has received it
        before. Without a slot (none is free, or the version is active already) the transfer is drained and refused.
        Raises PublishError if the previous ``start`` is in progress or no group is joined.
        """
        if not self._idle.is_set():
            raise PublishError(f"{manifest.ref}: the receiver is still busy with the previous version")
        select_device(self._device)
        links = self._links
        if not links.above:
            raise PublishError(f"{manifest.ref}: the receiver is in no group; the trainer must call /admin/join first")
        spans = Spans()
        started: tuple[_KnownLayout, Reception] | Exception
        try:
            known = self._layout(manifest, layout)
            deadline = time.monotonic() + timeout_s
            started = known, Reception(known.layout, links, deadline, spans, self._keys, self._writer.on_device)
        except Exception as e:  # fault boundary: a version's errors are reported by ``on_staged``, whatever they are  # noqa: BLE001
            started = e
        if self._thread is None:
            self._thread = watched_thread("stage", self._stage_all)
        self._idle.clear()
        self._work.put(partial(self._stage, manifest, slot, links, started, spans))

    def discard(self, ref: AdapterRef) -> None:
        """Forget a staged version that the server did not activate: it may be published again."""
        if (current := self._current.get(ref.name)) is not None and current.ref == ref:
            if (previous := self._previous.get(ref.name)) is not None:
                self._current[ref.name] = previous
            else:
                del self._current[ref.name]

    def forget(self, name: str) -> None:
        """Forget adapter ``name``, also as declared: it may be published again. Call it while nothing is staged."""
        for known in (self._current, self._previous, self._declared):
            known.pop(name, None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave all groups; a transfer in progress fails and is reported. No ``start`` may follow."""
        self._work.put(None)
        self._leave(timeout_s)

    def _leave(self, timeout_s: float) -> None:
        self._links.close()
        self._links = GroupLinks()
        self._await_idle(timeout_s)

    def _await_idle(self, timeout_s: float) -> None:
        if not self._idle.wait(timeout_s):
            raise PublishError("the receiver's transfer did not end in time; restart the server")

    def _stage_all(self) -> None:
        select_device(self._device)
        while (stage := self._work.get()) is not None:
            stage()
            del stage  # or it would keep the memory and connections of groups that the receiver leaves meanwhile

    def _stage(
        self,
        manifest: ShardManifest,
        slot: int | None,
        links: GroupLinks,
        started: tuple[_KnownLayout, Reception] | Exception,
        spans: Spans,
    ) -> None:
        written, digest, reason, detail = False, "", "", ""
        try:
            if isinstance(started, Exception):
                raise started
            known, reception = started
            with undo_on_error(reception.drain):  # the groups stay in step, for the next version of any adapter
                with spans.span("verify"):
                    plans, place = self._check(manifest, known, slot, links)
                written = True
                with spans.span("write"):
                    self._writer.prepare(place, known.layout)
            digest = reception.receive(
                manifest.ref, lambda shard, *part: self._writer.write(plans[shard], place, *part)
            )
            with spans.span("write"):
                self._writer.flush(place)
            reception.check_time(manifest.ref)
            name = manifest.ref.name
            self._previous[name] = self._current.get(name)
            self._current[name] = manifest
            self._declared.setdefault(name, known.layout.structure)
        except ManifestError as e:
            reason, detail = e.reason, e.detail
        except PublishError as e:
            links.close()
            reason, detail = RefusalReason.WIRE, str(e)
        except Exception as e:  # fault boundary: whatever the engine raises must not leave the publish unanswered  # noqa: BLE001
            reason, detail = RefusalReason.WRITE, repr(e)
        if isinstance(started, Exception):  # nothing was received, and how the bytes are cut may not be known
            links.close()
        if reason and written and slot is not None:
            self._writer.zero(slot)
        self._idle.set()
        self._on_staged(
            StageResult(
                ref=str(manifest.ref),
                slot=-1 if slot is None else slot,
                ok=not reason,
                reason=reason,
                detail=detail,
                digest="" if reason else digest,
                **{f"{phase}_s": seconds for phase, seconds in spans.seconds.items()},
            )
        )

    def _layout(self, manifest: ShardManifest, layout: AdapterLayout | None) -> _KnownLayout:
        """Find the layout a manifest names. A new layout is kept even if ``_check`` refuses it afterwards."""
        known = self._known.pop(manifest.layout, None)
        if layout is not None and layout.digest != manifest.layout:
            raise ManifestError(RefusalReason.MALFORMED, f"{manifest.ref} names another layout than it brings")
        if known is None:
            if layout is None:
                text = f"{manifest.ref} uses a layout that this server does not hold"
                raise ManifestError(RefusalReason.UNKNOWN_LAYOUT, text)
            while len(self._known) >= self._layouts:
                del self._known[next(iter(self._known))]
            known = _KnownLayout(layout)
        self._known[manifest.layout] = known
        return known

    def _check(
        self, manifest: ShardManifest, known: _KnownLayout, slot: int | None, links: GroupLinks
    ) -> tuple[Sequence[Any], int]:
        """Check the version and return each shard's plan and the slot. Raises ManifestError."""
        name, layout, held = manifest.ref.name, known.layout, self._current.get(manifest.ref.name)
        current = held.ref if held is not None and manifest.shares(held.ref, held.session) else None
        check_successor(manifest, layout.structure, current, self._run, self._base_digest, self._declared.get(name))
        if known.plans is None:
            check_layout(layout, self._writer.expected(layout.structure))
            known.plans = self._writer.plan(layout)
        sources = {s.source for s in layout.shards}
        if not sources <= links.above.keys():
            text = f"shards of source ranks {sorted(sources)}, joined groups {sorted(links.above)}"
            raise ManifestError(RefusalReason.MALFORMED, text)
        if slot is None:
            raise ManifestError(RefusalReason.SLOT, f"no free adapter slot for {manifest.ref}")
        return known.plans, slot


def _made(joins: Mapping[int, Future[BroadcastGroup]]) -> dict[int, BroadcastGroup]:
    return {source: made.result() for source, made in joins.items() if made.exception() is None}
