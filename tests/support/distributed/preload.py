"""What ranks, and the processes of runs that are killed many times, need: imported once, by what they are forks of."""

import os

import torch
from transformers import AutoTokenizer  # noqa: F401

from areal_lora.engine.megatron_utils.cpu_patches import install_cpu_patches

if not os.environ.get("EMULATED"):
    install_cpu_patches()

from areal_lora.engine import fsdp_engine, megatron_engine  # noqa: F401
from areal_lora.rollout import main as rollout_main  # noqa: F401
from areal_lora.trainer import build, loop, main  # noqa: F401
from areal_lora.weight_sync import kernels
from tests.support.engine.vllm_ext import stand_in  # noqa: F401
from tests.support.weight_sync import memory_server  # noqa: F401

torch.set_num_threads(1)

# The compiled copies are loaded from their cache once, too.
_memory = torch.zeros(2)
_block = kernels.Block(src=0, src_pitch=4, dst=4, dst_pitch=4, rows=1, cols=1)
kernels.TensorBlocks.of([[_block]], "float32", "float32").copy(_memory.data_ptr(), _memory.data_ptr())
