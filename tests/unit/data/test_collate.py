"""Packing keeps every token's facts together, and refuses what does not line up."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random, SystemRandom

import msgspec
import numpy as np
import pytest
import torch

from areal_lora.data.collate import (
    assert_staleness,
    collate,
    contradiction,
    scoring_batch,
    select,
    split_minibatches,
    split_rows,
)
from areal_lora.data.packed_groups import PackedGroups, TrajectoryRow
from areal_lora.errors import AlignmentError, StalenessError
from areal_lora.types import AdapterRef, RouteShape, TokenColumns, Trajectory, TrajectoryGroup


def _trajectory(uid: str, n_prompt: int, n_answer: int, version: int, reward: float, sample: int = 0) -> Trajectory:
    total = n_prompt + n_answer
    base = 100 * (ord(uid) - 96)
    return Trajectory(
        uid=uid,
        sample=sample,
        adapter=AdapterRef(name="math", version=version),
        columns=TokenColumns.of(
            [base + i for i in range(total)],
            [0.0] * n_prompt + [-(base + i) / 1000 for i in range(n_prompt, total)],
            [-1] * n_prompt + [version] * n_answer,
        ),
        reward=reward,
    )


GROUPS = [
    TrajectoryGroup(uid="0:x", trajectories=(_trajectory("a", 2, 3, 4, 1.0), _trajectory("b", 2, 1, 5, 0.0, 1))),
    TrajectoryGroup(uid="0:y", trajectories=(_trajectory("c", 4, 2, 6, 0.5),)),
]
PACKED = PackedGroups.of(GROUPS)


def test_every_array_speaks_of_the_same_token() -> None:
    batch = collate(PACKED)
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 14]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.sample_ids.tolist() == [0, 1, 2]
    on = batch.loss_mask
    assert torch.allclose(batch.rollout_logprobs[on], -batch.token_ids[on] / 1000)
    assert batch.versions[on].tolist() == [4, 4, 4, 5, 6, 6]
    assert (batch.versions[~on] == -1).all()


def test_a_teachers_column_speaks_of_the_same_tokens_and_given_answers_have_their_own() -> None:
    def taught(trajectory: Trajectory) -> Trajectory:
        scores = np.array([-token / 500 for token in trajectory.token_ids], "<f4")
        return replace(trajectory, columns=msgspec.structs.replace(trajectory.columns, teacher=scores.tobytes()))

    first, second = GROUPS[0].trajectories
    group = replace(GROUPS[0], trajectories=(taught(first), second))
    group = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=TrajectoryGroup)  # as in the ledger
    batch = collate(PackedGroups.of([group]))
    assert batch.ref_logprobs is not None
    assert torch.allclose(batch.ref_logprobs[:5], -batch.token_ids[:5] / 500)
    assert torch.equal(batch.ref_logprobs[5:], batch.rollout_logprobs[5:])
    assert torch.equal(select(batch, [1]).ref_logprobs, batch.ref_logprobs[5:])
    assert collate(PACKED).ref_logprobs is None


def test_select_moves_whole_sequences() -> None:
    batch = select(collate(PACKED), [2, 0])
    assert batch.cu_seqlens.tolist() == [0, 6, 11]
    assert batch.token_ids.tolist() == [*range(300, 306), *range(100, 105)]
    assert batch.rewards.tolist() == [0.5, 1.0]
    assert batch.sample_ids.tolist() == [2, 0]
    assert torch.allclose(batch.rollout_logprobs[batch.loss_mask], -batch.token_ids[batch.loss_mask] / 1000)


@pytest.mark.parametrize("experts", [8, 255, 256, 4000])
def test_routes_are_those_of_each_token(experts: int) -> None:
    """Random ones, of random trajectories; of the others, and where a layer chose none, -1."""
    seed = SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    rng, shape, want, groups = Random(seed), RouteShape(layers=3, per_token=2, experts=experts), [], []
    assert shape.n_bytes == (6 if experts < 256 else 12)
    for g in range(3):
        made = []
        for s in range(3):
            one = _trajectory("abc"[g], rng.randrange(1, 4), rng.randrange(1, 4), 4, 0.0, s)
            rows = np.array([[rng.choice((-1, 0, experts - 1, 1)) for _ in range(6)] for _ in one.token_ids])
            if rng.random() < 0.5:
                routed = one.columns.routed(rows.astype(shape.dtype).tobytes())
                one = replace(one, columns=msgspec.msgpack.decode(msgspec.msgpack.encode(routed), type=TokenColumns))
            else:
                rows[:] = -1
            want.append(rows.reshape(-1, 3, 2))
            made.append(one)
        groups.append(TrajectoryGroup(uid=f"0:{g}", trajectories=tuple(made)))
    batch = collate(PackedGroups.of(groups, shape))
    assert batch.routes is not None
    assert batch.routes.dtype == torch.int16
    assert batch.routes.tolist() == np.concatenate(want).tolist()
    moved = select(batch, [5, 0])
    assert moved.routes is not None
    assert moved.routes.tolist() == np.concatenate([want[5], want[0]]).tolist()
    assert collate(PackedGroups.of(groups)).routes is None


@pytest.mark.parametrize(("experts", "values"), [(255, 1 << 8), (4000, 1 << 16)])
def test_routes_keep_every_number_and_the_largest_is_minus_one(experts: int, values: int) -> None:
    shape = RouteShape(layers=1, per_token=1, experts=experts)
    tokens, numbers = 1 << 8, np.arange(values).astype(shape.dtype)
    want = np.append(np.arange(values - 1), -1).astype(np.int16)
    for first in range(0, values, tokens):
        one = _trajectory("a", tokens - 2, 2, 4, 0.0, 0)
        assert len(one.token_ids) == tokens
        its = slice(first, first + tokens)
        one = replace(one, columns=one.columns.routed(numbers[its].tobytes()))
        routes = collate(PackedGroups.of([TrajectoryGroup(uid="0:a", trajectories=(one,))], shape)).routes
        assert routes is not None
        assert routes.dtype == torch.int16
        assert routes.flatten().tolist() == want[its].tolist()


def test_routes_of_another_model_are_refused() -> None:
    one = GROUPS[0].trajectories[0]
    wrong = replace(one, columns=one.columns.routed(bytes(5 * len(one.token_ids))))
    groups = [TrajectoryGroup(uid="0:x", trajectories=(wrong,))]
    with pytest.raises(AlignmentError, match="trajectory a: 25 bytes of routes, 30 for RouteShape"):
        PackedGroups.of(groups, RouteShape(layers=3, per_token=2, experts=8))


def test_kept_ids_are_those_of_each_token_and_divide_a_common_start() -> None:
    def one(ids: list[int], kept: list[list[int]]) -> Trajectory:
        columns = TokenColumns.of(ids, [0.0, -0.5, -0.5, -0.5], [-1, 0, 0, 0], b"", kept, [0.0, -0.1, -0.2, -0.3])
        return replace(GROUPS[0].trajectories[0], columns=columns)

    first, second = one([1, 2, 3, 4], [[], [2], [9, 3], [4]]), one([1, 2, 3, 5], [[], [2], [8, 3], [5, 6, 7]])
    plain = GROUPS[0].trajectories[0]
    packed = PackedGroups.of([TrajectoryGroup(uid="0:x", trajectories=(first, second, replace(plain, sample=1)))])
    assert (packed.most_kept, packed.has_teacher) == (3, False)
    assert [row.shared for row in packed.rows] == [0, 2, 0], "the third token is of another distribution"
    batch = collate(packed)
    assert batch.kept is not None
    assert batch.log_mass is not None
    assert batch.kept[:8].tolist() == [
        *([-1, -1, -1], [2, -1, -1], [9, 3, -1], [4, -1, -1]),
        *([-1, -1, -1], [2, -1, -1], [8, 3, -1], [5, 6, 7]),
    ]
    assert (batch.kept[8:] == -1).all()
    assert batch.log_mass.tolist() == pytest.approx([0.0, -0.1, -0.2, -0.3] * 2 + [0.0] * len(plain.token_ids))
    moved = select(batch, [1])
    assert torch.equal(moved.kept, batch.kept[4:8])
    lost = TrajectoryGroup(uid="0:x", trajectories=(one([1, 2, 3, 4], [[], [2], [9], [4]]),))
    with pytest.raises(AlignmentError, match="trajectory a: 1 tokens are not among the ids kept for them"):
        PackedGroups.of([lost])


def test_a_sequence_that_is_moved_shares_nothing_with_the_one_that_is_before_it_then() -> None:
    batch = scoring_batch([[1, 2, 3], [1, 2, 4, 5], [1, 6], [1, 6]], "a")
    assert batch.shared_starts.tolist() == [0, 2, 1, 2]
    assert select(batch, [3, 0, 1]).shared_starts.tolist() == [0, 0, 2]
    assert [part.shared_starts.tolist() for part in split_minibatches(batch, 2)] == [[0, 2], [0, 2]]


def test_trajectories_of_one_sample_have_one_id_and_one_reward() -> None:
    first, second = _trajectory("a", 2, 3, 4, 1.0, 1), _trajectory("b", 2, 1, 5, 1.0, 1)
    third, other = _trajectory("c", 1, 1, 5, 0.0, 0), _trajectory("d", 1, 1, 5, 0.0, 1)
    groups = [
        TrajectoryGroup(uid="0:x", trajectories=(first, third, second)),
        TrajectoryGroup(uid="0:y", trajectories=(other,)),
    ]
    assert collate(PackedGroups.of(groups)).sample_ids.tolist() == [0, 1, 0, 2]
    differs = TrajectoryGroup(uid="0:x", trajectories=(first, third, replace(second, reward=0.5)))
    with pytest.raises(AlignmentError, match=r"trajectory b: reward 0\.5, another one of its sample has 1\.0"):
        collate(PackedGroups.of([differs]))


@pytest.mark.parametrize("how", ["length", "max_turns", "timeout"])
def test_a_sample_is_truncated_if_a_limit_ended_any_of_its_conversations(how: str) -> None:
    cut = replace(_trajectory("b", 2, 1, 5, 1.0, 1), finish_reason=how)
    groups = [
        TrajectoryGroup(
            uid="0:x", trajectories=(_trajectory("a", 2, 3, 4, 1.0, 1), _trajectory("c", 1, 1, 5, 0.0, 0), cut)
        ),
        TrajectoryGroup(uid="0:y", trajectories=(_trajectory("d", 1, 1, 5, 0.0, 1),)),
    ]
    packed = PackedGroups.of(msgspec.msgpack.decode(msgspec.msgpack.encode(groups), type=list[TrajectoryGroup]))
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(packed.rows), type=list[TrajectoryRow])
    batch = collate(msgspec.structs.replace(packed, rows=rows))
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [True, False, True, False]
    assert not contradiction(batch), "masks and versions stay as they are"
    parts = [select(batch, [3, 0]), *split_minibatches(batch, 2)]
    assert [part.truncated.tolist() for part in parts] == [[False, True], [True, False], [True, False]]
    assert not collate(PACKED).truncated.any()


def test_rewards_of_turns_are_at_their_tokens_and_records_without_them_are_readable() -> None:
    [a, b], [c] = (group.trajectories for group in GROUPS)
    groups = [
        replace(GROUPS[0], trajectories=(a, replace(b, turn_rewards=((2, -1.0),)))),
        replace(GROUPS[1], trajectories=(replace(c, turn_rewards=((4, 0.5), (5, 0.25), (5, 0.125))),)),
    ]
    groups = msgspec.msgpack.decode(msgspec.msgpack.encode(groups), type=list[TrajectoryGroup])
    packed = PackedGroups.of(groups)
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(packed.rows), type=list[TrajectoryRow])
    batch = collate(msgspec.structs.replace(packed, rows=rows))
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [0.0] * 7 + [-1.0] + [0.0] * 4 + [0.5, 0.375]
    assert select(batch, [2, 0]).turn_rewards.tolist() == [0.0] * 4 + [0.5, 0.375] + [0.0] * 5
    assert collate(PACKED).turn_rewards is None
    earlier = msgspec.msgpack.decode(msgspec.msgpack.encode(a))
    del earlier["turn_rewards"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(earlier), type=Trajectory) == a


def test_parts_of_a_reward_are_those_of_their_sequences() -> None:
    """NaN where a sample has none of a name."""
    [a, b], [c] = (group.trajectories for group in GROUPS)
    a, c = replace(a, components={"right": 1.0, "brief": -0.5}), replace(c, components={"right": 0.25})
    groups = [replace(GROUPS[0], trajectories=(a, b)), replace(GROUPS[1], trajectories=(c,))]
    batch = collate(PackedGroups.of(groups))
    assert batch.component_names == ("brief", "right")
    assert batch.components is not None
    wanted = torch.tensor([[-0.5, 1.0], [torch.nan, torch.nan], [torch.nan, 0.25]])
    torch.testing.assert_close(batch.components, wanted, rtol=0, atol=0, equal_nan=True)
    chosen = select(batch, [2, 0])
    assert chosen.components is not None
    torch.testing.assert_close(chosen.components, wanted[[2, 0]], rtol=0, atol=0, equal_nan=True)
    assert collate(PACKED).components is None


def test_minibatches_cover_the_batch_once() -> None:
    batch = collate(PACKED)
    parts = split_minibatches(batch, 2)
    assert torch.equal(torch.cat([p.token_ids for p in parts]), batch.token_ids)
    assert [p.n_sequences for p in parts] == [1, 2]


@pytest.mark.parametrize("columns", [TokenColumns.of([1, 2], [-0.1, -0.2], [4, 4]), TokenColumns.of([], [], [])])
def test_a_sequence_may_not_start_with_a_trained_token(columns: TokenColumns) -> None:
    """Nothing predicts entry 0."""
    bad = replace(GROUPS[0].trajectories[0], columns=columns)
    with pytest.raises(AlignmentError, match="trajectory a: entry 0"):
        collate(PackedGroups.of([TrajectoryGroup(uid="0:x", trajectories=(bad,))]))


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(AlignmentError, match="without trajectories"):
        collate(PackedGroups.of([]))


def test_staleness_is_counted_per_token_and_bounded() -> None:
    runs = PACKED.runs
    assert assert_staleness(runs, version=6, max_staleness=2) == {0: 2, 1: 1, 2: 3}
    with pytest.raises(StalenessError):
        assert_staleness(runs, version=6, max_staleness=1)
    with pytest.raises(StalenessError):
        assert_staleness(runs, version=5, max_staleness=2)  # a token from the future


def test_a_batch_is_made_on_the_host_and_its_parts_where_it_is() -> None:
    """Whatever torch's default device is: on "meta" a tensor that is made without a device holds nothing."""
    want = [select(collate(PACKED), [2, 0]), *split_minibatches(collate(PACKED), 2)]
    torch.set_default_device("meta")
    try:
        got = [select(collate(PACKED), [2, 0]), *split_minibatches(collate(PACKED), 2)]
    finally:
        torch.set_default_device(None)
    for a, b in zip(want, got, strict=True):
        for f in fields(a):
            value = getattr(b, f.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(a, f.name), value), f.name


@pytest.mark.parametrize("name", ["loss_mask", "rollout_logprobs", "versions", "mask and versions"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_shift_of_one_array_in_the_packed_batch_is_found(name: str, by: int) -> None:
    batch = collate(PACKED)
    assert not contradiction(batch)
    names = ["loss_mask", "versions"] if name == "mask and versions" else [name]
    assert "shifted" in contradiction(replace(batch, **{n: getattr(batch, n).roll(by) for n in names}))


def test_scoring_batch_masks_the_first_token_of_every_sequence() -> None:
    batch = scoring_batch([[5, 6, 7], [8, 9]], "a")
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert split_rows(batch.token_ids, batch.cu_seqlens) == [[5, 6, 7], [8, 9]]


def test_a_scoring_batch_is_made_on_the_host_whatever_the_default_device_is() -> None:
    torch.set_default_device("meta")
    try:
        batch = scoring_batch([[5, 6, 7], [8, 9]], "a")
        assert not contradiction(batch)
        assert split_rows(batch.token_ids, batch.cu_seqlens) == [[5, 6, 7], [8, 9]]
    finally:
        torch.set_default_device(None)
    tensors = [v for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)]
    assert {t.device.type for t in tensors} == {"cpu"}
