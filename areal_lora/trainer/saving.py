"""Checkpoints as the loop sees them: when one is due, what is copied, what has to wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_lora.checkpoint.saver import Save, Saver
from areal_lora.checkpoint.state import Clock, Manifest, RankRandom
from areal_lora.checkpoint.store import Snapshot
from areal_lora.config.models import Config
from areal_lora.engine.base import TrainEngine
from areal_lora.trainer.tenant import Tenant


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
