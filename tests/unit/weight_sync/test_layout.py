from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from areal_lora.errors import ManifestError, RefusalReason
from areal_lora.weight_sync.layout import AdapterLayout, make_layout, plan_buckets
from tests.support.weight_sync.helpers import layout_of, share, spec, values

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
shapes_st = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=0, max_size=12)


@settings(max_examples=100, deadline=None)
@given(per_source=st.lists(shapes_st, min_size=1, max_size=4), dtype=st.sampled_from(sorted(ITEM)))
def test_tensors_lie_back_to_back_once_each(per_source, dtype):
    owned = {s * 3: [(f"{s}.{i}", shape) for i, shape in enumerate(shapes)] for s, shapes in enumerate(per_source)}
    layout = make_layout(spec(), dtype, owned, {})
    assert [x.source for x in layout.shards] == sorted(owned)
    for shard in layout.shards:
        assert [(t.name, t.shape) for t in shard.tensors] == owned[shard.source]
        end = 0
        for t in shard.tensors:
            assert t.offset == end
            end += math.prod(t.shape) * ITEM[dtype]
        assert shard.nbytes == end
    again = msgspec.msgpack.decode(layout.encoded, type=AdapterLayout)
    assert (again, again.digest) == (layout, layout.digest)


@settings(max_examples=200, deadline=None)
@given(shapes=shapes_st, bucket=st.integers(1, 8_000))
def test_buckets_tile_the_shard_between_tensors(shapes, bucket):
    shard = make_layout(spec(), "float32", {0: [(str(i), s) for i, s in enumerate(shapes)]}, {}).shards[0]
    buckets = plan_buckets(shard, bucket)
    ends = [*(t.offset for t in shard.tensors[1:]), shard.nbytes]
    first = begin = 0
    for b in buckets:
        assert (b.first, b.start) == (first, begin)
        assert b.last > b.first
        assert b.end == ends[b.last - 1]
        assert b.nbytes <= bucket or b.last == b.first + 1
        first, begin = b.last, b.end
    assert (first, begin) == (len(shapes), shard.nbytes)


def test_buckets_double_at_the_beginning_and_halve_at_the_end():
    def sizes(n_tensors, bucket_kib):
        shapes = [(str(i), (1, 256)) for i in range(n_tensors)]
        shard = make_layout(spec(), "float32", {0: shapes}, {}).shards[0]
        return [b.nbytes // 1024 for b in plan_buckets(shard, bucket_kib * 1024)]

    assert sizes(88, 16) == [4, 8, 16, 16, 16, 16, 8, 4]
    assert sizes(30, 16) == [4, 14, 8, 4]
    assert sizes(13, 16) == [4, 5, 4]
    assert sizes(3, 16) == [3]
    one = make_layout(spec(), "float32", {0: [("x", (64, 256))]}, {}).shards[0]
    assert [b.nbytes // 1024 for b in plan_buckets(one, 16 * 1024)] == [64]


@pytest.mark.parametrize(
    ("owned", "dtype", "aliases", "reason"),
    [
        ({0: [("x", (1, 2))], 1: [("x", (1, 2))]}, "float32", {}, RefusalReason.DUPLICATE),
        ({0: [("x", (1, 2))]}, "float32", {"x": "x"}, RefusalReason.DUPLICATE),
        ({0: [("x", (1, 2))]}, "float32", {"y": "z"}, RefusalReason.UNKNOWN_TENSOR),
        ({0: []}, "float64", {}, RefusalReason.DTYPE),
    ],
)
def test_wrong_parts_are_refused(owned, dtype, aliases, reason):
    with pytest.raises(ManifestError) as e:
        make_layout(spec(), dtype, owned, aliases)
    assert e.value.reason == reason


def test_everything_that_matters_changes_the_digest():
    owned, aliases = share(values(0))
    digests = {
        layout_of(owned, aliases).digest,
        layout_of(owned, aliases, dtype="bfloat16").digest,
        layout_of(owned, aliases, s=spec(alpha=1.0)).digest,
        layout_of(owned[::-1], aliases).digest,
        layout_of(owned, aliases, source=1).digest,
    }
    assert len(digests) == 5
    assert layout_of(owned, aliases).digest in digests
