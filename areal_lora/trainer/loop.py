"""THE loop. Every trainer rank runs the same straight line; rank 0 talks to the others::

    controller --groups--> rank 0 --its part--> each rank
       ^    ^                                       |  collate, assert staleness (C7)
       |    |                                       v
       |  commit <--durable-- disk <--checkpoint-- annotate, learn   (version k -> k + 1)
       |                                            v
    announce <--activated-- servers <---------- publish
                                                 (both in the background: the next step joins them)

Step k is consumed once a checkpoint of version k + 1 or a later one is durable. A crash repeats the steps after it: at
most one, or as many as ``checkpoint`` allows (C9). With several adapters the same line is run for whichever has a batch
and whose turn it is (`turns`); a fault of one of them ends that one (`training_state`). Between two steps adapters may
join, pause and leave (`joining`), and clients drive their adapters with the same verbs (`operating`).
"""

import time
from functools import partial

from areal_lora.data.packed_groups import PackedGroups
from areal_lora.errors import AdapterRolloutError
from areal_lora.obs.trace import profiled, waiting
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.trainer import work as w
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.collective.joining import delete, join, next_change, pause
from areal_lora.trainer.collective.next_work import (
    batch_of,
    collect_audit,
    controller_state,
    join_last,
    join_publish,
    keep_pace,
    make_durable,
    next_work,
)
from areal_lora.trainer.collective.operating import conclude, copy_state, operate, pass_together
from areal_lora.trainer.learn import annotate, check_finite, learn, learning_rate, measures_causes
from areal_lora.trainer.training_state import Trainer, contained, enter, leave
from areal_lora.trainer.versions.checkpointing import export_adapter
from areal_lora.types import AdapterPhase, AdapterRef, TrainBatch


def train(trainer: Trainer) -> None:
    """Take all remaining steps of every adapter; each ends by itself, evaluated and exported.

    Raises the error of the first adapter that failed, once the others are done.
    """
    for state in list(trainer.states.values()):
        start(trainer, state)
    began_s = time.perf_counter()
    while (work := next_work(trainer, partial(next_change, trainer))) is not None:
        match work:
            case w.Join():
                if (joined := join(trainer, work)) is not None:
                    start(trainer, joined)
            case w.SetPhase(adapter=name, phase=DesiredPhase.DELETED):
                delete(trainer, trainer.states[name])
            case w.SetPhase(adapter=name, phase=phase):
                pause(trainer, trainer.states[name], phase is DesiredPhase.PAUSED)
            case w.Operate(adapter=name):
                operate(trainer, trainer.states[name], work)
            case w.JointPass():
                pass_together(trainer, work)
            case w.Conclude(adapter=name, publish=publish):
                conclude(trainer, trainer.states[name], publish=publish)
            case w.CopyState():
                copy_state(trainer)
            case w.TrainOn() | w.Finish() | w.PublishFault() | w.RolloutFault():
                for spans in trainer.spans.values():  # while there is no batch, no adapter is trained
                    spans.add("wait_batch", time.perf_counter() - began_s)
                carry_out(trainer, trainer.states[work.adapter], work)
        began_s = time.perf_counter()
    end(trainer)


def start(trainer: Trainer, state: TrainingState) -> None:
    """Publish the version that the adapter starts with; from then on it is active, or drains.

    Evaluations that were pending in the restored checkpoint are requested again: servers that kept running still hold
    a version or two; in place of any other version the newest one is evaluated.
    """
    with contained(trainer, state):
        if trainer.rank_0:
            for version in sorted(controller_state(trainer, state).pending):
                trainer.rank_0.controller.request_eval(AdapterRef(name=state.name, version=version))
        save_and_publish(trainer, state)
        enter(trainer, state, state.due_phase)


def carry_out(
    trainer: Trainer, state: TrainingState, work: w.TrainOn | w.Finish | w.PublishFault | w.RolloutFault
) -> None:
    """Do what is next for one adapter. A fault of its own ends it."""
    with contained(trainer, state):
        match work:
            case w.TrainOn(batch=packed):
                wanted, rank = trainer.config.run.profile or (), trainer.control.rank
                with profiled(wanted, trainer.run_folder.profile, state.name, state.version + 1, rank):
                    train_step(trainer, state, packed)
            case w.Finish():
                join_last(trainer, state)
                make_durable(trainer, state)
            case w.PublishFault():
                join_publish(trainer, state)
            case w.RolloutFault(reason=reason, exit_code=code):
                raise AdapterRolloutError(reason, code)
    if isinstance(work, w.Finish) and state.phase is AdapterPhase.DRAINING:
        finish(trainer, state)


def train_step(trainer: Trainer, state: TrainingState, packed: PackedGroups) -> None:
    """Consume one batch, make the adapter's next version, start its checkpoint and its publish."""
    adapter, spans = state.tuned, trainer.spans[state.name]
    with spans.span("collate"):
        batch, histogram = batch_of(trainer, state, packed)
    reached("trainer.batch_received")
    audited = start_audit(trainer, state, batch)
    with spans.span("annotate"):
        record = trainer.config.behaviour.router_replay == "old"
        batch = annotate(trainer.engine, adapter, batch, record=record)
    reached("trainer.annotated")
    with waiting(trainer.spans.values(), "checkpoint_join"):
        keep_pace(trainer, state)
    with spans.span("train"):
        lr = learning_rate(adapter.config.optimizer, state.version, adapter.run.steps)
        report = learn(
            trainer.engine,
            adapter,
            batch,
            version=state.version,
            base_dtype=trainer.config.model.dtype,
            lr=lr,
            kept_caches=trainer.config.rollout.in_flight == "keep",
            served_as=trainer.config.rollout.served_as,
            audited=audited,
        )
    spans.take(trainer.engine.spans)
    audit, memory = collect_audit(trainer, state), trainer.engine.memory()
    reached("trainer.learned")
    kl, mismatch = (report.per_sampled_token(name) for name in ("kl", "behaviour_abs"))
    state.advance(skipped=report.skipped == 1.0, kl=kl, mismatch=mismatch)
    if trainer.rank_0:
        trainer.rank_0.turns.trained(state.name, sum(histogram.values()))
        # Before the checkpoint: a resumed run voids records beyond it, and could not add one that is missing.
        trainer.rank_0.recorder.step(state.ref, batch, report, histogram, spans, audit, memory)
    check_finite(state, report)
    save_and_publish(trainer, state)
    enter(trainer, state, state.due_phase)


def start_audit(trainer: Trainer, state: TrainingState, batch: TrainBatch) -> list[int]:
    """Start the audit of ``batch``. In a step that measures causes return its sequences on every rank, else none."""
    causes, chosen = measures_causes(state.version), list[int]()
    if trainer.rank_0:
        temperature = state.adapter.config.sampling.temperature
        chosen = trainer.rank_0.auditor.start(state.ref, batch, temperature, base=causes)
    if not causes:
        return []
    text = " ".join(map(str, chosen)).encode()
    return [*map(int, trainer.control.broadcast_bytes(text if trainer.control.rank == 0 else None).split())]


def finish(trainer: Trainer, state: TrainingState) -> None:
    """Export an adapter that is done. Collective; a fault ends the run, since rank 0 alone writes and sees it."""
    export_adapter(trainer.engine, state.adapter, trainer.control, trainer.run_folder)
    enter(trainer, state, AdapterPhase.DONE)
    leave(trainer, state)


def end(trainer: Trainer) -> None:
    """Write the report and end the controller. Raises the error of the first adapter that failed."""
    if trainer.rank_0:
        trainer.rank_0.controller.shutdown()
        done = [state.name for state in trainer.states.values() if state.phase is AdapterPhase.DONE]
        trainer.rank_0.recorder.finish({name: trainer.run_folder.adapter_export(name) for name in done})
    trainer.control.all_gather_bytes(b"done")
    for failure in (state.failure for state in trainer.states.values() if state.failure):
        raise failure


def save_and_publish(trainer: Trainer, state: TrainingState) -> None:
    """Start the checkpoint and the publish of the adapter's version, and request an evaluation where one is due.

    The next step joins checkpoint and publish; the evaluation runs beside the rollouts once the version is active. The
    time of this function counts for the next step.
    """
    spans = trainer.spans[state.name]
    spans.restart()
    with spans.span("checkpoint_copy"):
        trainer.checkpointing.save(state, controller_state(trainer, state), at_once=True)
    with waiting(trainer.spans.values(), "publish_join"):
        join_publish(trainer, state)
    with spans.span("publish_pack"):
        trainer.publishing.publish(state.adapter, state.version)
    if trainer.rank_0:
        trainer.rank_0.driver(state.adapter).evaluate_if_due(state.ref, saved=trainer.checkpointing.holds(state.ref))
