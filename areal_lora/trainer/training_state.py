"""State of a trainer rank for a whole run, and how adapters change their phases and leave it.

An error that concerns one adapter ends this adapter, not the run (`contained`): only what every rank raises alike and
what concerns nothing that the adapters share::

    AdapterError, ParityError      its publish was refused, or the servers serve something else
    AlignmentError, StalenessError its batch violates a contract
    NonFiniteError                 its gradients
    AdapterRolloutError            its rewards, its workflow
    CheckpointError                its checkpoints cannot be written

Everything else (servers, other ranks, controller, ledger) ends the run.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from areal_lora import errors
from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.config.models import Config
from areal_lora.distributed.store import Exchange
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.obs.trace import Spans
from areal_lora.platforms.device import profiler_range
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import DesiredWatch, RunFolder
from areal_lora.trainer import companions
from areal_lora.trainer.adapter import SERVED, Adapter, TrainingState
from areal_lora.trainer.audit import Auditor
from areal_lora.trainer.clients.client_operations import Clients
from areal_lora.trainer.controller_link import ControllerLink
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.versions.checkpointing import Checkpointing
from areal_lora.trainer.versions.publishing import AdapterPublishing
from areal_lora.types import AdapterPhase

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank0:
    """State of rank 0 only. ``turns``: whose turn it is to train.

    ``desired`` and ``clients`` are there where adapters join and leave; ``absent`` are known states of other keys.
    """

    controller: ControllerLink
    recorder: Recorder
    auditor: Auditor
    turns: FairQueue
    desired: DesiredWatch | None = None
    absent: dict[str, AdapterPhase] = field(default_factory=dict)
    clients: Clients | None = None

    def driver(self, adapter: Adapter) -> ControllerLink | Clients:
        """What decides what the adapter does next: the controller, which has its rollouts, or its client."""
        return self.clients_of(adapter) if adapter.config.is_client else self.controller

    def clients_of(self, adapter: Adapter) -> Clients:
        """The clients, of whose adapters ``adapter`` is one."""
        assert self.clients is not None, f"{adapter.name} has no client: the run has no service"
        return self.clients

    def close(self) -> None:
        if self.clients:
            self.clients.close()
        self.controller.close()
        self.recorder.close()
        self.auditor.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """``states`` and ``spans`` are by adapter; ``spans`` are the phases since the previous version was made.

    ``control`` is the exchange in which the other ranks wait for rank 0. ``rank_0`` is None on the others.
    """

    config: Config
    run_folder: RunFolder
    engine: AdapterEngine
    states: dict[str, TrainingState]
    checkpointing: Checkpointing
    publishing: AdapterPublishing
    control: Exchange
    rank_0: Rank0 | None
    spans: dict[str, Spans] = field(default_factory=lambda: defaultdict(partial(Spans, label=profiler_range)))

    def close(self) -> None:
        """End the background threads, leave the servers' groups, disconnect from the controller."""
        self.checkpointing.close()
        self.publishing.close()
        if self.rank_0:
            self.rank_0.close()


CONTAINED = (
    errors.AdapterError,
    errors.ParityError,
    errors.AlignmentError,
    errors.StalenessError,
    errors.NonFiniteError,
    errors.AdapterRolloutError,
    errors.CheckpointError,
)


@contextmanager
def contained(trainer: Trainer, state: TrainingState) -> Iterator[None]:
    """A fault of the adapter inside the block ends the adapter. In a run of one adapter, and no service, it is raised.

    Collective over all ranks.
    """
    try:
        yield
    except CONTAINED as error:
        if len(trainer.states) == 1 and trainer.config.service is None:
            raise
        fail(trainer, state, error)


def fail(trainer: Trainer, state: TrainingState, error: errors.ArealLoraError) -> None:
    """End the training of an adapter; the others continue. Its newest checkpoint stays. Collective."""
    state.failure = error
    enter(trainer, state, AdapterPhase.FAILED, str(error))
    rest = [other.name for other in trainer.states.values() if other.phase in SERVED]
    others = f"{', '.join(rest)} continue" if rest else "no adapter remains"
    log.error("%s has failed at version %d: %s; %s", state.name, state.version, error, others)
    for join in (trainer.publishing.join, trainer.checkpointing.join):
        with suppress(*CONTAINED):  # the first error is the one that is reported
            join(state.name)
    leave(trainer, state)


def enter(trainer: Trainer, state: TrainingState, phase: AdapterPhase, reason: str = "") -> None:
    """Change the adapter's phase, and record it on rank 0."""
    if state.phase is phase:
        return
    state.phase = phase
    if trainer.rank_0:
        trainer.rank_0.recorder.phase(state.ref, phase, reason)


def leave(trainer: Trainer, state: TrainingState) -> None:
    """Leave the adapter's part of trainer and servers to the others, once it is done, failed or deleted.

    On every rank. Its checkpoints and its exported folder stay.
    """
    others = (other for other in trainer.states.values() if other is not state)
    if trainer.config.service is not None or any(other.phase in SERVED for other in others):
        trainer.publishing.drop(state.name)
        release(trainer, state.adapter)
    if trainer.rank_0:
        trainer.rank_0.turns.leave(state.name)
        trainer.rank_0.driver(state.adapter).end(state.name, str(state.failure or "the adapter was deleted"))


def release(trainer: Trainer, adapter: Adapter) -> None:
    """Free the adapter's weights, gradients and moments on this rank, and those of its companions."""
    for name in (adapter.name, *companions.resident(adapter).values()):
        trainer.engine.remove_adapter(name)
