"""What every rank of a layout test needs, imported once by the server that its processes are forked from."""

import torch

from areal_lora.platforms.megatron_cpu import install_cpu_patches

install_cpu_patches()

from areal_lora.engine.common import optimizer  # noqa: E402, F401
from areal_lora.engine.fsdp_utils import fsdp_model  # noqa: E402, F401
from areal_lora.engine.megatron_utils import base_weights, lora, model, schedule  # noqa: E402, F401
from areal_lora.weight_sync import blocks  # noqa: E402

# The compiled copies are loaded from their cache once, too.
_memory = torch.zeros(2)
_block = blocks.Block(src=0, src_pitch=4, dst=4, dst_pitch=4, rows=1, cols=1)
blocks.TensorBlocks.of([[_block]], "float32", "float32").copy(_memory.data_ptr(), _memory.data_ptr())
