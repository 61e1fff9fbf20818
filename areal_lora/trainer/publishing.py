"""Handing adapter versions to the rollout servers while training goes on.

``publish`` packs the adapter and returns; transfer, activation, probe and the announcement to
the controller happen in the publisher's thread. ``join`` waits for the previous publish and is
what raises if anything about it was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from areal_lora.checkpoint.saver import Save
from areal_lora.config.models import WeightSyncConfig
from areal_lora.engine.base import TrainEngine
from areal_lora.processes.faults import reached
from areal_lora.trainer.tenant import Tenant, split_rows
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.publisher import Publisher, PublishHandle
from areal_lora.weight_sync.trainer.report import PublishReport


class AdapterPublishing:
    """One per rank; all calls but ``changed`` are collective over the trainer's ranks."""

    def __init__(
        self,
        engine: TrainEngine,
        publisher: Publisher,
        config: WeightSyncConfig,
        on_report: Callable[[Tenant, PublishReport], None] | None,
    ) -> None:
        self._engine, self._publisher, self._config = engine, publisher, config
        self._on_report = on_report
        self._pending: dict[str, PublishHandle] = {}
        self._layouts: dict[str, AdapterLayout] = {}
        self._base: dict[str, list[list[float]]] = {}
        self._noise: dict[str, float] = {}
        self._scored: dict[str, tuple[AdapterRef, list[list[float]]]] = {}

    def publish(self, tenant: Tenant, save: Save | None) -> None:
        """Start sending ``tenant.ref``. At most one publish per adapter is under way: call ``join`` first.

        Nothing leaves before ``save``, the checkpoint of this version, is settled: a version that a server
        has ever held can be resumed, and is never made a second time with other numbers (contract C2).
        """

        def gate() -> None:
            if save is not None:
                save.wait_settled()
            reached("trainer.publish_begun")

        version, dtype = tenant.version, self._config.wire_dtype
        if tenant.name not in self._layouts:
            self._layouts[tenant.name] = self._engine.adapter_layout(tenant.name, dtype)
        self._pending[tenant.name] = self._publisher.publish(
            ref=tenant.ref,
            parent=AdapterRef(name=tenant.name, version=version - 1) if version else None,
            layout=self._layouts[tenant.name],
            pack=partial(self._engine.pack_adapter, tenant.name, dtype),
            base_digest=self._engine.base_digest(),
            probe=self._expected(tenant),
            gate=gate,
        )

    def join(self, tenant: Tenant) -> None:
        """Wait until the previous version serves on all servers that are left.

        Raises:
            PublishError, ManifestError, AdapterError, ParityError: see the publisher.
        """
        handle = self._pending.pop(tenant.name, None)
        if handle is None:
            return
        report = handle.wait()
        if self._on_report is not None:
            self._on_report(tenant, report)

    def changed(self) -> bool:
        """Whether servers have come that hold no version yet, or have gone silent (rank 0, not collective)."""
        return self._publisher.changed()

    def catch_up(self, tenant: Tenant) -> None:
        """Send ``tenant``'s newest version once more, so that newcomers serve it and silent servers are given up.

        Joins the publish before.
        """
        self.join(tenant)
        self._publisher.again(tenant.name).wait()

    def close(self) -> None:
        self._publisher.close()

    def _expected(self, tenant: Tenant) -> ProbeExpectation:
        """What the trainer scores: the adapter now, its base, and the version it published before."""
        name, cu_seqlens = tenant.name, tenant.probe.cu_seqlens
        if name not in self._base:
            base, again = (self._engine.logprobs(tenant.probe, adapter=None) for _ in range(2))
            self._base[name], self._noise[name] = split_rows(base, cu_seqlens), float((base - again).abs().max())
        scored = split_rows(self._engine.logprobs(tenant.probe, adapter=name), cu_seqlens)
        parent, before = self._scored.get(name, (None, None))
        self._scored[name] = tenant.ref, scored
        return ProbeExpectation(
            token_ids=[[int(x) for x in row] for row in split_rows(tenant.probe.token_ids, cu_seqlens)],
            logprobs=scored,
            base=self._base[name],
            parent=parent,
            before=before,
            noise=self._noise[name],
        )
