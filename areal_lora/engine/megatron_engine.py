"""The Megatron engine: one rank of a Megatron-core model with LoRA adapters.

`megatron_utils.megatron_model` computes. Importing this file does not import Megatron.
"""

from pathlib import Path

import torch

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel, check_widths
from areal_lora.engine.megatron_utils.cpu_patches import install_cpu_patches
from areal_lora.families.shape import ModelShape, read_hf_config


class MegatronEngine(AdapterEngine):
    """`AdapterEngine` on Megatron-core. Joins torch.distributed unless the caller has."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, device: torch.device) -> None:
        """Raises ConfigError where the parallel sizes do not fit the model."""
        hf = read_hf_config(Path(model.folder))
        shape = ModelShape.from_hf(hf)
        check_widths(trainer, shape)
        layout = ParallelLayout.of(trainer, layers=shape.layers, experts=shape.experts)
        sharded = ShardedModel(shape=shape, layout=layout)
        if device.type == "cpu":
            install_cpu_patches()
        # This import loads Megatron, which must find the patches in place.
        from areal_lora.engine.megatron_utils.megatron_model import MegatronModel

        super().__init__(MegatronModel(model, trainer, sharded, hf, device), sharded, model, trainer, device)
