"""State of a trainer rank for a whole run."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.config.models import Config
from areal_lora.distributed.store import Exchange
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.obs.trace import Spans
from areal_lora.platforms.device import profiler_range
from areal_lora.run_folder.paths import DesiredWatch, RunFolder
from areal_lora.trainer.adapter import Adapter, TrainingState
from areal_lora.trainer.audit import Auditor
from areal_lora.trainer.clients.client_operations import Clients
from areal_lora.trainer.controller_link import ControllerLink
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.versions.checkpointing import Checkpointing
from areal_lora.trainer.versions.publishing import AdapterPublishing
from areal_lora.types import AdapterPhase


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
