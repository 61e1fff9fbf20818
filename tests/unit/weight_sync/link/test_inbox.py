from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from areal_lora.errors import PublishError
from areal_lora.obs.trace import Spans
from areal_lora.weight_sync.link.inbox import RING, Ring, RingInbox, WindowInbox, Windows
from areal_lora.weight_sync.link.same_host import SharedSegment
from areal_lora.weight_sync.manifest import adapter_digest
from areal_lora.weight_sync.server.reception import GroupLinks, Reception
from tests.support.weight_sync.helpers import BUCKET_BYTES, KEYS, packed, ref, share, values

CPU = torch.device("cpu")


class Line:
    """Takes the place of a group's broadcasts: what is in ``sent`` has arrived, what is not yet never will."""

    def __init__(self, sent=()):
        self.sent, self.posted = list(sent), 0

    def start(self, flat):
        line, index, self.posted = self, self.posted, self.posted + 1

        class Work:
            def done(self):
                return index < len(line.sent)

            def wait(self):
                if index >= len(line.sent) or line.sent[index] is None:
                    raise PublishError("the source is gone")
                flat[:] = torch.frombuffer(bytearray(line.sent[index]), dtype=torch.uint8)

        return Work()


def test_a_ring_posts_ahead_what_it_has_buffers_for_and_reuses_each_after_its_turn():
    line = Line(bytes([i]) * (10 + i) for i in range(7))
    inbox = RingInbox(Ring(CPU), [(0, 10 + i) for i in range(7)], line.start)
    for i in range(7):
        assert line.posted == min(RING + max(i - 1, 0), 7)
        assert inbox.take().tobytes() == line.sent[i]
    inbox.finish()


def segment_of(nbytes=100, ready=None):
    segment = SharedSegment(nbytes, CPU)
    segment.bytes[:] = np.arange(nbytes)
    segment.advance(nbytes if ready is None else ready)
    return segment


def window_inbox(line, *parts, seconds=120.0):
    return WindowInbox(Windows(), parts, line.start, time.monotonic() + seconds)


def test_parts_that_are_ready_are_read_with_the_first_signal_alone():
    segment = segment_of()
    line = Line([segment.signal().encode()])
    inbox = window_inbox(line, (0, 10), (10, 70), (70, 100))
    assert line.posted == 2
    assert [inbox.take().tobytes() for _ in range(3)] == [bytes(range(10)), bytes(range(10, 70)), bytes(range(70, 100))]
    inbox.finish()
    segment.renew()
    with pytest.raises(PublishError, match="another version"):
        inbox.finish()


def test_a_part_that_is_being_packed_is_waited_for():
    segment = segment_of(ready=10)
    inbox = window_inbox(Line([segment.signal().encode()]), (0, 10), (10, 100))
    inbox.take()
    began = time.monotonic()
    threading.Timer(0.2, segment.advance, [99]).start()
    threading.Timer(0.4, segment.advance, [100]).start()
    assert inbox.take().size == 90
    assert time.monotonic() - began > 0.3


def test_a_source_that_dies_while_it_packs_is_noticed_before_the_deadline():
    segment = segment_of(ready=10)
    line = Line([segment.signal().encode()])
    inbox = window_inbox(line, (0, 10), (10, 100), seconds=120)
    inbox.take()
    threading.Timer(0.2, line.sent.append, [None]).start()
    with pytest.raises(PublishError, match="gone"):
        inbox.take()


def test_a_source_that_never_gets_ready_is_waited_for_until_the_deadline():
    segment = segment_of(ready=10)
    began = time.monotonic()
    inbox = window_inbox(Line([segment.signal().encode()]), (0, 11), seconds=0.3)
    with pytest.raises(PublishError):
        inbox.take()
    assert time.monotonic() - began > 0.2


def test_a_receiver_that_is_late_reads_nothing_although_all_is_ready():
    inbox = window_inbox(Line([segment_of(ready=100).signal().encode()]), (0, 10), seconds=0.0)
    with pytest.raises(PublishError, match="abandoned"):
        inbox.take()


def test_a_version_that_is_gone_already_is_not_begun():
    segment = segment_of()
    inbox = window_inbox(Line([segment.signal().encode()]), (0, 10))
    segment.renew()
    segment.advance(100)
    with pytest.raises(PublishError, match="another version"):
        inbox.take()


def test_a_part_that_the_source_has_not_got_is_an_error():
    segment = segment_of(ready=200)
    with pytest.raises(PublishError, match="100 bytes"):
        window_inbox(Line([segment.signal().encode()]), (10, 101)).take()


def test_the_memory_of_a_source_that_has_ended_is_an_error():
    segment = segment_of()
    line = Line([segment.signal().encode()])
    del segment
    with pytest.raises(PublishError, match="no longer be read"):
        window_inbox(line, (0, 10)).take()


class Lent:
    """An inbox over a shard's memory, whose owner does something when it is told that all was read."""

    def __init__(self, shard, parts, at_end):
        self._memory = shard._segment.bytes.copy()
        self._parts, self._at_end = [self._memory[begin:end] for begin, end in parts], at_end

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

    def receive(self, parts, deadline, on_device):
        return Lent(self._shard, parts, self._at_end)


def received(at_end):
    shard, _ = packed(*share(values(1)))
    reception = Reception(shard.layout, GroupLinks({0: Group(shard, at_end)}), time.monotonic() + 120, Spans(), KEYS)

    def on_bucket(index, arrived, first, last, marks):
        marks.measure(arrived.base, first, last)

    return reception.receive(ref(0), on_bucket), adapter_digest(shard.layout, [shard.sum])


def test_a_version_is_judged_by_what_was_read_before_the_last_look():
    got, want = received(lambda memory: memory.fill(7))
    assert got == want


def test_memory_that_changed_before_the_last_look_is_refused():
    def changed(memory):
        raise PublishError("another version")

    with pytest.raises(PublishError, match="another version"):
        received(changed)
