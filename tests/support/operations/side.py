"""The trainer's side of clients as it is, around a toy engine, a disk that a test holds up, and servers in its hands.

The loop's own decisions (`next_work`) run in a thread; a test is the client at the other end of the real link.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.checkpoint.checkpoint_store import CheckpointStore, Saver
from areal_lora.checkpoint.recover import find
from areal_lora.checkpoint.state import Disk
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import joined
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import RunMetrics
from areal_lora.operations.link import TrainerEnd
from areal_lora.run_folder.paths import DesiredAdapter, RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.trainer.adapter import Adapter, ControllerState, TrainingState, build_adapter
from areal_lora.trainer.build import _commit
from areal_lora.trainer.clients.client_operations import Clients
from areal_lora.trainer.clients.client_passes import Limits
from areal_lora.trainer.collective.next_work import next_work
from areal_lora.trainer.collective.operating import conclude, copy_state, operate, pass_together
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.training_state import Rank0, Trainer
from areal_lora.trainer.versions.checkpointing import Checkpointing, load
from areal_lora.trainer.work import Conclude, CopyState, JointPass, Operate, TrainOn, Work
from areal_lora.types import AdapterPhase, AdapterRef
from tests.support.operations.client import Client
from tests.support.operations.toy_engine import VOCABULARY, ToyEngine
from tests.support.paths import EXAMPLES
from tests.support.solo_exchange import SoloExchange

SECTION = {"workflow": {"kind": "client"}, "rank": 4, "alpha": 8, "target_modules": ["all-linear"], "seed": 3}
WAIT_S = 120.0


def service_config(**checkpoint: Any) -> Config:
    """A service without adapters on the tiny base."""
    base = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())
    base["model"]["path"] = str(EXAMPLES / "tiny_model")
    return load_config([base | {"adapters": [], "service": {}, "checkpoint": checkpoint}])


def client_adapter(config: Config, name: str, **changes: Any) -> Adapter:
    """The adapter ``name.1``, which a client drives."""
    desired = DesiredAdapter(name=name, incarnation=1, adapter={**SECTION, **changes})
    return build_adapter(config, joined(config, desired), [[1, 2, 3]])


class HeldDisk(Disk):
    """Renames wait while ``held``; writes below a folder called one of ``full`` find no space."""

    def __init__(self) -> None:
        self._go_on = threading.Event()
        self._go_on.set()
        self.full: set[str] = set()

    def hold(self) -> None:
        self._go_on.clear()

    def release(self) -> None:
        self._go_on.set()

    def about_to(self, operation: str, path: Path) -> None:
        if operation == "write" and self.full & set(path.parts):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if operation == "rename" and path.name != "newest":
            assert self._go_on.wait(WAIT_S)


class Servers:
    """What publishes say of servers that a test answers for. ``began`` are all versions, in order."""

    def __init__(self, active: Callable[[AdapterRef], None]) -> None:
        self.began: list[AdapterRef] = []
        self.at_once = True
        self._active = active
        self._newest: dict[str, int] = {}
        self._running: dict[str, Future[None]] = {}

    def publish(self, adapter: Adapter, version: int) -> None:
        self.began.append(AdapterRef(name=adapter.name, version=version))
        self._newest[adapter.name] = version
        self._running[adapter.name] = Future()
        if self.at_once:
            self.answer(adapter.name)

    def answer(self, name: str) -> None:
        """The newest version of ``name`` is active."""
        self._active(AdapterRef(name=name, version=self._newest[name]))
        self._running[name].set_result(None)

    def newest(self, name: str) -> int | None:
        return self._newest.get(name)

    def pending(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(outcome=self._running[name]) if name in self._running else None

    def join(self, name: str) -> None:
        if (running := self._running.pop(name, None)) is not None:
            running.result(WAIT_S)

    def failed(self) -> str | None:
        return None

    def changed(self) -> bool:
        return False

    def drop(self, name: str) -> None: ...


class Side:
    """Rank 0 with adapters that clients drive; with ``beside`` one that always has a batch, whose steps are counted.

    Adapters with a checkpoint below ``root`` resume from it.
    """

    def __init__(
        self,
        root: Path,
        *names: str,
        beside: bool = False,
        disk: Disk | None = None,
        client: Callable[[RunFolder], Any] | None = Client,
        **checkpoint: Any,
    ) -> None:
        """Without ``client`` another process has it."""
        self.folder = RunFolder(root / "a run")
        self.folder.path.mkdir(parents=True, exist_ok=True)
        if not self.folder.secret.exists():
            create_secret(self.folder)
        self.config = service_config(**checkpoint)
        self.engine, self.disk, self.stop = ToyEngine(), disk or HeldDisk(), threading.Event()
        self.beside_steps = 0
        self.joined: list[list[str]] = []
        """Adapters of each pass."""
        self.later: deque[Callable[[], object]] = deque()
        """What the loop does between two turns."""
        engine: Any = self.engine
        limits = Limits(vocabulary=VOCABULARY, longest=64)
        self.clients = Clients(self.folder, TrainerEnd(self.folder), limits, engine.base_digest())
        self.servers: Any = Servers(self.clients.active)
        self.recorder = Recorder(self.folder, [], {}, time.monotonic())
        committed = partial(_commit, SimpleNamespace(commit=lambda *_: None), self.clients)  # type: ignore[arg-type]
        store = CheckpointStore(self.folder, SoloExchange(), self.disk)
        self.saver = Saver(store=store, config=self.config.checkpoint, committed=committed, kept=self.clients.kept)
        controller: Any = SimpleNamespace(next_work=self._next_work, end=lambda *_: None)
        rank_0 = Rank0(
            controller=controller,
            recorder=self.recorder,
            auditor=SimpleNamespace(collect=lambda *_, **__: None),  # type: ignore[arg-type]
            turns=FairQueue({}),
            desired=SimpleNamespace(closed=False),  # type: ignore[arg-type]
            clients=self.clients,
        )
        self.trainer = Trainer(
            config=self.config,
            run_folder=self.folder,
            engine=engine,
            states={},
            checkpointing=Checkpointing(self.config, engine, self.saver, {}),
            publishing=self.servers,
            control=SoloExchange(),
            rank_0=rank_0,
        )
        for name in names:
            self.join(name)
        if beside:
            other: Any = SimpleNamespace(
                name="beside", config=SimpleNamespace(is_client=False), run=SimpleNamespace(steps=1 << 30)
            )
            self.trainer.states["beside"] = TrainingState(adapter=other, phase=AdapterPhase.ACTIVE)
            rank_0.turns.join("beside", 1.0)
        self.client: Any = client(self.folder) if client else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, name: str) -> TrainingState:
        adapter = client_adapter(self.config, name)
        self.engine.add_adapter(adapter.spec, adapter.config.optimizer, adapter.run.seed)
        state = TrainingState(adapter=adapter, phase=AdapterPhase.ACTIVE)
        self.trainer.states[adapter.name] = state
        engine: Any = self.engine
        found = find(self.folder, adapter.name).newest
        kept = ControllerState()
        if (restored := load(engine, adapter, str(found.path) if found else "", {})) is not None:
            state.version, kept = restored[0].version, restored[1]
            self.trainer.checkpointing.resumed(adapter.name, state.version)
            self.recorder.joined(state.ref, steps=None, resumed=True)
        self.clients.join(adapter, state.version, kept)
        self.trainer.checkpointing.save(state, self.clients.state(adapter.name), at_once=True)
        self.trainer.checkpointing.join(adapter.name)
        assert self.trainer.rank_0
        self.trainer.rank_0.turns.join(adapter.name, 1.0)
        return state

    def state(self, key: str) -> TrainingState:
        return self.trainer.states[key]

    @property
    def records(self) -> RunMetrics:
        return read_metrics(self.folder)

    def wait(self, ready: Callable[[], bool], what: str = "") -> None:
        deadline = time.monotonic() + WAIT_S
        while not ready():
            assert time.monotonic() < deadline, f"{what or 'it'} did not happen"
            assert self._thread.is_alive(), "the loop has ended"
            time.sleep(0.002)

    def quiet(self) -> None:
        """Wait until the trainer has taken note of everything in the background."""
        busy = [*self.clients.known]
        self.wait(
            lambda: not any(self.servers.pending(n) or self.saver.pending(n) for n in busy), "the end of all saves"
        )

    def close(self) -> None:
        if isinstance(self.disk, HeldDisk):
            self.disk.release()
        self.stop.set()
        self._thread.join(WAIT_S)
        self.client.close()
        self.saver.close()
        self.clients.close()
        self.recorder.close()

    def _next_work(self, wanted: Any, draining: Any, interruption: Callable[[], Work | None], wait_s: float) -> Work:
        """The controller: a batch is always there for adapters beside."""
        while True:
            if refs := wanted():
                return TrainOn(adapter=refs[0].name, batch=PackedGroups.of([]))
            if (work := interruption()) is not None:
                return work
            if self.stop.is_set():
                return TrainOn(adapter="", batch=PackedGroups.of([]))
            time.sleep(0.002)

    def _roll(self) -> None:
        while self.later:
            self.later.popleft()()

    def _run(self) -> None:
        while not self.stop.is_set():
            match next_work(self.trainer, self._roll):
                case Operate(adapter=name) as work:
                    operate(self.trainer, self.trainer.states[name], work)
                case JointPass() as work:
                    self.joined.append([operation.adapter for operation in work.operations])
                    pass_together(self.trainer, work)
                case Conclude(adapter=name, publish=publish):
                    conclude(self.trainer, self.trainer.states[name], publish=publish)
                case CopyState():
                    copy_state(self.trainer)
                case TrainOn(adapter=name) if name:
                    time.sleep(0.001)
                    self.beside_steps += 1
                    assert self.trainer.rank_0
                    self.trainer.rank_0.turns.trained(name, 10)
