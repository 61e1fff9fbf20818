"""What each trainer rank holds of a batch: enough for its passes, and for the same advantages as with all of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from areal_lora.algorithms.advantages import token_credit
from areal_lora.data.collate import collate, split_minibatches
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.common.micro_batches import plans_of
from areal_lora.engine.layers.active import PackedTokens
from areal_lora.engine.layers.attention import PackedMicroBatch, pack
from areal_lora.errors import AlignmentError, StalenessError
from areal_lora.obs.trace import Spans
from areal_lora.trainer.adapter import Adapter, TrainingState
from areal_lora.trainer.collective.next_work import batch_of
from areal_lora.trainer.work import TrainOn, _encode, share
from areal_lora.types import AdapterRef, RouteShape, TokenColumns, TrainBatch, Trajectory, TrajectoryGroup
from tests.support.checkpoint.helpers import ThreadExchange, on_ranks
from tests.support.trainer.recorded import make_adapter

VERSION, BUDGET, CPU = 5, 60, torch.device("cpu")


def trajectory(random: Random, group: int, sample: int, prompt: list[int]) -> Trajectory:
    """An answer of versions 4 and 5, with tokens between that were not sampled."""
    lengths = [random.randint(1, 30) for _ in range(3)]
    marks = [4] * lengths[0] + [-1] * lengths[1] + [5] * lengths[2]
    versions = [-1] * len(prompt) + marks
    ids = prompt + [random.randrange(2) for _ in marks]
    truncated = [version >= 0 and group % 3 == 0 for version in versions]
    return Trajectory(
        uid=f"{group}:{sample}",
        sample=sample,
        adapter=AdapterRef(name="a", version=VERSION),
        columns=TokenColumns.of(
            ids,
            [-random.random() if version >= 0 else 0.0 for version in versions],
            versions,
            b"",
            [[7] * random.randrange(3) + [token] if cut else [] for token, cut in zip(ids, truncated, strict=True)],
            [-random.random() if cut else 0.0 for cut in truncated],
        ),
        reward=random.random(),
        finish_reason="stop" if (group + sample) % 3 else "length",
    )


SHAPE = RouteShape(layers=2, per_token=2, experts=8)


def routed(made: Trajectory, random: Random) -> Trajectory:
    routes = bytes(random.randrange(8) for _ in range(SHAPE.n_bytes * len(made.columns)))
    return replace(made, columns=made.columns.routed(routes))


def groups(seed: int = 0) -> list[TrajectoryGroup]:
    random, made = Random(seed), []
    for group in range(7):
        prompt = [random.randrange(1000) for _ in range(random.randint(1, 40))]
        rows = tuple(trajectory(random, group, sample, prompt) for sample in range(random.randint(1, 5)))
        if group % 2:
            rows = tuple(routed(one, random) for one in rows)
        made.append(TrajectoryGroup(uid=f"0:{group}", trajectories=rows))
    return made


LAYOUTS = {
    "dp 4": ParallelLayout(world=4, tp=1, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0),
    "dp 2, tp 2": ParallelLayout(world=4, tp=2, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0),
    "dp 2, cp 2": ParallelLayout(world=4, tp=1, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0, cp=2),
    "dp 2, pp 2": ParallelLayout(world=4, tp=1, pp=2, ep=1, etp=1, stage_layers=(1, 1), experts=0),
    "dp 1, tp 2": ParallelLayout(world=2, tp=2, pp=1, ep=1, etp=1, stage_layers=(2,), experts=0),
}


def on_all(layout: ParallelLayout, adapter: Adapter, packed: PackedGroups) -> list[Any]:
    """The batch and histogram of each rank, or its error; rank 0 alone has ``packed``."""
    exchanges = ThreadExchange.make(layout.world)
    engine: Any = SimpleNamespace(
        _sharded=SimpleNamespace(layout=layout),
        _trainer=SimpleNamespace(max_tokens_per_microbatch=BUDGET),
        world_size=layout.world,
    )
    engine.parts = lambda *args: AdapterEngine.parts(engine, *args)

    def one(rank: int) -> tuple[TrainBatch, dict[int, int]]:
        trainer: Any = SimpleNamespace(control=exchanges[rank], engine=engine, spans=defaultdict(Spans))
        work = share(None if rank else TrainOn(adapter="a", batch=packed), exchanges[rank])
        assert isinstance(work, TrainOn)
        assert rank == 0 or not work.batch.columns.size
        return batch_of(trainer, TrainingState(adapter=adapter, version=VERSION), work.batch)

    return on_ranks(one, layout.world)


def equal(left: Any, right: Any) -> bool:
    """Whether all tensors of two dataclasses are equal in every bit."""
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, torch.Tensor):
            if one.dtype != other.dtype or not torch.equal(one, other):
                return False
        elif isinstance(one, TrainBatch | PackedTokens):
            if not equal(one, other):
                return False
        elif field.name == "micros":
            if len(one) != len(other) or not all(map(equal, one, other)):
                return False
        elif field.name not in ("attention", "held") and one != other:
            return False
    return True


def passes(batch: TrainBatch, layout: ParallelLayout, dp_rank: int, minibatches: int) -> list[PackedMicroBatch]:
    """The micro-batches of a rank in a pass over the batch, and in one over each minibatch."""
    each = [batch, *split_minibatches(batch, minibatches)]
    return [pack(part, plan, dp_rank, CPU) for part in each for plan in plans_of(part, layout, BUDGET)]


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_pass_of_a_rank_has_the_tokens_that_it_has_with_the_whole_batch(
    layout: ParallelLayout, minibatches: int
) -> None:
    packed = PackedGroups.of(groups(), SHAPE)
    adapter, whole = make_adapter(minibatches=minibatches), collate(packed)
    assert len(_encode(TrainOn(adapter="a", batch=packed))) < 100 * len(packed.rows), "a message has no columns"
    found = on_all(layout, adapter, packed)
    want = token_credit(adapter.algorithm.advantage, adapter.algorithm.shaping, whole)
    zero = torch.tensor([not part.any() for part in want.advantages.split(whole.cu_seqlens.diff().tolist())])
    assert 0 < zero.sum() < len(zero)
    whole = replace(whole, zero_advantage=zero & ~whole.given)
    held = torch.zeros(layout.dp, whole.n_sequences, dtype=torch.int64)
    for rank, (batch, histogram) in enumerate(found):
        assert histogram == {age: int((whole.versions == VERSION - age).sum()) for age in (0, 1)}
        dp_rank = layout.dp_rank(rank)
        mine = passes(batch, layout, dp_rank, minibatches)
        assert len(mine) > 1 + minibatches
        for got, alike in zip(mine, passes(whole, layout, dp_rank, minibatches), strict=True):
            assert equal(got, alike)
        credit = token_credit(adapter.algorithm.advantage, adapter.algorithm.shaping, batch)
        assert torch.equal(credit.advantages, want.advantages)
        if rank:
            assert batch.held is not None
            held[dp_rank] = batch.held
            assert batch.token_ids.numel() == int(batch.cu_seqlens.diff()[batch.held].sum())
            mine = batch.held.repeat_interleave(batch.cu_seqlens.diff())
            assert torch.equal(batch.routes, whole.routes[mine])
            assert torch.equal(batch.kept, whole.kept[mine])
            assert torch.equal(batch.log_mass, whole.log_mass[mine])
    assert equal(found[0][0], whole), "rank 0 has all"
    if minibatches == 1 and layout.dp == 4:
        assert (held[1:].sum(0) <= 1).all(), "a sequence is on one rank"


def test_with_a_divergence_in_the_reward_every_rank_has_all_log_probabilities() -> None:
    adapter, packed = make_adapter(kind="reinforce_pp", kl_coef=0.1), PackedGroups.of(groups())
    assert adapter.algorithm.shaping.kl_coef
    whole = collate(packed)
    reference = -torch.rand(whole.n_tokens, generator=torch.Generator().manual_seed(0))
    want, *credits = (
        token_credit(
            adapter.algorithm.advantage, adapter.algorithm.shaping, replace(batch, ref_logprobs=reference)
        ).advantages
        for batch in (whole, *(batch for batch, _ in on_all(LAYOUTS["dp 4"], adapter, packed)))
    )
    assert all(torch.equal(got, want) for got in credits)


@pytest.mark.parametrize("chosen", [{"kind": "distill"}, {"kl_coef": 0.1}], ids=["in the advantage", "in the loss"])
def test_every_rank_has_a_teachers_log_probabilities_of_all_tokens(chosen: dict[str, Any]) -> None:
    adapter, made = make_adapter(**chosen), groups()
    for i, group in enumerate(made[1:], 1):  # the first one's are given
        rows = [
            msgspec.structs.replace(t.columns, teacher=(t.columns.scores - 0.5).tobytes()) for t in group.trajectories
        ]
        each = tuple(replace(t, columns=row) for t, row in zip(group.trajectories, rows, strict=True))
        made[i] = replace(group, trajectories=each)
    packed = PackedGroups.of(made)
    whole = collate(packed)
    want = token_credit(adapter.algorithm.advantage, adapter.algorithm.shaping, whole).advantages
    first = int(whole.cu_seqlens[len(made[0].trajectories)])
    gap = (whole.ref_logprobs - whole.rollout_logprobs)[whole.loss_mask]
    assert gap.unique().numel() > 1
    if "kind" in chosen:
        assert not want[:first].any()
        assert torch.allclose(want[first:], -0.5 * whole.loss_mask[first:].float())
    for batch, _ in on_all(LAYOUTS["dp 4"], adapter, packed):
        assert torch.equal(batch.ref_logprobs, whole.ref_logprobs)
        assert torch.equal(token_credit(adapter.algorithm.advantage, adapter.algorithm.shaping, batch).advantages, want)


def test_columns_that_one_rank_receives_shifted_end_the_step_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = ThreadExchange.scatter

    def shifted(self: ThreadExchange, part: Any, of_ranks: Any, room: Any) -> None:
        scatter(self, part, of_ranks, room)
        if self.rank == 2:
            room[:] = np.roll(room, 1, axis=1)

    monkeypatch.setattr(ThreadExchange, "scatter", shifted)
    found = on_all(LAYOUTS["dp 4"], make_adapter(), PackedGroups.of(groups()))
    assert [type(error) for error in found] == [AlignmentError] * 4
    assert len({str(error) for error in found}) == 1


def test_an_old_token_ends_the_step_on_every_rank() -> None:
    adapter = make_adapter()
    adapter = replace(adapter, run=replace(adapter.run, max_staleness=0))
    found = on_all(LAYOUTS["dp 4"], adapter, PackedGroups.of(groups()))
    assert [type(error) for error in found] == [StalenessError] * 4
