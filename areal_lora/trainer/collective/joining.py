"""Adapters that join, pause and leave while the others train: what rank 0 decides, and what every rank does.

    desired state -> rank 0: `next_change` (rules of a start, checkpoint)  -- Join, SetPhase --> all ranks
    join:    resident, first version or checkpoint -> controller -> first publish -> active
    delete:  what is in progress ends -> controller, servers and residents forget it -> deleted

An adapter that cannot be trained has failed with the reason. The plan is pure, one change at a time (`difference`):

    desired        has                 change
    any            not there           `Join` while servers have room, else `Note` as pending
    paused         pending, active     `SetPhase`
    active         paused              `SetPhase`
    deleted, none  there               `SetPhase`; `Note` as deleted if it never joined

Adapters leave before others join, so that those find a free place. A joining adapter that fails, or an adapter that is
done, is not tried again in a session.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from areal_lora.checkpoint.recover import explain, recorded_evaluations
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import alone, joined
from areal_lora.config.sizing.slots import adapter_capacity
from areal_lora.data.prompts import load_tokenizer
from areal_lora.distributed.store import first_problem
from areal_lora.errors import AdapterError, ArealLoraError
from areal_lora.obs.metrics.reader import state_records
from areal_lora.obs.metrics.records import AdapterStateRecord
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, DesiredPhase, RunFolder
from areal_lora.tasks.check import joining
from areal_lora.trainer.adapter import SERVED, ControllerState, TrainingState, build_adapter, probe_rows
from areal_lora.trainer.collective.next_work import join_last
from areal_lora.trainer.training_state import CONTAINED, Trainer, enter, leave, release
from areal_lora.trainer.versions.checkpointing import chosen, load
from areal_lora.trainer.work import AdapterChange, Join, SetPhase
from areal_lora.types import AdapterPhase, AdapterRef

log = get_logger(__name__)

FINAL = (AdapterPhase.DONE, AdapterPhase.DELETED)
"""States that outlast a session; a failed adapter is tried again, as one of the configuration is."""


def recorded_as_final(run_folder: RunFolder) -> dict[str, AdapterPhase]:
    """Adapters that earlier sessions have recorded as done or deleted: they stay so."""
    newest = {r.adapter: r.state for r in state_records(run_folder) if isinstance(r, AdapterStateRecord)}
    return {key: state for key, state in newest.items() if state in FINAL}


def prepared(config: Config, run_folder: RunFolder, desired: DesiredAdapter) -> Join:
    """The change that attaches an adapter, which has passed the rules of a start.

    Raises an ArealLoraError that states what is wrong with it, its task or its checkpoints.
    """
    wanted = joined(config, desired)
    adapter = joining(config, wanted, online=True, resumed=run_folder.adapter_checkpoints(wanted.name).is_dir())
    single = alone(config, adapter)
    [checkpoint] = chosen(explain(run_folder, single), single)
    rows = probe_rows(config, adapter, load_tokenizer(config.model.folder))
    return Join(adapter=adapter.name, config=adapter.model_dump_json().encode(), probe=rows, checkpoint=checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An adapter that is not there is in ``phase``; nothing but its state changes."""

    adapter: str
    phase: AdapterPhase
    reason: str = ""


def difference(
    desired: DesiredAdapters,
    here: Mapping[str, AdapterPhase],
    absent: Mapping[str, AdapterPhase],
    *,
    configured: int = 0,
    capacity: int,
) -> AdapterChange | Note | None:
    """The first difference between what is desired and what is there; None if there is none.

    ``here`` are adapters that have joined and not left, ``absent`` known states of other keys. ``configured`` adapters
    of the configuration have a place on the servers, which hold ``capacity``.
    """
    wanted = {adapter.key: adapter for adapter in desired.adapters if adapter.phase is not DesiredPhase.DELETED}
    for key in here:
        if key not in wanted:
            return SetPhase(adapter=key, phase=DesiredPhase.DELETED)
    for adapter in desired.adapters:
        if adapter.phase is DesiredPhase.DELETED and absent.get(adapter.key) is not AdapterPhase.DELETED:
            return Note(adapter=adapter.key, phase=AdapterPhase.DELETED)
    for key, phase in here.items():
        to = wanted[key].phase
        changes = (AdapterPhase.PENDING, AdapterPhase.ACTIVE) if to is DesiredPhase.PAUSED else (AdapterPhase.PAUSED,)
        if phase in changes:
            return SetPhase(adapter=key, phase=to)
    served = configured + sum(phase in SERVED for phase in here.values())
    for key in wanted:
        known = absent.get(key)
        if key in here or known in (AdapterPhase.FAILED, AdapterPhase.DONE):
            continue
        if served < capacity:
            return Join(adapter=key)
        if known is None:
            full = f"waits for a place: servers hold rollout.max_adapters = {capacity}"
            return Note(adapter=key, phase=AdapterPhase.PENDING, reason=full)
    return None


# ---------------------------------------------------------------- rank 0


def next_change(trainer: Trainer) -> AdapterChange | None:
    """The next change of which adapters there are, on rank 0. What concerns none that is there, is done here."""
    if trainer.rank_0 is None or (watch := trainer.rank_0.desired) is None:
        return None
    own = {adapter.name for adapter in trainer.config.adapters}
    while True:
        here = {name: state.phase for name, state in trainer.states.items() if name not in own}
        configured = sum(state.phase in SERVED for name, state in trainer.states.items() if name in own)
        desired, capacity = watch.look(), adapter_capacity(trainer.config)
        match difference(desired, here, trainer.rank_0.absent, configured=configured, capacity=capacity):
            case Note(adapter=key, phase=phase, reason=reason):
                note(trainer, key, phase, reason)
            case Join(adapter=key):
                trainer.rank_0.recorder.status(f"{key} joins")
                [entry] = [adapter for adapter in desired.adapters if adapter.key == key]
                try:
                    return prepared(trainer.config, trainer.run_folder, entry)
                except ArealLoraError as error:
                    _refused(trainer, key, "; ".join(str(error).splitlines()))
                except Exception as error:  # fault boundary: a joining adapter's data
                    log.exception("joining of %s", key)
                    _refused(trainer, key, f"{type(error).__name__}: {error}")
            case change:
                return change


def note(trainer: Trainer, key: str, phase: AdapterPhase, reason: str = "") -> None:
    """Record the state of an adapter that is not there, on rank 0."""
    if trainer.rank_0:
        trainer.rank_0.absent[key] = phase
        trainer.rank_0.recorder.phase(AdapterRef(name=key, version=0), phase, reason)


def _refused(trainer: Trainer, key: str, reason: str) -> None:
    log.error("%s cannot join: %s", key, reason)
    note(trainer, key, AdapterPhase.FAILED, reason)


# ---------------------------------------------------------------- every rank


def join(trainer: Trainer, work: Join) -> TrainingState | None:
    """Attach a joining adapter to this rank, and on rank 0 to the controller; None if it cannot be. Collective."""
    config = AdapterConfig.model_validate_json(work.config)
    adapter = build_adapter(trainer.config, config, work.probe)
    restored, problem = None, ""
    try:
        trainer.engine.add_adapter(adapter.spec, config.optimizer, adapter.run.seed)
        reads = trainer.rank_0 and work.checkpoint and not config.is_client
        recorded = recorded_evaluations(trainer.run_folder) if reads else {}
        restored = load(trainer.engine, adapter, work.checkpoint, recorded)
    except (ArealLoraError, OSError) as error:
        problem = str(error)
    problem = first_problem(problem, trainer.control)
    state, kept = restored or (TrainingState(adapter=adapter), ControllerState())
    if trainer.rank_0 and not problem:
        problem = _announce(trainer, state, kept, resumed=restored is not None)
    problem = trainer.control.broadcast_bytes(problem.encode() if trainer.control.rank == 0 else None).decode()
    if problem:
        with suppress(AdapterError):  # it may not have become resident
            release(trainer, adapter)
        _refused(trainer, adapter.name, problem)
        return None
    if restored is not None:
        trainer.checkpointing.resumed(adapter.name, state.version)
    trainer.states[adapter.name] = state
    log.info("%s joins", state.ref)
    return state


def _announce(trainer: Trainer, state: TrainingState, kept: ControllerState, *, resumed: bool) -> str:
    """Make the joining adapter known on rank 0; returns why it cannot be driven, or nothing."""
    assert trainer.rank_0
    adapter = state.adapter
    if problem := trainer.rank_0.driver(adapter).join(adapter, state.version, kept):
        return problem
    trainer.rank_0.absent.pop(adapter.name, None)
    steps = None if adapter.run.endless else adapter.run.steps
    trainer.rank_0.recorder.joined(state.ref, steps=steps, resumed=resumed)
    trainer.rank_0.turns.join(adapter.name, adapter.run.weight)
    return ""


def pause(trainer: Trainer, state: TrainingState, paused: bool) -> None:
    """Issue no groups of the adapter and give it no turns; or again. What is in progress continues."""
    if trainer.rank_0:
        trainer.rank_0.driver(state.adapter).pause(state.name, paused)
    enter(trainer, state, AdapterPhase.PAUSED if paused else state.due_phase)


def delete(trainer: Trainer, state: TrainingState) -> None:
    """Forget the adapter once what is in progress of it has ended; its checkpoints stay. Collective."""
    if state.phase in SERVED:
        with suppress(*CONTAINED):  # what is wrong with it does not matter any more
            join_last(trainer, state)
        leave(trainer, state)
    enter(trainer, state, AdapterPhase.DELETED)
    del trainer.states[state.name]
    trainer.spans.pop(state.name, None)
    if trainer.rank_0:
        trainer.rank_0.absent[state.name] = AdapterPhase.DELETED
    log.info("%s has left", state.ref)
