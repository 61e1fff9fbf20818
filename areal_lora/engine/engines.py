"""The trainer engines by their configuration value. Importing this file imports neither Megatron nor transformers."""

from __future__ import annotations

import torch

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.engine.megatron_engine import MegatronEngine

ENGINES = {"megatron": MegatronEngine, "fsdp": FsdpEngine}


def build_engine(model: ModelConfig, trainer: TrainerConfig, device: torch.device) -> AdapterEngine:
    """This rank's engine, as ``trainer.engine`` chooses. Raises ConfigError where sizes and model do not fit it."""
    return ENGINES[trainer.engine](model, trainer, device)
