"""Adding a family is one row: every part that reads rows is tried with a made-up family.

Its models are Qwen2-MoE models whose parts have other names, so that a checkpoint of it can be made by renaming.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.config.rules.guardrails import check
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.common.transfer_plan import load_plan, pack_plan, wire_layout
from areal_lora.engine.megatron_utils.base_weights import architecture, load_base
from areal_lora.families import registry
from areal_lora.families.family import TARGETS, Attention, Experts, Family, GatedMlp, Scope
from areal_lora.families.peft_folder import CONFIG_FILE, FILE_PREFIX, contents
from areal_lora.families.registry import TABLE, Families, family_of, target_of, unsupported
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import adapter_size
from areal_lora.families.targets import resolve
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.messages import ModulesReply, check_served
from tests.support.families.tiny_families import TINY, save
from tests.support.paths import EXAMPLES

ROW = Family(
    model_type="made_up",
    attention=Attention(
        q="attn.query", k="attn.key", v="attn.value", o="attn.out", bias=True, q_norm="attn.qn", k_norm="attn.kn"
    ),
    mlp=GatedMlp(gate="feed.open", up="feed.widen", down="feed.narrow"),
    experts=Experts(
        mlp=GatedMlp(gate="feed.routed.{}.open", up="feed.routed.{}.widen", down="feed.routed.{}.narrow"),
        router="feed.router",
        ffn_key="routed_width",
        shared=GatedMlp(gate="feed.always.open", up="feed.always.widen", down="feed.always.narrow"),
        shared_gate="feed.always_gate",
    ),
    input_norm="first_norm",
    mlp_norm="second_norm",
)
RENAMED = {
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.o_proj": "attn.out",
    "mlp.shared_expert_gate": "feed.always_gate",
    "mlp.shared_expert.": "feed.always.",
    "mlp.experts.": "feed.routed.",
    "mlp.gate.": "feed.router.",
    "mlp.": "feed.",
    "gate_proj": "open",
    "up_proj": "widen",
    "down_proj": "narrow",
    "input_layernorm": "first_norm",
    "post_attention_layernorm": "second_norm",
}
SPEC = AdapterSpec(name="a", base_model="b", rank=4, alpha=8.0, target_modules=TARGETS)


def renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


@pytest.fixture(autouse=True)
def _one_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", Families([*TABLE, ROW]))


def hf_config() -> dict[str, Any]:
    """As the tiny Qwen2-MoE."""
    hf = {**TINY["qwen2_moe"], "rms_norm_eps": 1e-6, "model_type": "made_up"}
    hf["routed_width"] = hf.pop("moe_intermediate_size")
    return hf


def sharded(hf: dict[str, Any]) -> ShardedModel:
    shape = ModelShape.from_hf(hf)
    layout = ParallelLayout.of(TrainerConfig(world_size=1), layers=shape.layers, experts=shape.experts)
    return ShardedModel(shape=shape, layout=layout)


def twin() -> ShardedModel:
    return sharded({**TINY["qwen2_moe"], "rms_norm_eps": 1e-6})


def test_the_configuration_rules_accept_it() -> None:
    example = EXAMPLES
    config = load_config([example / "gsm8k_grpo_megatron_lora_moe.yaml", example / "embedded.yaml"], [])
    hf = {**hf_config(), "max_position_embeddings": 4096}
    findings = check(config, Facts(hf_config=hf))
    assert [f for f in findings if f.path.startswith(("model", "adapters"))] == []
    assert unsupported(hf) == []


def test_names_targets_and_sizes() -> None:
    shape = ModelShape.from_hf(hf_config())
    assert family_of("made_up") is shape.family is ROW
    assert (shape.expert_ffn, shape.shared_ffn, shape.dense_layers) == (20, 28, 2)
    assert shape.parameters == twin().shape.parameters
    assert resolve(["open", "widen", "attn.*"], [], shape) == ("linear_fc1", "linear_proj", "linear_qkv")
    assert resolve(["*.feed.routed.*.narrow"], [], shape) == ("expert.linear_fc2",)
    assert target_of("x.model.layers.1.feed.routed.3.widen") == ("linear_fc1", Scope.EXPERT)
    assert target_of("model.layers.1.feed.always.narrow") == ("linear_fc2", Scope.SHARED_EXPERT)
    assert target_of("model.layers.0.attn.key") == ("linear_qkv", Scope.ATTENTION)
    assert target_of("model.layers.1.feed.router") is None


@pytest.mark.parametrize("experts", ExpertLayout)
def test_the_wire_has_the_numbers_of_its_twin_under_its_own_names(experts: ExpertLayout) -> None:
    spec = AdapterSpec(
        name="a", base_model="b", rank=4, alpha=8.0, target_modules=("linear_fc1",), expert_layout=experts
    )
    for one in (spec, SPEC):
        mine, other = (wire_layout(model, one, "float32") for model in (sharded(hf_config()), twin()))
        rename = [[(renamed(t.name), t.shape, t.offset) for t in shard.tensors] for shard in other.shards]
        assert [[(t.name, t.shape, t.offset) for t in shard.tensors] for shard in mine.shards] == rename
        assert mine.aliases == {renamed(alias): renamed(name) for alias, name in other.aliases.items()}
        size = adapter_size(ModelShape.from_hf(hf_config()), one)
        assert (size.tensors, size.parameters * 4) == (len(rename[0]), mine.nbytes)
        assert pack_plan(sharded(hf_config()), one, 0, mine).blocks.first.tolist()
        assert load_plan(sharded(hf_config()), one, 0)[0] == [name for name, *_ in rename[0]]


def test_a_server_that_has_its_modules_takes_it() -> None:
    layout = wire_layout(sharded(hf_config()), SPEC, "float32")
    shapes = {t.name: t.shape for shard in layout.shards for t in shard.tensors}
    shapes |= {name: shapes[target] for name, target in layout.aliases.items()}
    modules = {
        name.removesuffix(".lora_A.weight"): (shape[1], shapes[name.replace("lora_A", "lora_B")][0])
        for name, shape in shapes.items()
        if "lora_A" in name
    }
    check_served(layout, ModulesReply(slots=2, modules=modules, max_rank=8))
    assert make_layout(SPEC, "float32", {0: list(shapes.items())}, {}).nbytes > layout.nbytes


def test_a_peft_folder_with_its_names_is_read(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ".*"}
    modules = ("attn.query", "feed.routed.3.open", "feed.always.narrow")
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    tensors = {
        f"{FILE_PREFIX}model.layers.1.{module}.lora_{side}.weight": np.zeros((4, 4))
        for module in modules
        for side in "AB"
    }
    spec, _ = contents(tmp_path, None, tensors, lambda _: None)
    assert spec.target_modules == ("linear_fc1", "linear_fc2", "linear_qkv")


def test_megatron_builds_the_same_architecture() -> None:
    other = {**TINY["qwen2_moe"], "rms_norm_eps": 1e-6}
    assert architecture(hf_config()) == architecture(other)


class Parameters(nn.Module):
    """Megatron's parameters of a layer or model, by name; dots make submodules."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name in {path.partition(".")[0] for path in shapes if "." in path}:
            below = {path.partition(".")[2]: s for path, s in shapes.items() if path.startswith(f"{name}.")}
            self.add_module(name, Parameters(below))
        for name, shape in shapes.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(torch.full(shape, torch.nan)))


def megatron_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    h, heads = shape.hidden, shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    shapes: dict[str, tuple[int, ...]] = {
        "0.embedding.word_embeddings.weight": (shape.vocab, h),
        "0.output_layer.weight": (shape.vocab, h),
        "0.decoder.final_layernorm.weight": (h,),
    }
    for layer in range(shape.layers):
        at = f"0.decoder.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (h,),
            f"{at}.pre_mlp_layernorm.weight": (h,),
            f"{at}.self_attention.linear_qkv.weight": (heads, h),
            f"{at}.self_attention.linear_qkv.bias": (heads,),
            f"{at}.self_attention.linear_proj.weight": (h, shape.head_dim * shape.heads),
        }
        if layer not in shape.sparse_layers:
            shapes |= {f"{at}.mlp.linear_fc1.weight": (2 * shape.ffn, h), f"{at}.mlp.linear_fc2.weight": (h, shape.ffn)}
            continue
        width, always = shape.expert_ffn, shape.shared_ffn
        shapes |= {
            f"{at}.mlp.router.weight": (shape.experts, h),
            f"{at}.mlp.experts.linear_fc1.weight": (shape.experts, 2 * width, h),
            f"{at}.mlp.experts.linear_fc2.weight": (shape.experts, h, width),
            f"{at}.mlp.shared_experts.gate_weight": (1, h),
            f"{at}.mlp.shared_experts.linear_fc1.weight": (2 * always, h),
            f"{at}.mlp.shared_experts.linear_fc2.weight": (h, always),
        }
    return shapes


def loaded(folder: Path, model: ShardedModel) -> dict[str, Tensor]:
    module = Parameters(megatron_shapes(model.shape))
    load_base(module, ModelFolder.of(ModelConfig(path=str(folder))), model, 0)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_its_base_weights_are_found(tmp_path: Path) -> None:
    other = save("qwen2_moe", tmp_path)
    tensors = {renamed(name): tensor for name, tensor in load_file(other / "model.safetensors").items()}
    assert not any(re.search(r"mlp|proj|layernorm", name) for name in tensors)
    (mine := tmp_path / "made_up").mkdir()
    save_file(tensors, mine / "model.safetensors")
    got, wanted = loaded(mine, sharded(hf_config())), loaded(other, twin())
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
        assert not tensor.isnan().any()
