from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from areal_lora.errors import PublishError
from areal_lora.weight_sync.inbox import RING, Ring, RingInbox, WindowInbox, Windows
from areal_lora.weight_sync.reception import Clock, Reception
from areal_lora.weight_sync.same_host import Segment
from areal_lora.weight_sync.wire import LayoutTables, adapter_digest

from .helpers import BUCKET_BYTES, packed, ref, share, values

CPU = torch.device("cpu")


class Line:
    """Takes the place of a group's broadcasts: ``sent`` arrives, in order, when it is waited for."""

    def __init__(self, sent=()):
        self.sent, self.posted = list(sent), 0

    def start(self, flat):
        line, index, self.posted = self, self.posted, self.posted + 1

        class Work:
            def wait(self):
                flat[:] = torch.frombuffer(bytearray(line.sent[index]), dtype=torch.uint8)

        return Work()


def test_a_ring_posts_ahead_what_it_has_buffers_for_and_reuses_each_after_its_turn():
    line = Line(bytes([i]) * (10 + i) for i in range(7))
    inbox = RingInbox(Ring(CPU), [10 + i for i in range(7)], line.start)
    for i in range(7):
        assert line.posted == min(RING + max(i - 1, 0), 7)
        part = inbox.take()
        assert part.tobytes() == line.sent[i]
    inbox.finish()


def signals(segment, *sizes):
    ends = np.cumsum(sizes)
    return [segment.signal(int(end) - n, n).encode() for end, n in zip(ends, sizes, strict=True)]


def segment_of(nbytes=100):
    segment = Segment(nbytes, CPU)
    segment.bytes[:] = np.arange(nbytes)
    return segment


def test_parts_lie_where_the_signals_say_until_the_next_version():
    segment = segment_of()
    line = Line(signals(segment, 10, 60, 30))
    inbox = WindowInbox(Windows(), [10, 60, 30], line.start)
    assert line.posted == 3
    assert [inbox.take().tobytes() for _ in range(3)] == [bytes(range(10)), bytes(range(10, 70)), bytes(range(70, 100))]
    inbox.finish()
    segment.renew()
    with pytest.raises(PublishError, match="another version"):
        inbox.finish()


def test_a_version_that_is_gone_already_is_not_begun():
    segment = segment_of()
    inbox = WindowInbox(Windows(), [10], Line(signals(segment, 10)).start)
    segment.renew()
    with pytest.raises(PublishError, match="another version"):
        inbox.take()


@pytest.mark.parametrize("wrong", ["size", "generation", "segment"])
def test_parts_that_do_not_belong_together_are_refused(wrong):
    segment, other = segment_of(), segment_of()
    sent = signals(segment, 10, 60)
    if wrong == "size":
        sent[1] = segment.signal(10, 59).encode()
    if wrong == "generation":
        segment.renew()
        sent[1] = segment.signal(10, 60).encode()
    if wrong == "segment":
        sent[1] = other.signal(10, 60).encode()
    inbox = WindowInbox(Windows(), [10, 60], Line(sent).start)
    with pytest.raises(PublishError):
        [inbox.take() for _ in range(2)]


def test_the_memory_of_a_source_that_has_ended_is_an_error():
    segment = segment_of()
    inbox = WindowInbox(Windows(), [10], Line(signals(segment, 10)).start)
    del segment
    with pytest.raises(PublishError, match="no longer be read"):
        inbox.take()


class Lent:
    """An inbox over a shard's memory, whose owner does something when it is told that all was read."""

    def __init__(self, shard, sizes, at_end):
        self._memory = shard._segment.bytes.copy()
        ends = np.cumsum(sizes[:-1])
        self._parts = [self._memory[e - n : e] for e, n in zip(ends, sizes[:-1], strict=True)]
        self._parts.append(self._memory[len(self._memory) - sizes[-1] :])
        self._at_end = at_end

    def take(self):
        return self._parts.pop(0)

    def finish(self):
        assert not self._parts
        self._at_end(self._memory)


class Group:
    """Takes the place of a ``BroadcastGroup`` that gives memory which is not the receiver's own."""

    source, bucket_bytes = 0, BUCKET_BYTES

    def __init__(self, shard, at_end):
        self._shard, self._at_end = shard, at_end

    def receive(self, sizes, deadline):
        return Lent(self._shard, sizes, self._at_end)


def received(at_end):
    shard, _ = packed(*share(values(1)))
    tables = LayoutTables(shard.layout)
    reception = Reception(tables, {0: Group(shard, at_end)}, time.monotonic() + 5, Clock())

    def on_bucket(index, base, first, last, marks):
        marks.measure(base, first, last)

    return reception.receive(ref(0), on_bucket), adapter_digest(shard.layout, [shard.sum])


def test_a_version_is_judged_by_what_was_read_before_the_last_look():
    got, want = received(lambda memory: memory.fill(7))
    assert got == want


def test_memory_that_changed_before_the_last_look_is_refused():
    def changed(memory):
        raise PublishError("another version")

    with pytest.raises(PublishError, match="another version"):
        received(changed)
