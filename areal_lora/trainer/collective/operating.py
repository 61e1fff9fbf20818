"""Carry out clients' operations on every rank, with the verbs that a training step uses::

    Pass                  gradients are added, log-probabilities are the answer; those of several adapters together
    OptimStep             the weights change, the number of the operation is their version -> answer; checkpoint
    LoadState             as a step; checkpoint -> answer
    SaveState             a folder beside the checkpoints -> answer
    Publish               the newest version is active on the servers -> answer

Checkpoints are written behind: the service's file repeats what a crash loses. They, saved states and publishes run in
the background while the next operations and other adapters have their turns (`next_work`). Answers follow each other
in the order of the operations (`Clients`). A fault of an operation fails it, a fault of the adapter ends the adapter
(`training_state`).
"""

import time

from areal_lora.engine.base import AdamValues
from areal_lora.operations import protocol
from areal_lora.processes.watched import reached
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.clients.client_passes import carry_out, load_saved
from areal_lora.trainer.collective.next_work import controller_state, join_checkpoint, join_publish
from areal_lora.trainer.training_state import Trainer, contained
from areal_lora.trainer.work import JointPass, Operate


def operate(trainer: Trainer, state: TrainingState, work: Operate) -> None:
    """Carry out one operation: answer it, or start what its answer waits for. Collective."""
    operation = work.operation
    with contained(trainer, state):
        outcome = work.refused or _outcome(trainer, state, operation)
        if protocol.ends_window(operation.what):
            assert outcome is not None
            trainer.engine.discard_gradients(state.name)
            _settle(trainer, state, operation, outcome)
        elif outcome is not None and trainer.rank_0:
            trainer.rank_0.clients_of(state.adapter).complete(operation, outcome)
        if trainer.rank_0:
            trainer.rank_0.turns.trained(state.name, 1)  # passes pay by token, other operations as one token
            trainer.rank_0.recorder.beat()
    copy_state(trainer)


def pass_together(trainer: Trainer, work: JointPass) -> None:
    """Carry out passes in one, and answer each. Collective.

    Each adapter pays for its tokens: in turns, in seconds and in FLOPs. No error is one adapter's: what is wrong with a
    request was refused before.
    """
    requests = {each.adapter: each.what for each in work.operations if isinstance(each.what, protocol.Pass)}
    all_spans = [trainer.spans[name] for name in requests]  # they start before the pass
    began_s = time.perf_counter()
    outcomes = carry_out(trainer.engine, requests)
    elapsed_s, total = time.perf_counter() - began_s, sum(request.n_tokens for request in requests.values())
    for operation, spans in zip(work.operations, all_spans, strict=True):
        state, tokens = trainer.states[operation.adapter], requests[operation.adapter].n_tokens
        spans.add("train", elapsed_s * tokens / total)
        spans.add_share(trainer.engine.spans, tokens / total)
        if trainer.rank_0:
            trainer.rank_0.clients_of(state.adapter).complete(operation, outcomes[state.name])
            trainer.rank_0.turns.trained(state.name, tokens)
    trainer.engine.spans.restart()
    if trainer.rank_0:
        trainer.rank_0.recorder.beat()
    copy_state(trainer)
    reached("trainer.operation.passed")


def copy_state(trainer: Trainer) -> None:
    """Make the next copies of a client's state, if any are missing. Collective.

    No operation waits for all of a large adapter. One that changes it abandons a checkpoint that is not copied yet: the
    next version gets one, and no step starts that would be too many ahead of the disk.
    """
    if (name := trainer.checkpointing.copying()) is not None:
        with trainer.spans[name].span("checkpoint_copy"):
            trainer.checkpointing.copy(name)


def conclude(trainer: Trainer, state: TrainingState, *, publish: bool) -> None:
    """Take note of what has ended in the background; start the checkpoint of a version without one. Collective.

    A checkpoint that could not be written in several tries ends the adapter.
    """
    with contained(trainer, state):
        if publish:
            join_publish(trainer, state)
            return
        join_checkpoint(trainer, state)
        _save(trainer, state)


def _outcome(trainer: Trainer, state: TrainingState, operation: protocol.Operation) -> protocol.Outcome | None:
    """What came of the operation; None where that is known later."""
    spans = trainer.spans[state.name]
    match operation.what:
        case protocol.OptimStep() as step:
            trainer.checkpointing.release(state.name)
            with spans.span("train"):
                stepped = _step(trainer, state, step)
            spans.take(trainer.engine.spans)
            return stepped
        case protocol.LoadState() as request:
            return load_saved(trainer.engine, trainer.run_folder, request, state.name, trainer.control)
        case protocol.SaveState(label=label, moments=moments):
            if trainer.rank_0:
                trainer.rank_0.clients_of(state.adapter).start(operation, state.version)
            with spans.span("checkpoint_copy"):
                trainer.checkpointing.keep(state, controller_state(trainer, state), label, moments=moments)
            return None
        case protocol.Publish():
            if trainer.publishing.newest(state.name) == state.version:
                return protocol.PublishResult(version=state.version)
            if trainer.rank_0:
                trainer.rank_0.clients_of(state.adapter).start(operation, state.version)
            with spans.span("publish_pack"):
                trainer.publishing.publish(state.adapter, state.version)
            return None
    raise AssertionError(f"{type(operation.what).__name__} is done by rank 0 alone, or together")


def _step(trainer: Trainer, state: TrainingState, step: protocol.OptimStep) -> protocol.StepResult:
    adam = AdamValues(
        beta1=step.beta1,
        beta2=step.beta2,
        eps=step.eps,
        weight_decay=step.weight_decay,
        max_grad_norm=step.grad_clip_norm or None,
    )
    stats = trainer.engine.optim_step(state.name, 1.0, step.lr, adam).values
    skipped, number = stats["skipped"] == 1.0, trainer.engine.resident(state.name).trained().step_count
    reached("trainer.operation.stepped")
    return protocol.StepResult(step=number, grad_norm=0.0 if skipped else stats["grad_norm"], skipped=skipped)


def _settle(trainer: Trainer, state: TrainingState, operation: protocol.Operation, outcome: protocol.Outcome) -> None:
    """Make the operation the adapter's version, and start its checkpoint unless an earlier one is in progress."""
    before, state.version = state.ref, operation.number
    if trainer.rank_0:
        clients, spans = trainer.rank_0.clients_of(state.adapter), trainer.spans[state.name]
        window = clients.windows[state.name]
        clients.settle(operation, outcome)  # no answer waits for a record: TensorBoard's first takes up to a second
        if isinstance(operation.what, protocol.OptimStep) and isinstance(outcome, protocol.StepResult):
            # Before the checkpoint, as of a training step: after any crash there is one record per step.
            trainer.rank_0.recorder.client_step(before, window, operation.what, outcome, spans)
    trainer.spans[state.name].restart()
    reached("trainer.operation.settling")
    _save(trainer, state)


def _save(trainer: Trainer, state: TrainingState) -> None:
    with trainer.spans[state.name].span("checkpoint_copy"):
        trainer.checkpointing.save(state, controller_state(trainer, state), at_once=False)
