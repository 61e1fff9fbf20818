"""Slices of real models on torch's ``meta`` device, as a rank of an engine holds them: of `real_sizes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from size_meter import META, FusedGate, FusedNorm, OneLaunch
from torch import Tensor, nn

from areal_lora.config.load import load_config
from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.compute import Compute
from areal_lora.engine.common.micro_batches import BatchJudge, Result
from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.engine.layers.attention import PackedMicroBatch, pack
from areal_lora.engine.layers.output import Readout
from areal_lora.families.shape import ModelShape
from areal_lora.trainer.adapter import build_adapter
from areal_lora.trainer.learn import make_loss
from areal_lora.types import AdapterSpec, TrainBatch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "math"
RANK = 32
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Answers of ``answers`` tokens after a shared prompt of ``prompt``, as one micro-batch of ``model``.

    ``engine`` is fsdp, megatron (a rank of ``tp`` and ``ep``) or peft. ``adapters``: one, or one for each answer, whose
    prompts are its own then. ``routes``: the experts of every token are given.
    """

    name: str
    model: Mapping[str, Any]
    prompt: int
    answers: tuple[int, ...]
    engine: str = "fsdp"
    adapters: tuple[str, ...] = ("a",)
    tp: int = 1
    ep: int = 1
    routes: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.answers)

    def sharded(self, layers: int) -> ShardedModel:
        shape = ModelShape.from_hf(dict(self.model) | {"num_hidden_layers": layers})
        layout = ParallelLayout.of(self.trainer, layers=layers, experts=shape.experts)
        return ShardedModel(shape=shape, layout=layout)

    @property
    def trainer(self) -> TrainerConfig:
        engine: Any = "megatron" if self.engine == "megatron" else "fsdp"
        return TrainerConfig(engine=engine, world_size=max(self.tp, self.ep), tp=self.tp, ep=self.ep)


@dataclass(frozen=True, slots=True)
class Slice:
    """``held`` are the tensors that are there before a pass. ``run`` passes so many micro-batches, and calls what it is
    given between the forward and the backward pass of each."""

    module: nn.Module
    held: Sequence[Tensor]
    run: Callable[[int, Callable[[], None]], None]


def hf_model(case: Case, layers: int, attention: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {k: v for k, v in case.model.items() if k != "model_type"}
    config = AutoConfig.for_model(str(case.model["model_type"]), num_hidden_layers=layers, **kind)
    with META:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Judge(BatchJudge):
    """The loss of training. ``between`` is called before the backward pass."""

    between: Callable[[], None]

    def __call__(self, packed: PackedMicroBatch, output: Tensor) -> tuple[Tensor, list[Result]]:
        found = BatchJudge.__call__(self, packed, output)
        self.between()
        return found


def loss_of(kind: str = "grpo") -> LossFn:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    own = config.adapters[0].model_copy(update={"algorithm": AlgorithmConfig.model_validate({"kind": kind})})
    return make_loss(build_adapter(config, own, [[0]]), 0)


def make_batch(case: Case, layers: int) -> tuple[TrainBatch, MicroPlan]:
    n = len(case.answers)
    lengths = [case.prompt + answer for answer in case.answers]
    tokens = sum(lengths)
    mask = torch.ones(tokens, dtype=torch.bool)
    batch = TrainBatch(
        token_ids=torch.ones(tokens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens),
        versions=torch.zeros(tokens, dtype=torch.int32),
        shared_starts=torch.full((n,), case.prompt),
        rewards=torch.zeros(n),
        group_ids=torch.zeros(n, dtype=torch.int64) if len(case.adapters) == 1 else torch.arange(n),
        sample_ids=torch.arange(n),
        given=torch.zeros(n, dtype=torch.bool),
        advantages=torch.zeros(tokens),
        adapters=case.adapters * n if len(case.adapters) == 1 else case.adapters,
        routes=torch.zeros(tokens, layers, case.model["num_experts_per_tok"], dtype=torch.int16)
        if case.routes
        else None,
    )
    apart = tuple(Tree(sequences=(i,), shared=0) for i in range(n))
    trees = (Tree(sequences=tuple(range(n)), shared=case.prompt),) if len(case.adapters) == 1 else apart
    return batch, MicroPlan(trees=(trees,) * case.sharded(1).layout.dp, n_tokens=case.tokens)


def adapted(case: Case, compute: Compute, module: nn.Module, sharded: ShardedModel) -> Slice:
    """With adapters on every linear layer of attention, MLP and experts, all in use."""
    held = [*module.parameters(), *module.buffers()]
    for name in case.adapters:
        spec = AdapterSpec(name=name, base_model="m", rank=RANK, alpha=RANK, target_modules=TARGETS)
        memory = AdapterMemory(sharded, spec, 0, META, torch.bfloat16)
        compute.attach(memory)
        held += [memory.weights, memory.grads, memory.cast]
    batch, plan = make_batch(case, sharded.shape.layers)
    loss = loss_of()

    def run(n: int, between: Callable[[], None]) -> None:
        judge = Judge(Readout(), dict.fromkeys(case.adapters, loss), between)
        with compute.active.using(dict.fromkeys(case.adapters)):
            compute.run((pack(batch, plan, 0, META) for _ in range(n)), [plan] * n, judge, train=True)

    return Slice(module, held, run)


@contextmanager
def fsdp(case: Case, layers: int) -> Iterator[Slice]:
    """All of the slice is on one rank: what `fully_shard` gathers is not counted."""
    from areal_lora.engine.fsdp_engine import FsdpModel
    from areal_lora.engine.fsdp_utils.fused import fuse_mlps, fuse_norms, fuse_rotations
    from areal_lora.engine.fsdp_utils.model import ATTENTION

    model, sharded = hf_model(case, layers, ATTENTION), case.sharded(layers)
    fuse_norms(model)
    fuse_rotations(model)
    fuse_mlps(model)
    with mock.patch.object(nn.functional, "rms_norm", FusedNorm.apply):
        compute = FsdpModel(model, sharded, ActiveAdapters())
        yield adapted(case, compute, model, sharded)


@contextmanager
def megatron(case: Case, layers: int) -> Iterator[Slice]:
    """Rank 0's part. A fake process group counts collectives; experts get equal numbers of tokens.

    Megatron's own layers, as on CPUs, stand for Transformer Engine's; fused norms, activations, permutations and sorts
    are one launch each way.
    """
    from torch.distributed._tools import fake_collectives  # noqa: F401  # collectives of meta tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from areal_lora.engine.megatron_utils.cpu_patches import RmsNorm, install_cpu_patches

    install_cpu_patches()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from areal_lora.engine.megatron_utils import exchange_sizes, megatron_model

    sharded, settings = case.sharded(layers), megatron_model._settings
    hf = dict(case.model) | {"num_hidden_layers": layers}
    rows = case.tokens // case.tp * int(case.model.get("num_experts_per_tok", 1))

    def as_on_gpus(*args: Any, on_cpu: bool) -> dict[str, Any]:
        return settings(*args, on_cpu=True) | {"moe_token_dispatcher_type": "alltoall"}

    def read(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            tokens_per_expert = equal(tokens_per_expert)
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if getattr(self, name) is not None:
                    setattr(self, name, equal(getattr(self, name)).numpy())
        if point == self.cuda_sync_point:
            wait()
        return tokens_per_expert

    def on_host(numbers: Tensor) -> Tensor:
        wait()
        each = equal(torch.empty(case.ep))
        return torch.cat([each, each, each.sum(0, keepdim=True) * case.ep]).expand(numbers.shape)

    def wait() -> None:
        """As on GPUs for numbers of the device: one event."""
        torch.ops.aten.equal(torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu"))

    def equal(numbers: Tensor) -> Tensor:
        found = torch.full(numbers.shape, rows // numbers.numel(), dtype=torch.int64, device="cpu")
        found.view(-1)[0] += rows % numbers.numel()
        return found

    def permute(x: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, ...]:
        out = OneLaunch.apply(((num_out_tokens, x.shape[1]), (num_out_tokens,)), x, probs)
        return *out, routing_map.new_empty(routing_map.shape, dtype=torch.int32)

    def unpermute(x: Tensor, _: Tensor, merging_probs: None, restore_shape: Sequence[int]) -> Tensor:
        (out,) = OneLaunch.apply((restore_shape,), x)
        return out

    def sort(x: Tensor, *_: Any) -> Tensor:
        (out,) = OneLaunch.apply((x.shape,), x)
        return out

    def sort_both(x: Tensor, probs: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return OneLaunch.apply((x.shape, probs.shape), x, probs)

    class OnMeta(type(schedules.torch)):
        def zeros(self, *args: Any, **kwargs: Any) -> Tensor:
            return torch.zeros(*args, **{**kwargs, "device": META})

    with ExitStack() as stack:
        patched = stack.enter_context
        patched(mock.patch.object(megatron_model, "_settings", as_on_gpus))
        patched(mock.patch.object(megatron_model, "load_base"))
        patched(mock.patch.object(megatron_model, "ModelFolder"))
        patched(mock.patch.object(schedules, "torch", OnMeta()))
        patched(mock.patch.object(RmsNorm, "forward", lambda _, x: FusedNorm.apply(x)))
        patched(mock.patch.object(token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", read))
        patched(mock.patch.object(exchange_sizes, "on_host", on_host))
        fused = {
            "fused_permute_with_probs": permute,
            "fused_unpermute": unpermute,
            "fused_sort_chunks_by_index": sort,
            "fused_sort_chunks_by_index_with_probs": sort_both,
        }
        patched(mock.patch.object(mlp, "bias_swiglu_impl", FusedGate.apply))
        patched(mock.patch.object(torch.cuda, "current_device", return_value=META))
        initialize = partial(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
        patched(mock.patch.object(parallel_state, "initialize_model_parallel", initialize))
        patched(mock.patch.multiple(moe_utils, create=True, HAVE_TE=True, **fused))
        dist.init_process_group("fake", rank=0, world_size=case.trainer.world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.callback(parallel_state.destroy_model_parallel)
        with META:
            model = ModelConfig.model_construct(path="", dtype="bfloat16")
            compute = megatron_model.MegatronModel(model, case.trainer, sharded, hf, META)
        config: Any = compute.module[0].config
        config.bias_activation_fusion = True
        config.moe_permute_fusion = True  # not before: a dispatcher would put its indices on a GPU
        yield adapted(case, compute, compute.module, sharded)


@contextmanager
def peft(case: Case, layers: int) -> Iterator[Slice]:
    """transformers and PEFT as in `train_sides.py`, for comparison: sequences as padded rows, logits of every token,
    flash attention, grouped experts whose adapters PEFT adds to the weights. Its loss is a cross entropy.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def flash(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
        found, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        return found.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("causal_rows", flash)
    model = hf_model(case, layers, "causal_rows")
    if "num_experts" in case.model:
        model.set_experts_implementation("grouped_mm")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "num_experts" in case.model else []
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", *(() if experts else ("gate_proj", "up_proj", "down_proj"))]
    with META:
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=linears, target_parameters=experts or None)
        adapted_model: Any = get_peft_model(model, lora).train()
    for parameter in adapted_model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in adapted_model.parameters() if p.grad is not None]
    rows = (len(case.answers), case.prompt + max(case.answers))

    def run(n: int, between: Callable[[], None]) -> None:
        for _ in range(n):
            tokens = torch.ones(rows, dtype=torch.int64).to(META)
            logits = adapted_model(input_ids=tokens, use_cache=False).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="sum")
            del logits
            between()
            loss.backward()
            del loss

    # PEFT switches autocast off, which ``meta`` does not know.
    with mock.patch.object(torch, "autocast", return_value=nullcontext()):
        yield Slice(adapted_model, (*adapted_model.parameters(), *adapted_model.buffers(), *grads), run)


ENGINES: dict[str, Callable[[Case, int], AbstractContextManager[Slice]]] = {
    "fsdp": fsdp,
    "megatron": megatron,
    "peft": peft,
}
