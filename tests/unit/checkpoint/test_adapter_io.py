"""PEFT folders, judged by stock ``peft`` and transformers."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from areal_lora.checkpoint.adapter_io import load_peft, peft_config, peft_writer, save_peft
from areal_lora.errors import AdapterError
from areal_lora.families.peft_folder import CONFIG_FILE, TENSOR_FILE
from areal_lora.types import AdapterSpec
from tests.support.lazy import Lazy

peft_helper, peft_other = Lazy("vllm.lora.peft_helper"), Lazy("peft.utils.other")

HIDDEN, FFN, EXPERTS, HEAD, LAYERS = 32, 16, 4, 8, 2


def spec(rank=4, alpha=8.0) -> AdapterSpec:
    return AdapterSpec(
        name="a",
        base_model="tiny",
        rank=rank,
        alpha=alpha,
        target_modules=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    )


def module_sizes() -> dict[str, tuple[int, int]]:
    """Module path -> (out, in) of every adapted Linear."""
    sizes = {}
    for layer in range(LAYERS):
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp.experts"
        sizes |= {f"{attn}.q_proj": (4 * HEAD, HIDDEN), f"{attn}.k_proj": (2 * HEAD, HIDDEN)}
        sizes |= {f"{attn}.v_proj": (2 * HEAD, HIDDEN), f"{attn}.o_proj": (HIDDEN, 4 * HEAD)}
        for e in range(EXPERTS):
            sizes |= {f"{mlp}.{e}.gate_proj": (FFN, HIDDEN), f"{mlp}.{e}.up_proj": (FFN, HIDDEN)}
            sizes[f"{mlp}.{e}.down_proj"] = (HIDDEN, FFN)
    return sizes


def adapter(rank=4, seed=0):
    """(unique tensors, aliases): up_proj shares gate_proj's lora_A, k and v share q's."""
    g = torch.Generator().manual_seed(seed)
    tensors, aliases = {}, {}
    for module, (out, inner) in module_sizes().items():
        first = module
        for other, leader in (("up_proj", "gate_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj")):
            first = first.replace(other, leader)
        if first != module:
            aliases[f"{module}.lora_A.weight"] = f"{first}.lora_A.weight"
        else:
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inner, generator=g) / inner**0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=g) * 0.2
    return tensors, aliases


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("base") / "tiny model"
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def merged_copy(base_folder, target, tensors, aliases, scale):
    """Merge by hand in float64 on the per-expert names of the checkpoint: no peft, no code of ours."""
    shutil.copytree(base_folder, target)
    weights = load_file(target / "model.safetensors")
    for module in module_sizes():
        name_a, name_b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        a, b = tensors[aliases.get(name_a, name_a)].double(), tensors[name_b].double()
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * (b @ a)).float()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@torch.no_grad()
def logprobs(model):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (3, 20), generator=g)
    return torch.log_softmax(model(ids).logits.float(), -1)


@pytest.mark.filterwarnings("ignore")
def test_stock_peft_scores_like_the_merged_model(base_folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tensors, aliases = adapter()
    save_peft(tmp_path / "adapter", spec(), tensors, str(base_folder), aliases)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32).eval()
    plain = logprobs(base)
    merged = AutoModelForCausalLM.from_pretrained(
        merged_copy(base_folder, tmp_path / "merged", tensors, aliases, scale=2.0), dtype=torch.float32
    ).eval()
    want = logprobs(merged)
    got = logprobs(PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    error, effect = (got - want).abs().max().item(), (want - plain).abs().max().item()
    print(f"error {error:.2e}, effect of the adapter {effect:.2e}")
    assert error < 1e-5
    assert effect > 0.1


def test_what_is_saved_is_what_is_loaded(tmp_path):
    tensors, aliases = adapter()
    save_peft(tmp_path / "x", spec(), tensors, "base/path", aliases)
    got_spec, got = load_peft(tmp_path / "x")
    assert got_spec == spec()
    assert got.keys() == tensors.keys() | aliases.keys()
    for name, tensor in got.items():
        want = tensors[aliases.get(name, name)]
        assert torch.equal(tensor, want)
        assert tensor.dtype == want.dtype


def test_peft_is_told_the_revision_of_a_base_from_the_hub(tmp_path):
    from peft import PeftConfig

    save_peft(tmp_path / "x", spec(), adapter()[0], "org/name", adapter()[1], revision="abc")
    read = PeftConfig.from_pretrained(str(tmp_path / "x"))
    assert (read.base_model_name_or_path, read.revision) == ("org/name", "abc")


def test_the_file_has_the_prefix_the_hugging_face_targets_and_no_shared_storage(tmp_path):
    tensors, aliases = adapter()
    save_peft(tmp_path / "x", spec(alpha=12.0), tensors, "base/path", aliases)
    config = json.loads((tmp_path / "x" / CONFIG_FILE).read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 12, "none", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "base/path"
    with safe_open(tmp_path / "x" / TENSOR_FILE, framework="pt") as f:
        names = list(f.keys())
    assert all(n.startswith("base_model.model.model.layers.") for n in names)
    assert len(names) == 2 * len(module_sizes())
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_a_crash_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError("no space left")

    monkeypatch.setattr("areal_lora.checkpoint.adapter_io.os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_peft(tmp_path / "x", spec(), *adapter()[:1], "b", adapter()[1])
    assert os.listdir(tmp_path) == []


def test_a_folder_is_never_overwritten(tmp_path):
    tensors, aliases = adapter()
    save_peft(tmp_path / "x", spec(), tensors, "b", aliases)
    with pytest.raises(AdapterError, match="exists"):
        save_peft(tmp_path / "x", spec(), tensors, "b", aliases)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.down_proj.lora_B.weight"), "partner"),
        (lambda t: t.update({"model.layers.0.self_attn.o_proj.lora_A.weight": torch.zeros(5, 32)}), "rank 4"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(4, 4)}), "lora_A.weight or"),
        (lambda t: t.clear(), "without tensors"),
    ],
)
def test_broken_adapters_are_not_saved(tmp_path, change, word):
    tensors, _ = adapter()
    full = dict(tensors) | {a: tensors[w] for a, w in adapter()[1].items()}
    change(full)
    with pytest.raises(AdapterError, match=word):
        save_peft(tmp_path / "x", spec(), full, "b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("chosen", "word"),
    [
        (lambda names: names[:-1], "1 tensors were not written"),
        (lambda names: [*names, names[0]], "comes twice"),
        (lambda names: [*names[1:], "model.layers.9.x.lora_A.weight"], "announced was another"),
    ],
)
def test_a_folder_appears_only_when_every_tensor_was_written_once(tmp_path, chosen, word):
    tensors, aliases = adapter()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}

    def written():
        with peft_writer(tmp_path / "x", spec(), shapes, "b", aliases) as write:
            for name in chosen(list(tensors)):
                write(name, tensors.get(name, torch.zeros(4, 32)))

    with pytest.raises(AdapterError, match=word):
        written()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_writing_does_not_matter_and_stock_safetensors_writes_the_same(tmp_path, dtype):
    tensors, aliases = adapter()
    tensors = {name: t.to(dtype) for name, t in reversed(tensors.items())}
    save_peft(tmp_path / "x", spec(), tensors, "b", aliases)
    full = tensors | {name: tensors[wire].clone() for name, wire in aliases.items()}
    save_file({f"base_model.model.{n}": t for n, t in full.items()}, tmp_path / "stock", metadata={"format": "pt"})
    ours, stock = ((tmp_path / name).read_bytes() for name in (f"x/{TENSOR_FILE}", "stock"))
    begins = [8 + int.from_bytes(content[:8], "little") for content in (ours, stock)]
    headers = [json.loads(content[8:begin]) for content, begin in zip((ours, stock), begins, strict=True)]
    assert headers[0].pop("__metadata__").keys() >= headers[1].pop("__metadata__").keys()
    assert headers[0] == headers[1]
    assert ours[begins[0] :] == stock[begins[1] :]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"lora_alpha": 16}, "changed"),
        ({"r": 8}, "changed"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": "4"}, "not a readable"),
    ],
)
def test_an_edited_configuration_is_an_error(tmp_path, fields, word):
    tensors, aliases = adapter()
    save_peft(tmp_path / "x", spec(), tensors, "b", aliases)
    path = tmp_path / "x" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterError, match=word):
        load_peft(tmp_path / "x")


def test_a_torn_tensor_file_and_a_missing_folder_are_errors(tmp_path):
    tensors, aliases = adapter()
    save_peft(tmp_path / "x", spec(), tensors, "b", aliases)
    path = tmp_path / "x" / TENSOR_FILE
    path.write_bytes(path.read_bytes()[:-100])
    for folder in ("x", "nowhere"):
        with pytest.raises(AdapterError, match="not a readable"):
            load_peft(tmp_path / folder)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_stock_peft_is_read(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
    )
    model = get_peft_model(
        Qwen3ForCausalLM(config),
        LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj", "down_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        ),
    )
    model.save_pretrained(tmp_path / "stock")
    got, tensors = load_peft(tmp_path / "stock")
    assert (got.name, got.rank, got.alpha, got.target_modules) == ("stock", 4, 16.0, ("linear_fc2", "linear_qkv"))
    key = "model.layers.1.self_attn.v_proj"
    module = model.base_model.model.get_submodule(key)
    assert torch.equal(tensors[f"{key}.lora_A.weight"], module.lora_A["default"].weight.detach())
    assert len(tensors) == 2 * 2 * 3


PARTS = {"gate_up_proj": ("gate_proj", 2), "down_proj": ("down_proj", 1)}
EXPERTS_ALONE = r"experts.*(gate|up|down)_proj"


@pytest.mark.parametrize(
    ("fields", "ranks", "alphas"),
    [
        ({}, 0, 0),
        ({"rslora": True}, 0, 1),  # gate and up: alpha / sqrt(2 rank) has to be as great
        ({"rank_pattern": ((EXPERTS_ALONE, 32),)}, 1, 0),  # that of down is found under the fused name
        ({"rank_pattern": ((EXPERTS_ALONE, 32),), "alpha_pattern": ((EXPERTS_ALONE, 5.0),)}, 1, 1),
        ({"rank_pattern": ((EXPERTS_ALONE, 4),)}, 1, 0),  # the default: the pattern gives gate and up half of theirs
        ({"alpha_pattern": ((EXPERTS_ALONE, 8.0),)}, 0, 1),
        ({"rank_pattern": ((r"layers\.(1|10)\..*_proj", 4),), "alpha_pattern": ((r"experts\..*", 8.0),)}, 1, 1),
        ({"rank_pattern": ((EXPERTS_ALONE, 8),), "alpha_pattern": ((EXPERTS_ALONE, 16.0),)}, 1, 1),
        ({"rank_pattern": ((r"layers\.(1|10)\..*_proj", 2), ("(gate|up)_proj", 7))}, 2, 0),
        ({"rslora": True, "rank_pattern": ((r"layers\.1\d?\..*", 2),), "alpha_pattern": ((r".*\.2\..*", 3.0),)}, 1, 3),
    ],
)
def test_patterns_of_fused_experts_are_few_and_give_readers_each_layers_numbers(fields, ranks, alphas):
    """Rank and scale of the experts alone, and peft's own search; layers 1, 10 and 11 start alike."""
    one = AdapterSpec(name="a", base_model="b", rank=4, alpha=8.0, target_modules=(), **fields)
    layers, leaves = range(12), ("gate_proj", "up_proj", "down_proj")
    single = [f"model.layers.{i}.mlp.experts.{e}.{leaf}" for i in layers for e in range(2) for leaf in leaves]
    kinds = ("self_attn.q_proj", "mlp.down_proj", "mlp.gate_up_proj")
    others = [f"model.layers.{i}.{kind}" for i in layers for kind in kinds]
    names = [f"{module}.lora_{side}.weight" for module in single for side in "AB"]
    got = peft_config(one, ["gate_proj"], names, "b", None)
    given = {key: dict(getattr(one, key)) for key in ("rank_pattern", "alpha_pattern")}
    assert len(got["rank_pattern"]) == ranks + len(one.rank_pattern)
    assert len(got["alpha_pattern"]) == alphas + len(one.alpha_pattern)

    def found(patterns, module, default):
        return patterns.get(peft_other.get_pattern_key(patterns, module), default)

    in_vllm = [peft_helper.PEFTHelper.from_dict(got | patterns) for patterns in ({}, given)]
    for module in [*single, *others]:
        for key, patterns in given.items():
            assert found(got[key], module, None) == found(patterns, module, None), (module, key)
        here, before = (helper.get_rank_and_scaling(module) for helper in in_vllm)
        assert here == (before[0], pytest.approx(before[1])), module
    for i in layers:
        for name, (leaf, parts) in PARTS.items():
            module, fused = (f"model.layers.{i}.mlp.experts.{path}" for path in (f"0.{leaf}", name))
            rank = found(got["rank_pattern"], fused, parts * one.rank)
            assert rank == parts * one.rank_of(module), fused
            alpha = found(got["alpha_pattern"], fused, parts * one.alpha)  # peft's own, where no pattern matches
            assert alpha / (rank**0.5 if one.rslora else rank) == pytest.approx(one.scale_of(module)), fused
