"""The FSDP2 engine: one rank of a Hugging Face model whose frozen weights are sharded over all ranks.

`fsdp_utils.fsdp_model` computes. Adapters are whole
on every rank, in fp32; rank 0 publishes them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.errors import ConfigError
from areal_lora.families.shape import read_shape


class FsdpEngine(AdapterEngine):
    """`AdapterEngine` on `fully_shard`. Joins torch.distributed unless the caller has."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, device: torch.device) -> None:
        """Raises ConfigError for parallel sizes other than 1, or a model that cannot train on packed sequences."""
        for key in ("tp", "pp", "ep", "etp"):
            if (size := getattr(trainer, key)) != 1:
                reason = f"{size} with trainer.engine = fsdp, which only shards"
                raise ConfigError(f"trainer.{key}", reason, "set it to 1")
        shape = read_shape(Path(model.folder))
        layout = ParallelLayout.of(trainer, layers=shape.layers, experts=shape.experts)
        sharded = ShardedModel(shape=shape, layout=layout)
        # This import loads transformers' modelling code.
        from areal_lora.engine.fsdp_utils.fsdp_model import FsdpModel

        super().__init__(FsdpModel(model, trainer, sharded, device), sharded, model, trainer, device)
