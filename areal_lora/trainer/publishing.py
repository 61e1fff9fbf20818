"""Handing adapter versions to the rollout servers while training goes on.

``publish`` copies the adapter out and returns; the transfer, the activation, the parity
probe and the announcement to the controller happen in the publisher's background thread.
``join`` waits for the previous publish and is what raises if anything about it was wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_lora.engine.base import TrainEngine
from areal_lora.trainer.tenant import Tenant, split_rows
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.publisher import Publisher, PublishHandle, PublishReport


class AdapterPublishing:
    """One per rank; all calls are collective over the trainer's ranks."""

    def __init__(
        self, engine: TrainEngine, publisher: Publisher, on_report: Callable[[Tenant, PublishReport], None] | None
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._on_report = on_report
        self._pending: dict[str, PublishHandle] = {}

    def publish(self, tenant: Tenant) -> None:
        """Start sending ``tenant.ref``. At most one publish per adapter is under way: call ``join`` first.

        The probe expects the server to differ from its base from version 1 on: lora_B is zero at version 0 only.
        """
        version = tenant.version
        parent = AdapterRef(name=tenant.name, version=version - 1) if version else None
        expected = self._engine.logprobs(tenant.probe, adapter=tenant.name)
        probe = ProbeExpectation(
            token_ids=[[int(x) for x in row] for row in split_rows(tenant.probe.token_ids, tenant.probe.cu_seqlens)],
            logprobs=split_rows(expected, tenant.probe.cu_seqlens),
            b_nonzero=version > 0,
        )
        plan = self._engine.adapter_plan(tenant.name)
        self._pending[tenant.name] = self._publisher.publish(
            ref=tenant.ref, parent=parent, spec=tenant.spec, owned=self._engine.export_adapter(tenant.name),
            aliases=plan.aliases, base_digest=self._engine.base_digest(), probe=probe,
        )

    def join(self, tenant: Tenant) -> None:
        """Wait until the previous version serves everywhere.

        Raises:
            PublishError, ManifestError, ParityError: see the publisher.
        """
        handle = self._pending.pop(tenant.name, None)
        if handle is None:
            return
        report = handle.join()
        if self._on_report is not None:
            self._on_report(tenant, report)

    def close(self) -> None:
        self._publisher.close()
