"""Checkpoints of a trainer rank: resume from the newest whole one, save where one is due; export at the end.

`export_adapter` writes a PEFT folder that stock peft, transformers and vLLM load. The tensors go one after another to
rank 0, which knows from the layout where each lies in the file::

    source rank:  sections of its shard -> a chunk -> rank 0 -> place in the file;  fsync, rename at the end

So no rank holds more than a chunk of it beyond what it trains. The source ranks take turns.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_lora.checkpoint import state as saved
from areal_lora.checkpoint.adapter_io import load_peft, peft_writer
from areal_lora.checkpoint.checkpoint_store import CheckpointSave, Saver, Snapshot
from areal_lora.checkpoint.merged_folder import fused
from areal_lora.checkpoint.recover import (
    AdapterResume,
    WholeCheckpoint,
    check_usable,
    evaluations_of,
    explain,
    recorded_evaluations,
    tidy,
)
from areal_lora.config.models import Config
from areal_lora.config.recorded import AdapterRun, adapter_named, adapter_run
from areal_lora.distributed.store import Exchange
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.adapter_memory import initial_tensor
from areal_lora.errors import CheckpointError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer import companions
from areal_lora.trainer.adapter import Adapter, ControllerState, Restored, TrainingState
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout, ShardLayout, plan_buckets

log = get_logger(__name__)

CHUNK_BYTES = 16 << 20
"""Size of one message; a single tensor may be larger."""


def export_adapter(engine: AdapterEngine, adapter: Adapter, exchange: Exchange, run_folder: RunFolder) -> Path:
    """Write the adapter from all source ranks on rank 0, in place of an earlier export. Collective over all ranks.

    Raises CheckpointError if it cannot be written, and PublishError if a rank is lost.
    """
    folder, layout = run_folder.adapter_export(adapter.name), engine.adapter_layout(adapter.name)
    mine = engine.export_adapter(adapter.name)
    if exchange.rank:
        _send(mine, next((s for s in layout.shards if s.source == exchange.rank), None), exchange)
        return folder
    try:
        _write(mine, adapter, layout, exchange, folder)
    except OSError as e:
        raise CheckpointError(
            f"{folder}: the adapter cannot be written: {e.strerror} (fix: make room on the disk, or repair it, then "
            "start the same command: it resumes from the newest checkpoint)"
        ) from e
    return folder


def _write(
    mine: Iterator[tuple[str, Tensor]], adapter: Adapter, layout: AdapterLayout, exchange: Exchange, folder: Path
) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover)  # of an export that a crash has ended
    shapes = {t.name: t.shape for shard in layout.shards for t in shard.tensors}
    spec, revision = adapter.spec, adapter.base_commit
    with peft_writer(folder, spec, shapes, spec.base_model, layout.aliases, replace=True, revision=revision) as write:
        for shard in layout.shards:
            for name, tensor in mine if shard.source == exchange.rank else _received(shard, exchange):
                write(name, tensor)


def _received(shard: ShardLayout, exchange: Exchange) -> Iterator[tuple[str, Tensor]]:
    """Another rank's tensors. Each is valid until the next is taken."""
    buckets = plan_buckets(shard, CHUNK_BYTES)
    room = np.empty(max(bucket.nbytes for bucket in buckets), dtype=np.uint8)
    for bucket in buckets:
        exchange.receive(room[: bucket.nbytes], shard.source)
        values = torch.from_numpy(room[: bucket.nbytes]).view(torch.float32)
        for t in shard.tensors[bucket.first : bucket.last]:
            at = (t.offset - bucket.start) // 4
            yield t.name, values[at : at + math.prod(t.shape)].view(t.shape)


def _send(mine: Iterator[tuple[str, Tensor]], shard: ShardLayout | None, exchange: Exchange) -> None:
    buckets = plan_buckets(shard, CHUNK_BYTES) if shard else ()
    room = np.empty(max((bucket.nbytes for bucket in buckets), default=0) // 4, dtype=np.float32)
    values = torch.from_numpy(room)
    for bucket in buckets:
        at = 0
        for _ in range(bucket.first, bucket.last):
            _, tensor = next(mine)
            values[at : at + tensor.numel()] = tensor.flatten()
            at += tensor.numel()
        exchange.send(room.view(np.uint8)[: bucket.nbytes], 0)
    # To the end, also on a rank without a shard: it gives its parts to the ranks that have one.
    rest = [name for name, _ in mine]
    assert not rest, f"{len(rest)} tensors more than the layout has"


def warm_start(engine: AdapterEngine, adapter: Adapter, seed: int) -> None:
    """Make the adapter of ``init_from`` the weights of ``adapter``; moments and clock stay those of a new adapter.

    Not collective: every rank reads the whole folder and holds it twice for a moment. Raises AdapterError or
    UnknownTensorError if the folder changed since the rules judged it, see `fused`.
    """
    folder = adapter.config.init_from
    if folder is None:
        return
    spec, tensors = load_peft(Path(os.path.expanduser(folder)), lambda _: engine.shape)
    layout = engine.adapter_layout(adapter.name)
    engine.load_adapter(adapter.name, fused(tensors, spec, layout, partial(initial_tensor, seed=seed)))


LAYOUT = ("world_size", "tp", "cp", "pp", "ep", "etp")
"""The parallel layout, by keys of the section ``trainer``."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A save of which ``rest`` makes the missing copies of ``snapshot``."""

    save: CheckpointSave
    snapshot: Snapshot
    rest: Iterator[None]


class Checkpointing:
    """One per rank; all calls are collective over the trainer's ranks.

    ``stored`` are the versions, by adapter, whose checkpoints the run resumed from.
    """

    def __init__(self, config: Config, engine: AdapterEngine, saver: Saver, stored: Mapping[str, int]) -> None:
        self._config, self._engine, self._saver = config, engine, saver
        self._newest = dict(stored)  # by adapter, written or being written
        self._durable: dict[str, float] = dict(stored)
        self._copies: dict[str, _Copy] = {}

    def resumed(self, adapter: str, version: int) -> None:
        """An adapter has joined from its checkpoint of ``version``."""
        self._newest[adapter] = self._durable[adapter] = version

    def behind(self, state: TrainingState) -> float:
        """Steps since the newest checkpoint that was joined; infinite without one: no run resumes from nothing."""
        return state.version - self._durable.get(state.name, -math.inf)

    def save(self, state: TrainingState, controller: ControllerState, *, at_once: bool) -> CheckpointSave | None:
        """Start a checkpoint if one is due and none is in progress; ``at_once``: its copies are made now (`copy`).

        One that could not be written is due again. Rank 0's ``controller`` goes into the manifest.
        """
        adapter, version = state.adapter, state.version
        if self.pending(adapter.name) or not due(adapter.run, version, self._newest.get(adapter.name, -1)):
            return None
        self._newest[adapter.name] = version
        save = self.keep(state, controller, "")
        if at_once:
            self.copy(adapter.name, whole=True)
        return save

    def keep(
        self, state: TrainingState, controller: ControllerState, label: str, *, moments: bool = True
    ) -> CheckpointSave:
        """Start the adapter's saved state ``label``, in place of what is there; without, a checkpoint.

        It is the adapter's save in progress.
        """
        adapter, optimizer = state.adapter, state.adapter.config.optimizer
        tensors, copying = self._engine.copy_state(adapter.name, moments=moments)
        others = companions.states(self._engine, adapter)
        manifest = saved.Manifest(
            run=self._config.run.name,
            version=state.version,
            spec=adapter.spec,
            base_digest=self._engine.base_digest(),
            layout=self._config.trainer.model_dump(include=set(LAYOUT)),
            clock=saved.Clock(
                step=tensors.step, total_steps=adapter.run.steps, lr=optimizer.lr, settings=optimizer.model_dump()
            ),
            files=(),
            random=(),
            ledger=controller.ledger,
            evaluations=dict(controller.evaluations),
            awaited=tuple(sorted(controller.pending)),
            kl_scale=state.kl_scale,
            correction=state.correction,
            companions={role: described for role, (_, described) in others.items()},
            written_s=0.0,
        )
        snapshot = Snapshot(
            ref=state.ref,
            state=tensors,
            companions={role: own for role, (own, _) in others.items()},
            random=random_state(self._engine.device),
            manifest=manifest,
        )
        save = self._saver.start(snapshot, label)
        self._copies[state.name] = _Copy(save, snapshot, copying)
        return save

    def copying(self) -> str | None:
        """The first adapter of which copies are missing (not collective)."""
        return next(iter(self._copies), None)

    def copy(self, adapter: str, *, whole: bool = False) -> None:
        """Make the next copies of the save in progress, or the ``whole`` rest. The writing starts after the last."""
        copy = self._copies[adapter]
        for _ in copy.rest:
            if not whole:
                return
        del self._copies[adapter]
        self._saver.write(copy.save, copy.snapshot)

    def release(self, adapter: str) -> None:
        """Let the adapter change: abandon a checkpoint whose copies are not complete, complete a saved state."""
        if (copy := self._copies.get(adapter)) is None:
            return
        if copy.save.label:
            self.copy(adapter, whole=True)
            return
        self._saver.abandon(adapter)
        del self._copies[adapter], self._newest[adapter]

    def holds(self, ref: AdapterRef) -> bool:
        """Whether ``ref`` is the newest version with a checkpoint, written or in progress."""
        return self._newest.get(ref.name) == ref.version

    def pending(self, adapter: str) -> CheckpointSave | None:
        """The adapter's save that was not joined yet (not collective)."""
        return self._saver.pending(adapter)

    def join(self, adapter: str) -> CheckpointSave | None:
        """Wait until the previous checkpoint is written and its step committed, or could not be; see `Saver.join`."""
        if adapter in self._copies:
            self.copy(adapter, whole=True)
        save = self._saver.join(adapter)
        if save is not None and not save.label:
            if save.failed:
                self._newest.pop(adapter, None)
            else:
                self._durable[adapter] = save.ref.version
        return save

    def close(self) -> None:
        self._saver.close()


def due(run: AdapterRun, version: int, newest: int) -> bool:
    """Whether ``version`` gets a checkpoint, where ``newest`` has the last one (-1: none).

    Due are the last version and every multiple of ``checkpoint_every``, or the first later version in place of a
    multiple at which another checkpoint was in progress.
    """
    return version > newest and (version >= run.steps or version - version % run.checkpoint_every > newest)


def random_state(device: torch.device) -> saved.RankRandom:
    own = b"" if device.type == "cpu" else bytes(torch.get_device_module(device).get_rng_state(device).numpy())
    return saved.RankRandom(host=bytes(torch.get_rng_state().numpy()), device=own)


def set_random_state(states: Sequence[saved.RankRandom], rank: int, device: torch.device) -> None:
    """Restore this rank's random numbers. A rank beyond those that wrote the checkpoint keeps its own."""
    if rank >= len(states):
        return
    torch.set_rng_state(_tensor(states[rank].host))
    if states[rank].device and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_tensor(states[rank].device), device)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def resume(
    engine: AdapterEngine, adapters: Sequence[Adapter], config: Config, run_folder: RunFolder, exchange: Exchange
) -> dict[str, Restored]:
    """Load every adapter from its newest whole checkpoint, or its first version if it has none, with its companions.

    Collective. Rank 0 verifies the checkpoints in whole, the others read what they need. Adapters without a
    checkpoint are not in the result.

    Raises:
        CheckpointError: an adapter has checkpoints and none can be used, or the disk fails.
        ConfigError: they are of another adapter or base than is configured.
    """
    mine = None
    if exchange.rank == 0:
        mine = msgspec.msgpack.encode(chosen(explain(run_folder, config), config))
    paths = msgspec.msgpack.decode(exchange.broadcast_bytes(mine), type=list[str])
    recorded = recorded_evaluations(run_folder) if exchange.rank == 0 and any(paths) else {}
    found = {a.name: load(engine, a, path, recorded) for a, path in zip(adapters, paths, strict=True)}
    return {name: restored for name, restored in found.items() if restored is not None}


def chosen(plan: Sequence[AdapterResume], config: Config) -> list[str]:
    """Folders of the checkpoints to load, in the order of the adapters; empty for one that has none. On rank 0.

    Removes what a crash left half-written. Raises CheckpointError as `resume` does.
    """
    for adapter in plan:
        for line in adapter.lines():
            log.warning("%s", line)
        if adapter.newest is not None:
            log.info("%s", _resumed(adapter.ref, adapter.newest, config))
    check_usable(plan)
    try:
        tidy(plan, saved.Disk())
    except OSError as e:
        raise CheckpointError(f"{e.filename}: {e.strerror}; the checkpoints' folder must be writable") from e
    return [str(a.newest.path) if a.newest else "" for a in plan]


def load(
    engine: AdapterEngine, adapter: Adapter, path: str, recorded: Mapping[str, Mapping[int, saved.Evaluation]]
) -> Restored | None:
    """Load a resident adapter from the checkpoint at ``path``, or its first version if that is empty. Collective.

    ``recorded`` are the run's evaluations, on rank 0.
    """
    if not path:
        warm_start(engine, adapter, adapter.run.seed)
    companions.start(engine, adapter, adapter.run.seed)
    if not path:
        return None
    folder = Path(path)
    manifest = saved.read_manifest(folder)
    engine.load_state(adapter.name, saved.read_tensors(folder, manifest), manifest.clock.step)
    companions.load(engine, adapter, manifest, folder)
    set_random_state(manifest.random, engine.rank, engine.device)
    kept = ControllerState(
        ledger=manifest.ledger, evaluations=evaluations_of(manifest, recorded), pending=frozenset(manifest.awaited)
    )
    return TrainingState(
        adapter=adapter, version=manifest.version, kl_scale=manifest.kl_scale, correction=manifest.correction
    ), kept


def _resumed(ref: AdapterRef, found: WholeCheckpoint, config: Config) -> str:
    """The log line of one adapter: which checkpoint, and what is configured otherwise than when it was written."""
    adapter = adapter_named(config, ref.name)
    was, now, steps = found.manifest, adapter.optimizer.model_dump(), adapter_run(config, adapter).steps
    layout = config.trainer.model_dump(include=set(LAYOUT))
    changes = [f"{k} {was.layout[k]} -> {layout[k]}" for k in was.layout if layout[k] != was.layout[k]]
    settings = was.clock.settings
    changes += [f"{k} {settings[k]} -> {now[k]}" for k in now if k in settings and now[k] != settings[k]]
    if was.clock.total_steps != steps:
        changes.append(f"{'run.' if adapter.steps is None else ''}steps {was.clock.total_steps} -> {steps}")
    text = f"resumed from checkpoint {ref} in {found.path}, written {found.age_s():.0f} s ago"
    return text + (f"; changed since: {', '.join(changes)}" if changes else "")
