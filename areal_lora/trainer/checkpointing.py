"""Checkpoints of a trainer rank: resume from the newest whole one, save where one is due."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from areal_lora.checkpoint.files import Disk
from areal_lora.checkpoint.recover import AdapterResume, ResumePlan, explain, tidy
from areal_lora.checkpoint.saver import Save, Saver
from areal_lora.checkpoint.state import MANIFEST_FILE, Clock, Manifest, RankRandom, decode_manifest, read_files
from areal_lora.checkpoint.store import Snapshot
from areal_lora.config.models import Config
from areal_lora.distributed.exchange import Exchange
from areal_lora.engine.base import TrainEngine
from areal_lora.errors import CheckpointError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.peft import warm_start
from areal_lora.trainer.tenant import Tenant

log = get_logger(__name__)


class Checkpointing:
    """One per rank; all calls are collective over the trainer's ranks."""

    def __init__(self, config: Config, engine: TrainEngine, saver: Saver) -> None:
        self._config, self._engine, self._saver = config, engine, saver

    def save(self, tenant: Tenant) -> Save | None:
        """Copy the tenant's state and begin to write it, if its version is to have a checkpoint and has none.

        At most one per adapter is under way: call ``join`` first.
        """
        if tenant.stored == tenant.version or not self.due(tenant.version):
            return None
        tenant.stored = tenant.version
        state = self._engine.export_state(tenant.name)
        optimizer = tenant.config.optimizer
        trainer = self._config.trainer
        manifest = Manifest(
            run=self._config.run.name,
            version=tenant.version,
            spec=tenant.spec,
            base_digest=self._engine.base_digest(),
            layout={"world_size": trainer.world_size} | {k: getattr(trainer, k) for k in ("tp", "pp", "ep", "etp")},
            clock=Clock(
                step=state.step, total_steps=self._config.run.steps, lr=optimizer.lr, settings=optimizer.model_dump()
            ),
            files=(),
            random=(),
            ledger=tenant.ledger,
            evaluations=dict(tenant.evaluations),
            awaited=tuple(sorted(tenant.awaited)),
            written_s=0.0,
        )
        return self._saver.save(
            Snapshot(ref=tenant.ref, state=state, random=random_state(self._engine.device), manifest=manifest)
        )

    def due(self, version: int) -> bool:
        return version % self._config.checkpoint.every_steps == 0 or version >= self._config.run.steps

    def join(self, tenant: Tenant) -> Save | None:
        """Wait until the tenant's checkpoint before is written and its step committed; see `Saver.join`."""
        return self._saver.join(tenant.name)

    def close(self) -> None:
        self._saver.close()


def random_state(device: torch.device) -> RankRandom:
    own = b"" if device.type == "cpu" else bytes(torch.get_device_module(device).get_rng_state(device).numpy())
    return RankRandom(host=bytes(torch.get_rng_state().numpy()), device=own)


def set_random_state(states: Sequence[RankRandom], rank: int, device: torch.device) -> None:
    """Go on with this rank's random numbers. A rank that the checkpoint does not know keeps its own."""
    if rank >= len(states):
        return
    torch.set_rng_state(_tensor(states[rank].host))
    if states[rank].device and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_tensor(states[rank].device), device)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def resume(
    engine: TrainEngine, tenants: Sequence[Tenant], config: Config, run_folder: RunFolder, exchange: Exchange
) -> None:
    """Give every tenant its state. Collective; rank 0 reads all of the checkpoints, the others what they need.

    Raises:
        CheckpointError: there were checkpoints of an adapter and none can be used, or the disk fails.
        ConfigError: they are of another adapter or base than is configured.
    """
    chosen = None
    if exchange.rank == 0:
        plan = explain(run_folder, config)
        _announce(plan, config)
        plan.check()
        _tidy(plan)
        chosen = msgspec.msgpack.encode([str(a.newest.path) if a.newest else "" for a in plan.adapters])
    paths = msgspec.msgpack.decode(exchange.broadcast_bytes(chosen), type=list[str])
    for tenant, path in zip(tenants, paths, strict=True):
        if path:
            _load(engine, tenant, Path(path))
        else:
            warm_start(engine, tenant, config.run.seed)


def _load(engine: TrainEngine, tenant: Tenant, folder: Path) -> None:
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    tensors = read_files([folder / entry.name for entry in manifest.files])
    engine.load_state(tenant.name, tensors, manifest.clock.step)
    tenant.version = tenant.stored = manifest.version
    tenant.resumed = True
    tenant.ledger = manifest.ledger
    tenant.evaluations, tenant.awaited = dict(manifest.evaluations), set(manifest.awaited)
    tenant.asked = max(tenant.evaluations.keys() | tenant.awaited, default=-1)
    set_random_state(manifest.random, engine.rank, engine.device)


def _announce(plan: ResumePlan, config: Config) -> None:
    for adapter in plan.adapters:
        for line in adapter.lines():
            log.warning("%s", line)
        if adapter.newest is not None:
            log.info("%s", _goes_on(adapter, adapter.newest.manifest, config))


def _goes_on(adapter: AdapterResume, manifest: Manifest, config: Config) -> str:
    assert adapter.newest is not None
    text = f"{adapter.ref} goes on from {adapter.newest.path}, written {adapter.newest.age_s():.0f} s ago"
    now = next(a for a in config.adapters if a.name == adapter.adapter).optimizer.model_dump()
    sizes = {"world_size", "tp", "pp", "ep", "etp"}
    layout = config.trainer.model_dump(include=sizes)
    changes = [f"{k} {manifest.layout[k]} -> {layout[k]}" for k in manifest.layout if layout[k] != manifest.layout[k]]
    was = manifest.clock.settings
    changes += [f"{k} {was[k]} -> {now[k]}" for k in now if k in was and now[k] != was[k]]
    if manifest.clock.total_steps != config.run.steps:
        changes.append(f"run.steps {manifest.clock.total_steps} -> {config.run.steps}")
    return text + (f"; changed since: {', '.join(changes)}" if changes else "")


def _tidy(plan: ResumePlan) -> None:
    try:
        tidy(plan, Disk())
    except OSError as e:
        raise CheckpointError(f"{e.filename}: {e.strerror}; the checkpoints' folder must be writable") from e
