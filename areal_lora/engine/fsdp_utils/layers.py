"""Attention and experts that transformers' models call in place of their own: packed token trees, LoRA inside.

transformers looks both up by the name in the model's configuration; they are registered when this file is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_lora.engine.common.output import OutputSite
from areal_lora.engine.fsdp_utils.adapter_sites import ExpertsSite
from areal_lora.engine.layers.attention import AttentionPlan, attend
from areal_lora.engine.layers.expert_mlp import ExpertMlp, Groups
from areal_lora.engine.layers.residents import ActiveAdapter
from areal_lora.errors import ConfigError

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
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    context = attend(packing, *rows, scale=scaling, window=sliding_window)
    return context.view(1, context.shape[0], query.shape[1], value.shape[3]), None


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts interface: ``hidden`` [t, h], experts ``chosen`` [t, k], router's ``weights`` [t, k]."""
    site: ExpertsSite = vars(module)[_SITE]
    k = chosen.shape[1]
    experts = chosen.reshape(-1)
    order = experts.argsort(stable=True)
    groups = Groups.of(experts.bincount(minlength=module.num_experts).tolist())
    fc1, fc2 = site.current()
    active = site.active
    keys = None if active.keys is None else active.keys.index_select(0, order // k)
    rows: Tensor = ExpertMlp.apply(
        hidden.index_select(0, order // k),
        weights.reshape(-1).index_select(0, order).to(hidden.dtype),
        fc1.a,
        fc1.b,
        fc2.a,
        fc2.b,
        module.gate_up_proj,
        module.down_proj,
        groups,
        (fc1.scale * active.factor, fc2.scale * active.factor),
        (
            fc1.keep(active.dropout, keys, groups, hidden.shape[1]),
            fc2.keep(active.dropout, keys, groups, module.down_proj.shape[2]),
        ),
    )
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    # A sum in the order of the choices: equal for every packing.
    return rows.index_select(0, back).view(hidden.shape[0], k, -1).sum(1)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, grouped_experts)


def take_experts(model: nn.Module, active: ActiveAdapter) -> dict[str, ExpertsSite]:
    """Let `grouped_experts` compute the fused experts of ``model``; the sites by module path.

    Experts of other shapes (biases, other activations, transposed weights) keep transformers' own computation and
    have no site.
    """
    found = {path: module for path, module in model.named_modules() if _is_gated_silu(module)}
    for module in found.values():
        module.config._experts_implementation = EXPERTS
        vars(module)[_SITE] = ExpertsSite(active)
    return {path: vars(module)[_SITE] for path, module in found.items()}


def take_output(model: Any, active: ActiveAdapter) -> OutputSite:
    """Let an `OutputSite` compute the model's output layer."""
    return OutputSite(model.get_output_embeddings(), active, lambda values: values)


def _is_gated_silu(module: Any) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    if {"gate_up_proj", "down_proj"} - parameters.keys() or parameters["gate_up_proj"].dim() != 3:
        return False
    own = vars(module)
    return (own.get("has_gate"), own.get("has_bias"), own.get("is_transposed"), own.get("is_concatenated")) == (
        True,
        False,
        False,
        True,
    ) and isinstance(module.act_fn, type(ACT2FN["silu"]))
