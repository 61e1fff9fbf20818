"""Checkpoints of a trainer rank: resume from the newest whole one, save where one is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from areal_lora.checkpoint.files import Disk
from areal_lora.checkpoint.recover import Found, ResumePlan, explain, tidy
from areal_lora.checkpoint.saver import Save, Saver
from areal_lora.checkpoint.state import MANIFEST_FILE, Clock, Manifest, RankRandom, decode_manifest, read_files
from areal_lora.checkpoint.store import Snapshot
from areal_lora.config.models import Config
from areal_lora.distributed.exchange import Exchange
from areal_lora.engine.base import TrainEngine
from areal_lora.errors import CheckpointError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import Adapter, ControllerState, Restored
from areal_lora.trainer.peft import warm_start
from areal_lora.types import AdapterRef

log = get_logger(__name__)

LAYOUT = ("world_size", "tp", "pp", "ep", "etp")
"""The parallel layout, by keys of the section ``trainer``."""


class Checkpointing:
    """One per rank; all calls are collective over the trainer's ranks.

    ``stored`` are the versions, by adapter, whose checkpoints the run resumed from.
    """

    def __init__(self, config: Config, engine: TrainEngine, saver: Saver, stored: Mapping[str, int]) -> None:
        self._config, self._engine, self._saver = config, engine, saver
        self._newest = dict(stored)  # by adapter, written or being written

    def save(self, adapter: Adapter, version: int, controller: ControllerState) -> Save | None:
        """Copy the adapter's tensors and begin to write them, if ``version`` is due for a checkpoint and has none.

        At most one save per adapter is in progress: call ``join`` first. Rank 0's ``controller`` goes into the
        manifest.
        """
        if self._newest.get(adapter.name) == version or not self.due(version):
            return None
        self._newest[adapter.name] = version
        state = self._engine.export_state(adapter.name)
        optimizer = adapter.config.optimizer
        manifest = Manifest(
            run=self._config.run.name,
            version=version,
            spec=adapter.spec,
            base_digest=self._engine.base_digest(),
            layout=self._config.trainer.model_dump(include=set(LAYOUT)),
            clock=Clock(
                step=state.step, total_steps=self._config.run.steps, lr=optimizer.lr, settings=optimizer.model_dump()
            ),
            files=(),
            random=(),
            ledger=controller.ledger,
            evaluations=dict(controller.evaluations),
            awaited=tuple(sorted(controller.pending)),
            written_s=0.0,
        )
        ref = AdapterRef(name=adapter.name, version=version)
        return self._saver.save(
            Snapshot(ref=ref, state=state, random=random_state(self._engine.device), manifest=manifest)
        )

    def due(self, version: int) -> bool:
        return version % self._config.checkpoint.every_steps == 0 or version >= self._config.run.steps

    def join(self, adapter: str) -> Save | None:
        """Wait until the previous checkpoint is written and its step committed; see `Saver.join`."""
        return self._saver.join(adapter)

    def close(self) -> None:
        self._saver.close()


def random_state(device: torch.device) -> RankRandom:
    own = b"" if device.type == "cpu" else bytes(torch.get_device_module(device).get_rng_state(device).numpy())
    return RankRandom(host=bytes(torch.get_rng_state().numpy()), device=own)


def set_random_state(states: Sequence[RankRandom], rank: int, device: torch.device) -> None:
    """Restore this rank's random numbers. A rank beyond those that wrote the checkpoint keeps its own."""
    if rank >= len(states):
        return
    torch.set_rng_state(_tensor(states[rank].host))
    if states[rank].device and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_tensor(states[rank].device), device)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def resume(
    engine: TrainEngine, adapters: Sequence[Adapter], config: Config, run_folder: RunFolder, exchange: Exchange
) -> dict[str, Restored]:
    """Load every adapter from its newest whole checkpoint, or its first version if it has none.

    Collective. Rank 0 verifies the checkpoints in whole, the others read what they need. Adapters without a
    checkpoint are not in the result.

    Raises:
        CheckpointError: an adapter has checkpoints and none can be used, or the disk fails.
        ConfigError: they are of another adapter or base than is configured.
    """
    chosen = None
    if exchange.rank == 0:
        plan = explain(run_folder, config)
        _log(plan, config)
        plan.check()
        _tidy(plan)
        chosen = msgspec.msgpack.encode([str(a.newest.path) if a.newest else "" for a in plan.adapters])
    paths = msgspec.msgpack.decode(exchange.broadcast_bytes(chosen), type=list[str])
    restored = {}
    for adapter, path in zip(adapters, paths, strict=True):
        if path:
            restored[adapter.name] = _load(engine, adapter.name, Path(path))
        else:
            warm_start(engine, adapter, config.run.seed)
    return restored


def _load(engine: TrainEngine, adapter: str, folder: Path) -> Restored:
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    tensors = read_files([folder / entry.name for entry in manifest.files])
    engine.load_state(adapter, tensors, manifest.clock.step)
    set_random_state(manifest.random, engine.rank, engine.device)
    controller = ControllerState(
        ledger=manifest.ledger, evaluations=manifest.evaluations, pending=frozenset(manifest.awaited)
    )
    return Restored(version=manifest.version, controller=controller)


def _log(plan: ResumePlan, config: Config) -> None:
    for adapter in plan.adapters:
        for line in adapter.lines():
            log.warning("%s", line)
        if adapter.newest is not None:
            log.info("%s", _resumed(adapter.ref, adapter.newest, config))


def _resumed(ref: AdapterRef, found: Found, config: Config) -> str:
    """The log line of one adapter: which checkpoint, and what is configured otherwise than when it was written."""
    was, now = found.manifest, next(a for a in config.adapters if a.name == ref.name).optimizer.model_dump()
    layout = config.trainer.model_dump(include=set(LAYOUT))
    changes = [f"{k} {was.layout[k]} -> {layout[k]}" for k in was.layout if layout[k] != was.layout[k]]
    settings = was.clock.settings
    changes += [f"{k} {settings[k]} -> {now[k]}" for k in now if k in settings and now[k] != settings[k]]
    if was.clock.total_steps != config.run.steps:
        changes.append(f"run.steps {was.clock.total_steps} -> {config.run.steps}")
    text = f"resumed from checkpoint {ref} in {found.path}, written {found.age_s():.0f} s ago"
    return text + (f"; changed since: {', '.join(changes)}" if changes else "")


def _tidy(plan: ResumePlan) -> None:
    try:
        tidy(plan, Disk())
    except OSError as e:
        raise CheckpointError(f"{e.filename}: {e.strerror}; the checkpoints' folder must be writable") from e
