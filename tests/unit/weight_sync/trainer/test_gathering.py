"""Ranks of one place send as one source: what is sent, by real ranks with gloo."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.errors import PublishError
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import adapter_digest
from areal_lora.weight_sync.trainer.gathering import LAYOUTS, PlaceGather, by_place
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.distributed import gather_ranks
from tests.support.distributed.spawn import run_ranks
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import KEYS, layout_of, ref, share, spec, values

OWNED, ALIASES = share(values(1))
TENSORS = dict(OWNED)
PLACES = [3, 3, 0, 0, 0]
OWNERS = {0: (0, 9), 1: (9, 20), 3: (20, 21), 4: (21, len(OWNED))}
"""Of each owner the first and the end of its tensors; rank 2 owns none."""


def owned_by(owners: dict[int, tuple[int, int]], dtype: str = "float32"):
    shapes = {rank: [(n, tuple(t.shape)) for n, t in OWNED[a:b]] for rank, (a, b) in owners.items()}
    named = {n for tensors in shapes.values() for n, _ in tensors}
    return make_layout(spec(), dtype, shapes, {a: n for a, n in ALIASES.items() if n in named})


def test_the_first_owner_of_a_place_sends_the_tensors_of_all_in_their_order() -> None:
    owned = owned_by(OWNERS)
    sent = by_place(owned, PLACES)
    assert [shard.source for shard in sent.shards] == [0, 3]
    assert [[t.name for t in shard.tensors] for shard in sent.shards] == [
        [n for n, _ in OWNED[:20]],
        [n for n, _ in OWNED[20:]],
    ]
    for shard in sent.shards:
        sizes = [TENSORS[t.name].numel() * 4 for t in shard.tensors]
        assert [t.offset for t in shard.tensors] == [sum(sizes[:i]) for i in range(len(sizes))]
        assert shard.nbytes == sum(sizes)
    assert (sent.aliases, sent.nbytes, sent.names_digest) == (owned.aliases, owned.nbytes, owned.names_digest)
    assert by_place(owned, range(5)) == owned, "each rank is a place"


def test_gathered_shards_have_the_bytes_and_fingerprints_of_one_source(tmp_path) -> None:
    """Uneven parts, a rank without tensors, an adapter that one rank owns, bfloat16; then a pack that fails."""
    layouts = [owned_by(OWNERS), owned_by({1: (0, 5), 4: (5, 9)}), owned_by(OWNERS, "bfloat16"), owned_by(OWNERS)]
    given = {n: t.numpy() for n, t in OWNED}
    ranks = run_ranks(gather_ranks.gathered, 5, tmp_path, (layouts, PLACES, given, 4))
    for i, layout in enumerate(layouts[:-1]):
        sent = by_place(layout, PLACES)
        sources = {shard.source: shard for shard in sent.shards}
        sums = []
        for rank, (digest, steps, flat, fingerprints) in enumerate(found[i] for found in ranks):
            assert digest == sent.digest
            if rank not in sources:
                assert (steps, flat) == ([], b"")
                continue
            tensors, dtype = sources[rank].tensors, getattr(torch, layout.dtype)
            want = torch.cat([TENSORS[t.name].to(dtype).reshape(-1) for t in tensors])
            assert flat == want.view(torch.uint8).numpy().tobytes()
            assert (steps, steps[-1]) == (sorted(set(steps)), len(tensors))
            alone = PackedShard(sent, rank, KEYS)
            alone.pack(ref(0), pack_of(sent, rank, TENSORS))
            assert fingerprints == alone.sums.tobytes()
            sums.append(alone.sum)
        named = {t.name for shard in sent.shards for t in shard.tensors}
        one = layout_of([(n, t) for n, t in OWNED if n in named], sent.aliases, dtype=layout.dtype)
        single = PackedShard(one, 0, KEYS)
        single.pack(ref(0), pack_of(one, 0, TENSORS))
        assert adapter_digest(sent, sums) == adapter_digest(one, [single.sum])
    *others, failed = [found[-1] for found in ranks]
    assert failed[2] == b"no tensor"
    (a, b), sent = OWNERS[4], np.frombuffer(others[3][2], dtype=np.float32)
    n_sent = sum(t.numel() for _, t in OWNED[a:b])
    assert np.isnan(sent[-n_sent:]).all(), "servers refuse what was not packed"
    assert np.isfinite(sent[:-n_sent]).all()
    assert [steps[-1] if steps else 0 for _, steps, _, _ in others] == [20, 0, 0, len(OWNED) - 20], "none waits"


def test_a_layout_is_made_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.new_subgroups_by_enumeration", lambda members: (None, []))
    gather = PlaceGather(PLACES, 2, torch.device("cpu"))
    layouts = [owned_by({1: (0, n), 3: (n, len(OWNED))}) for n in range(1, LAYOUTS + 2)]
    sent = [gather.of(layout, pack_of(layout, 2, {}))[0] for layout in layouts]
    again = [gather.of(layout, pack_of(layout, 2, {}))[0] for layout in reversed(layouts)]
    assert [a is b for a, b in zip(reversed(again), sent, strict=True)] == [False] + [True] * LAYOUTS
    assert again[-1] == sent[0]


def test_a_pack_that_ends_early_is_an_error() -> None:
    shard = PackedShard(by_place(owned_by(OWNERS), PLACES), 0, KEYS)
    with pytest.raises(PublishError, match="packed 9 of 20 tensors"):
        shard.pack(ref(0), pack_of(owned_by(OWNERS), 0, TENSORS))
    assert np.all(shard.sums[9:] == 0)
