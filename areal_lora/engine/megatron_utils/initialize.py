"""torch.distributed and Megatron's parallel groups for one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from areal_lora.config.models import TrainerConfig
from areal_lora.platforms.device import platform_of


def initialize_parallel(
    trainer: TrainerConfig, device: torch.device, seed: int = 0
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create the groups of ``trainer``'s layout; joins the world from the environment unless the caller has.

    Returns this rank's tensor-parallel group and expert-tensor-parallel group.
    """
    if not dist.is_initialized():
        dist.init_process_group(platform_of(device).collective)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        expert_model_parallel_size=trainer.ep,
        expert_tensor_parallel_size=trainer.etp,
    )
    model_parallel_cuda_manual_seed(seed)
    return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
