"""The table of supported families, one row each. To add one, see docs/en/models.md."""

from __future__ import annotations

from areal_lora.families.family import Attention, Experts, Family, GatedMlp

TABLE = (
    # Layers of mlp_only_layers, or those that decoder_sparse_step leaves out, keep the dense MLP.
    Family(model_type="qwen3_moe", attention=Attention(norms=True), experts=Experts(vllm_dense_key="mlp_only_layers")),
    Family(model_type="qwen3", attention=Attention(norms=True)),
    Family(model_type="qwen2", attention=Attention(bias=True), vllm_embeddings=False),  # Qwen2 and Qwen2.5
    Family(model_type="llama", rope_types=("default", "llama3")),  # Llama 2 and 3
    # The names are those of the published checkpoints, of vLLM's LoRA modules and of PEFT files. transformers 5
    # renames the experts in memory (mlp.experts.gate_up_proj) and translates at load and save.
    Family(
        model_type="mixtral",
        experts=Experts(
            mlp=GatedMlp(
                gate="block_sparse_moe.experts.{}.w1",
                up="block_sparse_moe.experts.{}.w3",
                down="block_sparse_moe.experts.{}.w2",
            ),
            router="block_sparse_moe.gate",
            ffn_key="intermediate_size",  # there is no other MLP
            normalized=True,
        ),
        sliding_window=True,
    ),
    # Qwen1.5-MoE and Qwen2-MoE; dense layers as in Qwen3-MoE.
    Family(
        model_type="qwen2_moe",
        attention=Attention(bias=True),
        experts=Experts(shared=GatedMlp.below("mlp.shared_expert")),
        vllm_embeddings=False,
    ),
)
