"""Declaration of a model family: the names of a checkpoint's parts, and the differences from Llama.

A family is a Hugging Face ``model_type``. All families have RMS norms, rotary positions, query, key, value and
output projections, and a gated MLP. Sparse layers have a router and experts instead of the MLP, each expert a
gated MLP. The defaults below are Llama's, and those of Qwen3-MoE for experts; a row states what differs.

Names are paths below a layer (``model.layers.N``); ``{}`` stands for the number of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ATTENTION_LINEARS = ("linear_qkv", "linear_proj")
MLP_LINEARS = ("linear_fc1", "linear_fc2")
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")
"""Layers whose outputs tensor parallelism divides, lora_B with them; of the others the inputs and lora_A."""
TARGETS = (*ATTENTION_LINEARS, *MLP_LINEARS)
"""Modules that LoRA can adapt, in Megatron's spelling; present in every family."""


class Scope(StrEnum):
    """Position of an adapted linear in a layer."""

    ATTENTION = "attention"  # linear_qkv, linear_proj
    MLP = "mlp"  # dense MLP of a layer
    EXPERT = "expert"  # one routed expert
    ALL_EXPERTS = "all_experts"  # one adapter shared by all routed experts of a layer (expert_layout "shared")
    SHARED_EXPERT = "shared_expert"  # Qwen2-MoE's always-on expert
    LINEAR = "linear"  # any linear layer of a family without a row; its name is its path in the layer


def covers(target_modules: Sequence[str], linear: str, scope: Scope) -> bool:
    """Whether canonical targets name ``linear`` in ``scope``.

    ``linear_fc1`` covers every scope; ``expert.linear_fc1`` covers the routed experts only, with one adapter
    each or one for all.
    """
    where = Scope.EXPERT if scope is Scope.ALL_EXPERTS else scope
    return linear in target_modules or f"{where}.{linear}" in target_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention, multi-head where there are as many keys as queries."""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    bias: bool = False  # of q, k and v
    norms: bool = False  # of every query and key head
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """``down(silu(gate x) * up x)``."""

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    @classmethod
    def below(cls, path: str) -> "GatedMlp":
        return cls(gate=f"{path}.gate_proj", up=f"{path}.up_proj", down=f"{path}.down_proj")


_EXPERT = GatedMlp.below("mlp.experts.{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts: softmax over the router's scores, top k."""

    mlp: GatedMlp = _EXPERT
    router: str = "mlp.gate"
    ffn_key: str = "moe_intermediate_size"  # key of config.json with the width of an expert
    normalized: bool = False  # the weights of the chosen experts always sum to 1; False: if norm_topk_prob is set
    shared: GatedMlp | None = None  # an expert that every token passes, as wide as shared_expert_intermediate_size
    shared_gate: str = "mlp.shared_expert_gate"
    vllm_dense_key: str = ""  # vLLM 0.32 adapts dense layers of a mixture only if this key lists some


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. ``experts`` is None for a family of dense models."""

    model_type: str
    attention: Attention = Attention()
    mlp: GatedMlp = GatedMlp()
    experts: Experts | None = None
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    rope_types: tuple[str, ...] = ("default",)
    vllm_embeddings: bool = True  # whether vLLM can serve LoRA on embeddings and output layer (`embedding_modules`)
    sliding_window: bool = False  # whether sliding_window applies where use_sliding_window is absent

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Scopes that models of the family may have, including `ALL_EXPERTS`."""
        if self.experts is None:
            return (Scope.ATTENTION, Scope.MLP)
        shared = () if self.experts.shared is None else (Scope.SHARED_EXPERT,)
        return (Scope.ATTENTION, Scope.MLP, *shared, Scope.EXPERT, Scope.ALL_EXPERTS)

    def projections(self, linear: str, scope: Scope) -> tuple[str, ...]:
        """Names of the projections that Megatron keeps in ``linear``, in Megatron's order; () for no such linear."""
        if scope is Scope.ATTENTION:
            a = self.attention
            return {"linear_qkv": (a.q, a.k, a.v), "linear_proj": (a.o,)}.get(linear, ())
        mlp: GatedMlp | None = None
        if scope is Scope.MLP:
            mlp = self.mlp
        elif self.experts is not None:
            mlp = self.experts.shared if scope is Scope.SHARED_EXPERT else self.experts.mlp
        return {"linear_fc1": (mlp.gate, mlp.up), "linear_fc2": (mlp.down,)}.get(linear, ()) if mlp else ()
