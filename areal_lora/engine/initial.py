"""The values of a new adapter."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from areal_lora.weight_sync.layout import WireTensor


def initial_tensor(tensor: WireTensor, seed: int) -> Tensor:
    """lora_A kaiming-uniform (a = sqrt 5, PEFT's choice), lora_B zero; a function of seed and name only."""
    values = torch.zeros(tensor.shape)
    if tensor.name.endswith("lora_A.weight"):
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = math.sqrt(1.0 / tensor.shape[1])
        values.uniform_(-bound, bound, generator=generator)
    return values
