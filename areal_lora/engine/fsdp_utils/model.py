"""A Hugging Face causal LM, frozen and sharded layer by layer with `fully_shard`.

The model is made without memory (meta device), sharded, and then filled with this rank's rows. Embeddings, every
decoder layer and the output layer are gathered one after the other, when they compute, and freed again::

    shard of everything | embeddings -> layer 0 -> layer 1 -> ... -> output layer      forward
                        |               layer 0 <- layer 1 <- ... <- output layer      backward

torch holds what it gathers twice for a moment, as it arrived and as parameters. So a large layer is gathered in parts
(`units_of`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.fsdp_utils.base_weights import Sources, load_base
from areal_lora.engine.fsdp_utils.layers import ATTENTION
from areal_lora.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNIT_BYTES = 8 * 2**20
"""A module with more is gathered in parts. Of less, the fixed cost of a gather (0.1 ms and two hooks) would show."""


def build_model(model: ModelConfig, trainer: TrainerConfig, rank: int, device: torch.device) -> nn.Module:
    """The frozen model with this rank's weights. Raises ConfigError for a model that cannot be packed."""
    config = AutoConfig.from_pretrained(model.folder)
    # Tied weights would be in two units that are gathered at different times: each gets its own shard.
    config.tie_word_embeddings = False
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[model.dtype], attn_implementation=ATTENTION)
    _check(module)
    module = module.eval().requires_grad_(False)
    if trainer.recompute:
        for layer in decoder_layers(module):
            layer.forward = partial(_recomputed, layer.forward)
    shard(module, trainer, device)
    where = torch.device("cpu") if trainer.cpu_offload else device
    module.to_empty(device=where)
    _fill_buffers(module, device)
    tied = {_weight_of(module, module.get_output_embeddings()): _weight_of(module, module.get_input_embeddings())}
    load_base(module, Sources(ModelFolder.of(model), config.model_type, tied), rank, trainer.world_size)
    return module


def _weight_of(module: nn.Module, part: nn.Module) -> str:
    (path,) = (path for path, found in module.named_modules() if found is part)
    return f"{path}.weight"


def shard(module: nn.Module, trainer: TrainerConfig, device: torch.device) -> None:
    """Apply `fully_shard` to the units of embeddings, decoder layers and output layer, and to what remains."""
    mesh = init_device_mesh(device.type, (trainer.world_size,))
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if trainer.cpu_offload else OffloadPolicy()
    model: Any = module
    parts = [model.get_input_embeddings(), *decoder_layers(module), model.get_output_embeddings()]
    for unit in (*(unit for part in parts for unit in units_of(part)), module):
        sharded: FSDPModule = fully_shard(unit, mesh=mesh, reshard_after_forward=True, offload_policy=offload)
        # Only itself: by default the backward pass gathers the next layer as well.
        sharded.set_modules_to_backward_prefetch([sharded])


def units_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``module`` that are gathered apart, inner ones first: large children, and what remains of it.

    Children below an eighth of `UNIT_BYTES` stay with their parent: norms, routers, small projections.
    """
    if _bytes_of(module) > UNIT_BYTES:
        for child in _called_children(module):
            if _bytes_of(child) > UNIT_BYTES // 8:
                yield from units_of(child)
    yield module


def _called_children(module: nn.Module) -> Iterator[nn.Module]:
    """Children of ``module``; those of a list in its place, which is never called itself."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _called_children(child)
        else:
            yield child


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Keep only the layer's input for the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _fill_buffers(module: Any, device: torch.device) -> None:
    """Buffers are no part of a model folder: each module makes its own, like transformers does after loading."""
    with torch.no_grad():
        for part in module.modules():
            if not (names := [name for name, _ in part.named_buffers(recurse=False)]):
                continue
            for name in names:
                part._buffers[name] = part._buffers[name].to(device)
            module._init_weights(part)


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
    elif "logits_to_keep" not in inspect.signature(module.forward).parameters:
        problem = "its logits cannot be restricted to the tokens that are predicted"
    if problem:
        name = type(module).__name__
        raise ConfigError("model.path", f"{name} cannot train on packed sequences: {problem}", "use another model")
