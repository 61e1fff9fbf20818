from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_lora.errors import PublishError
from areal_lora.weight_sync.link import same_host
from areal_lora.weight_sync.link.same_host import NO_CARD, SIGNAL_BYTES, MappedSegment, SharedSegment, Signal, readable
from tests.support import shared_memory

CPU = torch.device("cpu")
CHILD = """
import sys, torch
from areal_lora.weight_sync.link.same_host import SharedSegment
segment = SharedSegment(10_000, torch.device("cpu"))
segment.bytes[:] = 3
segment.renew()
print(segment.card().hex(), flush=True)
sys.stdin.read()
"""


def segment_of(nbytes=5000):
    segment = SharedSegment(nbytes, CPU)
    segment.bytes[:] = np.arange(nbytes) % 251
    return segment


def test_a_window_shows_what_the_segment_holds_and_cannot_change_it():
    segment = segment_of()
    view = MappedSegment(segment.signal()).view(100, 2100)
    np.testing.assert_array_equal(view, segment.bytes[100:2100])
    segment.bytes[100] = 255
    assert view[0] == 255
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert segment.bytes.ctypes.data % 4096 == 0


def test_a_new_version_shows_in_the_generation_and_nothing_of_it_is_ready():
    segment = segment_of()
    signal = segment.signal()
    window = MappedSegment(signal)
    segment.advance(77)
    assert (window.generation, window.ready) == (signal.generation, 77)
    segment.renew()
    assert (window.generation, window.ready) == (signal.generation + 1, 0)
    assert segment.signal().generation == signal.generation + 1


@pytest.mark.parametrize(("begin", "end"), [(4000, 5001), (5000, 5001), (1 << 40, (1 << 40) + 8), (0, 1 << 40)])
def test_a_part_that_leaves_the_segment_is_refused(begin, end):
    segment = segment_of()
    with pytest.raises(PublishError, match="5000"):
        MappedSegment(segment.signal()).view(begin, end)


def test_a_segment_never_becomes_shorter_under_its_readers():
    segment = segment_of()
    with pytest.raises(PermissionError):
        os.ftruncate(segment.signal().fd, 10)


def test_a_signal_survives_the_wire():
    signal = Signal(4_000_000, 17, 2**64 - 1, bytes(range(16)))
    assert len(signal.encode()) == SIGNAL_BYTES
    assert Signal.decode(signal.encode()) == signal


def test_memory_for_a_device_is_nobody_elses(monkeypatch):
    monkeypatch.setattr(same_host, "host_buffer", lambda nbytes, device: np.zeros(nbytes, dtype=np.uint8))
    segment = SharedSegment(100, torch.device("cuda"))
    segment.renew()
    assert len(segment.bytes) == 100
    assert not segment.shared
    with pytest.raises(PublishError, match="private"):
        segment.signal()


def test_a_system_that_refuses_memfds_gets_private_memory(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(same_host.os, "memfd_create", refuse)
    segment = segment_of()
    segment.renew()
    segment.advance(100)
    assert not segment.shared
    assert len(segment.bytes) == 5000


def test_another_process_is_read_until_it_is_killed_and_leaves_nothing():
    before = shared_memory.names()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    card = bytes.fromhex(child.stdout.readline())
    assert readable(card)
    signal = Signal.decode(card[-SIGNAL_BYTES:])
    assert signal.pid == child.pid
    window = MappedSegment(signal)
    child.kill()
    child.wait()
    assert (window.view(0, 10_000) == 3).all()
    assert not readable(card)
    assert not {name for name in shared_memory.left_behind(before) if "areal" in name}


def opened(monkeypatch):
    """Paths that are opened from now on."""
    paths, really = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *args: (paths.append(str(path)), really(path, *args))[1])
    return paths


def test_no_card_is_readable():
    segment = segment_of()
    card = segment.card()
    assert readable(card)
    assert not readable(NO_CARD)
    assert not readable(card[:-1] + bytes([card[-1] ^ 1]))
    del segment
    assert not readable(card)


@pytest.mark.parametrize("what", ["boot", "namespace"])
def test_of_another_machine_or_container_nothing_is_opened(monkeypatch, what):
    segment = segment_of()
    card = segment.card()
    read, link = Path.read_bytes, os.readlink
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + (b"other" if what == "boot" else b""))
    monkeypatch.setattr(os, "readlink", lambda p: "pid:[1]" if what == "namespace" and "/ns/" in str(p) else link(p))
    paths = opened(monkeypatch)
    assert not readable(card)
    assert paths == []


def test_where_the_place_cannot_be_told_nothing_is_shared(monkeypatch):
    def unreadable(path):
        raise PermissionError(13, "no /proc here", str(path))

    segment = segment_of()
    monkeypatch.setattr(Path, "read_bytes", unreadable)
    assert not readable(segment.card())


@pytest.mark.parametrize("kind", ["fifo", "another segment", "nothing"])
def test_a_descriptor_that_means_something_else_is_not_opened(monkeypatch, tmp_path, kind):
    segment, other = segment_of(), segment_of()
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    fd = {"fifo": fifo, "another segment": other.signal().fd, "nothing": 9999}[kind]
    card = segment.card()[:16] + segment.signal()._replace(fd=fd).encode()
    paths = opened(monkeypatch)
    assert not readable(card)
    assert paths == []
    assert readable(segment.card())
    os.close(fifo)


def test_no_other_program_inherits_the_memory():
    segment = segment_of()
    assert fcntl.fcntl(segment.signal().fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
