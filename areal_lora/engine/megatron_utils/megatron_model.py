"""This rank's part of the frozen base, a Hugging Face folder as a Megatron module, run as packed token trees [1, t].

Bridge 0.3 has no Mixtral and no Qwen2-MoE, reads neither the rope theta of transformers 5 nor the list of dense layers,
and gives every expert-parallel rank the first experts. Therefore `build_model` takes the sizes from config.json,
`base_weights` loads the weights, and Bridge builds the model only. `layers.attention` explains why no result depends on
the packing. Importing this file imports Megatron: the caller must have applied `cpu_patches` on a machine without GPU.
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.data.collate import MicroPlan
from areal_lora.engine.base import DTYPES
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.adapter_optimizer import GradientClass
from areal_lora.engine.common.arena import ParallelLayout, Range, ShardedModel
from areal_lora.engine.common.micro_batches import BatchJudge, Result
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.engine.layers.attention import PackedMicroBatch
from areal_lora.engine.layers.recompute import recompute
from areal_lora.engine.layers.served_weights import MergedPart, ServedSite
from areal_lora.engine.megatron_utils import modules
from areal_lora.engine.megatron_utils.base_weights import architecture, load_base
from areal_lora.engine.megatron_utils.exchange_sizes import padding_in_turn, with_sizes
from areal_lora.errors import ConfigError
from areal_lora.families.family import COLUMN_PARALLEL
from areal_lora.platforms.device import collective_of, profiler_range
from areal_lora.types import ExpertLayout


class ScheduleRanges:
    """Megatron's timers as ranges of profilers: ``forward`` and ``backward`` of a micro-batch, messages of stages."""

    def __init__(self) -> None:
        self._name, self._open = "", dict[str, AbstractContextManager[None]]()

    def __call__(self, name: str, log_level: int = 0) -> Self:
        self._name = name.removesuffix("-compute")
        return self

    def start(self, barrier: bool = False) -> None:
        self._open[self._name] = profiler_range(self._name)
        self._open[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        self._open.pop(self._name).__exit__(None, None, None)


def build_model(
    model: ModelConfig, trainer: TrainerConfig, layout: ParallelLayout, hf: Mapping[str, Any], device: torch.device
) -> tuple[nn.ModuleList, modules.Packing]:
    """This rank's part of the model by virtual stage, weights not loaded, and its attention plans.

    Parallel state must be initialised. Raises ConfigError where the kernels of the token dispatcher are not installed.
    """
    dtype = DTYPES[model.dtype]
    _check_dispatcher(trainer)
    settings = _settings(trainer, layout, dtype, on_cpu=device.type == "cpu")
    provider = GPTModelProvider(**architecture(hf), **settings)
    provider.finalize()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    chunks, numbers = nn.ModuleList(), range(trainer.chunks)
    for number in numbers:
        ends = {"pre_process": first and number == 0, "post_process": last and number == numbers[-1]}
        chunks.append(provider.provide(**ends, vp_stage=number if len(numbers) > 1 else None))
    module = chunks.to(device=device, dtype=dtype)
    # Losses arrive as plain sums; with this set the schedule divides by nothing.
    provider.calculate_per_token_loss = True
    provider.variable_seq_lengths = False
    provider.timers = ScheduleRanges()
    rotary = RotaryEmbedding(  # Megatron's own, with its scaling of long contexts
        provider.kv_channels,
        rotary_percent=1.0,
        rotary_base=provider.rotary_base,
        rope_scaling=provider.rope_scaling,
        rope_scaling_factor=provider.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    packing = modules.Packing(rotary.inv_freq.to(device), dtype)
    modules.follow_tokens(module)
    return module, packing


def _check_dispatcher(trainer: TrainerConfig) -> None:
    installed = {"alltoall": True, "deepep": fused_a2a.HAVE_DEEP_EP, "hybridep": fused_a2a.HAVE_HYBRIDEP}
    if not installed[trainer.moe_dispatcher]:
        name = {"deepep": "deep_ep.Buffer", "hybridep": "deep_ep.HybridEPBuffer"}[trainer.moe_dispatcher]
        reason = f"{trainer.moe_dispatcher}, but {sys.executable} cannot import {name}"
        fix = "install DeepEP there (https://github.com/deepseek-ai/DeepEP), or set it to alltoall"
        raise ConfigError("trainer.moe_dispatcher", reason, fix)


def _settings(trainer: TrainerConfig, layout: ParallelLayout, dtype: torch.dtype, *, on_cpu: bool) -> dict[str, Any]:
    stages = [["decoder"] * count for count in layout.stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    flex = trainer.moe_dispatcher != "alltoall"
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": trainer.tp,
        "pipeline_model_parallel_size": trainer.pp,
        "pipeline_model_parallel_layout": stages if trainer.pp > 1 else None,
        # Interleaved, both neighbours of a stage may be the same: a batch of messages would mix up the two directions.
        "overlap_p2p_comm": trainer.chunks > 1,
        "batch_p2p_comm": trainer.chunks == 1,
        "expert_model_parallel_size": trainer.ep,
        "expert_tensor_parallel_size": trainer.etp,
        "sequence_parallel": trainer.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "make_vocab_size_divisible_by": 1,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The router is frozen and no auxiliary loss may leak into the adapters' gradients.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # In bf16 two experts' scores are often equal, and another kernel than the server's chooses another one.
        "moe_router_dtype": "fp32",
        "transformer_layer_spec": partial(_layers, on_cpu=on_cpu),
        # Of Megatron's dispatchers without kernels gloo runs the one that gathers all tokens.
        "moe_token_dispatcher_type": "flex" if flex else "allgather" if on_cpu else "alltoall",
        **({"moe_flex_dispatcher_backend": trainer.moe_dispatcher} if flex else {}),
        "moe_permute_fusion": True,
        # Every weight is read from the folder.
        "perform_initialization": False,
    }
    if on_cpu:
        # No fused kernels.
        fused = (
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "cross_entropy_loss_fusion",
            "moe_permute_fusion",
            "apply_rope_fusion",
            "persist_layer_norm",
        )
        fields |= dict.fromkeys(fused, False) | {"use_cpu_initialization": True}
    return fields


def _layers(config: GPTModelProvider, vp_stage: int | None = None, *, on_cpu: bool) -> Any:
    """Attention over packed token trees, and grouped experts with LoRA inside."""
    norm = {"normalization": "RMSNorm"} if on_cpu else {}
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=not on_cpu, vp_stage=vp_stage, **norm)
    for layer in block.layer_specs:
        attention, mlp = _submodules(layer.submodules.self_attention), _submodules(layer.submodules.mlp)
        attention.core_attention = modules.PackedAttention
        if "experts" in vars(mlp):
            mlp.experts = modules.GroupedExperts
    return block


def _submodules(part: ModuleSpec | partial[Any]) -> Any:
    """Those of a part of a layer: of its specification, in newer versions of Megatron-core of the function for it."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def initialize_parallel(trainer: TrainerConfig, device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create the groups of ``trainer``'s layout; joins the world from the environment unless the caller has.

    Returns this rank's tensor-parallel group and expert-tensor-parallel group.
    """
    if not dist.is_initialized():
        dist.init_process_group(collective_of(device))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        virtual_pipeline_model_parallel_size=trainer.chunks if trainer.chunks > 1 else None,
        expert_model_parallel_size=trainer.ep,
        expert_tensor_parallel_size=trainer.etp,
    )
    model_parallel_cuda_manual_seed(0)
    return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()


def replicas() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ranks that hold the same dense layers as this one, and those that hold the same experts."""
    return (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )


def classify(memory: AdapterMemory) -> list[GradientClass]:
    """The groups over which the gradients of each range of a rank's memory must be summed.

    Split tensors are whole after the sum over their replicas, replicated ones need their tensor-parallel
    ranks' parts as well (see `modules`). The gradient of what all experts share covers this rank's experts only: its
    replicas include the expert-parallel ranks. With ``shared_outer`` these are the whole matrices, and the split ones
    are each expert's own.
    """
    dense, experts = ([group] for group in replicas())
    every = [*experts, parallel_state.get_expert_model_parallel_group()]
    shared = memory.spec.expert_layout
    split = every if shared is ExpertLayout.SHARED else experts
    whole = experts if shared is ExpertLayout.PER_EXPERT else every
    tp, etp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    rows = (
        (Range.DENSE_SPLIT, dense),
        (Range.DENSE_WHOLE, [tp, *dense]),
        (Range.EXPERT_SPLIT, split),
        (Range.EXPERT_WHOLE, [etp, *whole]),
    )
    classes = []
    for part, groups in rows:
        start, end = memory.arena.extent(part)
        if end > start:
            needed = [group for group in groups if dist.get_world_size(group) > 1]
            classes.append(GradientClass(start=start, end=end, groups=needed))
    return classes


def in_progress(stages: int, stage: int, chunks: int, *, train: bool) -> int:
    """Micro-batches that a rank of ``stage`` has not finished when its first chunk computes the next one, at most.

    One forward, one backward: the last stage has differentiated a micro-batch before it computes the next one, each
    stage before it has one more. Interleaved (Narayanan et al., arXiv 2104.04473, section 2.2), the chunks compute pp
    micro-batches in turn, and the last stage differentiates the first one of a round in the next round.
    """
    if chunks > 1:
        return 2 * stages - 1 if train else stages - 1
    return stages - 1 - stage if train else 0


class MegatronModel:
    """The `Compute` of the Megatron engine."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        sharded: ShardedModel,
        hf: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """Join torch.distributed unless the caller has, build the model and load the base."""
        tp_group, etp_group = initialize_parallel(trainer, device)
        self.groups: Mapping[Range, dist.ProcessGroup] = {Range.DENSE_SPLIT: tp_group, Range.EXPERT_SPLIT: etp_group}
        self.active, self._cp = ActiveAdapters(), trainer.cp
        self.module: nn.ModuleList
        self.module, self._packing = build_model(model, trainer, sharded.layout, hf, device)
        dense, experts = replicas()
        load_base(self.module, ModelFolder.of(model), sharded, dist.get_rank(), dense, experts)
        self._output = modules.take_output(self.module[-1], self.active)
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._packing.follow(self.module, self.active)
        self._dispatcher, shape = modules.exchanging(self.module), sharded.shape
        routing = (shape.moe_layers, shape.experts_per_token, shape.experts)
        self._routing = routing if sharded.layout.ep > 1 else None
        # In place of Megatron's own, which knows neither a micro-batch's keys nor what to keep of our attention.
        layers = (layer for layer in self.module.modules() if isinstance(layer, TransformerLayer))
        recompute(layers, trainer.recompute, self.active)

    def attach(self, memory: AdapterMemory) -> list[GradientClass]:
        modules.attach(self.module, memory, self.active)
        if head := memory.value_head():
            assert self._output is not None, "a value head is on the last stage"
            self._output.heads[memory.spec.name] = head
        return classify(memory)

    def detach(self, name: str) -> None:
        modules.detach(self.module, name)
        if self._output:
            self._output.heads.pop(name, None)

    def served_sites(self, merged: AdapterMemory | None) -> Iterator[ServedSite]:
        name = merged.spec.name if merged else ""
        for path, module in self.module.named_modules():
            if (found := modules.SITE.search(path)) is None:
                continue
            part, row = None, (found["attention"] or found["mlp"]) not in COLUMN_PARALLEL
            if isinstance(module, modules.GroupedLinear):
                experts, own = self.module.get_submodule(path.rpartition(".")[0]), module.residents.get(name)
                if merged and own:
                    part = MergedPart.of(merged.weights, own.a, own.b, own.scale)
                group = self.groups[Range.EXPERT_SPLIT]
                yield ServedSite(module=experts, owner=module, group=group, row_parallel=row, part=part)
                continue
            linear = module.to_wrap if isinstance(module, modules.AdaptedLinear) else module
            if merged and isinstance(module, modules.AdaptedLinear) and (its := module.residents.get(name)):
                part = MergedPart.of(merged.weights, its.lora_a, its.lora_b, its.scale)
            group = self.groups[Range.DENSE_SPLIT]
            yield ServedSite(module=linear, owner=linear, group=group, row_parallel=row, part=part)

    def run(
        self, batches: Iterator[PackedMicroBatch], plans: Sequence[MicroPlan], judge: BatchJudge, *, train: bool
    ) -> list[Result]:
        """Through Megatron's pipeline schedule."""
        results: list[Result] = []
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        earlier = in_progress(stages, stage, len(self.module), train=train)
        queues = [deque[tuple[PackedMicroBatch, Tensor]]() for _ in self.module]

        def forward_step(queue: deque[tuple[PackedMicroBatch, Tensor]], module: nn.Module) -> tuple[Tensor, Any]:
            if not queue:
                self._packing.keep(earlier)
                packed = next(batches)
                tokens, dispatcher = packed.tokens, self._dispatcher
                if dispatcher and tokens.routes is not None and not self.active.chooses:
                    tokens = with_sizes(packed, dispatcher)
                if self._routing and tokens is packed.tokens and not self.active.chooses:
                    tokens = padding_in_turn(packed, *self._routing)
                plan = self._packing.add(packed.attention, tokens)
                for each in queues:
                    each.append((packed, plan))
            packed, plan = queue.popleft()
            if self._output and module is self.module[-1]:
                self._output.expect(packed, judge.readout)
            # Positions are part of the attention plan; the model's embedding takes none.
            predictions = module(packed.token_ids, None, plan)

            def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                loss, found = judge(packed, output[0])
                results.extend(found)
                return loss, torch.ones((), dtype=torch.int32, device=output.device), {}

            return predictions, loss_of

        try:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=queues,
                model=list(self.module),
                num_microbatches=len(plans),
                seq_length=plans[0].n_tokens // self._cp,
                micro_batch_size=1,
                forward_only=not train,
            )
        finally:
            self._packing.keep(0)
        return results
