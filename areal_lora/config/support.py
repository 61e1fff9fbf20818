"""What works together: engine, model family, expert layout, rollout mode, and what an algorithm needs of them.

Pure data and the only judge of such combinations. The start-up rules report `refusals`; `docs/tools/support_tables`
pairs the axes and names the tests behind each pair; docs/en/support.md is rendered from both. `variants` are what a
single config.json requires beyond its family (a soft cap, another activation).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.sections.adapter import Kind
from areal_lora.errors import ConfigError
from areal_lora.families import targets
from areal_lora.families.family import Scope, covers
from areal_lora.families.registry import supported, unsupported
from areal_lora.families.shape import ModelShape
from areal_lora.types import ExpertLayout

Engine = Literal["megatron", "fsdp"]
ENGINES: tuple[Engine, ...] = ("megatron", "fsdp")

# fmt: off
PACKED = frozenset([
    "arcee", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "jais2", "ministral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
    "seed_oss", "smollm3", "starcoder2",
])
"""Model types without a row whose tiny models score alike packed by the FSDP engine and alone by transformers 5.19."""

UNSERVED = frozenset([
    "bitnet", "diffllama", "ernie4_5_moe", "glm4", "ministral", "persimmon",
])
# fmt: on
"""Those of `PACKED` for which vLLM 0.32 has no class, or one without LoRA; or the server scores differently
(ernie4_5_moe), or does not wrap mlp.gate_up_proj (glm4)."""

_NO_BIAS: Mapping[str, object] = {"attention_bias": False}
SERVED_AS: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("gemma", "qwen3", "qwen3_moe"), _NO_BIAS),
    **{kind: {**_NO_BIAS, "tie_word_embeddings": True} for kind in ("cohere", "cohere2")},
    "ernie4_5": {"use_bias": False},
    "olmoe": {**_NO_BIAS, "clip_qkv": None, "norm_topk_prob": False},
}
"""Keys of config.json that vLLM 0.32 ignores, at least in a part of the model, and transformers obeys, by model type,
with what vLLM assumes: transformers' defaults, too."""

# fmt: off
ENGINE_ARGS: Mapping[str, str] = {
    "model": "model.path", "tokenizer": "model.path", "dtype": "model.dtype", "seed": "run.seed",
    "tensor_parallel_size": "rollout.tp", "enable_expert_parallel": "rollout.expert_parallel",
    "pipeline_parallel_size": "the layout of adapter slots", "data_parallel_size": "rollout.servers",
    "max_model_len": "rollout.max_model_len", "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization", "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "scheduling_policy": "the order of probes and of interrupted sequences",
    "enable_prefix_caching": "rollout.deterministic", "disable_log_stats": "areal_lora",
    "logprobs_mode": "the training objective", "worker_extension_cls": "areal_lora",
    "enable_lora": "rollout.adapter_mode", "max_lora_rank": "rollout.max_lora_rank",
    "max_loras": "rollout.max_adapters", "max_cpu_loras": "rollout.max_adapters",
    "lora_target_modules": "adapters.target_modules", "enable_moe_shared_loras": "adapters.expert_layout",
    "enable_return_routed_experts": "behaviour.router_replay",
    "aux_output_config": "behaviour.router_replay", "max_logprobs": "adapters.sampling.top_k",
    "speculative_config": "the training objective", "specialize_active_lora": "rollout.adapter_mode",
    "enable_eplb": "the layout of adapter slots", "eplb_config": "the layout of adapter slots",
    "fully_sharded_loras": "the layout of adapter slots",
}
# fmt: on
"""Arguments of vLLM's engine that `rollout.engine_args` cannot have, with what decides each."""

_LAYERS = {"full_attention", "sliding_attention"}


def variants(engine: Engine, config: Mapping[str, Any]) -> list[str]:
    """What a config.json requires beyond its family and the engine or its servers do not compute; empty if nothing."""
    if engine == "megatron":
        return unsupported(config) if config.get("model_type") in supported() else []
    odd = sorted(set(config.get("layer_types") or ()) - _LAYERS)
    found = {
        f"layers of type {', '.join(odd)}, whose states cross packed sequences": bool(odd),
        "attention scores with a soft cap": config.get("attn_logit_softcapping") is not None,
        "logits with a soft cap": config.get("final_logit_softcapping") is not None,
    }
    for key, value in SERVED_AS.get(str(config.get("model_type")), {}).items():
        found[f"{key} of {config.get(key)}, which vLLM serves as {value}"] = config.get(key, value) != value
    return [what for what, bad in found.items() if bad]


def quantised(config: Mapping[str, Any]) -> str:
    """The method by which the checkpoint of a config.json is quantised; empty if it is not."""
    found = config.get("quantization_config") or config.get("compression_config")
    return str(found.get("quant_method", "of an unknown method")) if found else ""


Layout = Literal["none", "per_expert", "shared", "shared_outer"]
"""How routed experts are adapted; ``none``: a dense model, or no expert among the modules."""
Mode = Literal["unmerged", "merged"]
Group = Literal["row", "no row", "not served", "unknown"]
"""What is known of a model type; ``not served``: no row, and vLLM does not serve it, or not as it is trained."""
# fmt: off
Need = Literal[
    "several minibatches", "KL to the base", "KL to a version", "entropy bonus", "critic", "greedy answers",
    "given answers", "several adapters", "a service", "an agent",
]
# fmt: on
"""What an adapter's settings need of engine and servers beyond sampling and one gradient."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
MODES: tuple[Mode, ...] = get_args(Mode)
NEEDS: tuple[Need, ...] = get_args(Need)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One adapter of a run. ``experts``: the model has experts that can be adapted."""

    engine: Engine = "megatron"
    family: str = "qwen3_moe"
    experts: bool = True
    layout: Layout = "per_expert"
    mode: Mode = "unmerged"
    algorithm: Kind = "grpo"
    needs: frozenset[Need] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Combinations that do not work: those that have one of the named values on every axis, and need all of
    ``needs``. An axis without values does not matter. ``{i}`` of ``key`` is the adapter's number."""

    key: str
    reason: str
    fix: str
    engine: tuple[Engine, ...] = ()
    group: tuple[Group, ...] = ()
    experts: bool | None = None
    layout: tuple[Layout, ...] = ()
    mode: tuple[Mode, ...] = ()
    needs: frozenset[Need] = frozenset()

    def matches(self, c: Combination) -> bool:
        return (
            (not self.engine or c.engine in self.engine)
            and (not self.group or group_of(c.family) in self.group)
            and self.experts in (None, c.experts)
            and (not self.layout or c.layout in self.layout)
            and (not self.mode or c.mode in self.mode)
            and self.needs <= c.needs
        )

    def text(self, family: str) -> str:
        return self.reason.format(family=family)


MODEL = "model.path"
"""Key of the refusals that state which engine trains a family."""

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        key=MODEL,
        engine=("megatron",),
        group=("no row", "not served", "unknown"),
        reason="model type {family!r} has no row in families/registry.py, which the Megatron engine needs",
        fix="set trainer.engine=fsdp, or use another model",
    ),
    Refusal(
        key=MODEL,
        engine=("fsdp",),
        group=("unknown",),
        reason="transformers is not known to compute model type {family!r} over packed sequences",
        fix="use another model",
    ),
    Refusal(
        key="rollout",
        group=("not served",),
        reason="vLLM 0.32 serves no adapters of model type {family!r}, or not as they are trained",
        fix="use another model",
    ),
    Refusal(
        key="rollout.adapter_mode",
        group=("no row",),
        mode=("merged",),
        reason="merged, which has not been tried for model type {family!r}, which has no row",
        fix="set it to unmerged",
    ),
    Refusal(
        key="rollout.adapter_mode",
        mode=("merged",),
        needs=frozenset({"several adapters"}),
        reason="several adapters cannot be merged into one model",
        fix="set it to unmerged, or train one adapter",
    ),
    Refusal(
        key="rollout.adapter_mode",
        mode=("merged",),
        needs=frozenset({"a service"}),
        reason="the adapters of a service cannot be merged into one model",
        fix="set it to unmerged, or remove the service",
    ),
    Refusal(
        key="adapters.{i}.expert_layout",
        experts=False,
        layout=("shared", "shared_outer"),
        reason="the model has no experts that could share an adapter",
        fix="leave it at per_expert, which adapts each module by itself",
    ),
    Refusal(
        key="adapters.{i}.algorithm.advantage",
        needs=frozenset({"greedy answers", "an agent"}),
        reason="an agent's requests state how they are sampled, so it has no greedy answer",
        fix="use another advantage, or another workflow",
    ),
)


def group_of(model_type: str) -> Group:
    if model_type in supported():
        return "row"
    if model_type not in PACKED:
        return "unknown"
    return "not served" if model_type in UNSERVED else "no row"


def refusals(c: Combination) -> tuple[Refusal, ...]:
    """All reasons why ``c`` does not work; empty if it does."""
    return tuple(refusal for refusal in REFUSALS if refusal.matches(c))


def engine_problems(engine: Engine, config: Mapping[str, Any]) -> list[str]:
    """Why the engine cannot train a model with this config.json; empty if it can."""
    family = str(config.get("model_type"))
    found = [r.text(family) for r in refusals(Combination(engine=engine, family=family)) if r.key == MODEL]
    return found if found and engine == "megatron" else [*found, *variants(engine, config)]


def engines(config: Mapping[str, Any]) -> tuple[Engine, ...]:
    return tuple(engine for engine in ENGINES if not engine_problems(engine, config))


def combination_of(config: Config, adapter: AdapterConfig, family: str, shape: ModelShape | None) -> Combination:
    """What ``adapter``, an entry of ``config``, combines. Without ``shape`` the model counts as one with experts."""
    run = combination_of_run(config, family, shape)
    needs = run.needs | _needs(adapter)
    return replace(run, layout=_layout(adapter, shape), algorithm=adapter.algorithm.kind, needs=needs)


def combination_of_run(config: Config, family: str, shape: ModelShape | None) -> Combination:
    """What is decided before any adapter is: a service starts with none."""
    present: dict[Need, bool] = {"several adapters": len(config.adapters) > 1, "a service": config.service is not None}
    return Combination(
        engine=config.trainer.engine,
        family=family,
        experts=shape is None or shape.experts > 0,
        layout="none",
        mode=config.rollout.adapter_mode,
        needs=frozenset(need for need, given in present.items() if given),
    )


def _layout(adapter: AdapterConfig, shape: ModelShape | None) -> Layout:
    if adapter.expert_layout is not ExpertLayout.PER_EXPERT:
        return "shared" if adapter.expert_layout is ExpertLayout.SHARED else "shared_outer"
    if shape is None:
        return "per_expert"
    try:
        found = targets.resolve(adapter.target_modules, adapter.exclude_modules, shape)
    except ConfigError:
        return "per_expert"  # the rule about targets reports it
    linears = ("linear_fc1", "linear_fc2")
    return "per_expert" if shape.experts and any(covers(found, name, Scope.EXPERT) for name in linears) else "none"


def _needs(adapter: AdapterConfig) -> frozenset[Need]:
    chosen = adapter.algorithm
    present: dict[Need, bool] = {
        "several minibatches": adapter.minibatches > 1,
        "KL to the base": chosen.kl_coef > 0 and chosen.reference == "base",
        "KL to a version": chosen.has_reference,
        "entropy bonus": chosen.entropy_coef > 0,
        "critic": chosen.has_critic,
        "greedy answers": chosen.has_baseline,
        "given answers": adapter.sft.steps > 0,
        "an agent": adapter.workflow.calls_endpoint,
    }
    return frozenset(need for need, given in present.items() if given)
