"""Families without a row: the FSDP engine against stock PEFT on stock transformers, and a real vLLM server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lora.checkpoint.adapter_io import save_peft
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.support import PACKED, SERVED_AS, UNSERVED, engines
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.base import LossSums, MicroBatch
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.families.shape import read_hf_config, read_shape
from areal_lora.families.targets import resolve
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import make_layout
from tests.support.engine.vllm_ext.serving import PROMPT, RANK, make_tokenizer, running_server
from tests.support.families.rowless import ROWLESS, save_rowless
from tests.support.lazy import Lazy
from tests.support.sizes import sample

peft = Lazy("peft")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ALPHA = 12.0
ROWS = [[3, 5, 7, 9, 11, 13, 2, 40, 41, 42], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3]]
CPU = torch.device("cpu")
SERVED = sorted(PACKED - UNSERVED)
# fused projections, no gate, experts, scaled logits, a window of its own meaning
UNLIKE = {"phi3", "starcoder2", "olmoe", "granite", "cohere2"}
PEFT_READS_A_PART = ["ernie4_5_moe", "exaone_moe", "glm4_moe"]
PREFIX = "base_model.model."


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def targets_of(folder: Path, named: Sequence[str] = ("all-linear",)) -> tuple[str, ...]:
    return resolve(list(named), [], read_shape(folder))


def make_engine(
    folder: Path, target_modules: Sequence[str] = ("all-linear",), longest: int = 0, **settings: Any
) -> FsdpEngine:
    """With a random adapter, on every linear layer unless others are named."""
    trainer = TrainerConfig(engine="fsdp", world_size=1, max_tokens_per_microbatch=256)
    engine = FsdpEngine(ModelConfig(path=str(folder), dtype="float32"), trainer, CPU, longest)
    found = targets_of(folder, target_modules)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=ALPHA, target_modules=found, **settings)
    engine.add_adapter(spec, OptimizerConfig(lr=0.1), seed=1)
    generator = torch.Generator().manual_seed(5)
    shapes = {t.name: t.shape for shard in engine.adapter_layout("a").shards for t in shard.tensors}
    engine.load_adapter("a", {n: torch.randn(shape, generator=generator) * 0.1 for n, shape in shapes.items()})
    return engine


def export(engine: FsdpEngine, folder: Path) -> dict[str, Tensor]:
    """The wire tensors, which are also written as a PEFT folder."""
    spec, wire = engine.resident("a").spec, dict(engine.export_adapter("a"))
    save_peft(folder, spec, wire, "m", engine.adapter_layout("a").aliases)
    return wire


def stock(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    if config.model_type == "cohere2":
        config.sliding_window += 1  # as vLLM reads it
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def scores(model: Any, rows: list[list[int]]) -> Tensor:
    """Log-probabilities of all rows in a row, 0 for the first token of each. [T]"""
    found = []
    for row in rows:
        logp = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)[:-1]
        found += [torch.zeros(1), logp.gather(1, torch.tensor(row)[1:, None])[:, 0]]
    return torch.cat(found)


def weighted(_: MicroBatch, logprobs: Tensor, __: Tensor | None) -> LossSums:
    return LossSums(loss=-logprobs.square().sum())


@pytest.mark.parametrize(
    "kind", sample([kind for kind in ROWLESS if kind not in PEFT_READS_A_PART], 6, lambda kind: {kind} & UNLIKE)
)
def test_scores_and_exports_like_stock_peft(kind: str, tmp_path: Path) -> None:
    engine, base = make_engine(save_rowless(kind, tmp_path / "model")), stock(tmp_path / "model")
    batch = scoring_batch(ROWS, "a")
    export(engine, tmp_path / "adapter")
    with torch.no_grad():
        plain = scores(base, ROWS)
        adapted = scores(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), ROWS)
    assert (adapted - plain).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(engine.logprobs(batch, adapter=None), plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(engine.logprobs(batch, adapter="a"), adapted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", sample(PEFT_READS_A_PART, 1))
def test_scores_like_merged_weights(kind: str, tmp_path: Path) -> None:
    """Where stock PEFT leaves out dense layers and shared experts beside the routed ones."""
    compare_with_merged_weights(save_rowless(kind, tmp_path / "model"), tmp_path / "merged")


@pytest.mark.parametrize("layout", ["none", "shared", "shared_outer"])
def test_experts_that_share(layout: str, tmp_path: Path) -> None:
    folder = save_rowless("olmoe", tmp_path / "model")
    if layout == "none":
        adapted = compare_with_merged_weights(folder, tmp_path / "merged", target_modules=("attention",))
        assert not any(".experts." in name for name in adapted)
    else:
        compare_with_merged_weights(folder, tmp_path / "merged", expert_layout=ExpertLayout(layout))


def compare_with_merged_weights(folder: Path, copy: Path, **settings: Any) -> list[str]:
    """Scores of the engine against transformers with the adapter in its weights; the modules adapted."""
    engine, base, batch = make_engine(folder, **settings), stock(folder), scoring_batch(ROWS, "a")
    wire, aliases = dict(engine.export_adapter("a")), engine.adapter_layout("a").aliases
    weights, adapted_modules = load_file(folder / "model.safetensors"), []
    for name in (*wire, *aliases):
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            a, b = (wire[aliases.get(n, n)] for n in (name, f"{module}.lora_B.weight"))
            adapted_modules.append(module)
            weights[f"{module}.weight"] += ALPHA / RANK * b @ a
    merged = shutil.copytree(folder, copy)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        plain, adapted = scores(base, ROWS), scores(stock(merged), ROWS)
    assert (adapted - plain).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(engine.logprobs(batch, adapter=None), plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(engine.logprobs(batch, adapter="a"), adapted, atol=1e-4, rtol=0)
    return adapted_modules


@pytest.mark.parametrize("kind", ["phi3", "starcoder2"])
def test_loss_and_gradients_equal_those_of_stock_peft(kind: str, tmp_path: Path) -> None:
    """PEFT's own all-linear: the same modules under the same names."""
    engine = make_engine(save_rowless(kind, tmp_path / "model"))
    wire = export(engine, tmp_path / "adapter")
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(stock(tmp_path / "model"), config)
    own = {name.replace(".default", "").removeprefix(PREFIX): p for name, p in model.named_parameters()}
    own = {name: p for name, p in own.items() if "lora_" in name}
    assert own.keys() == wire.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(wire[name])
    expected = -scores(model, ROWS).square().sum()
    expected.backward()
    found = engine.forward_backward(scoring_batch(ROWS, "a"), weighted)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-4)
    memory = engine.resident("a").memory
    memory.weights.copy_(memory.grads)
    gradients = dict(engine.export_adapter("a"))
    for name, parameter in own.items():
        assert parameter.grad is not None
        assert (gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


@pytest.mark.parametrize("kind", sample(SERVED, 1))
def test_a_real_server_scores_a_published_adapter_alike(kind: str, tmp_path: Path) -> None:
    folder = save_rowless(kind, tmp_path / "model")
    make_tokenizer(folder)
    engine = make_engine(folder)
    differing = {"target_modules": list(targets_of(folder)), "alpha": ALPHA}
    with running_server(tmp_path / "run", folder, differing=differing) as server:
        wire = dict(engine.export_adapter("a"))
        owned, aliases = {0: [(n, tuple(t.shape)) for n, t in wire.items()]}, engine.adapter_layout("a").aliases
        layout = make_layout(server.spec, "float32", owned, aliases)
        base, adapted = (server.score(ref) for ref in (None, server.publish(wire, layout=layout)))
    batch = scoring_batch([PROMPT], "a")
    for found, name in ((base, None), (adapted, "a")):
        torch.testing.assert_close(torch.tensor(found), engine.logprobs(batch, adapter=name), atol=1e-4, rtol=0)
    assert max(abs(a - b) for a, b in zip(adapted, base, strict=True)) > 0.1, "the adapter does something"


@pytest.mark.parametrize(
    ("kind", "key", "assumed"), sample([(kind, *item) for kind in SERVED_AS for item in SERVED_AS[kind].items()], 1)
)
def test_a_server_ignores_a_key_that_is_refused(kind: str, key: str, assumed: object, tmp_path: Path) -> None:
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind.endswith("moe") else {}
    folder = save_rowless(kind, tmp_path / "model", **few, **{key: 0.5 if assumed is None else not assumed})
    make_tokenizer(folder)
    assert not engines(read_hf_config(folder))
    with running_server(tmp_path / "run", folder) as server, torch.no_grad():
        apart = torch.tensor(server.score(None)) - scores(stock(folder), [PROMPT])
    assert apart.abs().max() > 0.02


def test_above_the_original_context_long_rope_is_that_of_a_server(tmp_path: Path) -> None:
    """transformers takes the long factors for a whole sequence above it: the oracle also of that one's first tokens."""
    rope = {"type": "longrope", "short_factor": [1 + i / 10 for i in range(16)], "long_factor": list(range(2, 18))}
    keys = {"rope_scaling": rope, "original_max_position_embeddings": 32, "max_position_embeddings": 1024}
    folder, few = save_rowless("phi3", tmp_path / "model", **keys), PROMPT[:20]
    make_tokenizer(folder)
    with torch.no_grad():
        long, short = scores(stock(folder), [PROMPT]), scores(stock(folder), [few])
    assert (long[:20] - short).abs().max() > 0.1, "the factors do something"
    with running_server(tmp_path / "run", folder, differing={"target_modules": list(targets_of(folder))}) as server:
        longest = server.config.rollout.max_model_len
        found = [server.score(None, row) for row in (PROMPT, few)]
    engine = make_engine(folder, longest=longest)
    for row, served in zip((PROMPT, few), found, strict=True):
        torch.testing.assert_close(torch.tensor(served), long[: len(row)], atol=1e-4, rtol=0)
        own = engine.logprobs(scoring_batch([row], "a"), adapter=None)
        torch.testing.assert_close(own, long[: len(row)], atol=1e-4, rtol=0)
    own = make_engine(folder, longest=32).logprobs(scoring_batch([few], "a"), adapter=None)
    torch.testing.assert_close(own, short, atol=1e-4, rtol=0)
