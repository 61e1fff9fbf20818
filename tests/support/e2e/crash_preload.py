"""What every process of a crash run needs, imported once by the server that they are forked from.

A trainer rank starts in a second instead of ten, so that a run can be killed twenty times.
"""

import torch
from transformers import AutoTokenizer  # noqa: F401

import tests.support.distributed.preload  # noqa: F401
from areal_lora.engine import megatron_engine  # noqa: F401
from areal_lora.engine.vllm_ext import stand_in  # noqa: F401
from areal_lora.rollout import main as rollout_main  # noqa: F401
from areal_lora.trainer import build, loop, main  # noqa: F401

torch.set_num_threads(1)
