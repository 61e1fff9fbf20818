"""THE loop. Every trainer rank runs the same straight line; rank 0 talks to the others::

    controller --groups--> rank 0 --broadcast--> all ranks
       ^    ^                                       |  collate, assert staleness (C7)
       |    |                                       v
       |  commit <--durable-- disk <--checkpoint-- annotate, learn   (version k -> k + 1)
       |                       |                    |
       |                       v (not before)       v
    announce <--activated-- servers <---------- publish
                                                 (both in the background: the next step joins them)

Step k is consumed once the checkpoint of version k + 1 is durable; a crash repeats at most one step (C9).
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.config.models import Config
from areal_lora.distributed.exchange import Exchange
from areal_lora.engine.base import TrainEngine
from areal_lora.processes.faults import reached
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.audit import Auditor
from areal_lora.trainer.checkpointing import Checkpointing
from areal_lora.trainer.learn import annotate, count_skips, learn, learning_rate
from areal_lora.trainer.peft import export_adapter
from areal_lora.trainer.publishing import AdapterPublishing
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.tenant import Tenant
from areal_lora.trainer.waits import (
    begin_audit,
    catch_up,
    collect_audit,
    evaluated,
    join_checkpoint,
    join_publish,
    next_batch,
)
from areal_lora.types import AdapterRef


@dataclass(slots=True, kw_only=True)
class Trainer:
    """What a rank holds for a whole run. ``recorder`` and ``auditor`` talk to others: rank 0 only."""

    config: Config
    run_folder: RunFolder
    engine: TrainEngine
    tenants: list[Tenant]
    checkpointing: Checkpointing
    publishing: AdapterPublishing
    recorder: Recorder | None
    control: Exchange
    auditor: Auditor | None = None

    def close(self) -> None:
        """Say goodbye to the controller and the servers' groups."""
        self.checkpointing.close()
        self.publishing.close()
        if self.recorder:
            self.recorder.close()
        if self.auditor:
            self.auditor.close()


def train(trainer: Trainer) -> None:
    """Take every step that is left of every adapter, then wait for the last version and the evaluations."""
    for tenant in trainer.tenants:
        rerequest_evals(trainer, tenant)
        save_and_publish(trainer, tenant)
    while (tenant := min(trainer.tenants, key=lambda t: t.version)).version < trainer.config.run.steps:
        train_step(trainer, tenant)
    collect_audit(trainer, wait=True)
    for tenant in trainer.tenants:
        join_checkpoint(trainer, tenant)
        join_publish(trainer, tenant)
        export_adapter(trainer.engine, tenant, trainer.control, trainer.run_folder)
        while not evaluated(trainer, tenant):
            catch_up(trainer)
    if trainer.recorder:
        trainer.recorder.finish(trainer.run_folder.adapter_export(trainer.tenants[0].name))
    trainer.control.all_gather_bytes(b"done")


def train_step(trainer: Trainer, tenant: Tenant) -> None:
    """Consume one batch, improve the adapter by one version, hand the version to disk and servers."""
    spans = tenant.spans
    with spans.span("wait_batch"):
        batch, histogram = next_batch(trainer, tenant)
    reached("trainer.batch_received")
    begin_audit(trainer, tenant, batch)
    with spans.span("annotate"):
        batch = annotate(trainer.engine, tenant, batch)
    reached("trainer.annotated")
    with spans.span("checkpoint_join"):
        join_checkpoint(trainer, tenant)
    with spans.span("train"):
        lr = learning_rate(tenant.config.optimizer, tenant.version, trainer.config.run.steps)
        report = learn(trainer.engine, tenant, batch, base_dtype=trainer.config.model.dtype, lr=lr)
    audit = collect_audit(trainer)
    reached("trainer.learned")
    tenant.version += 1
    if trainer.recorder:
        # Before the checkpoint: a resumed run strikes out records beyond it, and could not add one that is missing.
        trainer.recorder.step(tenant, batch, report, histogram, spans, audit)
    count_skips(tenant, report)
    save_and_publish(trainer, tenant)


def save_and_publish(trainer: Trainer, tenant: Tenant) -> None:
    """Begin to write the tenant's version to disk and to send it; have it evaluated where the plan says so.

    None of it is waited for: the next step joins both, and the evaluation begins when the version is
    active and runs on the servers beside the rollouts. The time it takes counts for the next step.
    """
    spans = tenant.spans
    spans.restart()
    with spans.span("checkpoint_copy"):
        save = trainer.checkpointing.save(tenant)
    with spans.span("publish_join"):
        join_publish(trainer, tenant)
    with spans.span("publish_pack"):
        trainer.publishing.publish(tenant, save)
    if trainer.recorder:
        trainer.recorder.evaluate(tenant)


def rerequest_evals(trainer: Trainer, tenant: Tenant) -> None:
    """Evaluations that had no answer when the checkpoint was written that this trainer goes on from.

    Servers that went on still hold a version or two; of others the answer is a failure, which is logged.
    """
    if trainer.recorder:
        for version in sorted(tenant.awaited):
            trainer.recorder.request_eval(AdapterRef(name=tenant.name, version=version))
