"""The rows by model type and by the names that they give to modules.

A family without a row: what a checkpoint's safetensors headers state of the linear layers of its model.

Every two-dimensional ``weight`` of a numbered layer is a linear layer under its published name, except routers and
norms (Cohere's have a row for each head). It is adapted alone, with a lora_A of its own, as PEFT does. Experts that are
published one by one as gate, up and down projections under names that a row of the table uses are adapted like those of
that row.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lora.errors import ConfigError
from areal_lora.families.family import TARGETS, Attention, Experts, Family, GatedMlp, Scope
from areal_lora.families.safetensors_head import read_head, weight_files

TABLE = (
    # Layers of mlp_only_layers, or those that decoder_sparse_step leaves out, keep the dense MLP.
    Family(model_type="qwen3_moe", attention=Attention(norms=True), experts=Experts(vllm_dense_key="mlp_only_layers")),
    Family(model_type="qwen3", attention=Attention(norms=True)),
    Family(model_type="qwen2", attention=Attention(bias=True), vllm_embeddings=False),  # Qwen2 and Qwen2.5
    Family(model_type="llama", rope_types=("default", "llama3")),  # Llama 2 and 3
    Family(model_type="mistral", vllm_embeddings=False, sliding_window=True),  # only v0.1 has a window
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


ROUTERS = {"router", "gate", "shared_expert_gate", "wg"}
"""Components of names that belong to routers, never to a projection."""
_NUMBER = re.compile(r"\.\d+(?=\.)")


class Families:
    """``rows`` by model type; in ``modules`` linear and scope by a projection's path below its layer, experts as ``*``.

    Raises ValueError if two rows have one model type or give one name two meanings.
    """

    def __init__(self, rows: Iterable[Family]) -> None:
        self.rows: dict[str, Family] = {}
        self.modules: dict[str, tuple[str, Scope]] = {}
        for row in rows:
            if row.model_type in self.rows:
                raise ValueError(f"two families have the model type {row.model_type}")
            self.rows[row.model_type] = row
            for scope in row.scopes:
                if scope is Scope.ALL_EXPERTS:  # the names of EXPERT
                    continue
                for linear in TARGETS:
                    for name in row.projections(linear, scope):
                        if self.modules.setdefault(name.replace("{}", "*"), (linear, scope)) != (linear, scope):
                            raise ValueError(f"families disagree about {name}")


FAMILIES = Families(TABLE)


def family_of(model_type: str) -> Family:
    """The row of a Hugging Face ``model_type``. Raises ConfigError for an unsupported one."""
    if model_type not in FAMILIES.rows:
        raise ConfigError(
            "model.path", f"model type {model_type!r} is not supported", f"known: {', '.join(sorted(FAMILIES.rows))}"
        )
    return FAMILIES.rows[model_type]


def supported() -> tuple[str, ...]:
    """Model types that have a row."""
    return tuple(FAMILIES.rows)


def target_of(module: str) -> tuple[str, Scope] | None:
    """Megatron's linear and scope of a Hugging Face module (no ``.weight``, any prefix); None: not adaptable.

    ``model.layers.3.mlp.experts.7.gate_proj`` is ``("linear_fc1", Scope.EXPERT)``. All families are looked through,
    so a server needs no model to judge a name.
    """
    rest = kind_of(module)
    while rest and rest not in FAMILIES.modules:
        rest = rest.partition(".")[2]
    return FAMILIES.modules.get(rest)


def path_of(module: str) -> str | None:
    """The path below its layer of a Hugging Face module, experts as ``*``; None for a router or one outside of layers.

    ``model.layers.3.self_attn.qkv_proj`` is ``self_attn.qkv_proj``: the canonical target of a family without a row.
    """
    _, numbered, path = kind_of(module).partition(".*.")
    return path if numbered and not ROUTERS & set(path.split(".")) else None


def kind_of(module: str) -> str:
    """The module with its numbers as ``*``: the name of one projection in every layer and expert."""
    return _NUMBER.sub(".*", module)


_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

_DENSE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "tie_word_embeddings",
)
_MOE_KEYS = (*_DENSE_KEYS[:5], "moe_intermediate_size")


def _dense(common: dict[str, Any], *values: int | bool) -> dict[str, Any]:
    return {**common, **dict(zip(_DENSE_KEYS, values, strict=True))}


def _moe(common: dict[str, Any], *values: int) -> dict[str, Any]:
    return {**common, **dict(zip(_MOE_KEYS, values, strict=True)), "tie_word_embeddings": False}


_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
_QWEN25 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN25_WIDE = {**_QWEN25, "vocab_size": 152064}
_QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}
_LLAMA2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
_MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}

# fmt: off
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _dense(_QWEN3, 28, 1024, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B": _dense(_QWEN3, 28, 2048, 16, 8, 6144, True),
    "Qwen/Qwen3-4B": _dense(_QWEN3, 36, 2560, 32, 8, 9728, True),
    "Qwen/Qwen3-8B": _dense(_QWEN3, 36, 4096, 32, 8, 12288, False),
    "Qwen/Qwen3-14B": _dense(_QWEN3, 40, 5120, 40, 8, 17408, False),
    "Qwen/Qwen3-32B": _dense(_QWEN3, 64, 5120, 64, 8, 25600, False),
    "Qwen/Qwen3-30B-A3B": _moe(_QWEN3_MOE, 48, 2048, 32, 4, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _moe(_QWEN3_MOE, 94, 4096, 64, 4, 12288, 1536),
    "Qwen/Qwen2.5-0.5B-Instruct": _dense(_QWEN25, 24, 896, 14, 2, 4864, True),
    "Qwen/Qwen2.5-1.5B-Instruct": _dense(_QWEN25, 28, 1536, 12, 2, 8960, True),
    "Qwen/Qwen2.5-3B-Instruct": _dense(_QWEN25, 36, 2048, 16, 2, 11008, True),
    "Qwen/Qwen2.5-7B-Instruct": _dense(_QWEN25_WIDE, 28, 3584, 28, 4, 18944, False),
    "Qwen/Qwen2.5-14B-Instruct": _dense(_QWEN25_WIDE, 48, 5120, 40, 8, 13824, False),
    "Qwen/Qwen2.5-32B-Instruct": _dense(_QWEN25_WIDE, 64, 5120, 40, 8, 27648, False),
    "Qwen/Qwen2.5-72B-Instruct": _dense(_QWEN25_WIDE, 80, 8192, 64, 8, 29568, False),
    "Qwen/Qwen1.5-MoE-A2.7B": _moe(_QWEN15_MOE, 24, 2048, 16, 16, 5632, 1408),
    "meta-llama/Llama-2-7b-hf": _dense(_LLAMA2, 32, 4096, 32, 32, 11008, False),
    "meta-llama/Llama-3.1-8B": _dense(_LLAMA3, 32, 4096, 32, 8, 14336, False),
    "meta-llama/Llama-3.1-70B": _dense(_LLAMA3, 80, 8192, 64, 8, 28672, False),
    "meta-llama/Llama-3.2-1B": _dense({**_LLAMA3, "head_dim": 64}, 16, 2048, 32, 8, 8192, True),
    "meta-llama/Llama-3.2-3B": _dense({**_LLAMA3, "head_dim": 128}, 28, 3072, 24, 8, 8192, True),
    "mistralai/Mixtral-8x7B-v0.1":
        _dense({**_MIXTRAL, "max_position_embeddings": 32768}, 32, 4096, 32, 8, 14336, False),
    "mistralai/Mixtral-8x22B-v0.1":
        _dense({**_MIXTRAL, "max_position_embeddings": 65536}, 56, 6144, 48, 8, 16384, False),
}
# fmt: on


def is_hub_name(path: str) -> bool:
    """True for ``owner/name``."""
    return bool(_HUB_NAME.match(path))


def known_config(hub_name: str) -> dict[str, Any] | None:
    """The built-in description of a published model; ``-Base`` variants share their sibling's sizes."""
    return PUBLISHED.get(hub_name) or PUBLISHED.get(hub_name.removesuffix("-Base"))


# Megatron's numbers, those of Llama 3.1 and later; only the factor can be chosen.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The type of a config.json's rotary positions, and their numbers. Older files call ``rope_type`` ``type``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default", rope


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """List what the config.json of a supported family requires and the Megatron engine does not compute."""
    family = family_of(str(config["model_type"]))
    kind, rope = rope_of(config)
    numbers = {key: rope.get(key, value) for key, value in _LLAMA3_ROPE.items()}
    sliding = config.get("sliding_window") and config.get("use_sliding_window", family.sliding_window)
    problems = {
        "attention_bias or mlp_bias is set": bool(config.get("attention_bias") or config.get("mlp_bias")),
        "qkv_bias is off": config.get("qkv_bias") is False,
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"rope type {kind!r}": kind not in family.rope_types,
        f"llama3 rope with {numbers}": kind == "llama3" and numbers != _LLAMA3_ROPE,
        "rope on a part of the head": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1,
        f"sliding window of {config.get('sliding_window')}": bool(sliding),
    }
    return [f"{what}, which the Megatron engine does not compute" for what, found in problems.items() if found]


PREFIX = "model.layers"
"""Where all families with experts have their layers."""
_LAYER = re.compile(r"^(?P<prefix>.+?)\.(?P<layer>\d+)\.(?P<rest>.+)$")
_EXPERT = re.compile(r"^(?P<before>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)$")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One projection in all of its layers: ``{prefix}.{layer}.{path}`` has ``inputs`` and ``outputs``."""

    path: str  # `self_attn.qkv_proj`
    prefix: str  # `model.layers`
    layers: tuple[int, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The projections that LoRA can adapt, and sizes in elements. ``experts`` is None unless they can be adapted.

    ``expert_layers`` are the layers with ``n_experts`` of width ``expert_ffn``. ``parameters`` are those of the model,
    of one layer in ``largest_layer``; ``saved`` has those of MTP, too.
    """

    linears: tuple[Linear, ...]
    experts: GatedMlp | None
    expert_layers: tuple[int, ...]
    n_experts: int
    expert_ffn: int
    parameters: int
    saved: int
    largest_layer: int


def read_checkpoint(folder: Path, config: Mapping[str, Any]) -> Checkpoint | None:
    """Read the headers of the weight files; None where there are none.

    Raises OSError, ValueError, ConfigError, and KeyError for a config.json without a number of layers.
    """
    tensors: dict[str, Shape] = {}
    for file in weight_files(folder):
        with (folder / file).open("rb") as opened:
            tensors |= {name: tuple(entry.shape) for name, entry in read_head(opened)[0].items()}
    return derive(tensors, int(config["num_hidden_layers"])) if tensors else None


def derive(tensors: Mapping[str, Shape], layers: int) -> Checkpoint:
    """``tensors`` has the shape of every tensor of the checkpoint by name.

    Those of MTP follow the last of the ``layers``, or have a name of their own (EXAONE): neither transformers nor vLLM
    makes a module of them here.
    """
    per_layer: dict[str, int] = defaultdict(int)
    kinds: dict[str, list[tuple[str, int, Shape]]] = defaultdict(list)
    experts: dict[str, set[tuple[int, int]]] = defaultdict(set)
    widths: dict[str, Shape] = {}
    parameters = 0
    for name, shape in tensors.items():
        found = _LAYER.match(name)
        if name.startswith("mtp.") or (found is not None and int(found["layer"]) >= layers):
            continue
        parameters += math.prod(shape)
        if found is None:
            continue
        per_layer[f"{found['prefix']}.{found['layer']}"] += math.prod(shape)
        if not name.endswith(".weight") or len(shape) != 2:
            continue
        rest, layer = found["rest"].removesuffix(".weight"), int(found["layer"])
        if (expert := _EXPERT.match(rest)) is not None:
            if found["prefix"] != PREFIX:
                continue
            path = f"{expert['before']}.{{}}.{expert['leaf']}"
            experts[path].add((layer, int(expert["expert"])))
            widths[path] = shape
        elif not rest.endswith("norm") and path_of(f"{found['prefix']}.{layer}.{rest}"):
            kinds[rest].append((found["prefix"], layer, shape))
    mlp = _gated(experts)
    sparse = sorted({layer for layer, _ in experts[mlp.down]}) if mlp else []
    return Checkpoint(
        linears=tuple(linear for path, places in sorted(kinds.items()) if (linear := _linear(path, places))),
        experts=mlp,
        expert_layers=tuple(sparse),
        n_experts=1 + max(expert for _, expert in experts[mlp.down]) if mlp else 0,
        expert_ffn=widths[mlp.down][1] if mlp else 0,
        parameters=parameters,
        saved=sum(map(math.prod, tensors.values())),
        largest_layer=max(per_layer.values(), default=0),
    )


def _linear(path: str, places: Iterable[tuple[str, int, Shape]]) -> Linear | None:
    """None for a name that stands for several things: other sizes or other stacks of layers."""
    if len({(prefix, shape) for prefix, _, shape in places}) != 1:
        return None
    prefix, _, (outputs, inputs) = next(iter(places))
    layers = tuple(sorted(layer for _, layer, _ in places))
    return Linear(path=path, prefix=prefix, layers=layers, inputs=inputs, outputs=outputs)


def _gated(experts: Mapping[str, set[tuple[int, int]]]) -> GatedMlp | None:
    """The experts' projections, if every one has all three and servers know their names."""
    for before in {path.rpartition(".")[0] for path in experts}:
        for names in _GATED:
            paths = [f"{before}.{leaf}" for leaf in names]
            known = [target_of(kind_of(f"{PREFIX}.0.{path.format(0)}")) for path in paths]
            same = len({frozenset(experts.get(path, ())) for path in paths}) == 1 and experts.get(paths[0])
            if same and all(found is not None and found[1] is Scope.EXPERT for found in known):
                return GatedMlp(gate=paths[0], up=paths[1], down=paths[2])
    return None
