"""The names of vLLM that areal_lora uses, with what it relies on. Data; nothing is imported.

``tests/repository/test_internals.py`` compares the table with the imports of `engine.vllm_ext` and with vLLM's
sources: the installed version always, newer wheels in the nightly suite (docs/en/results.md). Rows without a reason
are vLLM's interface for programs, of which the table names the arguments and attributes in use.
"""

from __future__ import annotations

from tests.support.internals import Used

_EXPERTS = "vllm.model_executor.layers.fused_moe"
_LAYERS = "vllm.lora.layers"
_LINEAR = "vllm.model_executor.layers.linear"
_STACKS = ("lora_a_stacked", "lora_b_stacked")

INTERNALS: tuple[Used, ...] = (
    # The engine and its requests.
    Used(
        module="vllm.engine.arg_utils",
        name="AsyncEngineArgs",
        members=(
            "model",
            "dtype",
            "seed",
            "tensor_parallel_size",
            "enable_expert_parallel",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "enforce_eager",
            "scheduling_policy",
            "scheduler_cls",
            "block_size",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "disable_log_stats",
            "logprobs_mode",
            "enable_lora",
            "max_lora_rank",
            "max_loras",
            "max_cpu_loras",
            "lora_target_modules",
            "worker_extension_cls",
            "distributed_executor_backend",
            "additional_config",
            "enable_return_routed_experts",
        ),
        calls=(("create_engine_config", ()),),
    ),
    Used(
        module="vllm.v1.engine.async_llm",
        name="AsyncLLM",
        members=("errored", "output_processor", "engine_core", "model_config", "get_tokenizer"),
        calls=(
            ("from_vllm_config", ("vllm_config", "disable_log_stats")),
            ("add_request", ("request_id", "prompt", "params", "arrival_time", "lora_request", "priority")),
            ("abort", ("request_id", "internal")),
            ("collective_rpc", ("method", "args")),
            ("shutdown", ("timeout",)),
        ),
    ),
    Used(
        module="vllm.v1.engine.core",
        name="EngineCore",
        members=("scheduler",),
        why="the use of the KV cache is in statistics only, which cost time at every model step",
    ),
    Used(
        module="vllm.v1.core.sched.interface",
        name="SchedulerInterface",
        members=("get_kv_cache_usage",),
        why="as EngineCore",
    ),
    Used(
        module="vllm.v1.engine.core_client",
        name="AsyncMPClient",
        calls=(("call_utility_async", ("method",)),),
        why="as EngineCore",
    ),
    Used(module="vllm.outputs", name="RequestOutput", members=("outputs", "finished", "prompt_logprobs")),
    Used(
        module="vllm.outputs",
        name="CompletionOutput",
        members=("token_ids", "logprobs", "finish_reason", "index", "routed_experts"),
    ),
    Used(
        module="vllm.sampling_params",
        name="SamplingParams",
        members=(
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "output_kind",
            "extra_args",
            "structured_outputs",
        ),
    ),
    Used(module="vllm.sampling_params", name="StructuredOutputsParams", members=("json",)),
    Used(module="vllm.sampling_params", name="RequestOutputKind", members=("FINAL_ONLY", "DELTA")),
    Used(module="vllm.lora.request", name="LoRARequest", members=("lora_name", "lora_int_id", "lora_path")),
    Used(
        module="vllm.config.lora",
        name="MaxLoRARanks",
        why="the ranks that vLLM's kernels hold; it has no function for that",
    ),
    Used(module="vllm.exceptions", name="VLLMClientError"),
    Used(module="vllm.v1.engine.exceptions", name="EngineDeadError"),
    Used(module="vllm.platforms", members=("current_platform",)),
    Used(
        module="vllm.tool_parsers.abstract_tool_parser",
        name="ToolParser",
        calls=(("__init__", ("tokenizer", "tools")), ("extract_tool_calls", ("model_output", "request"))),
    ),
    Used(module="vllm.tool_parsers.abstract_tool_parser", name="ToolParserManager", members=("get_tool_parser",)),
    Used(
        module="vllm.entrypoints.openai.chat_completion.protocol",
        name="ChatCompletionRequest",
        members=("messages", "tools", "tool_choice"),
    ),
    # Log-probabilities of the first model runner.
    Used(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner",
        members=("sampler", "num_prompt_logprobs", "requests", "lora_manager", "input_batch"),
        calls=(("_get_prompt_logprobs_dict", ("hidden_states", "num_scheduled_tokens")),),
        why="log-probabilities at a temperature, of prompts too, have no setting",
    ),
    Used(
        module="vllm.v1.sample.sampler",
        name="Sampler",
        members=("topk_topp_sampler",),
        calls=(("compute_logprobs", ("logits",)),),
        why="as GPUModelRunner",
    ),
    Used(
        module="vllm.v1.sample.ops.topk_topp_sampler",
        name="TopKTopPSampler",
        calls=tuple(
            (name, ("logits", "generators", "k", "p")) for name in ("forward_native", "forward_cpu", "forward_cuda")
        ),
        why="log-probabilities before top-p and top-k have no setting",
    ),
    # Slots of adapters.
    Used(
        module="vllm.v1.worker.gpu_input_batch",
        name="InputBatch",
        members=("lora_id_to_request_ids",),
        why="whether a step that is scheduled still computes an adapter",
    ),
    Used(
        module="vllm.lora.worker_manager",
        name="WorkerLoRAManager",
        members=("_adapter_manager",),
        calls=(("_load_adapter", ("lora_request",)),),
        why="adapters arrive over the wire: vLLM loads files only",
    ),
    Used(
        module="vllm.lora.model_manager",
        name="LRUCacheLoRAModelManager",
        members=(
            "modules",
            "packed_modules",
            "lora_config",
            "lora_index_to_id",
            "capacity",
            "_registered_adapters",
            "_active_adapters",
        ),
        calls=(("remove_adapter", ("adapter_id",)),),
        why="which slot serves an adapter, set without a file and without eviction",
    ),
    Used(
        module="vllm.config.lora",
        name="LoRAConfig",
        members=("fully_sharded_loras", "max_lora_rank"),
        why="ranks and splits of the slots",
    ),
    Used(
        module="vllm.lora.lora_model",
        name="LoRAModel",
        calls=(("__init__", ("lora_model_id", "rank", "loras")),),
        why="what the manager holds for an adapter, here empty",
    ),
    Used(
        module=f"{_LAYERS}.base_linear",
        name="BaseLinearLayerWithLoRA",
        members=("base_layer", "input_size", "output_size", "tp_size", "tp_rank", *_STACKS),
        why="the slots of a linear layer",
    ),
    Used(
        module=f"{_LAYERS}.row_parallel_linear",
        name="RowParallelLinearWithLoRA",
        members=("input_size",),
        why="the part of a slot that a worker holds",
    ),
    Used(
        module=f"{_LAYERS}.column_parallel_linear",
        name="ColumnParallelLinearWithLoRA",
        members=("output_size",),
        why="as RowParallelLinearWithLoRA",
    ),
    Used(
        module=f"{_LAYERS}.column_parallel_linear",
        name="MergedColumnParallelLinearWithLoRA",
        members=("output_ids", "output_slices"),
        why="as RowParallelLinearWithLoRA",
    ),
    Used(
        module=f"{_LAYERS}.column_parallel_linear",
        name="MergedQKVParallelLinearWithLoRA",
        members=("output_ids", "output_slices"),
        why="as RowParallelLinearWithLoRA",
    ),
    Used(
        module="vllm.model_executor.layers.linear",
        name="QKVParallelLinear",
        members=("total_num_heads", "total_num_kv_heads", "head_size"),
        why="repeated key and value heads",
    ),
    Used(
        module=f"{_LAYERS}.fused_moe",
        name="FusedMoEWithLoRA",
        members=(
            "w13_lora_a_stacked",
            "w13_lora_b_stacked",
            "w2_lora_a_stacked",
            "w2_lora_b_stacked",
            "adapter_enabled",
            "base_layer",
            "hidden_size",
            "intermediate_size_per_partition",
            "global_num_experts",
            "moe_config",
            "tp_size",
            "tp_rank",
        ),
        why="the slots of experts",
    ),
    Used(module=f"{_LAYERS}.fused_moe", name="FusedMoE3DWithLoRA", why="experts of another form, which are refused"),
    # Weights of merged rollouts.
    Used(
        module="vllm.lora.utils", members=("process_packed_modules_mapping",), why="which projections a model has fused"
    ),
    Used(
        module=_LINEAR,
        name="LinearBase",
        members=("quant_method", "input_size", "output_size", "tp_rank"),
        why="merged rollouts write weights in place; vLLM's own reload reads files",
    ),
    Used(module=_LINEAR, name="ColumnParallelLinear", members=("output_size_per_partition",), why="as LinearBase"),
    Used(module=_LINEAR, name="MergedColumnParallelLinear", members=("output_sizes",), why="as LinearBase"),
    Used(module=_LINEAR, name="RowParallelLinear", members=("input_size_per_partition",), why="as LinearBase"),
    Used(
        module=_LINEAR,
        name="UnquantizedLinearMethod",
        calls=(("process_weights_after_loading", ("layer",)),),
        why="a CPU packs weights again; quantized ones are refused",
    ),
    Used(
        module=f"{_EXPERTS}.routed_experts",
        name="RoutedExperts",
        members=("quant_method", "moe_config", "local_num_experts", "global_num_experts", "expert_map", "hidden_size"),
        why="as LinearBase",
    ),
    Used(
        module=f"{_EXPERTS}.unquantized_fused_moe_method",
        name="UnquantizedFusedMoEMethod",
        members=("unquantized_backend", "moe_kernel"),
        why="as UnquantizedLinearMethod",
    ),
    Used(
        module=f"{_EXPERTS}.oracle.unquantized",
        name="UnquantizedMoeBackend",
        members=("TRITON", "BATCHED_TRITON"),
        why="kernels that take experts as they are loaded",
    ),
    # CPUs only.
    Used(module="vllm.v1.executor.uniproc_executor", name="UniProcExecutor", on="cpu"),
    Used(
        module="vllm._custom_ops",
        members=("create_onednn_mm",),
        on="cpu",
        why="products of experts; torch's are slow for few rows",
    ),
    Used(
        module="vllm.lora.punica_wrapper.punica_cpu",
        name="PunicaWrapperCPU",
        calls=(
            ("update_metadata", ("mapping", "lora_index_to_id")),
            ("add_lora_linear", ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices")),
        ),
        on="cpu",
        why="vLLM's LoRA of linear layers reads the last slot for tokens without an adapter",
    ),
    Used(
        module="vllm.platforms.cpu",
        name="CpuPlatform",
        calls=(("get_punica_wrapper", ()),),
        on="cpu",
        why="the platform chooses the LoRA of linear layers",
    ),
    Used(
        module=f"{_EXPERTS}.modular_kernel",
        members=("FusedMoEExperts", "FusedMoEExpertsModular", "FusedMoEActivationFormat"),
        on="cpu",
        why="with LoRA vLLM has Triton experts only",
    ),
    Used(
        module=f"{_EXPERTS}.oracle.unquantized",
        members=("backend_to_kernel_cls",),
        on="cpu",
        why="the choice of experts",
    ),
    Used(
        module=f"{_EXPERTS}.experts.lora_experts_mixin",
        name="LoRAExpertsMixin",
        members=("_lora_context",),
        calls=(("set_lora_context", ("ctx",)),),
        on="cpu",
        why="the slots that experts compute with",
    ),
    Used(
        module=f"{_EXPERTS}.topk_weight_and_reduce", name="TopKWeightAndReduceNoOP", on="cpu", why="as modular_kernel"
    ),
    Used(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler",
        members=("kv_cache_manager", "block_size", "max_num_active_reqs", "aux_output_connector", "cache_config"),
        calls=(
            ("schedule", ("throttle_prefills",)),
            ("_handle_blocked_waiting_request", ("request",)),
            ("_get_local_prefix_cache_hit", ("request",)),
            ("add_request", ("request",)),
            ("update_from_output", ("scheduler_output", "model_runner_output")),
            ("finish_requests", ("request_ids", "finished_status")),
        ),
        on="cpu",
        why="a group's prompt is computed once, and an answer is one message",
    ),
    Used(
        module=f"{_EXPERTS}.routed_experts_capturer",
        members=("RoutedExpertsCapturer", "bind_routed_experts_capturer"),
        on="cpu",
        why="routes are returned by the second model runner only",
    ),
    Used(
        module="vllm.v1.core.kv_cache_manager",
        name="KVCacheManager",
        calls=(
            ("get_blocks", ("request_id",)),
            ("create_kv_cache_blocks", ("blocks",)),
            ("prefix_cache_lookup_enabled", ("request",)),
        ),
        on="cpu",
        why="a sample of a group starts with the blocks of the first",
    ),
    Used(
        module="vllm.v1.engine",
        name="EngineCoreOutput",
        members=(
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "new_prompt_logprobs_tensors",
            "prefill_stats",
            "finish_reason",
        ),
        on="cpu",
        why="what the message of an answer holds",
    ),
    Used(
        module="vllm.v1.engine",
        name="EngineCoreOutputs",
        members=("outputs", "finished_requests", "scheduler_stats"),
        on="cpu",
        why="as EngineCoreOutput",
    ),
    Used(
        module="vllm.v1.outputs",
        name="LogprobsLists",
        members=("logprob_token_ids", "logprobs", "sampled_token_ranks"),
        on="cpu",
        why="as EngineCoreOutput",
    ),
    Used(
        module="vllm.v1.request",
        name="Request",
        members=(
            "request_id",
            "num_computed_tokens",
            "num_prompt_tokens",
            "num_tokens",
            "prompt_token_ids",
            "sampling_params",
            "lora_request",
            "cache_salt",
        ),
        on="cpu",
        why="whether two requests have one prompt, and how far it is computed",
    ),
)
