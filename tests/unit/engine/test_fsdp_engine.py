"""The FSDP engine on one rank in this process; tests/process/distributed compares it with Megatron's on several."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.base import LossSums
from areal_lora.engine.common import adapter_engine
from areal_lora.engine.common.adapter_engine import DeviceMemory
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.errors import ConfigError
from areal_lora.families.flops import PassSizes
from areal_lora.families.shape import read_shape
from areal_lora.types import AdapterSpec
from tests.support.families.tiny_families import save

CPU = torch.device("cpu")
TARGETS = ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")
SPEC = AdapterSpec(name="a", base_model="m", rank=2, alpha=4.0, target_modules=TARGETS)
ROWS = [list(range(3, 40)), list(range(3, 20)) + list(range(50, 60)), [5, 9, 5]]


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine_of(folder: Path, dtype: Any = "float32", **trainer: Any) -> FsdpEngine:
    config = TrainerConfig(engine="fsdp", world_size=1, **trainer)
    return FsdpEngine(ModelConfig(path=str(folder), dtype=dtype), config, CPU)


def one_by_one(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """transformers, a sequence at a time: [T] log-probabilities, 0 for first tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found = []
    with torch.no_grad():
        for row in ROWS:
            ids = torch.tensor([row])
            scores = model(ids).logits[0].float().log_softmax(-1)[:-1]
            found.append(torch.cat([torch.zeros(1), scores.gather(1, ids[0, 1:, None])[:, 0]]))
    return torch.cat(found)


def change(folder: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def test_a_sliding_window_is_that_of_transformers(world: None, tmp_path: Path) -> None:
    folder = change(save("mixtral", tmp_path), sliding_window=6)
    found = engine_of(folder).logprobs(scoring_batch(ROWS, "a"), adapter=None)
    torch.testing.assert_close(found, one_by_one(folder, torch.float32), atol=1e-4, rtol=0)
    plain = one_by_one(change(folder, sliding_window=None), torch.float32)
    assert (found - plain).abs().max() > 0.01, "the window does something"


def test_positions_stay_fp32_beside_a_bf16_base(world: None, tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    engine = engine_of(folder, "bfloat16")
    model: Any = engine._model
    assert {b.dtype for b in model.module.buffers()} == {torch.float32}
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    found = engine.logprobs(scoring_batch(ROWS, "a"), adapter=None)
    assert (found - one_by_one(folder, torch.bfloat16)).abs().mean() < 0.03


def test_offloaded_shards_train_alike(world: None, tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path)
    batch, norms = scoring_batch(ROWS, "a"), []
    for offload in (False, True):
        engine = engine_of(folder, cpu_offload=offload)
        engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)
        engine.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
        norms.append(engine.optim_step("a", 1.0, 0.1).values["grad_norm"])
    assert norms[0] == norms[1] > 0.1


def test_a_bf16_base_computes_with_the_newest_weights_and_adds_gradients_in_fp32(world: None, tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path)
    batch = scoring_batch(ROWS, "a")
    one, other = (engine_of(folder, "bfloat16") for _ in range(2))
    for engine in (one, other):
        engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)
    before = one.logprobs(batch, adapter="a")
    one.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
    once = one.resident("a").memory.grads.clone()
    for bank in one.resident("a").memory.arena.banks:  # lora_A has none while lora_B is zero
        assert once[bank.b :][: math.prod(bank.b_shape)].any(), bank.linear
    one.resident("a").memory.grads.mul_(1000)
    one.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
    found = one.resident("a").memory.grads - 1000 * once  # all of it would be lost in bf16
    torch.testing.assert_close(found, once, rtol=1e-3, atol=0)
    one.optim_step("a", 1.0, 0.1)
    after = one.logprobs(batch, adapter="a")
    assert not torch.equal(before, after)
    other.load_adapter("a", dict(one.export_adapter("a")))
    assert torch.equal(other.logprobs(batch, adapter="a"), after)
    one.freeze_copy("a", "copy")
    assert torch.equal(one.logprobs(batch, adapter="copy"), after)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_layer_is_gathered_while_the_one_before_computes(world: None, tmp_path: Path, recompute: str) -> None:
    """By the names that torch gives to what it does."""
    engine = engine_of(save("qwen3_moe", tmp_path), recompute=recompute)
    engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)
    batch = scoring_batch(ROWS, "a")
    engine.logprobs(batch, adapter="a")  # the first pass makes what later ones use
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name.startswith("FSDP::")]
    order = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "lm_head"]
    for now, after in pairwise(order):
        assert next_of(names, f"FSDP::pre_forward ({now})") == f"FSDP::forward_prefetch for {after}"
    for before, now in pairwise(order[1:]):
        assert next_of(names, f"FSDP::pre_backward ({now})") == f"FSDP::backward_prefetch for {before}"
    assert "FSDP::backward_prefetch for model.embed_tokens" not in names, "nothing of theirs is differentiated"


def next_of(names: list[str], name: str) -> str:
    assert names.count(name) == 1
    return names[names.index(name) + 1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_passes_are_timed_and_their_operations_counted(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    """Rows 0 and 1 have a start of 17 tokens in common, row 2 none with them."""
    folder = save("qwen3_moe", tmp_path)
    spec = AdapterSpec(name="a", base_model="m", rank=2, alpha=4.0, target_modules=("linear_proj",))
    engine = engine_of(folder, recompute=recompute)
    engine.add_adapter(spec, OptimizerConfig(lr=0.1), seed=1)
    batch = replace(scoring_batch(ROWS, "a"), group_ids=torch.tensor([0, 0, 1]))
    engine.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
    engine.optim_step("a", 1.0, 0.1)
    engine.logprobs(batch, adapter=None)
    shape = read_shape(folder)
    tokens = 37 + 27 + 3 - 17
    pairs = sum(range(38)) + sum(range(28)) - sum(range(18)) + sum(range(4))
    adapted, base = PassSizes.of(shape, spec), PassSizes.of(shape, None)
    flops = adapted.training(tokens, pairs) + base.forward(tokens, pairs)
    again = {"selective": adapted.recompute(tokens, 0), "full": adapted.recompute(tokens, pairs)}
    assert dict(engine.spans.counts) == {"flops": flops} | (
        {"recomputed_flops": again[recompute]} if recompute in again else {}
    )
    assert engine.spans.seconds.keys() == {"passes", "optimizer", "score"}
    assert engine.memory() is None
    monkeypatch.setattr(adapter_engine, "peak_bytes", lambda _: 1000)
    size = 2 * shape.layers * (shape.heads * shape.head_dim + shape.hidden)
    engine.freeze_copy("a", "frozen")
    assert engine.memory() == DeviceMemory(peak=1000, base=0, adapters=size * (16 + 4))


@pytest.mark.parametrize("key", ["tp", "pp", "ep", "etp"])
def test_other_parallel_sizes_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{key}: 2 with trainer.engine = fsdp"):
        FsdpEngine(ModelConfig(path=str(tmp_path)), TrainerConfig(engine="fsdp", world_size=2, **{key: 2}), CPU)
