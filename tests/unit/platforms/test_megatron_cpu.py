"""What importing Megatron on a CPU loads, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

IMPORT = """
import json, sys
import torch
compiler = torch.compile
from areal_lora.platforms.megatron_cpu import install_cpu_patches
install_cpu_patches()
import areal_lora.engine.megatron_utils.megatron_model
assert torch.compile is compiler
assert "transformer_engine" not in sys.modules
print(json.dumps([name for name in sys.modules if name.count(".") < 2]))
"""
SLOW = {"transformers", "torch._inductor", "torch._dynamo", "megatron.training"}
"""Each takes a second of CPU time or more; none is needed to build and run the model."""


def test_megatron_is_imported_without_what_the_model_does_not_need() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(json.loads(done.stdout))
    assert {"megatron.core", "megatron.bridge"} <= loaded
    assert not loaded & SLOW
