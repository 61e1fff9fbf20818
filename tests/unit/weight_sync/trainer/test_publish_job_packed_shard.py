from __future__ import annotations

import hashlib
import itertools
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_lora.errors import PublishError
from areal_lora.weight_sync.link.backends import Backend
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup
from areal_lora.weight_sync.link.same_host import MappedSegment
from areal_lora.weight_sync.manifest import masked, seal, trailer_part
from areal_lora.weight_sync.messages import SourceEndpoint
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.clocks import wait_until
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import BUCKET_BYTES, KEYS, layout_of, packed, ref, share, values
from tests.support.weight_sync.recorded_lane import RecordedLane


class Line:
    """Takes the place of a group: keeps what is sent, and when."""

    def __init__(self):
        self.sent, self.bucket_bytes, self.same_host, self.on_device = [], BUCKET_BYTES, False, False

    def start(self, flat, deadline):
        self.sent.append(flat.clone())
        return self

    def wait(self):
        pass


def test_the_wire_carries_the_tensors_then_their_fingerprints_and_the_seal():
    full = values(1)
    owned, aliases = share(full)
    shard, _ = packed(owned, aliases, version=3)
    line = Line()
    shard.send(line, time.monotonic() + 120)
    *buckets, trailer = line.sent
    assert all(b.numel() <= BUCKET_BYTES for b in buckets)
    sent = torch.cat(buckets).view(torch.float32)
    assert torch.equal(sent, torch.cat([t.reshape(-1) for _, t in owned]))
    sealed = trailer[-16:].numpy().tobytes()
    stream = int.from_bytes(hashlib.shake_256(KEYS.mask + sealed).digest(trailer.numel() - 16), "little")
    fingerprints = int.from_bytes(trailer[:-16].numpy().tobytes(), "little") ^ stream
    assert fingerprints.to_bytes(trailer.numel() - 16, "little") == shard.sums.tobytes()
    assert sealed == seal(ref(3), shard.layout.digest, shard.sum, KEYS.seal)
    assert seal(ref(4), shard.layout.digest, shard.sum, KEYS.seal) != sealed
    assert seal(ref(3), shard.layout.digest, shard.sum, bytes(32)) != sealed


def test_a_bucket_is_sent_as_soon_as_it_is_packed():
    owned, aliases = share(values(1))
    layout = layout_of(owned, aliases)
    shard, line, go = PackedShard(layout, 0, KEYS), Line(), threading.Event()

    def slowly(flat):
        steps = list(pack_of(layout, 0, dict(owned))(flat))
        yield steps[len(steps) // 2]
        assert go.wait(120)
        yield steps[-1]

    sender = threading.Thread(target=shard.send, args=(line, time.monotonic() + 120))
    packer = threading.Thread(target=shard.pack, args=(ref(0), slowly))
    sender.start()
    packer.start()
    wait_until(lambda: len(line.sent) >= 3)
    before = len(line.sent)
    go.set()
    packer.join()
    sender.join()
    assert 3 <= before < len(line.sent)


class LateLibrary:
    """A library of a device: it reads a buffer when it is asked for the end of that broadcast for the second time."""

    def __init__(self):
        self.read = []

    def broadcast(self, tensors, options):
        asked = itertools.count()
        return SimpleNamespace(is_completed=lambda: self._ended(tensors[0], next(asked)), exception=lambda: None)

    def _ended(self, tensor, asked):
        if asked == 1:
            self.read.append(tensor.clone())
        return asked > 0

    def abort(self):
        pass


class CountedLane(RecordedLane):
    """Counts the bytes that it allocates; copies at once, whichever thread asks for it."""

    allocated = 0

    def copy(self, target, source):
        target.copy_(source)

    def twin(self, host):
        self.allocated += host.nbytes
        return super().twin(host)


def test_a_source_of_host_memory_has_a_few_buckets_on_the_device_and_sends_all_bytes():
    """Two versions, of 40 buckets and more each: a bucket's memory is used again once the library has read it."""
    owned, aliases = share(values(1, layers=12))
    shard, _ = packed(owned, aliases, version=3)
    lane, library = CountedLane([], CPU), LateLibrary()
    endpoint = SourceEndpoint(
        source=0, host="127.0.0.1", port=1, world=2, token="t", bucket_bytes=BUCKET_BYTES, backend="late"
    )
    group = BroadcastGroup(endpoint, 0, Backend(library, lane), CPU, leave=lambda: None)
    with closing(group):
        for _ in range(2):
            library.read.clear()
            shard.send(group, time.monotonic() + 120)
            *buckets, trailer = library.read
            assert len(buckets) > 40
            assert torch.equal(torch.cat(buckets).view(torch.float32), torch.cat([t.reshape(-1) for _, t in owned]))
            assert trailer[-16:].numpy().tobytes() == seal(ref(3), shard.layout.digest, shard.sum, KEYS.seal)
    # Memory that is too small for a later part is allocated again.
    largest = max(BUCKET_BYTES, trailer.numel())
    assert sum(bucket.numel() for bucket in buckets) > 20 * largest
    assert lane.allocated <= 10 * largest


class Reader(Line):
    """Takes the place of a group whose receivers read the source's memory."""

    def __init__(self):
        super().__init__()
        self.same_host = True

    def signal(self, segment, deadline):
        self.sent.append(segment.signal())
        return self


def test_receivers_on_this_machine_are_told_twice_and_see_how_far_packing_is():
    owned, aliases = share(values(1))
    layout = layout_of(owned, aliases)
    shard, reader, go, half = PackedShard(layout, 0, KEYS), Reader(), threading.Event(), threading.Event()
    tensors = layout.shards[0].tensors
    middle = len(tensors) // 2

    def slowly(flat):
        steps = list(pack_of(layout, 0, dict(owned))(flat))
        yield steps[middle - 1]
        half.set()
        assert go.wait(120)
        yield steps[-1]

    shard.reset()
    sender = threading.Thread(target=shard.send, args=(reader, time.monotonic() + 120))
    packer = threading.Thread(target=shard.pack, args=(ref(0), slowly))
    sender.start()
    packer.start()
    assert half.wait(120)
    window = MappedSegment(shard._segment.signal())
    assert window.ready == tensors[middle].offset
    assert reader.sent == [shard._segment.signal()]
    go.set()
    packer.join()
    sender.join()
    begin, end = trailer_part(layout.shards[0])
    assert window.ready == end
    trailer = window.view(begin, end)
    assert (
        masked(trailer[:-16].copy().view(np.uint64), trailer[-16:].tobytes(), KEYS.mask).tolist() == shard.sums.tolist()
    )
    assert reader.sent == [shard._segment.signal()] * 2
    shard.reset()
    assert (window.ready, window.generation) == (0, reader.sent[0].generation + 1)


def test_a_failed_pack_ends_the_send_at_once_and_the_shard_can_be_packed_again():
    owned, aliases = share(values(1))
    layout = layout_of(owned, aliases)
    shard, errors = PackedShard(layout, 0, KEYS), []

    def broken(flat):
        yield 1
        raise IndexError("engine says no")

    def send():
        try:
            shard.send(Line(), time.monotonic() + 120)
        except PublishError as e:
            errors.append(e)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(IndexError):
        shard.pack(ref(0), broken)
    sender.join(120)
    assert "packing failed" in str(errors[0])
    shard.reset()
    with pytest.raises(PublishError, match="of this rank"):
        shard.pack(ref(0), lambda flat: iter([1]))
    shard.reset()
    with pytest.raises(PublishError, match="deadline"):
        shard.send(Line(), time.monotonic() + 0.05)
    shard.pack(ref(0), pack_of(layout, 0, dict(owned)))
    shard.send(Line(), time.monotonic() + 120)


def test_a_rank_that_owns_nothing_packs_nothing_but_takes_part():
    owned, aliases = share(values(3))
    shard = PackedShard(layout_of(owned, aliases), 5, KEYS)
    seen = []
    shard.pack(ref(0), lambda flat: seen.append(flat.numel()) or iter([0]))
    assert seen == [0]
    assert not shard.is_source
    assert isinstance(shard.sums, np.ndarray)
