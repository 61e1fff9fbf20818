"""The FSDP engine on one rank in this process; tests/process/distributed compares it with Megatron's on several."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.data.collate import scoring_batch, select
from areal_lora.engine.base import LossSums
from areal_lora.engine.common import adapter_engine
from areal_lora.engine.common.adapter_engine import DeviceMemory
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.shape import read_shape
from areal_lora.families.sites import PassSizes
from areal_lora.obs.trace import Spans
from areal_lora.types import AdapterSpec
from tests.support.clocks import Clock
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


@pytest.mark.parametrize("offload", [False, True])
def test_one_rank_copies_no_weight_in_a_pass_unless_they_are_on_the_host(
    world: None, tmp_path: Path, offload: bool
) -> None:
    """fully_shard over one rank would copy every parameter, forward and backward."""
    engine, copied = engine_of(save("llama", tmp_path), cpu_offload=offload), set[int]()
    module: Any = engine._model.module
    held = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    places = {p.data_ptr() for p in held}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                copied.add(args[1].data_ptr())
            return func(*args, **(kwargs or {}))

    with Copies():
        engine.logprobs(scoring_batch(ROWS, "a"), adapter=None)
    assert len(places & copied) == (len(held) if offload else 0)


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


def test_spans_of_passes_end_with_the_devices_work_and_not_with_its_queueing(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, clock, batch = engine_of(save("llama", tmp_path)), Clock(), scoring_batch(ROWS, "a")
    engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)

    def finish(device: torch.device) -> None:
        clock.now += 5.0

    monkeypatch.setattr(adapter_engine, "finish_stream", finish)
    engine.spans = Spans(clock=clock)
    engine.logprobs(batch, adapter="a")
    engine.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
    assert engine.spans.seconds == {"score": 5.0, "passes": 5.0}


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
    engine = engine_of(
        save("qwen3_moe", tmp_path), recompute=recompute, cpu_offload=True
    )  # one rank has no unit otherwise
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
    read = tokens - 2  # the first token of a start is one
    flops = adapted.training(tokens, pairs, read) + base.forward(tokens, pairs, read)
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


JOINED = {
    "a": SPEC,
    "b": replace(SPEC, name="b", rank=5, alpha=2.0, target_modules=("linear_qkv",), dropout=0.3),
    "c": replace(SPEC, name="c", rank=3, target_modules=TARGETS[:2], dropout=0.6),
}
"""Other ranks, layers and masks; that of ``b`` has no part in the experts, that of ``c`` none in attention."""


def joined_engine(folder: Path, **trainer: Any) -> FsdpEngine:
    """With weights that are not zero, and an adapter ``d`` that no pass names."""
    engine = engine_of(folder, **trainer)
    draw = torch.Generator().manual_seed(6)
    for seed, spec in enumerate((*JOINED.values(), replace(SPEC, name="d"))):
        engine.add_adapter(spec, OptimizerConfig(lr=0.1), seed=seed)
        weights = engine.resident(spec.name).memory.weights
        weights.copy_(torch.randn(len(weights), generator=draw) / 4)
    return engine


def slopes(adapter: str) -> Any:
    """A loss of its own for each adapter, from positions in the sequence."""

    def sums(micro: Any, logprobs: torch.Tensor, _: object) -> LossSums:
        assert set(micro.adapters) == {adapter}
        weights = torch.cat([torch.arange(n) for n in micro.cu_seqlens.diff()]) % (3 + ord(adapter) % 5) + 0.5
        return LossSums(loss=(weights * logprobs).sum(), stats={"tokens": micro.n_tokens})

    return sums


@pytest.mark.parametrize("trainer", [{}, {"max_tokens_per_microbatch": 70, "recompute": "full"}], ids=["one", "many"])
def test_a_joined_pass_gives_each_adapter_what_its_own_pass_gives(
    world: None, tmp_path: Path, trainer: dict[str, Any]
) -> None:
    """In one micro-batch, and in several that are recomputed. One group has sequences of two adapters."""
    folder = save("qwen3_moe", tmp_path)
    batch = scoring_batch(ROWS + ROWS[::-1] + [row[:9] for row in ROWS], "a")
    mixed = replace(batch, adapters=tuple("bbaaaccab"), group_ids=torch.tensor([0] * 5 + [1, 1, 2, 3]))
    alone, joint = (joined_engine(folder, **trainer) for _ in range(2))
    held = joint.resident("d").memory.grads.clone(), joint.resident("d").memory.weights.clone()
    scores, looked = torch.zeros(batch.n_tokens), joint.logprobs_of_each(mixed)
    found = joint.forward_backward_of_each(mixed, {name: slopes(name) for name in JOINED}, scores=scores)
    for name in JOINED:
        own = [i for i, other in enumerate(mixed.adapters) if other == name]
        mine = select(mixed, own)
        values = torch.zeros(mine.n_tokens)
        sums = alone.forward_backward(mine, slopes(name), scores=values)
        rows = torch.cat([torch.arange(*mixed.cu_seqlens[i : i + 2]) for i in own])
        torch.testing.assert_close(scores[rows], values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(looked[rows], alone.logprobs(mine, adapter=name), rtol=1e-5, atol=1e-5)
        got, want = (engine.resident(name).memory.grads for engine in (joint, alone))
        assert float((got - want).norm() / want.norm()) < 1e-5
        assert found[name] == pytest.approx(sums, rel=1e-5)
    assert torch.equal(joint.resident("d").memory.grads, held[0])
    assert torch.equal(joint.resident("d").memory.weights, held[1])
    assert joint.spans.counts == alone.spans.counts, "operations by formula"


@pytest.mark.parametrize("budget", [70, 4096], ids=["many", "one"])
def test_a_training_pass_reports_the_entropy_of_each_token(world: None, tmp_path: Path, budget: int) -> None:
    folder, temperature = save("qwen3_moe", tmp_path), 0.7
    engine, batch = engine_of(folder, max_tokens_per_microbatch=budget), scoring_batch(ROWS, "a")
    engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)  # it is the base until its first step
    scores = torch.full((batch.n_tokens, 2), math.nan)
    summed = lambda _, logprobs, entropy: LossSums(loss=logprobs.sum(), stats={"entropy": entropy.sum()})  # noqa: E731
    sums = engine.forward_backward(batch, summed, temperature=temperature, need_entropy=True, scores=scores)
    model, wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for row in ROWS:
        with torch.no_grad():
            logp = (model(torch.tensor([row])).logits[0, :-1].double() / temperature).log_softmax(-1)
        wanted += [0.0, *(-(logp.exp() * logp).sum(-1)).tolist()]
    assert scores[:, 1].tolist() == pytest.approx(wanted, abs=1e-4)
    assert sums["entropy"] == pytest.approx(sum(wanted), rel=1e-5)
    torch.testing.assert_close(scores[:, 0], engine.logprobs(batch, adapter="a", temperature=temperature))


def test_an_adapter_that_is_not_finite_spoils_no_other(world: None, tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path)
    mixed = replace(scoring_batch(ROWS + ROWS, "a"), adapters=tuple("abccba"))
    losses, scores = {name: slopes(name) for name in JOINED}, torch.zeros(2 * sum(map(len, ROWS)))
    fine, spoiled = (joined_engine(folder) for _ in range(2))
    spoiled.resident("b").memory.weights.fill_(math.inf)
    wanted, found = (engine.forward_backward_of_each(mixed, losses, scores=scores) for engine in (fine, spoiled))
    assert math.isnan(found["b"]["loss"])
    assert spoiled.resident("b").memory.grads.isnan().any()
    for name in "ac":
        assert found[name] == wanted[name]
        assert torch.equal(spoiled.resident(name).memory.grads, fine.resident(name).memory.grads)


def test_who_cannot_be_in_a_joined_pass(world: None, tmp_path: Path) -> None:
    engine = engine_of(save("qwen3_moe", tmp_path))
    for name in "ab":
        engine.add_adapter(replace(SPEC, name=name, value_head=name == "b"), OptimizerConfig(lr=0.1), seed=1)
    mixed, scores = replace(scoring_batch(ROWS, "a"), adapters=tuple("aba")), torch.zeros(sum(map(len, ROWS)))
    with pytest.raises(AdapterError, match="'b' has a value head: a pass has no other"):
        engine.forward_backward_of_each(mixed, {name: slopes(name) for name in "ab"}, scores=scores)
    with pytest.raises(AdapterError, match="each batch trains one"):
        engine.forward_backward(mixed, slopes("a"))


@pytest.mark.parametrize("key", ["tp", "pp", "ep", "etp"])
def test_other_parallel_sizes_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{key}: 2 with trainer.engine = fsdp"):
        FsdpEngine(ModelConfig(path=str(tmp_path)), TrainerConfig(engine="fsdp", world_size=2, **{key: 2}), CPU)


def exact_gradients(folder: Path, wire: dict[str, torch.Tensor], aliases: Any, tokens: torch.Tensor) -> Any:
    """Of the sum of ``tokens`` times the log-probabilities, by wire name: transformers in float64, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    leaves = {name: tensor.double().requires_grad_() for name, tensor in wire.items()}
    held = leaves | {name: leaves[its] for name, its in aliases.items()}
    weights = dict(model.named_parameters())
    for name in (name.removesuffix(".lora_B.weight") for name in held if name.endswith("lora_B.weight")):
        change = held[f"{name}.lora_B.weight"] @ held[f"{name}.lora_A.weight"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + SPEC.scale_of(name) * change
    loss = torch.zeros((), dtype=torch.float64)
    for row, own in zip(ROWS, tokens.double().split([len(row) for row in ROWS]), strict=True):
        logits = functional_call(model, weights, (torch.tensor([row]),)).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        loss = loss + (chosen * own[1:]).sum()
    loss.backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def test_float16_needs_no_loss_scale_and_an_overflow_is_a_skipped_step(world: None, tmp_path: Path) -> None:
    """A loss is a sum over tokens, of weights down to those of `gradient_scale` beside far shorter answers."""
    print("seed 3")
    folder, draw = save("llama", tmp_path), torch.Generator().manual_seed(3)
    engine, batch = engine_of(folder, "float16"), scoring_batch(ROWS, "a")
    engine.add_adapter(SPEC, OptimizerConfig(lr=0.1), seed=1)
    memory = engine.resident("a").memory
    memory.weights.copy_(torch.randn(len(memory.weights), generator=draw) / 8)
    wire, tokens = dict(engine.export_adapter("a")), torch.randn(batch.n_tokens, generator=draw)
    truth = exact_gradients(folder, wire, memory.layout("float32").aliases, tokens)
    size = math.sqrt(sum(float(t.square().sum()) for t in truth.values()))

    def weighted(weight: float, _: Any, logprobs: torch.Tensor, __: object) -> LossSums:
        return LossSums(loss=weight * (tokens * logprobs).sum())

    for weight in (1.0, 2.0**-13):
        engine.forward_backward(batch, partial(weighted, weight))
        found = dict(memory.packer("float32").tensors(memory.grads, {}))
        errors = [float((found[name].double() / weight - t).square().sum()) for name, t in truth.items()]
        print(f"weight {weight}: relative error of the gradient {math.sqrt(sum(errors)) / size}")
        assert math.sqrt(sum(errors)) / size < 0.02
        engine.discard_gradients("a")
    engine.forward_backward(batch, partial(weighted, 2.0**30))
    assert engine.optim_step("a", 1.0, 0.1).values["skipped"] == 1.0
    assert all(torch.equal(tensor, wire[name]) for name, tensor in engine.export_adapter("a"))
