"""Merged folders, judged by stock peft and transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_lora.checkpoint.adapter_io import load_peft, save_peft
from areal_lora.checkpoint.merged_folder import write_merged
from areal_lora.checkpoint.recover import aliases_of
from areal_lora.errors import ConfigError, UnknownTensorError
from areal_lora.families.peft_folder import TENSOR_FILE, describe
from areal_lora.families.shape import ModelShape, read_hf_config, read_shape
from areal_lora.families.sites import pieces_of, sites_of, wire_names
from areal_lora.types import AdapterSpec, ExpertLayout
from tests.support.families.rowless import ROWLESS, save_rowless
from tests.support.families.tiny_families import save
from tests.support.lazy import Lazy
from tests.support.paths import TINY_MODEL

peft = Lazy("peft")

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@torch.no_grad()
def logits(model) -> torch.Tensor:
    ids = torch.randint(0, 24, (3, 20), generator=torch.Generator().manual_seed(1))
    return model.eval()(ids).logits.float()


def loaded(folder: Path, **keys):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **keys})


def judge(base: Path, adapter: Path, out: Path) -> None:
    """Logits of the merged folder are those of base and adapter by peft, and far from the base's."""
    spec, tensors = load_peft(adapter, lambda _: read_shape(base))
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    made = write_merged(base, tensors, spec.scale_of, out)
    want, got, plain = (
        logits(peft.PeftModel.from_pretrained(loaded(base), adapter)),
        logits(loaded(out)),
        logits(loaded(base)),
    )
    error, effect = (got - want).abs().max().item(), (want - plain).abs().max().item()
    print(f"error {error:.1e}, effect of the adapter {effect:.2f}; {made}")
    assert error < 2e-5 * max(1.0, want.abs().max().item())
    assert effect > 0.1
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before, "the base was changed"


@pytest.mark.filterwarnings("ignore")
def test_a_dense_model_in_several_files_with_an_adapter_by_peft(tmp_path: Path) -> None:
    whole = save("qwen3", tmp_path / "whole")
    base = tmp_path / "base model"
    loaded(whole).save_pretrained(base, max_shard_size="60KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(
        loaded(base), peft.LoraConfig(r=4, lora_alpha=12, target_modules=names, task_type="CAUSAL_LM")
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    judge(base, tmp_path / "adapter", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / "out" / name) for name in set(index["weight_map"].values())}
    assert {name: file for file, held in files.items() for name in held} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in files.values() for t in held.values())


def stock_adapter(base: Path, folder: Path, **keys) -> Path:
    """By stock peft, of random numbers."""
    config = peft.LoraConfig(lora_alpha=12, task_type="CAUSAL_LM", init_lora_weights=False, r=4, **keys)
    model = peft.get_peft_model(loaded(base), config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


STOCK = [
    ("qwen3", r".*layers\.\d+\..*(q_proj|down_proj)", ("linear_fc2", "linear_qkv")),
    ("qwen3", [f"model.layers.{layer}.self_attn.v_proj" for layer in range(3)], ("linear_qkv",)),
    ("qwen3", ["self_attn.q_proj", "mlp.up_proj"], ("linear_fc1", "linear_qkv")),
    ("phi3", ["qkv_proj", "gate_up_proj"], ("mlp.gate_up_proj", "self_attn.qkv_proj")),
    ("starcoder2", ["q_proj", "c_fc"], ("linear_qkv", "mlp.c_fc")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "spelling", "targets"), STOCK)
def test_targets_in_every_spelling_of_peft(kind: str, spelling: object, targets: object, tmp_path: Path) -> None:
    base = (save_rowless if kind in ROWLESS else save)(kind, tmp_path / "base")
    adapter = stock_adapter(base, tmp_path / "adapter", target_modules=spelling)
    assert load_peft(adapter)[0].target_modules == targets
    judge(base, adapter, tmp_path / "out")


FUSED: dict[str, object] = {
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "target_modules": [],
}
ALL = ["q_proj", "gate_proj", "up_proj", "down_proj"]
ODD = {"experts.down_proj": 2, r"layers\.2\.mlp\.experts\.gate_up_proj": 3, "gate_proj": 5}
EXPERTS: list[tuple[str, dict[str, object]]] = [
    ("qwen3_moe", {"target_modules": ALL}),
    ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    ("olmoe", {"target_modules": ALL}),
    ("qwen3_moe", FUSED),
    ("mixtral", FUSED | {"rank_pattern": ODD, "alpha_pattern": ODD, "use_rslora": True}),
    ("qwen2_moe", FUSED | {"target_modules": ["v_proj", "shared_expert.up_proj"]}),
    ("qwen3_moe", FUSED | {"target_parameters": ["experts.gate_up_proj"]}),
    ("mixtral", FUSED | {"target_parameters": ["down_proj", "model.layers.1.mlp.experts.gate_up_proj"]}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "keys"), EXPERTS, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(EXPERTS)])
def test_experts_that_peft_holds_as_one_parameter(kind: str, keys: dict[str, object], tmp_path: Path) -> None:
    base = (save_rowless if kind in ROWLESS else save)(kind, tmp_path / "base")
    adapter = stock_adapter(base, tmp_path / "adapter", **keys)
    assert "experts.0." not in str(load_file(adapter / TENSOR_FILE).keys())
    judge(base, adapter, tmp_path / "out")
    shape = read_shape(base)
    spec, tensors = load_peft(adapter, lambda _: shape)
    save_peft(tmp_path / "again", spec, tensors, str(base))
    again, same = load_peft(tmp_path / "again")
    assert again == spec
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[name], tensor) for name, tensor in tensors.items())
    found, exact = (describe(tmp_path / folder, lambda _: shape) for folder in ("adapter", "again"))
    assert (found.spec, found.shapes, found.digests) == (exact.spec, exact.shapes, exact.digests)


def moe_adapter(base: Path, folder: Path, layout: ExpertLayout, std: float) -> None:
    shape = ModelShape.from_hf(read_hf_config(base))
    spec = AdapterSpec(name="a", base_model=str(base), rank=4, alpha=8.0, target_modules=TARGETS, expert_layout=layout)
    generator, tensors = torch.Generator().manual_seed(2), {}
    for key in sites_of(shape, layout):
        for name, size in wire_names(pieces_of(shape, key))[0].items():
            full = [spec.rank if n == -1 else n for n in size]
            tensors[name] = std * torch.randn(full, generator=generator)
    save_peft(folder, spec, tensors, str(base), aliases_of(shape, spec))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", list(ExpertLayout))
def test_a_moe_model_with_adapted_experts(layout: ExpertLayout, tmp_path: Path) -> None:
    # All layers have experts: of a model with dense layers beside them, peft 0.21 leaves gate and up of those out.
    base = TINY_MODEL
    moe_adapter(base, tmp_path / "adapter", layout, std=0.1)
    judge(base, tmp_path / "adapter", tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
def test_our_adapter_of_experts_saved_by_peft(tmp_path: Path) -> None:
    moe_adapter(TINY_MODEL, tmp_path / "own", ExpertLayout.PER_EXPERT, std=0.1)
    peft.PeftModel.from_pretrained(loaded(TINY_MODEL), tmp_path / "own").save_pretrained(tmp_path / "adapter")
    assert "experts.0." not in str(load_file(tmp_path / "adapter" / TENSOR_FILE).keys())
    judge(TINY_MODEL, tmp_path / "adapter", tmp_path / "out")
    own, saved = (load_peft(tmp_path / name, lambda _: read_shape(TINY_MODEL)) for name in ("own", "adapter"))
    module = "model.layers.1.mlp.experts.3.up_proj"
    products = [t[f"{module}.lora_B.weight"] @ t[f"{module}.lora_A.weight"] for _, t in (own, saved)]
    assert torch.allclose(*products, atol=1e-6)
    assert own[0].scale_of(module) == saved[0].scale_of(module)


def test_the_type_of_the_weights(tmp_path: Path) -> None:
    base = save("qwen3_moe", tmp_path / "base")
    moe_adapter(base, tmp_path / "adapter", ExpertLayout.PER_EXPERT, std=0.02)
    _, tensors = load_peft(tmp_path / "adapter")
    exact = write_merged(base, tensors, lambda _: 2.0, tmp_path / "float32")
    half = write_merged(base, tensors, lambda _: 2.0, tmp_path / "bfloat16", dtype=torch.bfloat16)
    want = load_file(tmp_path / "float32" / "model.safetensors")
    got = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in want.items())
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert half.nbytes * 2 == exact.nbytes
    assert half.bfloat16 == exact.bfloat16, "the loss is of the cast, whatever is written"
    assert 0 < half.bfloat16.error < 1
    assert loaded(tmp_path / "bfloat16", dtype="auto").dtype is torch.bfloat16


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    base, other = save("qwen3_moe", tmp_path / "base"), save("qwen3", tmp_path / "other")
    moe_adapter(base, tmp_path / "adapter", ExpertLayout.PER_EXPERT, std=0.02)
    _, tensors = load_peft(tmp_path / "adapter")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UnknownTensorError, match="belongs to another base"):
        write_merged(other, tensors, lambda _: 2.0, tmp_path / "out")
    with pytest.raises(ConfigError, match="it exists"):
        write_merged(base, tensors, lambda _: 2.0, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"no model.safetensors"):
        write_merged(tmp_path, tensors, lambda _: 2.0, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
