"""The names of Megatron-core and Megatron-Bridge that the engine uses on every device.

What is replaced on CPUs is listed in `engine.megatron_utils.cpu_patches`.
"""

from __future__ import annotations

from tests.support.internals import Used

MEGATRON: tuple[Used, ...] = (
    Used(
        module="megatron.core.parallel_state",
        members=(
            "is_pipeline_first_stage",
            "is_pipeline_last_stage",
            "get_tensor_model_parallel_group",
            "get_tensor_model_parallel_rank",
            "get_tensor_model_parallel_world_size",
            "get_expert_tensor_parallel_group",
            "get_expert_model_parallel_group",
            "get_expert_data_parallel_group",
            "get_data_parallel_group",
        ),
        calls=(
            (
                "initialize_model_parallel",
                (
                    "tensor_model_parallel_size",
                    "pipeline_model_parallel_size",
                    "virtual_pipeline_model_parallel_size",
                    "expert_model_parallel_size",
                    "expert_tensor_parallel_size",
                ),
            ),
            ("get_data_parallel_group", ("with_context_parallel",)),
        ),
    ),
    Used(
        module="megatron.core.tensor_parallel.random", name="model_parallel_cuda_manual_seed", calls=(("", ("seed",)),)
    ),
    Used(
        module="megatron.core.tensor_parallel.mappings",
        name="gather_from_sequence_parallel_region",
        calls=(("", ("input_",)),),
    ),
    Used(
        module="megatron.core.tensor_parallel.mappings",
        name="reduce_scatter_to_sequence_parallel_region",
        calls=(("", ("input_",)),),
    ),
    Used(
        module="megatron.core.models.common.embeddings.rotary_pos_embedding",
        name="RotaryEmbedding",
        members=("inv_freq",),
        calls=(
            (
                "__init__",
                (
                    "kv_channels",
                    "rotary_percent",
                    "rotary_base",
                    "rope_scaling",
                    "rope_scaling_factor",
                    "use_cpu_initialization",
                ),
            ),
        ),
    ),
    Used(
        module="megatron.core.models.gpt.gpt_layer_specs",
        name="get_gpt_decoder_block_spec",
        calls=(("", ("config", "use_transformer_engine", "normalization", "vp_stage")),),
    ),
    Used(
        module="megatron.core.transformer.transformer_layer",
        name="TransformerLayer",
        calls=(("forward", ("attention_mask",)),),
    ),
    Used(
        module="megatron.core.transformer.moe.moe_layer",
        name="MoELayer",
        members=("router", "token_dispatcher", "experts"),
    ),
    Used(module="megatron.core.transformer.moe.router", name="TopKRouter", members=("router_replay",)),
    Used(
        module="megatron.core.transformer.moe.router_replay",
        name="RouterReplay",
        calls=(("get_replay_topk", ("scores", "topk", "num_groups", "group_topk", "default_compute_topk")),),
    ),
    Used(
        module="megatron.core.transformer.moe.token_dispatcher",
        name="MoETokenDispatcher",
        members=(
            "dispatch_preprocess",
            "token_dispatch",
            "dispatch_postprocess",
            "ep_size",
            "tp_size",
            "tp_rank",
            "tp_ep_group",
        ),
    ),
    Used(
        module="megatron.core.transformer.moe.token_dispatcher",
        name="MoEAlltoAllTokenDispatcher",
        members=(
            "preprocess",
            "_maybe_dtoh_and_synchronize",
            "num_local_experts",
            "local_expert_indices",
            "input_splits",
            "output_splits",
            "output_splits_tp",
            "num_out_tokens",
            "num_global_tokens_per_local_expert",
        ),
    ),
    Used(module="megatron.core.transformer.moe.fused_a2a", members=("HAVE_DEEP_EP", "HAVE_HYBRIDEP")),
    Used(module="megatron.core.transformer.spec_utils", name="ModuleSpec", members=("module", "submodules")),
    Used(
        module="megatron.core.pipeline_parallel.schedules",
        name="forward_backward_no_pipelining",
        calls=(
            (
                "",
                (
                    "forward_step_func",
                    "data_iterator",
                    "model",
                    "num_microbatches",
                    "seq_length",
                    "micro_batch_size",
                    "forward_only",
                ),
            ),
        ),
    ),
    Used(
        module="megatron.core.pipeline_parallel.schedules",
        name="forward_backward_pipelining_with_interleaving",
        calls=(("", ("forward_step_func", "data_iterator", "model", "num_microbatches", "forward_only")),),
    ),
    Used(module="megatron.core.pipeline_parallel.schedules", name="get_forward_backward_func"),
    Used(
        module="megatron.core.transformer.transformer_config",
        name="TransformerConfig",
        members=(
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "layernorm_epsilon",
            "normalization",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_layer_freq",
            "moe_router_pre_softmax",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend",
            "moe_permute_fusion",
            "calculate_per_token_loss",
            "pipeline_model_parallel_layout",
        ),
    ),
    Used(
        module="megatron.core.model_parallel_config",
        name="ModelParallelConfig",
        members=(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "params_dtype",
            "pipeline_dtype",
            "bf16",
            "fp16",
            "perform_initialization",
            "use_cpu_initialization",
            "gradient_accumulation_fusion",
            "variable_seq_lengths",
            "overlap_p2p_comm",
            "batch_p2p_comm",
        ),
    ),
)

BRIDGE: tuple[Used, ...] = (
    Used(
        module="megatron.bridge.models.gpt_provider",
        name="GPTModelProvider",
        members=(
            "vocab_size",
            "seq_length",
            "share_embeddings_and_output_weights",
            "position_embedding_type",
            "rotary_base",
            "make_vocab_size_divisible_by",
            "transformer_layer_spec",
            "finalize",
        ),
        calls=(("provide", ("pre_process", "post_process", "vp_stage")),),
    ),
    Used(module="megatron.bridge.peft.lora_layers", name="LoRALinear"),
    Used(
        module="megatron.bridge.peft.adapter_wrapper",
        name="AdapterWrapper",
        members=("to_wrap",),
        calls=(("__init__", ("to_wrap", "adapter")), ("base_linear_forward", ("x",))),
    ),
    Used(module="megatron.bridge.peft.utils", name="get_adapter_attributes_from_linear", calls=(("", ("m",)),)),
)
