from __future__ import annotations

import dataclasses
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lora.errors import ManifestError
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.digests import shard_digest
from areal_lora.weight_sync.manifest import (
    ALIGN_BYTES,
    ITEM_BYTES,
    Refusal,
    bucket_ranges,
    check_cover,
    check_successor,
    decode,
    encode,
    plan_shards,
)
from areal_lora.weight_sync.testing import moe_shapes

from .helpers import BASE, RUN, packed, ref, share, spec, values

A0 = "model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = "model.layers.0.self_attn.q_proj.lora_B.weight"
LAST = "model.layers.1.mlp.experts.3.down_proj.lora_B.weight"


def reshard(manifest, change):
    """The manifest with its only shard's tensors replaced by ``change(list)``, digest made right again."""
    shard = manifest.shards[0]
    tensors = tuple(change(list(shard.tensors)))
    dropped = len(tensors) < len(shard.tensors)
    nbytes = -(-max(t.offset + t.nbytes for t in tensors) // 64) * 64 if dropped else shard.nbytes
    shard = dataclasses.replace(shard, tensors=tensors, nbytes=nbytes, digest=shard_digest(tensors))
    return dataclasses.replace(manifest, shards=(shard,))


def edit(which, /, **fields):
    return lambda ts: [dataclasses.replace(t, **fields) if t.name == which else t for t in ts]


@pytest.fixture(scope="module")
def manifest():
    owned, aliases = share(values(0))
    return packed(owned, aliases)[1]


shapes_st = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=0, max_size=12)


@settings(max_examples=200, deadline=None)
@given(per_source=st.lists(shapes_st, min_size=1, max_size=4), dtype=st.sampled_from(sorted(ITEM_BYTES)))
def test_plan_places_every_tensor_once_aligned_and_apart(per_source, dtype):
    owned = [(s * 3, [(f"{s}.{i}", shape) for i, shape in enumerate(shapes)]) for s, shapes in enumerate(per_source)]
    layouts = plan_shards(owned, dtype)
    assert [x.source for x in layouts] == [s for s, _ in owned]
    for layout, (_, tensors) in zip(layouts, owned, strict=True):
        assert [(p.name, p.shape) for p in layout.tensors] == tensors
        taken = bytearray(layout.nbytes)
        for p in layout.tensors:
            assert p.offset % ALIGN_BYTES == 0
            assert p.nbytes == p.shape[0] * p.shape[1] * {"float32": 4, "bfloat16": 2}[dtype]
            assert not any(taken[p.offset : p.offset + p.nbytes])
            assert p.offset + p.nbytes <= layout.nbytes
            taken[p.offset : p.offset + p.nbytes] = b"\1" * p.nbytes
        assert taken.count(0) < ALIGN_BYTES * max(1, len(tensors))


@settings(deadline=None)
@given(nbytes=st.integers(0, 10_000), bucket=st.integers(1, 3_000))
def test_bucket_ranges_tile_the_buffer(nbytes, bucket):
    ranges = bucket_ranges(nbytes, bucket)
    assert [i for b, e in ranges for i in range(b, e)] == list(range(nbytes))
    assert all(0 < e - b <= bucket for b, e in ranges)


def test_plan_refuses_duplicates_and_unknown_dtypes():
    for owned, dtype, reason in (
        ([(0, [("x", (1, 2))]), (1, [("x", (1, 2))])], "float32", Refusal.DUPLICATE),
        ([(0, []), (0, [])], "float32", Refusal.DUPLICATE),
        ([(0, [])], "float16", Refusal.DTYPE),
    ):
        with pytest.raises(ManifestError) as e:
            plan_shards(owned, dtype)
        assert e.value.reason == reason


def test_encoding_round_trips_and_is_strict(manifest):
    data = encode(manifest)
    assert decode(data) == manifest
    assert isinstance(decode(data).spec.expert_layout, ExpertLayout)
    raw = msgspec.msgpack.decode(data[4:])
    raw["ref"]["version"] = "7"
    for bad in (data[:-1], b"XXXX" + data[4:], b"", data[:4] + msgspec.msgpack.encode(raw)):
        with pytest.raises(ManifestError) as e:
            decode(bad)
        assert e.value.reason == Refusal.MALFORMED


def test_right_cover_passes(manifest):
    check_cover(manifest, moe_shapes(4))


def test_aliased_tensors_are_not_on_the_wire(manifest):
    names = {t.name for t in manifest.shards[0].tensors}
    assert A0 in names
    assert A0.replace("q_proj", "k_proj") not in names
    assert manifest.aliases[A0.replace("q_proj", "v_proj")] == A0


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Refusal.MISSING_TENSOR, lambda ts: [t for t in ts if t.name != LAST]),
        (Refusal.MISSING_TENSOR, lambda ts: [t for t in ts if "layers.1." not in t.name or "q_proj.lora_A" in t.name
                                             or "gate_proj.lora_A" in t.name]),
        (Refusal.UNKNOWN_TENSOR, edit(LAST, name=LAST.replace("layers.1", "layers.9"))),
        (Refusal.PREFIX, edit(LAST, name="base_model.model." + LAST)),
        (Refusal.DUPLICATE, edit(LAST, name=B0)),
        (Refusal.SHAPE, edit(B0, shape=(4, 16))),
        (Refusal.SHAPE, edit(B0, shape=(64,))),
        (Refusal.RANK, edit(B0, shape=(16, 3), nbytes=192)),
        (Refusal.SIZE, edit(B0, nbytes=128)),
        (Refusal.SIZE, edit(LAST, offset=1 << 20)),
        (Refusal.SIZE, edit(LAST, offset=-64)),
        (Refusal.SIZE, edit(B0, offset=33)),
        (Refusal.SIZE, edit(B0, shape=(0, 4), nbytes=0)),
        (Refusal.DTYPE, edit(B0, dtype="float16")),
        (Refusal.DTYPE, edit(B0, dtype="bfloat16", nbytes=128)),
        (Refusal.OVERLAP, edit(LAST, offset=64)),
    ],
)
def test_wrong_cover_is_refused(manifest, reason, change):
    with pytest.raises(ManifestError) as e:
        check_cover(reshard(manifest, change), moe_shapes(4))
    assert e.value.reason == reason


def test_one_rank_more_is_a_rank_error(manifest):
    with pytest.raises(ManifestError, match="rank"):
        check_cover(manifest, moe_shapes(5))


def test_wrong_aliases_are_refused(manifest):
    alias = A0.replace("q_proj", "k_proj")
    for aliases, reason in (
        ({k: v for k, v in manifest.aliases.items() if k != alias}, Refusal.MISSING_TENSOR),
        (manifest.aliases | {alias: "nowhere"}, Refusal.UNKNOWN_TENSOR),
        (manifest.aliases | {"model.layers.9.x.lora_A.weight": A0}, Refusal.UNKNOWN_TENSOR),
        (manifest.aliases | {A0: A0}, Refusal.DUPLICATE),
        (manifest.aliases | {alias: A0.replace("self_attn.q", "mlp.experts.0.down")}, Refusal.SHAPE),
    ):
        with pytest.raises(ManifestError) as e:
            check_cover(dataclasses.replace(manifest, aliases=aliases), moe_shapes(4))
        assert e.value.reason == reason


def test_shard_level_faults_are_refused(manifest):
    shard = manifest.shards[0]
    for shards, reason in (
        ((shard, shard), Refusal.DUPLICATE),
        ((dataclasses.replace(shard, nbytes=shard.nbytes + 64),), Refusal.SIZE),
        ((dataclasses.replace(shard, digest="0" * 32),), Refusal.HASH),
    ):
        with pytest.raises(ManifestError) as e:
            check_cover(dataclasses.replace(manifest, shards=shards), moe_shapes(4))
        assert e.value.reason == reason


def test_successor_rules():
    owned, aliases = share(values(0))
    good = packed(owned, aliases, version=5, parent=ref(4))[1]
    check_successor(good, ref(4), RUN, BASE, spec())
    check_successor(good, None, RUN, BASE, None)
    check_successor(good, ref(2), RUN, BASE, spec())  # a version in between was lost: full tensors, so no harm

    now = ref(4)

    def refused(reason, m=good, current=now, run=RUN, base=BASE, s=None):
        with pytest.raises(ManifestError) as e:
            check_successor(m, current, run, base, s or spec())
        assert e.value.reason == reason

    refused(Refusal.DUPLICATE, current=ref(5))
    refused(Refusal.STALE_VERSION, current=ref(6))
    refused(Refusal.STALE_VERSION, dataclasses.replace(good, parent=ref(5)))
    refused(Refusal.STALE_VERSION, dataclasses.replace(good, parent=ref(1, "other")))
    refused(Refusal.WRONG_RUN, run="run-2")
    refused(Refusal.WRONG_BASE, base="another")
    refused(Refusal.RANK, s=spec(rank=8))
    refused(Refusal.ALPHA, s=spec(alpha=16.0))
    refused(Refusal.TARGETS, s=spec(targets=("linear_qkv",)))
    refused(Refusal.ALPHA, dataclasses.replace(good, spec=spec(alpha=float("nan"))))
    refused(Refusal.MALFORMED, dataclasses.replace(good, ref=ref(5, "b"), parent=None))
    moved = AdapterSpec(name="a", base_model="elsewhere", rank=4, alpha=8.0, target_modules=spec().target_modules[::-1])
    check_successor(good, ref(4), RUN, BASE, moved)


def test_manifest_of_a_30b_adapter_encodes_in_time():
    shapes = {f"model.layers.{i % 48}.mlp.experts.{i // 48}.down_proj.lora_A.weight": (1, 8) for i in range(18_000)}
    owned = [(n, torch.zeros(s)) for n, s in shapes.items()]
    began = time.process_time()
    manifest = packed(owned)[1]
    check_cover(decode(encode(manifest)), shapes)
    assert time.process_time() - began < 4.0
