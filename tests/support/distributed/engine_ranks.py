"""What each rank of a layout test does: drive the real engine, return numpy and plain numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_lora.algorithms.losses import token_weights, value_loss
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.sections.run import Recompute
from areal_lora.data.collate import OF_HELD, split_minibatches
from areal_lora.data.packed_groups import shared_starts
from areal_lora.engine import base
from areal_lora.engine.base import LossSums
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.arena import Range
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.errors import ArealLoraError
from areal_lora.trainer.step_metrics import explained_variance
from areal_lora.types import AdapterSpec, ExpertLayout, TrainBatch
from tests.support.checkpoint.helpers import tensors_of
from tests.support.distributed.oracle import (
    ALPHA,
    ALPHA_PATTERN,
    EXPERTS,
    LAYERS,
    OUTER,
    PATTERNS,
    RANK,
    RANK_PATTERN,
    SHARED,
    VOCAB,
    random_head,
)
from tests.support.sizes import size

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EPS = 1.0
"""Adam's eps in `exercise_all`. The first step is then g / (|g| + 1): it tells sizes of gradients, not only signs."""
OPTIMIZER = OptimizerConfig(lr=0.05, max_grad_norm=1e9)
CLIPPED = 0.5
DENOMINATOR = 50.0
TEMPERATURE = 0.7
VALUE_CLIP = 0.4
STEPS = size(suite=2, nightly=20)
CHUNKS = 3
MINIBATCHES = 3


@dataclass(frozen=True)
class Case:
    """One layout. ``budget`` is small, so that there are several micro-batches and padding in each."""

    name: str
    world: int
    kind: str = "moe"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[int, ...] | None = None
    budget: int = 150
    recompute: Recompute = "none"
    dropout: bool = False  # also train an adapter with dropout
    engine: Literal["megatron", "fsdp"] = "megatron"
    fsdp_shard: int | None = None

    @property
    def model(self) -> str:
        return self.kind.partition("+")[0]

    @property
    def replays(self) -> bool:
        """Whether it also passes a batch with routes."""
        return self.kind == "moe" and (self.dropout or self.pp > 1)

    @property
    def expert_layout(self) -> ExpertLayout:
        kinds = {SHARED: ExpertLayout.SHARED, OUTER: ExpertLayout.SHARED_OUTER}
        return next((layout for end, layout in kinds.items() if self.kind.endswith(end)), ExpertLayout.PER_EXPERT)

    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            engine=self.engine,
            world_size=self.world,
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            pp_layers=list(self.stages) if self.stages else None,
            max_tokens_per_microbatch=self.budget,
            recompute=self.recompute,
            fsdp_shard=self.fsdp_shard,
        )


def make_rows(seed: int = 5) -> list[list[int]]:
    """13 sequences of 2 to 60 tokens: a number no data-parallel size divides. Some have a common start (`groups_of`).

    Two of them are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [2, *torch.randint(3, 61, (12,), generator=generator).tolist()]
    rows = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]
    for first, others, shared in ((1, (2, 3, 4), 20), (6, (7, 8), 2), (9, (10,), 60)):
        for i in others:
            n = min(shared, len(rows[first]), len(rows[i]) - 1)
            rows[i] = rows[first][:n] + rows[i][n:]
    rows[11] = list(rows[10])
    return rows


def groups_of(rows: list[list[int]]) -> list[int]:
    """A number for each row; rows in a row that begin with the same two tokens have the same one."""
    groups: list[int] = []
    for i, row in enumerate(rows):
        groups.append(groups[-1] if i and row[:2] == rows[i - 1][:2] else i)
    return groups


def make_batch(rows: list[list[int]]) -> TrainBatch:
    """``advantages`` are random token weights; the mask leaves out two thirds of each sequence's start."""
    tokens = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    mask = torch.cat([torch.arange(len(r)) >= max(1, 2 * len(r) // 3) for r in rows])
    # A seed whose weights do not cancel: losses are compared relative to their size.
    weights = torch.randn(tokens.numel(), generator=torch.Generator().manual_seed(18))
    return TrainBatch(
        token_ids=tokens,
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens.numel()),
        versions=torch.zeros(tokens.numel(), dtype=torch.int64),
        shared_starts=torch.tensor(shared_starts([np.array(row) for row in rows])),
        rewards=torch.zeros(len(rows)),
        group_ids=torch.tensor(groups_of(rows)),
        sample_ids=torch.arange(len(rows)),
        given=torch.zeros(len(rows), dtype=torch.bool),
        adapters=("a",) * len(rows),
        advantages=weights,
    )


def make_routes(rows: list[list[int]], layers: int, known: float = 0.7) -> Tensor:
    """[T, layers, 2]: random experts by its text so far, as equal starts have equal ones; -1 but of ``known``."""
    found = []
    for text in (row[:end] for row in rows for end in range(1, len(row) + 1)):
        draw = np.random.default_rng(text)
        own = [draw.permutation(EXPERTS)[:2] for _ in range(layers)]
        found.append(own if draw.random() < known else [[-1, -1]] * layers)
    return torch.tensor(np.array(found, dtype=np.int16))


def make_kept(rows: list[list[int]]) -> Tensor:
    """[T, 9]: of each token itself and up to 8 random ids by its text so far, then -1; of some tokens -1 alone."""
    found = np.full((sum(map(len, rows)), 9), -1, np.int32)
    for own, text in zip(found, (row[:end] for row in rows for end in range(1, len(row) + 1)), strict=True):
        draw = np.random.default_rng(text)
        others = [i for i in draw.permutation(VOCAB)[: draw.integers(9)] if i != text[-1]]
        if draw.random() < 0.7:
            own[: 1 + len(others)] = [text[-1], *others]
    return torch.from_numpy(found)


def own_part(engine: AdapterEngine, batch: TrainBatch, minibatches: int = 1) -> TrainBatch:
    """The batch with the token columns of this rank's part alone."""
    parts, of_ranks = engine.parts(batch, minibatches)
    held = torch.from_numpy(parts[of_ranks[engine.rank]])
    tokens = held.repeat_interleave(batch.cu_seqlens.diff())
    columns = {name: getattr(batch, name) for name in OF_HELD}
    return replace(batch, held=held, **{name: x[tokens] for name, x in columns.items() if x is not None})


def every_token(batch: TrainBatch) -> TrainBatch:
    return replace(batch, loss_mask=torch.ones_like(batch.loss_mask))


def scores(
    engine: AdapterEngine, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0, masked: bool = False
) -> np.ndarray:
    """Log-probabilities of the whole batch: a rank has those of its part, and 0, above all others, for the rest.

    Of all tokens, or those on the mask.
    """
    batch = batch if masked else every_token(batch)
    own = engine.logprobs(batch, adapter=adapter, temperature=temperature)
    if batch.held is not None:
        assert not own[~batch.held.repeat_interleave(batch.cu_seqlens.diff())].any()
    dist.all_reduce(own, dist.ReduceOp.MIN)
    return own.cpu().numpy()


def loss_fn(micro: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
    assert entropy is not None
    assert micro.advantages is not None
    assert logprobs.shape == entropy.shape == micro.token_ids.shape
    loss = (micro.loss_mask * (micro.advantages * logprobs + 0.1 * entropy)).sum()
    return LossSums(loss=loss, stats={"tokens": micro.loss_mask.sum()})


def nan_loss_fn(micro: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
    """Not finite on the one micro-batch that holds sequence 0, so on one data-parallel rank only."""
    return LossSums(loss=logprobs.sum() * (float("nan") if bool((micro.group_ids == 0).any()) else 1.0))


def numpy_of(tensors: dict[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    return {n: t.detach().cpu().numpy() for n, t in dict(tensors).items()}


def is_source(engine: AdapterEngine) -> bool:
    """Whether this rank owns adapter tensors to publish."""
    return any(shard.source == engine.rank for shard in engine.adapter_layout("a").shards)


def frozen_weights(engine: AdapterEngine) -> dict[str, Tensor]:
    """Copies of this rank's part of the base."""
    model: Any = engine._model
    frozen = {n: p.detach() for n, p in model.module.named_parameters() if not p.requires_grad}
    return {n: (p.to_local() if isinstance(p, DTensor) else p).clone() for n, p in frozen.items()}


def build(
    path: str, case: Case, optimizer: OptimizerConfig = OPTIMIZER, targets: tuple[str, ...] = TARGETS
) -> AdapterEngine:
    kind = {"megatron": MegatronEngine, "fsdp": FsdpEngine}[case.engine]
    engine = kind(
        ModelConfig(path=path, dtype="float32"), case.trainer(), torch.device(os.environ.get("EMULATED", "cpu"))
    )
    engine.add_adapter(make_spec("a", path, case, targets), optimizer, seed=1)
    return engine


def make_spec(name: str, path: str, case: Case, targets: tuple[str, ...] = TARGETS) -> AdapterSpec:
    patterns = case.kind.endswith(PATTERNS)
    return AdapterSpec(
        name=name,
        base_model=path,
        # Of no module: all have ranks of their own.
        rank=3 if patterns else RANK,
        alpha=ALPHA,
        target_modules=targets,
        expert_layout=case.expert_layout,
        rslora=patterns,
        rank_pattern=RANK_PATTERN if patterns else (),
        alpha_pattern=ALPHA_PATTERN if patterns else (),
    )


def export_gradients(engine: AdapterEngine, name: str = "a") -> list[tuple[str, Tensor]]:
    """The summed gradients under their wire names: reduced like a step does, exported in the weights' place."""
    memory, optimizer = engine.resident(name).memory, engine.resident(name).trained()
    optimizer._reduce(DENOMINATOR)
    optimizer._gather(memory.grads)
    weights = memory.weights.clone()
    memory.weights.copy_(memory.grads)
    exported = list(engine.export_adapter(name))
    memory.weights.copy_(weights)
    memory.grads.zero_()
    return exported


def exercise(path: str, case: Case, wire: dict[str, Any], neighbours: bool) -> dict[str, Any]:
    """Every claim about one layout, as data for the parent to judge; with ``neighbours`` those of other adapters."""
    adapter = {n: torch.from_numpy(v) for n, v in wire.items()}
    engine = build(path, case)
    batch, seen = own_part(engine, make_batch(make_rows())), {}
    layout = engine.adapter_layout("a")
    seen["plan"] = {shard.source: [(t.name, t.shape) for t in shard.tensors] for shard in layout.shards}
    seen["aliases"], seen["digest"] = layout.aliases, layout.digest
    assert is_source(engine) == (engine.rank in seen["plan"])
    seen["initial"] = numpy_of(engine.export_adapter("a"))
    seen["base"] = scores(engine, batch, adapter=None)
    seen["zero_b"] = scores(engine, batch, adapter="a")
    engine.load_adapter("a", adapter)
    seen["loaded"] = numpy_of(engine.export_adapter("a"))
    frozen = frozen_weights(engine)
    seen["lora"] = scores(engine, batch, adapter="a")
    seen["on_mask"] = scores(engine, batch, adapter="a", masked=True)
    seen["lora_cool"] = scores(engine, batch, adapter="a", temperature=TEMPERATURE)
    # One sequence: with data parallelism all other ranks run padding only.
    seen["single"] = scores(engine, make_batch(make_rows()[3:4]), adapter="a")

    engine.forward_backward(batch, nan_loss_fn)
    seen["skipped"] = engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr).values
    seen["after_skip"] = numpy_of(engine.export_adapter("a"))

    engine.forward_backward(batch, loss_fn, need_entropy=True)
    seen["grads"] = numpy_of(export_gradients(engine))
    seen["stats"] = engine.forward_backward(batch, loss_fn, need_entropy=True)
    seen["step"] = engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr).values
    seen["stepped"] = numpy_of(engine.export_adapter("a"))
    memory = engine.resident("a").memory
    seen["shared"] = memory.weights[slice(*memory.arena.extent(Range.EXPERT_WHOLE))].cpu().numpy().tobytes()
    seen["base_after"] = scores(engine, batch, adapter=None)
    seen["frozen_moved"] = [n for n, p in frozen_weights(engine).items() if not torch.equal(p, frozen[n])]
    if neighbours:
        seen["beside"] = beside(engine, path, case, adapter)
        seen["critic"] = critic(engine, path, case, adapter)
    if case.dropout:
        seen["dropped"] = dropped(engine, path, case, adapter)
    if case.replays:
        seen["replayed"], seen["recorded"] = replayed(engine, adapter), recorded(engine, adapter)
    return seen


def replayed(engine: AdapterEngine, adapter: dict[str, Tensor]) -> dict[str, Any]:
    """Scores and gradients of a batch with routes and kept ids."""
    rows = make_rows()
    batch = own_part(engine, replace(make_batch(rows), routes=make_routes(rows, LAYERS), kept=make_kept(rows)))
    engine.load_adapter("a", adapter)
    seen: dict[str, Any] = {"base": scores(engine, batch, adapter=None), "lora": scores(engine, batch, adapter="a")}
    engine.forward_backward(batch, loss_fn, need_entropy=True)
    return seen | {"grads": numpy_of(export_gradients(engine))}


def flipped(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with which routers choose other experts."""
    return {name: -2.0 * value if name.endswith("lora_B.weight") else value for name, value in adapter.items()}


def recorded(engine: AdapterEngine, adapter: dict[str, Tensor]) -> dict[str, Any]:
    """Scores and routes of a pass over a batch with kept ids, and along them gradients of other weights over its
    minibatches, which other micro-batches make up. Rank 0 has the columns of all sequences, as in a trainer."""
    rows = make_rows()
    batch = replace(make_batch(rows), kept=make_kept(rows))
    parts, of_ranks = engine.parts(batch, MINIBATCHES)
    needed = torch.from_numpy(parts[of_ranks[engine.rank]])
    batch = own_part(engine, batch, MINIBATCHES) if engine.rank else batch
    engine.load_adapter("a", adapter)
    found, routes = engine.recorded(batch, MINIBATCHES, adapter="a", temperature=TEMPERATURE)
    assert torch.equal(found, engine.logprobs(batch, adapter="a", temperature=TEMPERATURE)), "the same pass"
    engine.load_adapter("a", flipped(adapter))
    for minibatch in split_minibatches(replace(batch, routes=routes), MINIBATCHES):
        engine.forward_backward(minibatch, loss_fn, need_entropy=True)
    tokens = needed.repeat_interleave(batch.cu_seqlens.diff())
    own = routes if engine.rank else routes[tokens]
    return {"tokens": tokens.cpu().numpy(), "routes": own.cpu().numpy(), "grads": numpy_of(export_gradients(engine))}


def dropped(engine: AdapterEngine, path: str, case: Case, adapter: dict[str, Tensor]) -> dict[str, Any]:
    """Gradients of an adapter with dropout, of two passes before one step and of one after it."""
    engine.add_adapter(replace(make_spec("d", path, case), dropout=0.3), OPTIMIZER, seed=4)
    engine.load_adapter("d", adapter)
    batch = make_batch(make_rows())
    mine, seen = replace(batch, adapters=("d",) * len(batch.adapters)), {}
    for step in ("first", "again", "next"):
        seen[f"{step}_stats"] = engine.forward_backward(mine, loss_fn, need_entropy=True)
        seen[step] = numpy_of(export_gradients(engine, "d"))
        if step == "again":
            engine.resident("d").trained().step_count = 1
    seen["scores"] = scores(engine, batch, adapter="d")
    return seen


def beside(engine: AdapterEngine, path: str, case: Case, adapter: dict[str, Tensor]) -> dict[str, Any]:
    """The step of ``a`` by a twin, between the passes of another adapter with other rank, targets and layout."""
    flipped = ExpertLayout.PER_EXPERT if case.expert_layout is ExpertLayout.SHARED else ExpertLayout.SHARED
    other = replace(
        make_spec("other", path, case, ("linear_proj", "linear_fc2")),
        rank=2 * RANK,
        rank_pattern=(),
        alpha=3.0,
        expert_layout=flipped if case.model == "moe" else case.expert_layout,
    )
    engine.add_adapter(make_spec("twin", path, case), OPTIMIZER, seed=1)
    others_optimizer = OPTIMIZER.model_copy(update={"max_grad_norm": 0.3})
    engine.add_adapter(other, others_optimizer, seed=2)
    engine.load_adapter("twin", adapter)
    batch, seen = make_batch(make_rows()), {}
    mine, others = (replace(batch, adapters=(name,) * len(batch.adapters)) for name in ("twin", "other"))
    seen["a"] = numpy_of(engine.export_adapter("a"))
    engine.forward_backward(mine, loss_fn, need_entropy=True)
    for _ in range(2):  # its first step moves lora_B only
        engine.forward_backward(others, loss_fn, need_entropy=True)
        engine.optim_step("other", DENOMINATOR, OPTIMIZER.lr)
    seen["other"] = numpy_of(engine.export_adapter("other"))
    seen["other_scores"] = scores(engine, batch, adapter="other")
    seen["step"] = engine.optim_step("twin", DENOMINATOR, OPTIMIZER.lr).values
    seen["stepped"] = numpy_of(engine.export_adapter("twin"))
    seen["other_after"] = numpy_of(engine.export_adapter("other"))
    seen["base"] = scores(engine, batch, adapter=None)
    engine.remove_adapter("other")
    seen["twin_scores"] = scores(engine, batch, adapter="twin")
    seen["a_scores"] = scores(engine, batch, adapter="a")
    seen["a_after"] = numpy_of(engine.export_adapter("a"))
    try:
        engine.logprobs(batch, adapter="other")
        seen["removed"] = None
    except ArealLoraError as error:
        seen["removed"] = str(error)
    engine.remove_adapter("twin")
    seen["many_alone"] = many_steps(engine, make_spec("twin", path, case), adapter)
    engine.add_adapter(other, others_optimizer, seed=2)
    seen["many_beside"] = many_steps(engine, make_spec("twin", path, case), adapter, "other")
    engine.remove_adapter("other")
    return seen


def many_steps(
    engine: AdapterEngine, spec: AdapterSpec, adapter: dict[str, Tensor], other: str | None = None
) -> dict[str, Any]:
    """``STEPS`` steps of a new adapter that is removed afterwards: bytes of its gradients, weights and moments.

    ``other`` makes passes and steps before, between and after those of each step. ``chunked`` are the gradients of
    the last batch as ``CHUNKS`` passes, ``whole`` as one.
    """
    engine.add_adapter(spec, OPTIMIZER, seed=1)
    engine.load_adapter(spec.name, adapter)

    def passes(name: str, seed: int, chunks: int = 1) -> None:
        batch = make_batch(make_rows(seed)[:5])
        for part in split_minibatches(replace(batch, adapters=(name,) * len(batch.adapters)), chunks):
            engine.forward_backward(part, loss_fn, need_entropy=True)

    gradients = []
    for step in range(STEPS):
        if other:
            passes(other, 60 + step)
        passes(spec.name, 30 + step)
        gradients.append(engine.resident(spec.name).memory.grads.cpu().numpy().tobytes())
        if other:
            engine.optim_step(other, DENOMINATOR, OPTIMIZER.lr)
            passes(other, 90 + step)
        engine.optim_step(spec.name, DENOMINATOR, OPTIMIZER.lr)
    state = engine.export_state(spec.name)
    seen: dict[str, Any] = {
        "gradients": gradients,
        "clock": state.step,
        "state": {part: flat.tobytes() for part, flat in state.parts.items()},
    }
    if not other:
        for name, chunks in (("whole", 1), ("chunked", CHUNKS)):
            passes(spec.name, 30, chunks)
            seen[name] = numpy_of(export_gradients(engine, spec.name))
    engine.remove_adapter(spec.name)
    return seen


def value_loss_fn(micro: TrainBatch, values: Tensor, entropy: Tensor | None) -> LossSums:
    """Half the squared error against ``returns``, clipped around ``values``, of the whole mask."""
    assert micro.values is not None
    assert micro.returns is not None
    weights = token_weights(micro.loss_mask, micro.cu_seqlens, "token")
    sums = value_loss(VALUE_CLIP, values=values, before=micro.values, returns=micro.returns, weights=weights)
    return LossSums(loss=sums.loss, stats=sums.stats)


def value_targets(rows: list[list[int]]) -> TrainBatch:
    """The batch with random ``values`` and ``returns`` of size 1."""
    batch = make_batch(rows)
    draw = torch.Generator().manual_seed(29)
    values, returns = torch.randn(2, batch.n_tokens, generator=draw)
    return replace(batch, values=values, returns=returns)


def critic(engine: AdapterEngine, path: str, case: Case, adapter: dict[str, Tensor]) -> dict[str, Any]:
    """A value head on an adapter of its own beside ``a``: values, gradients, and who moves at whose step."""
    spec = replace(make_spec("critic", path, case), value_head=True)
    engine.add_adapter(spec, OPTIMIZER, seed=3)
    batch, seen = value_targets(make_rows()), {}
    mine = replace(batch, adapters=("critic",) * len(batch.adapters))
    seen["at_first"] = engine.values(batch, adapter="critic").cpu().numpy()
    engine.load_adapter("critic", {**adapter, **random_head()})
    seen["loaded"] = numpy_of(engine.export_adapter("critic"))
    seen["values"] = engine.values(every_token(batch), adapter="critic").cpu().numpy()
    seen["a"], seen["a_scores"] = numpy_of(engine.export_adapter("a")), scores(engine, batch, adapter="a")
    seen["stats"] = engine.forward_backward(mine, value_loss_fn)
    seen["grads"] = numpy_of(export_gradients(engine, "critic"))
    engine.forward_backward(mine, value_loss_fn)
    seen["step"] = engine.optim_step("critic", DENOMINATOR, OPTIMIZER.lr).values
    seen["stepped"] = numpy_of(engine.export_adapter("critic"))
    seen["a_after"] = numpy_of(engine.export_adapter("a"))
    seen["a_scores_after"] = scores(engine, batch, adapter="a")
    engine.freeze_copy("a", "before")
    engine.forward_backward(batch, loss_fn, need_entropy=True)
    engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr)
    seen["after_a"] = numpy_of(engine.export_adapter("critic"))
    seen["a_moved"] = scores(engine, batch, adapter="a")
    seen["frozen_scores"] = scores(engine, batch, adapter="before")
    engine.freeze_copy("a", "before")
    seen["swapped_scores"] = scores(engine, batch, adapter="before")
    engine.remove_adapter("before")
    seen["refused"] = []
    for call in (
        lambda: engine.logprobs(batch, adapter="critic"),
        lambda: engine.values(batch, adapter="a"),
        lambda: engine.freeze_copy("a", "critic"),
    ):
        try:
            call()
        except ArealLoraError as error:
            seen["refused"].append(str(error))
    return seen


def exercise_all(
    paths: dict[str, str], cases: list[Case], neighbours: list[str], wires: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Several layouts of one world in the same processes; other adapters are in those of the names ``neighbours``."""
    results: dict[str, Any] = {}
    base.EPS = EPS
    for case in cases:
        results[case.name] = exercise(paths[case.model], case, wires[case.kind], case.name in neighbours)
        forget_layout()
    names = {case.name for case in cases}
    if "single" in names:
        results["extras"] = single_rank_extras(paths["moe"], wires["moe"])
        forget_layout()
    if "pp3" in names:
        results["experts_only"] = experts_only(paths["qwen2_moe"], wires["qwen2_moe"])
        forget_layout()
    return results


def experts_only(path: str, wire: dict[str, Any]) -> dict[str, Any]:
    """An adapter on routed experts in a pipeline whose middle stage has none (layer 2 is dense)."""
    case = Case("experts_only", 3, kind="qwen2_moe", pp=3, stages=(2, 1, 1))
    engine = build(path, case, targets=("expert.linear_fc1", "expert.linear_fc2"))
    layout = engine.adapter_layout("a")
    engine.load_adapter("a", {t.name: torch.from_numpy(wire[t.name]) for s in layout.shards for t in s.tensors})
    engine.forward_backward(make_batch(make_rows()), loss_fn, need_entropy=True)
    engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr)
    return {"is_source": is_source(engine), "stepped": numpy_of(engine.export_adapter("a"))}


def forget_layout() -> None:
    """Drop Megatron's process groups, so that the next engine can choose another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def single_rank_extras(path: str, wire: dict[str, Any]) -> dict[str, Any]:
    """Claims that do not depend on the layout: refusals, accumulation, clipping, state."""
    adapter = {n: torch.from_numpy(v) for n, v in wire.items()}
    case = Case("extras", 1)
    clipped = OPTIMIZER.model_copy(update={"max_grad_norm": CLIPPED})
    engine = build(path, case, clipped)
    batch, seen = make_batch(make_rows()), {}
    engine.load_adapter("a", adapter)

    seen["refused"] = {}
    some = next(iter(adapter))
    for what, tensors in {
        "unknown": {**adapter, "model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(RANK, 128)},
        "missing": {n: t for n, t in adapter.items() if n != some},
        "shape": {**adapter, some: torch.zeros(3, 3)},
    }.items():
        try:
            engine.load_adapter("a", tensors)
            seen["refused"][what] = None
        except ArealLoraError as error:
            seen["refused"][what] = (type(error).__name__, str(error))
    for what, call in {
        "not_resident": lambda: engine.optim_step("b", 1.0, 1.0),
        "twice": lambda: engine.add_adapter(make_spec("a", path, case), OPTIMIZER, seed=1),
        "mixed": lambda: engine.forward_backward(replace(batch, adapters=("a", "b", *batch.adapters[2:])), loss_fn),
    }.items():
        try:
            call()
            seen["refused"][what] = None
        except ArealLoraError as error:
            seen["refused"][what] = (type(error).__name__, str(error))

    try:
        forget_layout()
        build(path, case, targets=("linear_qkv", "mlp.linear_fc1"))
        seen["refused"]["target"] = None
    except ArealLoraError as error:
        seen["refused"]["target"] = (type(error).__name__, str(error))

    state = engine.export_state("a")
    engine.forward_backward(batch, loss_fn, need_entropy=True)
    seen["clipped_step"] = engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr).values
    seen["clipped"] = numpy_of(engine.export_adapter("a"))
    middle = engine.export_state("a")
    engine.forward_backward(batch, loss_fn, need_entropy=True)
    engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr)
    seen["second"] = numpy_of(engine.export_adapter("a"))
    engine.load_state("a", tensors_of(middle), middle.step)
    engine.forward_backward(batch, loss_fn, need_entropy=True)
    engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr)
    seen["resumed"] = numpy_of(engine.export_adapter("a"))

    engine.load_state("a", tensors_of(state), state.step)
    for part in split_minibatches(batch, 2):
        engine.forward_backward(part, loss_fn, need_entropy=True)
    engine.optim_step("a", DENOMINATOR, OPTIMIZER.lr)
    seen["accumulated"] = numpy_of(engine.export_adapter("a"))
    seen["explained"] = fitted(engine, path, case)
    return seen


def fitted(engine: AdapterEngine, path: str, case: Case) -> list[float | None]:
    """Explained variance of a new critic's values, before and after 40 steps towards one return per sequence."""
    spec = replace(make_spec("critic", path, case), value_head=True)
    base.EPS = 1e-8
    engine.add_adapter(spec, OptimizerConfig(lr=0.01), seed=3)
    batch = make_batch(make_rows()[:9])
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]).repeat_interleave(batch.cu_seqlens.diff())
    batch = replace(batch, returns=returns, adapters=("critic",) * batch.n_sequences)
    seen = []
    for step in range(41):
        batch = replace(batch, values=engine.values(batch, adapter="critic"))
        if step in (0, 40):
            seen.append(explained_variance(batch))
        engine.forward_backward(batch, value_loss_fn)
        engine.optim_step("critic", float(batch.loss_mask.sum()), 0.01)
    return seen
