"""Mixtral: every layer has experts, named ``block_sparse_moe.experts.E``: w1 gate, w3 up, w2 down.

Those are the names of the published checkpoints, of vLLM (``MixtralForCausalLM``, also for its
LoRA modules) and of PEFT files. transformers 5 renames them in memory (``mlp.experts.gate_up_proj``,
all experts in one parameter) and translates at load and save, so no file has the new names.
"""

from functools import partial

from areal_lora.engine.megatron_utils.convert.blocks import GatedMlp, layer_pieces, layer_sites
from areal_lora.engine.megatron_utils.convert.registry import Family

FAMILY = Family(
    model_types=("mixtral",),
    sites=layer_sites,
    pieces=partial(layer_pieces, experts="block_sparse_moe.experts", names=GatedMlp(gate="w1", up="w3", down="w2")),
)
