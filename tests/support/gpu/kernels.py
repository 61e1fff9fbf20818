"""vLLM's Triton kernels for LoRA on linear layers, on slots that `StackedSlotWriter` wrote. Imports vLLM with CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from areal_lora.engine.vllm_ext.worker.lora_install import StackedSlotWriter
from areal_lora.types import AdapterSpec
from tests.support.engine.vllm_ext.slots import install, layout_of
from tests.support.gpu.cases import modules_with_stacks

WIDTH, RANK, TOKENS, LORA_ID = 2048, 32, 96, 5


def worst_error(device: torch.device) -> dict[str, float]:
    """Of tokens with the adapter in slot 1: largest error over the largest output; of base tokens: changed numbers."""
    (a, stack_a), (b, stack_b) = modules_with_stacks(1, WIDTH, RANK, device)
    writer = StackedSlotWriter([a, b], RANK)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=2 * RANK, target_modules=("linear_proj",))
    rng = np.random.default_rng(4)
    full = {n: 0.05 * rng.standard_normal(s, dtype=np.float32) for n, s in writer.expected(spec).items()}
    install(writer, 1, layout_of(full, spec, "bfloat16"), full)
    config = SimpleNamespace(
        max_loras=2, max_lora_rank=RANK, fully_sharded_loras=False, specialize_active_lora=False, lora_dtype=None
    )
    wrapper = PunicaWrapperGPU(TOKENS, TOKENS, device, lora_config=config, max_loras=2)
    ids = tuple(LORA_ID if i % 2 else 0 for i in range(TOKENS))
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [None, LORA_ID], 2, 32000)
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    base = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    found = base.clone()
    wrapper.add_lora_linear(found, x, (stack_a,), (stack_b,), 1.0, (WIDTH,))
    matrices = [torch.from_numpy(full[n]).to(device).to(torch.bfloat16).double() for n in sorted(full)]
    truth = base.double() + spec.scale_of(next(iter(full))) * (x.double() @ matrices[0].t()) @ matrices[1].t()
    adapted = torch.arange(TOKENS, device=device) % 2 == 1
    error = (found[adapted].double() - truth[adapted]).abs().max() / truth[adapted].abs().max()
    return {"relative_error": float(error), "base_tokens_changed": int((found[~adapted] != base[~adapted]).sum())}
