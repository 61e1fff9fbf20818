from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import replace

import msgspec
import pytest

from areal_lora.errors import ManifestError, RefusalReason
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import Announcement, check_layout, check_successor, decode, encode, sent_later
from tests.support.weight_sync.adapters import moe_shapes
from tests.support.weight_sync.helpers import BASE, RUN, announce, layout_of, ref, share, spec, values

A0 = "model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = "model.layers.0.self_attn.q_proj.lora_B.weight"
LAST = "model.layers.1.mlp.experts.3.down_proj.lora_B.weight"


def reshard(layout, change):
    """The layout with its only shard's tensors replaced by ``change(list)``; the shard ends where they end."""
    shard = layout.shards[0]
    tensors = tuple(change(list(shard.tensors)))
    shard = msgspec.structs.replace(shard, tensors=tensors)
    return msgspec.structs.replace(layout, shards=(shard,))


def without(*gone):
    """The layout's tensors without some, laid back to back again."""

    def change(tensors):
        kept, at = [], 0
        for t in tensors:
            if not any(part in t.name for part in gone):
                kept.append(msgspec.structs.replace(t, offset=at))
                at += 4 * t.shape[0] * t.shape[1]
        return kept

    return change


def edit(which, /, **fields):
    return lambda ts: [msgspec.structs.replace(t, **fields) if t.name == which else t for t in ts]


@pytest.fixture(scope="module")
def layout():
    return layout_of(*share(values(0)))


def test_encoding_round_trips_and_is_strict(layout):
    for announcement in (announce(layout), announce(layout, known=True)):
        data = encode(announcement)
        assert decode(data) == announcement
        layout_bytes = msgspec.Raw(msgspec.msgpack.encode(announcement.layout))
        sealed = Announcement(manifest=announcement.manifest, layout=layout_bytes, timeout_s=0.0)
        for timeout_s in (10.0, 0.25):  # what remains when each server is notified
            want = msgspec.structs.replace(announcement, timeout_s=timeout_s)
            sent = encode(msgspec.structs.replace(sealed, timeout_s=timeout_s))
            assert sent == encode(want)
            assert decode(sent) == want
            assert sent_later(data, 10.0 - timeout_s) == encode(want)
    data = encode(announce(layout))
    assert isinstance(decode(data).layout.structure.expert_layout, ExpertLayout)
    assert decode(data).layout.digest == layout.digest
    raw = msgspec.msgpack.decode(data[4:])
    raw["manifest"]["ref"]["version"] = "7"
    torn = msgspec.msgpack.decode(data[4:])
    torn["layout"]["aliases"] = 3
    times = [msgspec.msgpack.decode(data[4:]) | {"timeout_s": t} for t in (0.0, -1.0, math.inf, math.nan, None)]
    wrong = [data[:4] + msgspec.msgpack.encode(x) for x in (raw, torn, *times)]
    for bad in (*wrong, data[:-1], b"XXXX" + data[4:], b""):
        with pytest.raises(ManifestError) as e:
            decode(bad)
        assert e.value.reason == RefusalReason.MALFORMED
    with pytest.raises(ManifestError, match="wire format"):
        sent_later(b"XXXX" + data[4:], 1.0)


def test_right_cover_passes(layout):
    check_layout(layout, moe_shapes(4))


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (RefusalReason.MISSING_TENSOR, without(LAST)),
        (RefusalReason.MISSING_TENSOR, without("layers.1.self_attn.o_proj")),
        (RefusalReason.UNKNOWN_TENSOR, edit(LAST, name=LAST.replace("layers.1", "layers.9"))),
        (RefusalReason.PREFIX, edit(LAST, name="base_model.model." + LAST)),
        (RefusalReason.DUPLICATE, edit(LAST, name=B0)),
        (RefusalReason.SHAPE, edit(B0, shape=(4, 16))),
        (RefusalReason.SHAPE, edit(B0, shape=(64,))),
        (RefusalReason.SIZE, edit(LAST, offset=1 << 20)),
        (RefusalReason.SIZE, edit(LAST, offset=-64)),
        (RefusalReason.SIZE, edit(B0, offset=33)),
        (RefusalReason.SIZE, edit(B0, shape=(0, 4))),
        (RefusalReason.SIZE, lambda ts: [t for t in ts if t.name != B0]),
    ],
)
def test_wrong_cover_is_refused(layout, reason, change):
    broken = reshard(layout, change)
    end = max(t.offset + 4 * math.prod(t.shape) for t in broken.shards[0].tensors)
    if reason == RefusalReason.MISSING_TENSOR:
        broken = msgspec.structs.replace(
            broken,
            shards=(msgspec.structs.replace(broken.shards[0], nbytes=end),),
            aliases={a: w for a, w in broken.aliases.items() if w in {t.name for t in broken.shards[0].tensors}},
        )
    with pytest.raises(ManifestError) as e:
        check_layout(broken, moe_shapes(4))
    assert e.value.reason == reason


def test_one_rank_more_is_a_rank_error(layout):
    with pytest.raises(ManifestError, match="rank"):
        check_layout(layout, moe_shapes(5))


def test_wrong_aliases_are_refused(layout):
    alias = A0.replace("q_proj", "k_proj")
    for aliases, reason in (
        ({k: v for k, v in layout.aliases.items() if k != alias}, RefusalReason.MISSING_TENSOR),
        (layout.aliases | {alias: "nowhere"}, RefusalReason.UNKNOWN_TENSOR),
        (layout.aliases | {"model.layers.9.x.lora_A.weight": A0}, RefusalReason.UNKNOWN_TENSOR),
        (layout.aliases | {A0: A0}, RefusalReason.DUPLICATE),
        (layout.aliases | {alias: A0.replace("self_attn.q", "mlp.experts.0.down")}, RefusalReason.SHAPE),
    ):
        with pytest.raises(ManifestError) as e:
            check_layout(msgspec.structs.replace(layout, aliases=aliases), moe_shapes(4))
        assert e.value.reason == reason


def test_shard_level_faults_are_refused(layout):
    shard = layout.shards[0]
    for fields, reason in (
        ({"shards": (shard, shard)}, RefusalReason.DUPLICATE),
        ({"shards": (msgspec.structs.replace(shard, nbytes=shard.nbytes + 64),)}, RefusalReason.SIZE),
        ({"dtype": "float64"}, RefusalReason.DTYPE),
    ):
        with pytest.raises(ManifestError) as e:
            check_layout(msgspec.structs.replace(layout, **fields), moe_shapes(4))
        assert e.value.reason == reason


def test_successor_rules(layout):
    good = announce(layout, version=5, parent=ref(4)).manifest

    def check(m=good, of=None, current=ref(4), run=RUN, base=BASE, declared=None):  # noqa: B008 (frozen)
        check_successor(m, of or spec(), current, run, base, declared or spec())

    def refused(reason, *args, **options):
        with pytest.raises(ManifestError) as e:
            check(*args, **options)
        assert e.value.reason == reason

    check()
    check_successor(good, spec(), None, RUN, BASE, None)
    check(current=ref(2))  # a version in between was lost: full tensors, so no harm
    refused(RefusalReason.DUPLICATE, current=ref(5))
    refused(RefusalReason.STALE_VERSION, current=ref(6))
    refused(RefusalReason.STALE_VERSION, dataclasses.replace(good, parent=ref(5)))
    refused(RefusalReason.STALE_VERSION, dataclasses.replace(good, parent=ref(1, "other")))
    refused(RefusalReason.WRONG_RUN, run="run-2")
    refused(RefusalReason.WRONG_BASE, base="another")
    refused(RefusalReason.RANK, declared=spec(rank=8))
    refused(RefusalReason.ALPHA, declared=spec(alpha=16.0))
    refused(RefusalReason.ALPHA, declared=replace(spec(), rslora=True))
    refused(RefusalReason.ALPHA, declared=replace(spec(), alpha_pattern=(("o_proj", 2.0),)))
    refused(RefusalReason.RANK, declared=replace(spec(), rank_pattern=(("o_proj", 2),)))
    refused(RefusalReason.RANK, of=replace(spec(), rank_pattern=(("o_proj", 0),)))
    refused(RefusalReason.MALFORMED, of=replace(spec(), rank_pattern=(("o_(", 2),)))
    refused(RefusalReason.TARGETS, declared=spec(targets=("linear_qkv",)))
    refused(RefusalReason.ALPHA, of=spec(alpha=float("nan")))
    moved = AdapterSpec(name="a", base_model="elsewhere", rank=4, alpha=8.0, target_modules=spec().target_modules[::-1])
    check(declared=moved)


def test_announcing_a_30b_adapter_takes_bytes_and_its_layout_is_checked_in_time():
    shapes = {f"model.layers.{i % 48}.mlp.experts.{i // 48}.down_proj.lora_A.weight": (1, 8) for i in range(18_000)}
    layout = make_layout(spec(), "float32", {0: list(shapes.items())}, {})
    began = time.process_time()
    check_layout(decode(encode(announce(layout))).layout, shapes)
    assert time.process_time() - began < 4.0
    assert len(encode(announce(layout, known=True))) < 500
