"""The first version of an adapter from a PEFT folder: its own export, or an adapter of other tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from areal_lora.checkpoint.adapter_io import load_peft
from areal_lora.checkpoint.fuse import fused
from areal_lora.engine.base import TrainEngine
from areal_lora.engine.megatron_engine import initial_tensor
from areal_lora.trainer.tenant import Tenant


def warm_start(engine: TrainEngine, tenant: Tenant, seed: int) -> None:
    """Make the adapter of ``init_from`` the tenant's weights; moments and clock stay those of a new adapter.

    Not collective. Every rank reads the whole folder itself and holds it twice for a moment: one file
    on a shared file system costs less than a second way to cut tensors into ranks' parts.

    Raises:
        AdapterError, UnknownTensorError: the folder changed since the rules judged it, see `fused`.
    """
    folder = tenant.config.init_from
    if folder is None:
        return
    spec, tensors = load_peft(Path(folder).expanduser())
    layout = engine.adapter_layout(tenant.name)
    engine.load_adapter(tenant.name, fused(tensors, spec, layout, partial(initial_tensor, seed=seed)))
