"""Folders that cannot become version 0 of the embedded example's adapter: one line each, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areal_lora.checkpoint.adapter_io import load_peft, save_peft
from areal_lora.checkpoint.merged_folder import fused
from areal_lora.config.facts import Facts, gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import resolve_targets
from areal_lora.config.rules.guardrails import check
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.transfer_plan import wire_layout
from areal_lora.errors import AdapterError
from areal_lora.families.peft_folder import CONFIG_FILE, TENSOR_FILE
from areal_lora.families.shape import ModelShape, read_shape
from areal_lora.families.targets import resolve
from areal_lora.types import AdapterSpec
from tests.support.families.rowless import save_rowless
from tests.support.lazy import Lazy
from tests.support.paths import EXAMPLES

peft = Lazy("peft")

EMBEDDED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
HF = json.loads((EXAMPLES / "tiny_model" / "config.json").read_text())
LAYERS, EXPERTS, RANK = 4, 8, 2
SIZES = {"q": (128, 128), "k": (64, 128), "v": (64, 128), "o": (128, 128)}
Tensors = dict[str, torch.Tensor]


def name(layer: int, leaf: str, side: str, expert: int | None = None) -> str:
    where = "self_attn" if expert is None else f"mlp.experts.{expert}"
    return f"base_model.model.model.layers.{layer}.{where}.{leaf}_proj.lora_{side}.weight"


def stock() -> Tensors:
    """What another tool would write for the tiny model: a lora_A for every projection."""
    g = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        sites = [(leaf, *SIZES[leaf], None) for leaf in SIZES]
        for e in range(EXPERTS):
            sites += [("gate", 64, 128, e), ("up", 64, 128, e), ("down", 128, 64, e)]
        for leaf, out, inner, e in sites:
            tensors[name(layer, leaf, "A", e)] = torch.randn(RANK, inner, generator=g)
            tensors[name(layer, leaf, "B", e)] = torch.randn(out, RANK, generator=g)
    return tensors


def write(folder: Path, tensors: Tensors, **fields: object) -> str:
    folder.mkdir()
    save_file(tensors, folder / TENSOR_FILE)
    modules = sorted({n.split(".lora_")[0].rpartition(".")[2] for n in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": modules, **fields}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return str(folder)


def lines(folder: str, *overrides: str) -> list[str]:
    config = load_config(EMBEDDED, [f"adapters.0.init_from={folder}", *overrides])
    return [str(f.error()) for f in check(config, gather_facts(config, runs_here=False))]


def refusal(folder: str, *overrides: str) -> str | None:
    """What the trainer would say."""
    config = load_config(EMBEDDED, [f"adapters.0.init_from={folder}", *overrides])
    config = resolve_targets(config, Facts(hf_config=HF))
    layout = ParallelLayout.of(config.trainer, layers=LAYERS, experts=EXPERTS)
    model = ShardedModel(shape=ModelShape.from_hf(HF), layout=layout)
    spec = config.adapters[0].spec("m")
    loaded, tensors = load_peft(folder, lambda _: model.shape)
    try:
        fused(tensors, loaded, wire_layout(model, spec, "float32"), lambda t: torch.zeros(t.shape))
    except AdapterError as error:
        return str(error)
    return None


def one_expert_for_all(tensors: Tensors) -> Tensors:
    return {n: tensors[n.replace(f"experts.{e}.", "experts.0.") if (e := expert(n)) else n].clone() for n in tensors}


def expert(n: str) -> int:
    return int(n.split("experts.")[1].split(".")[0]) if "experts." in n else 0


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if not any(p in n for p in parts)}


def other_sizes(tensors: Tensors) -> Tensors:
    return {n: torch.zeros(t.shape[0], 96) if "o_proj.lora_A" in n else t for n, t in tensors.items()}


def another_layer(tensors: Tensors) -> Tensors:
    return tensors | {name(9, "o", side): tensors[name(3, "o", side)].clone() for side in "AB"}


def fused_layers(tensors: Tensors) -> Tensors:
    """As areal_lora writes them."""
    for leaf, first in (("k_", "q_"), ("v_", "q_"), ("up_", "gate_")):
        tensors = {
            n: (tensors[n.replace(leaf, first)] if f"{leaf}proj.lora_A" in n else t).clone() for n, t in tensors.items()
        }
    return tensors


SPELLINGS = (r"(?:.*?(?:self_attn|mlp).*?(?:q|o)_proj)", ["self_attn.q_proj", "model.layers.0.self_attn.o_proj"], None)
STARTS = ["pissa", "pissa_niter_2", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga", "another"]


def fused_experts(tensors: Tensors) -> Tensors:
    """As peft holds them: ranks of the experts side by side."""
    kept = without("experts")(tensors)
    for layer in range(LAYERS):
        for inner, ins, outs in ((".base_layer", 128, 128), ("", 64, 128)):
            where = f"base_model.model.model.layers.{layer}.mlp.experts{inner}.lora_"
            kept |= {
                f"{where}A.weight": torch.rand(EXPERTS * RANK, ins),
                f"{where}B.weight": torch.rand(outs, EXPERTS * RANK),
            }
    return kept


PARAMETERS = ["gate_up_proj", "mlp.experts.down_proj"]
SAME: Callable[[Tensors], Tensors] = dict
RULES: list[tuple[str, Callable[[Tensors], Tensors], tuple[str, ...], str, list[str]]] = [
    ("three lora_A", SAME, ("adapters.0.rank=5",), "adapters.0.rank", ["rank 2", "3 of its lora_A", "at least 6"]),
    ("two lora_A", without("self_attn"), ("adapters.0.rank=3",), "adapters.0.rank", ["2 of its", "at least 4"]),
    ("one lora_A", fused_layers, ("adapters.0.rank=1",), "adapters.0.rank", ["has rank 2 (fix", "at least 2"]),
    (
        "other ranks",
        SAME,
        ("adapters.0.rank=6", "adapters.0.rank_pattern={experts.*(gate|up)_proj: 3}"),
        "adapters.0.rank_pattern",
        ["3 is too small", "experts.0.gate_proj it has rank 2", "2 of its lora_A", "at least 4"],
    ),
    (
        "more targets",
        SAME,
        ("adapters.0.target_modules=[attention]",),
        "adapters.0.target_modules",
        ["layers.*.mlp.experts.*.", "linear_fc"],
    ),
    ("a layer less", without("layers.2.self_attn.o_proj"), (), "adapters.0.init_from", ["layers.2.self_attn.o_proj"]),
    ("an expert less", without("layers.1.mlp.experts.7."), (), "adapters.0.init_from", ["not model.layers.1.mlp"]),
    ("a layer more", another_layer, (), "adapters.0.init_from", ["layers.9", "does not have"]),
    ("other sizes", other_sizes, (), "adapters.0.init_from", ["96 inputs", "128 outputs"]),
    ("shared", SAME, ("adapters.0.expert_layout=shared",), "adapters.0.expert_layout", ["differ", "per_expert"]),
]


@pytest.mark.parametrize(("change", "overrides", "key", "words"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_rule(
    tmp_path: Path, change: Callable[[Tensors], Tensors], overrides: tuple[str, ...], key: str, words: list[str]
) -> None:
    folder = write(tmp_path / "sft", change(stock()))
    (line,) = lines(folder, *overrides)
    assert line.startswith(f"{key}: ")
    assert "\n" not in line
    assert [w for w in words if w not in line] == []
    assert refusal(folder, *overrides) is not None, "the rule refuses what the trainer would load"


@pytest.mark.parametrize(
    ("change", "overrides"),
    [
        (SAME, ()),
        (SAME, ("adapters.0.rank=6", "adapters.0.alpha=5")),
        (without("k_proj", "experts"), ()),
        (fused_layers, ("adapters.0.rank=2",)),
        (one_expert_for_all, ("adapters.0.expert_layout=shared",)),
        (one_expert_for_all, ()),
    ],
)
def test_allowed(tmp_path: Path, change: Callable[[Tensors], Tensors], overrides: tuple[str, ...]) -> None:
    folder = write(tmp_path / "sft", change(stock()))
    assert lines(folder, *overrides) == []
    assert refusal(folder, *overrides) is None, "the trainer refuses what the rule lets pass"


def test_fused_experts_become_single_ones(tmp_path: Path) -> None:
    folder = write(tmp_path / "sft", fused_experts(stock()), target_parameters=PARAMETERS)
    assert lines(folder) == []
    assert refusal(folder) is None
    (line,) = lines(folder, "adapters.0.rank=6", "adapters.0.rank_pattern={experts.*proj: 1}")
    assert "experts.0.down_proj it has rank 2 (fix: set it to at least 2)" in line, "gate and up have one lora_A"
    (line,) = lines(folder, "adapters.0.expert_layout=shared")
    assert "the experts of" in line
    with pytest.raises(AdapterError, match=r"adapts fused experts, which its base does not have; give the folder's"):
        load_peft(folder)


def test_fused_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "sft", fused_experts(stock()), target_parameters=PARAMETERS, rank_pattern={".*_proj": 4})
    (line,) = lines(folder)
    assert "shape [16, 128], which does not fit rank 4 of 8 experts" in line


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_the_spelling_of_targets_means_nothing_beside_the_tensors(tmp_path: Path, spelling: object) -> None:
    folder = write(tmp_path / "sft", without("k_proj", "v_proj", "experts")(stock()), target_modules=spelling)
    assert lines(folder) == []
    assert refusal(folder) is None
    assert load_peft(folder)[0].target_modules == ("linear_proj", "linear_qkv")


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica", "MiCA"])
def test_initialisations_that_leave_the_base_alone(tmp_path: Path, start: object) -> None:
    assert lines(write(tmp_path / "sft", stock(), init_lora_weights=start)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "mica", "MiCA", "pissa_niter_2", "OLoRA"])
def test_stock_peft_leaves_the_base_alone_with_what_is_allowed_only(tmp_path: Path, start: str) -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    before = linear[0].weight.detach().clone()
    made = peft.get_peft_model(linear, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=start))
    same = torch.equal(before, made.base_model.model[0].base_layer.weight)
    assert same == (start not in STARTS)
    assert same == (lines(write(tmp_path / "sft", stock(), init_lora_weights=start)) == [])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("absent", "No such file"),
        ("no config", "No such file"),
        ("no tensors", "No such file"),
        ("torn", "not whole"),
        ("garbage", "not a readable"),
        ("empty", "not a readable"),
        ("ia3", "peft_type"),
        ("dora", "use_dora scales each row by a trained magnitude, which vLLM does not serve"),
        *((start, f"init_lora_weights '{start}' is not known to leave the base") for start in STARTS),
        ("parameters", "target_parameters adapts gate.weight: only projections of experts are taken, no router"),
        ("tokens", "trainable_token_indices changes rows of the embedding"),
        ("prefix", "lacks the prefix"),
        ("partner", "lacks its partner"),
        ("rank", "does not fit rank 4"),
        ("output", "adapts lm_head: a router, or outside of the layers"),
        ("router", "adapts model.layers.0.mlp.gate: a router, or outside of the layers"),
        ("alora", "alora_invocation_tokens"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path: Path, broken: str, words: str) -> None:
    path, tensors, fields = tmp_path / "sft", stock(), {}
    match broken:
        case "ia3":
            fields = {"peft_type": "IA3"}
        case "dora":
            fields = {"use_dora": True}
        case _ if broken in STARTS:
            fields = {"init_lora_weights": broken}
        case "parameters":
            fields = {"target_parameters": ["down_proj", "gate.weight", "gate_up_proj"]}
        case "tokens":
            fields = {"trainable_token_indices": {"embed_tokens": [3]}}
        case "alora":
            fields = {"alora_invocation_tokens": [1, 2]}
        case "rank":
            fields = {"r": 4}
        case "output" | "router":
            module = {"output": "lm_head", "router": "model.layers.0.mlp.gate"}[broken]
            sizes = {"A": (RANK, 128), "B": (8, RANK)}
            tensors |= {f"base_model.model.{module}.lora_{side}.weight": torch.ones(sizes[side]) for side in "AB"}
        case "prefix":
            tensors = {n.removeprefix("base_model.model."): t for n, t in tensors.items()}
        case "partner":
            tensors.pop(name(0, "q", "B"))
    folder = write(path, tensors, **fields)
    data = (path / TENSOR_FILE).read_bytes()
    match broken:
        case "absent":
            folder = str(tmp_path / "nowhere")
        case "no config":
            (path / CONFIG_FILE).unlink()
        case "no tensors":
            (path / TENSOR_FILE).unlink()
        case "torn":
            (path / TENSOR_FILE).write_bytes(data[:-100])
        case "garbage":
            (path / TENSOR_FILE).write_bytes(data[:8] + b"x" * 64)
        case "empty":
            (path / TENSOR_FILE).write_bytes(b"")
    (line,) = lines(folder)
    assert line.startswith("adapters.0.init_from: ")
    assert "\n" not in line
    assert words in line
    with pytest.raises(AdapterError):
        load_peft(folder)


@pytest.mark.parametrize("kind", ["olmo2", "phi3", "starcoder2", "olmoe"])
def test_without_a_row_each_projection_holds_its_own_lora_a(tmp_path: Path, kind: str) -> None:
    """Its own export continues at its rank, a lower rank is refused, and fewer targets are named by their path."""
    model = save_rowless(kind, tmp_path / kind)
    checkpoint = (shape := read_shape(model)).checkpoint
    assert checkpoint is not None
    first = checkpoint.linears[0].path
    spec = AdapterSpec(name="m", base_model="m", rank=8, alpha=16.0, target_modules=resolve(["all-linear"], [], shape))
    layout = ParallelLayout(world=1, tp=1, pp=1, ep=1, etp=1, stage_layers=(shape.layers,), experts=shape.experts)
    wire = wire_layout(ShardedModel(shape=shape, layout=layout), spec, "float32")
    tensors = {t.name: torch.randn(t.shape) for shard in wire.shards for t in shard.tensors}
    save_peft(tmp_path / "own", spec, tensors, str(model), wire.aliases)
    given = (f"model.path={model}", "trainer.engine=fsdp", "adapters.0.target_modules=[all-linear]")

    def found(*overrides: str) -> list[str]:
        return [line for line in lines(str(tmp_path / "own"), *given, *overrides) if line.startswith("adapters.")]

    assert found("adapters.0.rank=8") == []
    same = fused(load_peft(tmp_path / "own")[1], spec, wire, lambda t: torch.zeros(t.shape))
    assert all(torch.equal(same[name], tensor) for name, tensor in tensors.items())
    (line,) = found("adapters.0.rank=7")
    assert "has rank 8 (fix: set it to at least 8" in line
    (line,) = found("adapters.0.rank=8", f"adapters.0.exclude_modules=[{first}]")
    assert f"(fix: name {first} too)" in line


def test_a_relative_folder_is_found_next_to_the_file_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "sft", stock())
    overlay = tmp_path / "warm.yaml"
    overlay.write_text("adapters:\n  - name: gsm8k\n    init_from: sft\n")
    config = load_config([*EMBEDDED, overlay])
    assert config.adapters[0].init_from == str(tmp_path / "sft")
