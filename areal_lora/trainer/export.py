"""The trained adapter as a PEFT folder that stock peft, transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load, save

from areal_lora.checkpoint.adapter_io import save_peft
from areal_lora.engine.base import TrainEngine
from areal_lora.trainer.tenant import Tenant
from areal_lora.weight_sync.exchange import Exchange


def adapter_folder(run_folder: Path, tenant: Tenant) -> Path:
    return run_folder / "adapters" / tenant.name


def export_adapter(engine: TrainEngine, tenant: Tenant, exchange: Exchange, run_folder: Path) -> Path:
    """Write ``tenant.ref`` from all source ranks; rank 0 writes. Collective over all ranks.

    What an earlier end of the run has exported is replaced.
    """
    parts = exchange.all_gather_bytes(save(dict(engine.export_adapter(tenant.name))))
    folder = adapter_folder(run_folder, tenant)
    if exchange.rank == 0:
        tensors = {name: tensor for part in parts for name, tensor in load(part).items()}
        aliases = engine.adapter_layout(tenant.name).aliases
        tensors |= {name: tensors[target] for name, target in aliases.items()}
        if folder.exists():
            shutil.rmtree(folder)
        save_peft(folder, tenant.spec, tensors, tenant.spec.base_model, revision=tenant.base_commit)
    return folder
