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

from areal_lora.processes.faults import reached
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.learn import annotate, check_finite, learn, learning_rate
from areal_lora.trainer.peft import export_adapter
from areal_lora.trainer.state import Trainer
from areal_lora.trainer.waits import (
    begin_audit,
    catch_up,
    collect_audit,
    controller_state,
    evaluated,
    join_checkpoint,
    join_publish,
    next_batch,
)
from areal_lora.types import AdapterRef


def train(trainer: Trainer) -> None:
    """Take all remaining steps of every adapter, then wait for the last version and the evaluations."""
    states = trainer.states.values()
    for state in states:
        rerequest_evals(trainer, state)
        save_and_publish(trainer, state)
    while (state := min(states, key=lambda s: s.version)).version < trainer.config.run.steps:
        train_step(trainer, state)
    collect_audit(trainer, wait=True)
    for state in states:
        join_checkpoint(trainer, state)
        join_publish(trainer, state)
        export_adapter(trainer.engine, state.adapter, trainer.control, trainer.run_folder)
        while not evaluated(trainer, state):
            catch_up(trainer)
    if trainer.rank_0:
        trainer.rank_0.controller.shutdown()
        trainer.rank_0.recorder.finish(trainer.run_folder.adapter_export(next(iter(trainer.states))))
    trainer.control.all_gather_bytes(b"done")


def train_step(trainer: Trainer, state: TrainingState) -> None:
    """Consume one batch, make the adapter's next version, begin its checkpoint and its publish."""
    adapter, spans = state.adapter, trainer.spans[state.name]
    with spans.span("wait_batch"):
        batch, histogram = next_batch(trainer, state)
    reached("trainer.batch_received")
    begin_audit(trainer, state, batch)
    with spans.span("annotate"):
        batch = annotate(trainer.engine, adapter, batch)
    reached("trainer.annotated")
    with spans.span("checkpoint_join"):
        join_checkpoint(trainer, state)
    with spans.span("train"):
        lr = learning_rate(adapter.config.optimizer, state.version, trainer.config.run.steps)
        report = learn(
            trainer.engine, adapter, batch, version=state.version, base_dtype=trainer.config.model.dtype, lr=lr
        )
    audit = collect_audit(trainer)
    reached("trainer.learned")
    state.advance(skipped=report.skipped == 1.0)
    if trainer.rank_0:
        # Before the checkpoint: a resumed run voids records beyond it, and could not add one that is missing.
        trainer.rank_0.recorder.step(state.ref, batch, report, histogram, spans, audit)
    check_finite(state, report)
    save_and_publish(trainer, state)


def save_and_publish(trainer: Trainer, state: TrainingState) -> None:
    """Begin the checkpoint and the publish of the adapter's version, and request an evaluation where one is due.

    This function does not wait: the next step joins checkpoint and publish, and the evaluation runs on the servers
    together with the rollouts once the version is active. The time of this function counts for the next step.
    """
    spans = trainer.spans[state.name]
    spans.restart()
    with spans.span("checkpoint_copy"):
        save = trainer.checkpointing.save(state.adapter, state.version, controller_state(trainer, state))
    with spans.span("publish_join"):
        join_publish(trainer, state)
    with spans.span("publish_pack"):
        trainer.publishing.publish(state.adapter, state.version, save)
    if trainer.rank_0:
        trainer.rank_0.controller.evaluate_if_due(state.ref)


def rerequest_evals(trainer: Trainer, state: TrainingState) -> None:
    """Re-request evaluations that were pending in the restored checkpoint.

    Servers that kept running still hold a version or two; an evaluation of any other version fails and is logged.
    """
    if trainer.rank_0:
        for version in sorted(controller_state(trainer, state).pending):
            trainer.rank_0.controller.request_eval(AdapterRef(name=state.name, version=version))
