"""What the trainer does next: rank 0 decides, every rank receives the decision. `turns` has the order.

Operations of clients run in the background once they are started; other adapters have their turns meanwhile::

    OptimStep                             waits where it is `checkpoint.max_behind` ahead of the disk
    SaveState, LoadState, Publish         wait until the version is durable, and for each other
    Pass                                  waits for nothing

The points where the loop waits, for publishes, checkpoints, evaluations and audits, are collective over the ranks: the
others wait for rank 0 in the control exchange, which has the longest time-out.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import msgspec
import numpy as np

from areal_lora.algorithms.fair_queue import before
from areal_lora.checkpoint.checkpoint_store import CheckpointSave
from areal_lora.data.collate import assert_staleness, collate, contradiction
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.distributed.store import first_problem
from areal_lora.engine.layers.grouped_lora import MOST_GROUPS
from areal_lora.errors import AlignmentError
from areal_lora.operations.protocol import DropState, Operation, OptimStep, Pass, Poison, Publish
from areal_lora.rollout.channel.client import SHORT_POLL_S
from areal_lora.trainer import work as w
from areal_lora.trainer.adapter import SERVED, ControllerState, TrainingState
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.training_state import Rank0, Trainer, contained
from areal_lora.types import AdapterPhase, AdapterRef, TrainBatch

RETRY_S = 1.0
"""Before a checkpoint that could not be written is tried again."""


def catch_up(trainer: Trainer) -> None:
    """Send the newest versions to servers that joined, and exclude servers that do not answer.

    The controller may need these servers for the next batch. An adapter whose version is refused there ends.
    """
    for state in trainer.states.values():
        if state.phase in SERVED:
            with contained(trainer, state):
                join_publish(trainer, state)
                trainer.publishing.catch_up(state.name)


def controller_state(trainer: Trainer, state: TrainingState) -> ControllerState:
    """Return the adapter's controller state on rank 0, an empty one elsewhere. Not collective."""
    return trainer.rank_0.driver(state.adapter).state(state.name) if trainer.rank_0 else ControllerState()


def join_checkpoint(trainer: Trainer, state: TrainingState) -> CheckpointSave | None:
    saved = trainer.checkpointing.join(state.name)
    if trainer.rank_0 and saved is not None and not saved.label:
        trainer.rank_0.recorder.checkpointed(saved)
    wait_for_rank_0(trainer)
    return saved


def keep_pace(trainer: Trainer, state: TrainingState) -> None:
    """Join the checkpoint in progress if it has ended, or if a crash after the next step would repeat too many.

    Collective. Raises CheckpointError as `Saver.join` does.
    """
    save = trainer.checkpointing.pending(state.name)
    if save is None:
        return
    due = trainer.checkpointing.behind(state) >= _allowed(trainer, state)
    if not due:  # the others may see its end earlier or later
        due = trainer.control.broadcast_bytes(b"1" * save.ended.is_set() if trainer.control.rank == 0 else None) != b""
    if due:
        join_checkpoint(trainer, state)


def _allowed(trainer: Trainer, state: TrainingState) -> int:
    """Steps that a crash may repeat."""
    return state.adapter.run.checkpoint_every + trainer.config.checkpoint.max_behind


def make_durable(trainer: Trainer, state: TrainingState) -> None:
    """Write the checkpoint of the newest version, if it is due and has none, until it is durable. Collective.

    Raises CheckpointError on every rank when the disk takes none in several tries, see `Saver.join`.
    """
    while (save := trainer.checkpointing.save(state, controller_state(trainer, state), at_once=True)) is not None:
        join_checkpoint(trainer, state)
        if save.failed:
            time.sleep(RETRY_S)


def join_publish(trainer: Trainer, state: TrainingState) -> None:
    trainer.publishing.join(state.name)
    wait_for_rank_0(trainer)


def join_last(trainer: Trainer, state: TrainingState) -> None:
    """Wait for what is in progress of an adapter that takes no further step. Collective."""
    collect_audit(trainer, state, wait=True)
    join_checkpoint(trainer, state)
    join_publish(trainer, state)


def wait_for_rank_0(trainer: Trainer) -> None:
    """Wait for rank 0, which may have waited for the controller longer than other collectives allow."""
    trainer.control.broadcast_bytes(b"" if trainer.control.rank == 0 else None)


def collect_audit(trainer: Trainer, state: TrainingState, *, wait: bool = False) -> Audit | None:
    """Return the adapter's finished audits on rank 0, None elsewhere; they are of this batch or the previous one.

    Raises:
        AlignmentError: a server's scores contradict the batch; on every rank.
    """
    audit = trainer.rank_0.auditor.collect(state.name, wait=wait) if trainer.rank_0 else None
    mine = (audit.error if audit else "").encode() if trainer.control.rank == 0 else None
    if error := trainer.control.broadcast_bytes(mine).decode():
        raise AlignmentError(error)
    return audit


def batch_of(trainer: Trainer, state: TrainingState, packed: PackedGroups) -> tuple[TrainBatch, dict[int, int]]:
    """The batch of the next step with the token columns of this rank's part, and its staleness histogram in tokens.

    Rank 0, which records the batch, has all columns. With a KL divergence in the reward, or of a teacher, every rank
    has: advantages are computed from the log-probabilities of all tokens. Collective.

    Raises:
        StalenessError: a token is older than ``max_staleness`` (contract C7).
        AlignmentError: as `collate` does, or for a `contradiction` on any rank.
    """
    exchange = trainer.control
    others = exchange.rank != 0
    histogram = assert_staleness(packed.runs, state.version, state.adapter.run.max_staleness)
    batch = collate(packed, np.zeros(len(packed.rows), np.bool_) if others else None)
    batch = replace(batch, zero_advantage=(zero := state.tuned.algorithm.zero_advantage(batch)))
    held, of_ranks = trainer.engine.parts(batch, state.adapter.config.minibatches)
    held |= bool(state.tuned.algorithm.shaping.kl_coef) or packed.has_teacher
    own = held[of_ranks[exchange.rank]] & others
    columns = np.empty((len(packed.columns), int(batch.cu_seqlens.diff().numpy() @ own)), np.int32)
    with trainer.spans[state.name].span("exchange"):
        exchange.scatter(lambda part: packed.part(held[part]), of_ranks, columns)
        routes = None
        if packed.shape is not None:
            room = np.empty((columns.shape[1], packed.shape.n_bytes), np.uint8)
            exchange.scatter(lambda part: packed.routes_of(held[part]), of_ranks, room)
            routes = room.view(f"V{packed.shape.n_bytes}")[:, 0]
    if others:
        packed = msgspec.structs.replace(packed, columns=columns, routes=routes)
        batch = replace(collate(packed, own), zero_advantage=zero)
    if problem := first_problem(contradiction(batch), exchange):
        raise AlignmentError(problem)
    return batch, histogram


CLIENT_POLL_S = 0.02
"""Of a poll of the controller, where clients wait for answers."""

Changes = Callable[[], w.AdapterChange | None]


def next_work(trainer: Trainer, changes: Changes = lambda: None) -> w.Work | None:
    """What is to be done next, the same on every rank; None once no adapter remains and none will come.

    Rank 0 calls ``changes``, which adapters join, leave, pause or resume, between two steps and about every second
    while it waits. While it waits for work, it renews the time-out of the other ranks (`work.Waiting`).
    """
    while True:
        decided = _decide(trainer, trainer.rank_0, changes) if trainer.rank_0 else None
        work = w.share(decided, trainer.control)
        if isinstance(work, w.EndRun):
            return None
        if not isinstance(work, w.CatchUp):
            return work
        catch_up(trainer)


def _decide(trainer: Trainer, rank_0: Rank0, changes: Changes) -> w.Work:
    """Changes of adapters come first, then what has ended in the background, then whose turn it is (`turns.before`)."""
    if (change := changes()) is not None:
        return change
    operation = _of_clients(trainer)
    if isinstance(operation, w.Conclude | w.CopyState):
        return operation
    active, draining = (
        [s.name for s in trainer.states.values() if s.phase is phase]
        for phase in (AdapterPhase.ACTIVE, AdapterPhase.DRAINING)
    )
    remain = any(state.phase in SERVED for state in trainer.states.values())
    if not remain and (rank_0.desired is None or rank_0.desired.newest.closed):
        return w.EndRun()
    clients = {state.name for state in trainer.states.values() if state.adapter.config.is_client}
    wanted = before(rank_0.turns.order(active), clients, operation.adapter if operation else None)
    if operation is not None and not wanted:
        return operation
    poll_s = 0.0 if operation else CLIENT_POLL_S if clients else SHORT_POLL_S
    interruption = partial(_interruption, trainer, changes, w.Waiting(trainer.control))
    return rank_0.controller.next_work(partial(_with_slots, trainer, wanted), draining, interruption, poll_s)


def _with_slots(trainer: Trainer, names: Sequence[str]) -> list[AdapterRef]:
    """The adapters ``names`` without those whose publish waits for a slot, unless all do.

    A step ends with the start of the next publish, which waits for that one, and with it the steps of all others.
    """
    publishes = {name: trainer.publishing.pending(name) for name in names}
    free = [name for name, publish in publishes.items() if publish is None or not publish.waits_for_slot()]
    return [trainer.states[name].ref for name in free or names]


def _interruption(trainer: Trainer, changes: Changes, waiting: w.Waiting) -> w.Work | None:
    """What is to be done before the next batch, on rank 0."""
    waiting.signal()
    if (failed := trainer.publishing.failed()) is not None:
        return w.PublishFault(adapter=failed)
    if trainer.publishing.changed():
        return w.CatchUp()
    return changes() or _of_clients(trainer)


def _of_clients(trainer: Trainer) -> w.Operations | None:
    """What has ended in the background, else the operation of the client whose turn it is among them, on rank 0.

    Where no client has one, a state is copied.

    Others' passes join a pass, as many as one micro-batch of each data-parallel rank holds. Their rounding depends on
    each other, so that they do not where `rollout.deterministic` promises the same bits; nor with a flex dispatcher,
    which does not send adapters' numbers with tokens.
    """
    if trainer.rank_0 is None or trainer.rank_0.clients is None:
        return None
    if (ended := concluded(trainer)) is not None:
        return ended
    trainer.rank_0.clients.listen()
    active = (s for s in trainer.states.values() if s.phase is AdapterPhase.ACTIVE and s.adapter.config.is_client)
    order = trainer.rank_0.turns.order(state.name for state in active)
    ready = trainer.rank_0.clients.ready(order, partial(may_start, trainer))
    first, layout = next(ready, None), trainer.config.trainer
    if first is None:
        return w.CopyState() if trainer.checkpointing.copying() else None
    if not isinstance(first.operation.what, Pass):
        return first
    budget = layout.max_tokens_per_microbatch * (layout.world_size // (layout.tp * layout.pp))
    waiting = (each.operation for each in chain((first,), ready))
    alone = trainer.config.rollout.deterministic or layout.moe_dispatcher != "alltoall"
    operations = joint(waiting, 0 if alone else budget, lambda name: trainer.engine.resident(name).memory.groups)
    return w.JointPass(adapter=first.adapter, operations=operations)


def joint(ready: Iterable[Operation], token_budget: int, groups: Callable[[str], int]) -> tuple[Operation, ...]:
    """The first operation that is ``ready``, a pass, and those that are computed with it, in their order.

    ``ready`` has one of each adapter, in order of turns. Passes join that have gradients as the first has, or none as
    it, until one exceeds the rest of ``token_budget``, or with its adapter a product has too many groups: a later one
    does not overtake it. All adapters have as many ``groups`` in a product as the one with most of them.
    """
    found, backward, most = list[Operation](), None, 1
    for operation in ready:
        if not isinstance(what := operation.what, Pass) or backward not in (None, what.backward):
            continue
        backward, token_budget = what.backward, token_budget - what.n_tokens
        most = max(most, groups(operation.adapter))
        if found and (token_budget < 0 or most * (len(found) + 1) > MOST_GROUPS):
            break
        found.append(operation)
        if token_budget <= 0:
            break
    return tuple(found)


def may_start(trainer: Trainer, operation: Operation, ahead: float) -> bool:
    """Whether nothing has to end before ``operation`` of an adapter that is ``ahead`` steps of its checkpoints.

    While a version is not durable, its checkpoint or an earlier one is in progress. What is saved, loaded or published
    there is not lost: a crash would repeat it when what it refers to may be dropped.
    """
    name = operation.adapter
    save = trainer.checkpointing.pending(name)
    match operation.what:
        case Pass() | Poison(of_step=False):
            return True
        case OptimStep() | Poison():
            return ahead < _allowed(trainer, trainer.states[name])
        case DropState():  # a state that is being saved is not
            return save is None or not save.label
        case Publish() if trainer.publishing.pending(name) is not None:
            return False
    return save is None


def concluded(trainer: Trainer) -> w.Conclude | None:
    """The first publish, checkpoint or saved state of a client's adapter that has ended and that no rank has joined."""
    for state in trainer.states.values():
        if not state.adapter.config.is_client or state.phase not in SERVED:
            continue
        publish = trainer.publishing.pending(state.name)
        if publish is not None and publish.outcome.done():
            return w.Conclude(adapter=state.name, publish=True)
        save = trainer.checkpointing.pending(state.name)
        if save is None or not save.ended.is_set():
            continue
        again = save.failed and not save.label
        if not again or save.error is not None or time.monotonic() - save.ended_s >= RETRY_S:
            return w.Conclude(adapter=state.name, publish=False)
    return None
