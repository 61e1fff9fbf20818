"""Layers of a family without a row, from names and shapes of a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from areal_lora.errors import ConfigError
from areal_lora.families.registry import derive, read_checkpoint
from areal_lora.families.safetensors_head import INDEX_FILE
from areal_lora.families.shape import ModelShape, read_shape, saved_bytes
from areal_lora.families.sites import adapter_size
from areal_lora.families.targets import modules, resolve
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.messages import covered

CONFIG = {"model_type": "made_up", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 32}
FUSED = {"self_attn.qkv_proj": (24, 8), "self_attn.dense": (8, 8), "mlp.c_fc": (12, 8), "mlp.c_proj": (8, 12)}
NAMES = {
    "model.embed_tokens.weight": (32, 8),
    "model.norm.weight": (8,),
    **{f"model.layers.{i}.{path}.weight": shape for i in range(2) for path, shape in FUSED.items()},
    **{f"model.layers.{i}.mlp.c_fc.bias": (12,) for i in range(2)},
    **{f"model.layers.{i}.input_layernorm.weight": (8,) for i in range(2)},
    **{f"model.layers.{i}.mlp.gate.weight": (3, 8) for i in range(2)},
    "model.layers.1.mlp.router.layer.weight": (3, 8),
    "lm_head.weight": (32, 8),
}
EXPERTS = {
    f"model.layers.1.mlp.experts.{e}.{leaf}.weight": shape
    for e in range(3)
    for leaf, shape in {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}.items()
}


def shape_of(names: dict[str, tuple[int, ...]]) -> ModelShape:
    return ModelShape.from_hf(CONFIG, derive(names, 2))


def test_linear_layers_are_the_matrices_of_layers_but_routers() -> None:
    found = modules(["all-linear"], [], shape_of(NAMES))
    assert found == {
        f"model.layers.{i}.{path}": (inputs, outputs) for i in range(2) for path, (outputs, inputs) in FUSED.items()
    }
    assert shape_of(NAMES).parameters == sum(a * (b[0] if b else 1) for a, *b in NAMES.values())


def test_norms_of_each_head_are_no_linear_layers() -> None:
    """Command R+ has a matrix of query and key norms; the oracle is transformers' modules."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ids = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["cohere"](**sizes, **ids, use_qk_norm=True))
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(names["model.layers.0.self_attn.q_norm.weight"]) == 2
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert modules(["all-linear"], [], shape_of(names)).keys() == linear


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        (["all-linear"], ["mlp"], ("self_attn.dense", "self_attn.qkv_proj")),
        (["attention"], [], ("self_attn.dense", "self_attn.qkv_proj")),
        (["c_fc", "*.qkv_proj"], [], ("mlp.c_fc", "self_attn.qkv_proj")),
        (["all-linear"], ["lm_head", "self_attn.*", "c_proj"], ("mlp.c_fc",)),
        (["mlp.c_fc"], [], ("mlp.c_fc",)),
    ],
)
def test_targets_are_paths_below_a_layer(targets: list[str], excluded: list[str], expected: tuple[str, ...]) -> None:
    found = resolve(targets, excluded, shape_of(NAMES))
    assert found == expected
    assert resolve(found, [], shape_of(NAMES)) == expected, "canonical targets are valid input"


def test_a_target_that_matches_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"linear_qkv.*the model has all-linear, mlp\.c_fc"):
        resolve(["linear_qkv"], [], shape_of(NAMES))


def test_experts_with_known_names_are_adapted_one_by_one() -> None:
    shape = shape_of(NAMES | EXPERTS)
    assert (shape.experts, shape.sparse_layers, shape.expert_ffn) == (3, (1,), 6)
    found = resolve(["all-linear"], [], shape)
    assert found == ("expert.linear_fc1", "expert.linear_fc2", *sorted(FUSED))
    assert "model.layers.1.mlp.experts.2.up_proj" in modules(["experts"], [], shape)
    # A server with these names takes exactly these modules.
    names = [n.removesuffix(".weight") for n in NAMES | EXPERTS if n.endswith("weight")]
    assert {n for n in names if covered(n, found)} == modules(["all-linear"], [], shape).keys()


def test_layers_that_predict_several_tokens_are_neither_adapted_nor_held() -> None:
    """GLM-4.5 publishes one after its last layer, EXAONE beside; transformers makes no module of them."""
    last = {n: size for n, size in (NAMES | EXPERTS).items() if "layers.1" in n}
    mtp = {n.replace("layers.1", "layers.2"): size for n, size in last.items()}
    mtp |= {n.replace("model.layers.1", "mtp.layers.0"): size for n, size in last.items()}
    mtp |= {"model.layers.2.eh_proj.weight": (8, 16), "model.layers.2.embed_tokens.weight": (32, 8)}
    plain, found = shape_of(NAMES | EXPERTS), shape_of(NAMES | EXPERTS | mtp)
    assert modules(["all-linear"], [], found) == modules(["all-linear"], [], plain)
    assert resolve(["all-linear"], [], found) == resolve(["all-linear"], [], plain)
    assert (found.routes, found.dense_layers) == (plain.routes, 1)
    assert found.checkpoint is not None
    assert plain.checkpoint is not None
    assert replace(found.checkpoint, saved=plain.checkpoint.saved) == plain.checkpoint
    assert found.parameters == sum(map(math.prod, (NAMES | EXPERTS).values()))
    assert saved_bytes(found, "bfloat16") == 2 * sum(map(math.prod, (NAMES | EXPERTS | mtp).values()))


def test_the_size_of_an_adapter_is_counted_from_every_tensor() -> None:
    spec = AdapterSpec(name="a", base_model="m", rank=2, alpha=1.0, target_modules=tuple(sorted(FUSED)))
    size = adapter_size(shape_of(NAMES), spec)
    assert size.parameters == size.file_parameters == 2 * 2 * sum(map(sum, FUSED.values()))
    assert size.tensors == size.names == 2 * 2 * len(FUSED)


def test_a_folder_is_read_by_its_headers(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path, CONFIG) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_shards(tmp_path)
    assert read_shape(tmp_path) == shape_of(NAMES)


def write_head(file: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header = json.dumps({n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in tensors.items()}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def write_shards(folder: Path) -> dict[str, str]:
    """The index's map of two files."""
    items = list(NAMES.items())
    parts = {"a.safetensors": dict(items[:5]), "b.safetensors": dict(items[5:])}
    for name, part in parts.items():
        write_head(folder / name, part)
    return {tensor: name for name, part in parts.items() for tensor in part}


@pytest.mark.parametrize("sharded", [True, False])
def test_the_same_weights_under_other_names_are_no_second_model(tmp_path: Path, sharded: bool) -> None:
    """As Mistral publishes: ``consolidated.safetensors`` beside what transformers reads."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if sharded:
        (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": write_shards(tmp_path)}))
    else:
        write_head(tmp_path / "model.safetensors", NAMES)
    renamed = {name.removeprefix("model.").replace("self_attn", "attention"): shape for name, shape in NAMES.items()}
    write_head(tmp_path / "consolidated.safetensors", renamed)
    assert read_shape(tmp_path) == shape_of(NAMES)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"[]", "is no index of tensors"),
        (b'{"weight_map": {"\xff": 1}}', "is no index of tensors"),
        (b'{"weight_map": {"x": "c.safetensors"}}', "names c.safetensors, which is not there"),
    ],
)
def test_an_index_that_does_not_fit_its_folder_is_refused(tmp_path: Path, index: bytes, words: str) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(index)
    with pytest.raises(ConfigError, match=words):
        read_checkpoint(tmp_path, CONFIG)
