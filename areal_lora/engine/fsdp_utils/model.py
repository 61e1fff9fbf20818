"""A Hugging Face causal LM, frozen and sharded layer by layer with `fully_shard`, over all ranks or over some of them
(``trainer.fsdp_shard``), so that every so many ranks have a copy of it. One rank has it whole, without `fully_shard`.

The model is made without memory (meta device), sharded, and then filled with this rank's rows. Embeddings, every
decoder layer and the output layer are gathered one after the other, when they compute, and freed again::

    shard of everything | embeddings -> layer 0 -> layer 1 -> ... -> output layer      forward
                        |               layer 0 <- layer 1 <- ... <- output layer      backward

torch holds what it gathers twice, as it arrived and as parameters, and the next unit, which arrives meanwhile.

Attention and experts are this module's (packed token trees, LoRA inside): transformers looks them up by the name in
the model's configuration. A place where adapters act is wrapped once, however many adapters come. Adapters' parameters
are no parameters of the modules, so `fully_shard` never sees them.

Every rank reads the rows of the base that it holds: no weight travels between ranks, and no rank holds the whole model.
transformers keeps the experts of a layer in one parameter and some modules under other names than the published
folders; its own table of conversions maps them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.base import DTYPES
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.fsdp_utils import fused
from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens
from areal_lora.engine.layers.attention import AttentionPlan, attend
from areal_lora.engine.layers.expert_mlp import ExpertLora, expert_mlp
from areal_lora.engine.layers.recompute import recompute
from areal_lora.engine.layers.router_replay import follow_routes
from areal_lora.errors import ConfigError, UnknownTensorError
from areal_lora.families.shape import longrope_context


class Sources:
    """The tensors of a model folder by transformers' names in memory."""

    def __init__(self, folder: ModelFolder, model_type: str, tied: dict[str, str]) -> None:
        """``tied`` maps a parameter that the folder may lack to the one with the same numbers."""
        self._folder, self._tied = folder, tied
        conversions: Sequence[Any] = get_checkpoint_conversion_mapping(model_type) or ()
        self._renamings = [
            (target, source)
            for c in conversions
            if isinstance(c, WeightRenaming)
            for source, target in zip(c.source_patterns, c.target_patterns, strict=True)
        ]
        self._stacks = [
            (c.target_patterns[0], tuple(c.source_patterns))
            for c in conversions
            if isinstance(c, WeightConverter) and _stacks_experts(c.operations)
        ]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Raises UnknownTensorError."""
        for known in (name, self._tied.get(name, name)):
            for candidate in self._published(known):
                if candidate in self._folder:
                    return self._folder.rows(candidate, start, stop)
                for target, sources in self._stacks:
                    prefix = candidate.removesuffix(target)
                    if prefix != candidate and (prefix + sources[0]).replace("*", "0") in self._folder:
                        names = [prefix + source for source in sources]  # of an expert's matrices, in their order
                        each = ([name.replace("*", str(e)) for name in names] for e in range(start, stop))
                        return torch.stack([torch.cat(list(map(self._folder.whole, own))) for own in each])
        raise UnknownTensorError(f"the model's parameter {name} is in no safetensors file of {self._folder.path}")

    def _published(self, name: str) -> Iterator[str]:
        yield name
        for target, source in self._renamings:
            if target in name:
                yield name.replace(target, source.replace("\\", ""))


def _stacks_experts(operations: Sequence[Any]) -> bool:
    """Whether a conversion makes one matrix of each expert and then one parameter of all experts."""
    merge, *others = operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(isinstance(op, Concatenate) and op.dim == 1 for op in others)
    )


def load_base(module: nn.Module, sources: Sources, rank: int, world_size: int) -> None:
    """Fill this rank's shard of every parameter, and persistent buffers such as a router's correction bias.

    Raises UnknownTensorError for one that the folder lacks.
    """
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            divided = isinstance(tensor, DTensor)
            shard = tensor.to_local() if divided else tensor
            start, stop = shard_rows(tensor.shape[0], rank, world_size) if divided else (0, tensor.shape[0])
            if tuple(shard.shape) != (stop - start, *tensor.shape[1:]):
                raise UnknownTensorError(f"{name}: rank {rank} holds {tuple(shard.shape)} of {tuple(tensor.shape)}")
            if stop > start:
                shard.copy_(sources.rows(name, start, stop))


def shard_rows(n: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows [start, stop) of ``n`` that `fully_shard` gives a rank: equal runs rounded up, the last ones shorter."""
    each = -(-n // world_size)
    return min(rank * each, n), min((rank + 1) * each, n)


@dataclass(slots=True)
class ExpertsSite:
    """The adapters of a layer's fused experts: fc1 (gate and up) and fc2 (down) by adapter."""

    active: ActiveAdapters
    fc1: dict[str, ExpertLora] = field(default_factory=dict)
    fc2: dict[str, ExpertLora] = field(default_factory=dict)


ATTENTION = "areal_lora_packed"
EXPERTS = "areal_lora_grouped"
_WITHOUT_EFFECT = ("dropout", "position_ids", "use_cache", "is_causal", "cache_position", "output_attentions")
"""Arguments that change nothing here: positions are in the plan, dropout is off, nothing is cached."""
_SITE = "areal_lora_site"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: ``query`` [1, h, t, d] to [1, t, h, dv]; the model was called with a plan.

    Raises ConfigError for a model whose attention has terms of its own.
    """
    odd = [n for n, value in others.items() if value is not None and value is not False and n not in _WITHOUT_EFFECT]
    if odd or attention_mask is not None:
        raise ConfigError(
            "model.path",
            f"{type(module).__name__} computes attention with {', '.join(odd) or 'a mask of its own'}",
            "use a model with plain or sliding-window attention",
        )
    rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]  # a selection has a launch in the backward pass
    context = attend(packing, *rows, scale=scaling, window=sliding_window)
    return context.view(1, context.shape[0], query.shape[1], value.shape[3]), None


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts interface: ``hidden`` [t, h], experts ``chosen`` [t, k], router's ``weights`` [t, k]."""
    site: ExpertsSite = vars(module)[_SITE]
    k = chosen.shape[1]
    experts, order = chosen.reshape(-1).sort(stable=True)
    active, tokens, back = site.active, order // k, torch.empty_like(order)
    held, each, none = active.tokens, len(active.each), ExpertLora()
    numbers = torch.arange(max(module.num_experts * max(each, 1), experts.numel()), device=experts.device)
    back[order] = numbers[: order.numel()]
    its = None
    if held is not None and (active.drops or each > 1):
        its = PackedTokens(keys=held.keys.index_select(0, tokens))
        if held.owners is not None:
            # Tokens are sorted by adapter, and so are an expert's rows: the sort by expert keeps their order.
            owners, cells = held.owners.index_select(0, tokens), numbers[: module.num_experts * each]
            ends = torch.searchsorted(experts * each + owners, cells, right=True, out_int32=True)
            its = replace(its, owners=owners, ends=ends)
    rows = expert_mlp(
        _Exchange.apply(hidden, tokens, back, k, True),
        weights.reshape(-1).index_select(0, order),
        [(site.fc1.get(name, none), site.fc2.get(name, none)) for name in active.each],
        (module.gate_up_proj, module.down_proj),
        torch.searchsorted(experts, numbers[: module.num_experts], right=True, out_int32=True),
        active,
        its,
    )
    found: Tensor = _Exchange.apply(rows, tokens, back, k, False)
    return found


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Tokens [t, h] to the rows [t k, h] of their experts, or the sums of rows to tokens: each is the backward pass of
    the other. Sums are in the order of the choices: equal for every packing, and on a GPU in every run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, back: Tensor, k: int, to_experts: bool) -> Tensor:
        ctx.save_for_backward(tokens, back)
        ctx.k, ctx.to_experts = k, to_experts
        return x.index_select(0, tokens) if to_experts else x.index_select(0, back).view(-1, k, x.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grads[0], *ctx.saved_tensors, ctx.k, not ctx.to_experts), None, None, None, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, grouped_experts)


def take_experts(model: nn.Module, active: ActiveAdapters) -> dict[str, ExpertsSite]:
    """Let `grouped_experts` compute the fused experts of ``model``; the sites by module path.

    Experts of other shapes (biases, other activations, transposed weights) keep transformers' own computation and
    have no site. Routers of experts with a site follow the routes of their tokens.
    """
    found = {path: module for path, module in model.named_modules() if _is_gated_silu(module)}
    sites = {}
    for layer, (path, module) in enumerate(found.items()):
        module.config._experts_implementation = EXPERTS
        sites[path] = vars(module)[_SITE] = ExpertsSite(active)
        block = model.get_submodule(path.rpartition(".")[0])
        follow_routes(dict(block.named_children()).get("gate", block), active, layer, module.num_experts)
    return sites


def _is_gated_silu(module: Any) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    if {"gate_up_proj", "down_proj"} - parameters.keys() or parameters["gate_up_proj"].dim() != 3:
        return False
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return wanted.items() <= vars(module).items() and isinstance(module.act_fn, type(ACT2FN["silu"]))


def build_model(
    model: ModelConfig, trainer: TrainerConfig, longest: int, rank: int, device: torch.device, active: ActiveAdapters
) -> nn.Module:
    """The frozen model with this rank's weights, for servers of ``longest`` tokens.

    Raises ConfigError for a model that cannot be packed.
    """
    config = AutoConfig.from_pretrained(model.folder)
    # Tied weights would be in two units that are gathered at different times: each gets its own shard.
    config.tie_word_embeddings = False
    if config.model_type == "cohere2" and config.sliding_window:
        config.sliding_window += 1  # Cohere counts the tokens before a token's own, and so does vLLM; not transformers
    if (original := longrope_context(config.to_dict())) and longest > original:
        # As vLLM, which takes these at every position, and transformers only in a pass over a longer sequence.
        config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[model.dtype], attn_implementation=ATTENTION)
    _check(module)
    module = module.eval().requires_grad_(False)
    fused.fuse_norms(module)
    fused.fuse_rotations(module)
    fused.fuse_mlps(module)
    recompute(decoder_layers(module), trainer.recompute, active)
    size = trainer.fsdp_shard or trainer.world_size
    if size > 1 or trainer.cpu_offload:  # torch copies what one rank has whole in every pass
        shard(module, size, trainer, device)
    where = torch.device("cpu") if trainer.cpu_offload else device
    module.to_empty(device=where)
    _fill_buffers(module, device)
    tied = {_weight_of(module, module.get_output_embeddings()): _weight_of(module, module.get_input_embeddings())}
    load_base(module, Sources(ModelFolder.of(model), config.model_type, tied), rank % size, size)
    return module


def _weight_of(module: nn.Module, part: nn.Module) -> str:
    (path,) = (path for path, found in module.named_modules() if found is part)
    return f"{path}.weight"


def shard(module: nn.Module, size: int, trainer: TrainerConfig, device: torch.device) -> None:
    """Apply `fully_shard` over each ``size`` ranks to embeddings, decoder layers and output layer, and to the rest.

    A unit is gathered while the one before it computes, in both directions.
    """
    replicas = trainer.world_size // size
    # One dimension is enough: a frozen base has no gradients to sum over its replicas.
    mesh = init_device_mesh(device.type, (replicas, size), mesh_dim_names=("replicas", "shard"))["shard"]
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if trainer.cpu_offload else OffloadPolicy()
    model: Any = module
    parts = [model.get_input_embeddings(), *decoder_layers(module), model.get_output_embeddings()]
    units: list[FSDPModule] = [
        fully_shard(part, mesh=mesh, reshard_after_forward=True, offload_policy=offload) for part in (*parts, module)
    ]
    _, first, *_ = units
    first.set_modules_to_backward_prefetch([first])  # only itself: frozen embeddings take no part in that pass
    for before, after in pairwise(units[1:-1]):
        after.set_modules_to_backward_prefetch([before])
    for before, after in pairwise(units[:-1]):
        before.set_modules_to_forward_prefetch([after])


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def _fill_buffers(module: Any, device: torch.device) -> None:
    """Let each module make its buffers, like transformers does after loading; few are part of a model folder."""
    with torch.no_grad():
        for part in module.modules():
            buffers = list(part.named_buffers(recurse=False))
            for name, values in buffers:
                part._buffers[name] = values.to(device)
            if buffers:
                module._init_weights(part)


def take_logit_scale(module: Any) -> float:
    """The factor of a family's logits (Granite, Cohere), which ``module`` no longer applies to what its output layer
    returns."""
    scale = 1.0
    if divisor := getattr(module.config, "logits_scaling", None):
        scale, module.config.logits_scaling = 1.0 / divisor, 1.0
    if "logit_scale" in vars(module):
        scale, module.logit_scale = module.logit_scale, 1.0
    return scale


def _check(module: Any) -> None:
    """Refuse models in which packed sequences would see each other."""
    kinds = set(getattr(module.config, "layer_types", None) or ())
    problem = ""
    if not module._supports_attention_backend:
        problem = "transformers does not let its attention be replaced"
    elif odd := kinds - {"full_attention", "sliding_attention"}:
        problem = f"it has layers of type {', '.join(sorted(odd))}"
    elif not decoder_layers(module):
        problem = "its decoder layers are not marked"
    if problem:
        name = type(module).__name__
        raise ConfigError("model.path", f"{name} cannot train on packed sequences: {problem}", "use another model")
