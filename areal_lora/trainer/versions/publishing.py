"""Publish adapter versions to the rollout servers while training continues.

``publish`` packs the adapter and returns; transfer, activation, probe and the announcement to
the controller happen in the publisher's thread. ``join`` waits for the previous publish and
raises its errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from areal_lora.algorithms.merging import MAX_LOST, CastLoss
from areal_lora.data.collate import split_rows
from areal_lora.engine.base import DTYPES
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.transfer_plan import MEASURED_ROWS
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.trainer.adapter import Adapter
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.decisions import PublishReport
from areal_lora.weight_sync.trainer.publish_job import Pack, PublishJob
from areal_lora.weight_sync.trainer.publisher import Publisher

log = get_logger(__name__)

Scores = list[list[float]]  # log-probabilities of the probe, one row per sequence


@dataclass(slots=True, kw_only=True)
class _PublishState:
    """State of one adapter between publishes. ``handle`` is the publish in progress.

    ``base`` are the base's scores of the probe, ``noise`` the largest difference between two computations of them.
    ``scored`` are the trainer's scores of ``newest``, the version published last.
    """

    layout: AdapterLayout
    base: Scores
    noise: float
    newest: AdapterRef | None = None
    scored: Scores | None = None
    handle: PublishJob | None = None


class AdapterPublishing:
    """One per rank; all calls but ``changed`` are collective over the trainer's ranks.

    A version travels as lora_A and lora_B, or where rollouts are ``merged`` as the weights that they change. Both in
    the wire type of the adapter's `AdapterRun`, which is that of the servers where weights are merged.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        publisher: Publisher,
        mode: Literal["unmerged", "merged"],
        on_report: Callable[[PublishReport, bool], None] | None,
    ) -> None:
        """``on_report`` gets every report, and whether it is of a new version."""
        self._engine, self._publisher, self._merged = engine, publisher, mode == "merged"
        self._on_report = on_report
        self._published: dict[str, _PublishState] = {}
        self._lossy = False

    def publish(self, adapter: Adapter, version: int) -> None:
        """Start to send the adapter as ``version``. One publish per adapter may be in progress: call ``join`` first.

        It waits for no disk. A version that no checkpoint has is lost with this session of the trainer, and the first
        publish of the next session lets the servers forget it.
        """
        reached("trainer.publish_begun")
        kept, dtype, cast = self._kept(adapter), adapter.run.wire_dtype, None
        pack: Pack = partial(self._engine.pack_adapter, adapter.name, dtype)
        if self._merged:
            cast = CastLoss(dtype=DTYPES[dtype], rows=MEASURED_ROWS)
            pack = partial(self._engine.pack_merged, adapter.name, cast)
        kept.handle = self._publisher.publish(
            ref=AdapterRef(name=adapter.name, version=version),
            parent=AdapterRef(name=adapter.name, version=version - 1) if version else None,
            layout=kept.layout,
            pack=pack,
            cast=cast,
            base_digest=self._engine.base_digest(),
            probe=self._expected(adapter, version, kept),
        )

    def join(self, adapter: str) -> None:
        """Wait until the previous version is active on all remaining servers.

        Raises:
            PublishError, ManifestError, AdapterError, ParityError: see the publisher.
        """
        if (handle := self.pending(adapter)) is None:
            return
        self._published[adapter].handle = None
        report = handle.wait()
        self._warn_of_loss(report)
        if self._on_report is not None:
            self._on_report(report, True)

    def pending(self, adapter: str) -> PublishJob | None:
        """The publish that was not joined yet (not collective)."""
        kept = self._published.get(adapter)
        return kept.handle if kept else None

    def newest(self, adapter: str) -> int | None:
        """The version that was published last; None before the first."""
        kept = self._published.get(adapter)
        return kept.newest.version if kept and kept.newest else None

    def failed(self) -> str | None:
        """An adapter whose publish in progress has failed; ``join`` raises its error (rank 0, not collective)."""
        kept = self._published.items()
        return next((name for name, each in kept if each.handle is not None and each.handle.failed()), None)

    def changed(self) -> bool:
        """Whether servers lack the newest version of an adapter, or fell silent (rank 0, not collective)."""
        return self._publisher.changed()

    def catch_up(self, adapter: str) -> None:
        """Join the previous publish, then send the newest version again, unless all servers serve it already.

        It reaches servers that joined, releases those that leave, and excludes silent ones.
        """
        self.join(adapter)
        report = self._publisher.again(adapter).wait()
        if self._on_report is not None:
            self._on_report(report, False)

    def drop(self, adapter: str) -> None:
        """Forget a deleted adapter; the servers free what they hold of it as soon as no request uses it."""
        self._published.pop(adapter, None)
        self._publisher.drop(adapter)

    def close(self) -> None:
        self._publisher.close()

    def _warn_of_loss(self, report: PublishReport) -> None:
        """Warn when the cast starts to lose much of a merged adapter (rank 0's report is that of all ranks)."""
        lossy = report.cast is not None and report.cast.error > MAX_LOST
        if report.cast is not None and lossy and not self._lossy and self._on_report is not None:
            log.warning(
                "%s: %.0f %% of the adapter survives the cast of the merged weights (relative error %.2f, limit %.2f): "
                "the servers sample from another policy; use rollout.adapter_mode=unmerged, or model.dtype=float32",
                report.ref,
                100 * report.cast.survives,
                report.cast.error,
                MAX_LOST,
            )
        self._lossy = lossy

    def _kept(self, adapter: Adapter) -> _PublishState:
        if adapter.name not in self._published:
            base, again = (self._engine.logprobs(adapter.probe, adapter=None) for _ in range(2))
            describe = self._engine.merged_layout if self._merged else self._engine.adapter_layout
            self._published[adapter.name] = _PublishState(
                layout=describe(adapter.name, adapter.run.wire_dtype),
                base=split_rows(base, adapter.probe.cu_seqlens),
                noise=float((base - again).abs().max()),
            )
        return self._published[adapter.name]

    def _expected(self, adapter: Adapter, version: int, kept: _PublishState) -> ProbeExpectation:
        """The trainer's scores of the probe: by the adapter now, by its base, and by the previous version."""
        cu_seqlens = adapter.probe.cu_seqlens
        scored = split_rows(self._engine.logprobs(adapter.probe, adapter=adapter.name), cu_seqlens)
        parent, before = kept.newest, kept.scored
        kept.newest, kept.scored = AdapterRef(name=adapter.name, version=version), scored
        return ProbeExpectation(
            token_ids=[[int(x) for x in row] for row in split_rows(adapter.probe.token_ids, cu_seqlens)],
            logprobs=scored,
            base=kept.base,
            parent=parent,
            before=before,
            noise=kept.noise,
            routed=self._engine.routed,
        )
