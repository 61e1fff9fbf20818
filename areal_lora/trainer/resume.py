"""How a trainer begins: from the newest checkpoint of each adapter that is whole, or anew where none was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_lora.checkpoint.files import Disk
from areal_lora.checkpoint.recover import AdapterResume, ResumePlan, explain, tidy
from areal_lora.checkpoint.state import MANIFEST_FILE, Manifest, decode_manifest, read_files
from areal_lora.config.models import Config
from areal_lora.distributed.exchange import Exchange
from areal_lora.engine.base import TrainEngine
from areal_lora.errors import CheckpointError
from areal_lora.processes.log import get_logger
from areal_lora.trainer.saving import set_random_state
from areal_lora.trainer.tenant import Tenant
from areal_lora.trainer.warm_start import warm_start

log = get_logger(__name__)


def resume(
    engine: TrainEngine, tenants: Sequence[Tenant], config: Config, run_folder: Path, exchange: Exchange
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
