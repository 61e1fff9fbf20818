"""Every fault is refused with its reason, no slot keeps anything of it, and the next good version goes through."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from areal_lora.distributed.store import CurveStore
from areal_lora.errors import ManifestError, PublishError, RefusalReason
from areal_lora.weight_sync.link import broadcast_groups, same_host
from areal_lora.weight_sync.link.broadcast_groups import GroupListener
from areal_lora.weight_sync.manifest import adapter_digest, shard_keys
from areal_lora.weight_sync.server.receiver import AdapterReceiver
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.weight_sync import SOCKETS
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import (
    BASE,
    BUCKET_BYTES,
    RUN,
    SECRET,
    announce,
    packed,
    ref,
    shapes_of,
    share,
    spec,
    values,
)
from tests.support.weight_sync.memory_writer import MemoryWriter

pytestmark = pytest.mark.slow
LONG_S = 150.0
LORA_B = "model.layers.1.mlp.experts.2.up_proj.lora_B.weight"


@pytest.fixture(scope="module", params=["gloo", SOCKETS])
def backend(request):
    """The receiver reads the source's memory, or gets the bytes as between machines."""
    return request.param


class Bench:
    """One source and one receiver in this process, on a real gloo group."""

    def __init__(self, backend, shares=True, **options):
        self.backend, self.shares = backend, shares and backend == "gloo"
        self.writer = MemoryWriter(shapes_of)
        self.results = queue.Queue()
        self.receiver = AdapterReceiver(
            self.writer, run=RUN, secret=SECRET, base_digest=BASE, on_staged=self.results.put, **options
        )
        self.connect()

    def connect(self):
        listener = GroupListener(
            source=0,
            bind="127.0.0.1",
            receivers=["a worker"],
            bucket_bytes=BUCKET_BYTES,
            backend=self.backend,
            timeout_s=LONG_S,
            secret=SECRET,
        )
        thread = threading.Thread(target=self.receiver.join, args=([listener.endpoint], 1, LONG_S))
        thread.start()
        self.group = listener.accept()
        thread.join()
        assert self.group.same_host == self.shares

    def send(self, shard, announcement, slot=0, timeout_s=LONG_S):
        self.receiver.start(announcement.manifest, announcement.layout, slot, timeout_s)
        shard.send(self.group, time.monotonic() + timeout_s)
        return self.results.get(timeout=timeout_s)

    def good(self, version, slot=1, seed=9):
        full = values(seed)
        owned, aliases = share(full)
        shard, announcement = packed(owned, aliases, version=version)
        result = self.send(shard, announcement, slot)
        assert result.ok, result
        assert result.digest == adapter_digest(shard.layout, [shard.sum])
        assert self.writer.slots[slot].keys() == full.keys()
        for name, want in full.items():
            scale = 2.0 if ".lora_B." in name else 1.0
            np.testing.assert_array_equal(self.writer.slots[slot][name], want.numpy() * np.float32(scale), err_msg=name)

    def close(self):
        self.group.close()
        self.receiver.close()


@pytest.fixture(scope="module")
def shared_bench(backend):
    bench = Bench(backend, declared={"a": spec()})
    bench.version = 0
    yield bench
    bench.close()


@pytest.fixture
def bench(shared_bench):
    shared_bench.writer.touched.clear()
    return shared_bench


def tampered(shard, change):
    """``shard`` with its packed bytes changed by ``change(flat, place by name)`` behind its fingerprints' back."""
    change(
        shard.flat.numpy(), {t.name: slice(t.offset, t.offset + 4 * int(np.prod(t.shape))) for t in shard.shard.tensors}
    )
    return shard


def flip(flat, places):
    flat[places[LORA_B].stop - 1] ^= 1


def swap(flat, places):
    up, gate = places[LORA_B], places[LORA_B.replace("up", "gate")]
    kept = flat[up].copy()
    flat[up] = flat[gate]
    flat[gate] = kept


def renamed(full, old, new):
    return {new if n == old else n: t for n, t in full.items()}


WRITTEN = {"flipped bit", "swapped gate and up", "NaN", "trailer of another version"}  # seen after the slot was filled


def faulty(kind, version):
    """(packed shard, announcement, reason) of one broken publish."""
    full = values(5)
    owned, aliases = share(full)
    make = {"version": version}
    if kind in ("flipped bit", "swapped gate and up"):
        shard, announcement = packed(owned, aliases, **make)
        return tampered(shard, flip if kind == "flipped bit" else swap), announcement, RefusalReason.HASH
    if kind == "NaN":
        full[LORA_B][0, 0] = float("nan")
        return *packed(owned, aliases, **make), RefusalReason.NON_FINITE
    if kind == "trailer of another version":
        shard, _ = packed(owned, aliases, version=version + 1)
        return shard, announce(shard.layout, version=version), RefusalReason.HASH
    if kind == "missing layer":
        kept = [(n, t) for n, t in owned if ".layers.1." not in n]
        aliases = {a: w for a, w in aliases.items() if ".layers.1." not in a}
        return *packed(kept, aliases, **make), RefusalReason.MISSING_TENSOR
    if kind == "missing expert":
        return *packed([(n, t) for n, t in owned if n != LORA_B], aliases, **make), RefusalReason.MISSING_TENSOR
    if kind == "wrong alpha":
        return *packed(owned, aliases, s=spec(alpha=16.0), **make), RefusalReason.ALPHA
    if kind == "wrong targets":
        return *packed(owned, aliases, s=spec(targets=("linear_qkv",)), **make), RefusalReason.TARGETS
    if kind == "wrong shape":
        full[LORA_B] = full[LORA_B].t().contiguous()
        return *packed([(n, full[n]) for n, _ in owned], aliases, **make), RefusalReason.SHAPE
    if kind == "tensors of rank + 1":
        return *packed(share(values(5, rank=5))[0], aliases, **make), RefusalReason.RANK
    if kind == "all of rank + 1":
        return *packed(share(values(5, rank=5))[0], aliases, s=spec(rank=5), **make), RefusalReason.RANK
    if kind == "file prefix":
        other = renamed(dict(owned), LORA_B, "base_model.model." + LORA_B)
        return *packed(list(other.items()), aliases, **make), RefusalReason.PREFIX
    if kind == "unknown tensor":
        other = renamed(dict(owned), LORA_B, LORA_B.replace("experts.2", "experts.200"))
        return *packed(list(other.items()), aliases, **make), RefusalReason.UNKNOWN_TENSOR
    if kind == "other run":
        return *packed(owned, aliases, run="run-2", **make), RefusalReason.WRONG_RUN
    if kind == "other base":
        return *packed(owned, aliases, base="other", **make), RefusalReason.WRONG_BASE
    if kind == "replay":
        return *packed(owned, aliases, version=version - 1), RefusalReason.DUPLICATE
    assert kind == "older"
    return *packed(owned, aliases, version=version - 2), RefusalReason.STALE_VERSION


@pytest.mark.parametrize(
    "kind",
    [
        "flipped bit",
        "swapped gate and up",
        "NaN",
        "trailer of another version",
        "missing layer",
        "missing expert",
        "wrong alpha",
        "wrong targets",
        "wrong shape",
        "tensors of rank + 1",
        "all of rank + 1",
        "file prefix",
        "unknown tensor",
        "other run",
        "other base",
        "replay",
        "older",
    ],
)
def test_a_broken_publish_is_refused_and_leaves_nothing(bench, kind):
    bench.good(bench.version)
    bench.good(bench.version + 1)
    bench.version += 2
    bench.writer.touched.clear()
    shard, announcement, reason = faulty(kind, bench.version)
    result = bench.send(shard, announcement, slot=2)
    assert (result.ok, result.reason, result.digest) == (False, reason, ""), result
    assert result.detail
    assert bench.writer.touched == ({2} if kind in WRITTEN else set())
    assert not bench.writer.slots.get(2)
    bench.good(bench.version)  # the group is still in step and the version was not burnt
    bench.version += 1


def test_a_known_layout_need_not_come_again_and_an_unknown_one_is_refused(backend):
    bench = Bench(backend)
    owned, aliases = share(values(1))
    shard, announcement = packed(owned, aliases)
    bench.receiver.start(announce(shard.layout, known=True).manifest, None, 0, LONG_S)
    assert bench.results.get(timeout=LONG_S).reason == RefusalReason.UNKNOWN_LAYOUT
    bench.connect()  # it left: how the bytes of an unknown layout are cut is not known
    assert bench.send(shard, announcement).ok
    shard, _ = packed(owned, aliases, version=1)
    assert bench.send(shard, announce(shard.layout, version=1, known=True)).ok
    wrong = announce(shard.layout, version=2)
    other = packed(owned, aliases, s=spec(alpha=2.0))[0].layout
    bench.receiver.start(wrong.manifest, other, 0, LONG_S)
    assert bench.results.get(timeout=LONG_S).reason == RefusalReason.MALFORMED
    bench.close()


def test_without_a_slot_the_transfer_is_drained_and_refused(bench):
    shard, announcement = packed(*share(values(1)), version=bench.version)
    result = bench.send(shard, announcement, slot=None)
    assert (result.ok, result.reason, result.slot) == (False, RefusalReason.SLOT, -1)
    bench.good(bench.version)
    bench.version += 1


def test_a_discarded_version_may_come_again(bench):
    bench.good(bench.version)
    bench.receiver.discard(ref(bench.version))
    bench.good(bench.version)
    bench.version += 1


def test_the_first_version_declares_the_adapter_if_the_configuration_did_not(backend):
    bench = Bench(backend)
    bench.good(0)
    result = bench.send(*packed(*share(values(1)), version=1, s=spec(alpha=4.0)))
    assert result.reason == RefusalReason.ALPHA
    bench.close()


def test_a_writer_that_fails_leaves_no_half_written_slot(backend):
    bench = Bench(backend)
    calls = []

    def failing():
        calls.append(1)
        if len(calls) == 3:
            raise IndexError("engine says no")

    bench.writer.on_write = failing
    result = bench.send(*packed(*share(values(1))))
    assert (result.ok, result.reason) == (False, RefusalReason.WRITE)
    assert "engine says no" in result.detail
    assert bench.writer.slots[0] == {}
    bench.close()


def test_an_engine_that_cannot_serve_the_rank_refuses(backend):
    bench = Bench(backend)

    def expected(s):
        raise ManifestError(RefusalReason.RANK, f"rank {s.rank} is above max_lora_rank 2")

    bench.writer.expected = expected
    assert bench.send(*packed(*share(values(1)))).reason == RefusalReason.RANK
    bench.close()


def test_a_source_that_stays_silent_is_reported_at_the_deadline_and_rejoining_works(backend):
    bench = Bench(backend)
    _, announcement = packed(*share(values(1)))
    bench.receiver.start(announcement.manifest, announcement.layout, 0, LONG_S)
    with pytest.raises(PublishError, match="busy"):
        bench.receiver.start(announcement.manifest, announcement.layout, 1, LONG_S)
    bench.group.close()
    assert bench.results.get(timeout=LONG_S).reason == RefusalReason.WIRE
    bench.connect()
    began = time.monotonic()
    bench.receiver.start(announcement.manifest, announcement.layout, 0, 0.5)
    result = bench.results.get(timeout=LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert (result.ok, result.reason) == (False, RefusalReason.WIRE)
    assert not bench.writer.slots[0]
    bench.connect()
    bench.good(0)
    bench.close()


def test_where_memory_cannot_be_shared_the_bytes_are_sent(monkeypatch):
    monkeypatch.setattr(same_host, "_memfd", lambda name: -1)
    bench = Bench("gloo", shares=False)
    bench.good(0)
    bench.close()


def test_groups_that_were_left_are_let_go_while_nothing_is_staged(backend):
    bench = Bench(backend)
    bench.good(0)
    left = [weakref.ref(group) for group in bench.receiver._links.above.values()]
    bench.connect()
    deadline = time.monotonic() + LONG_S
    while any(group() is not None for group in left):
        assert time.monotonic() < deadline, "their memory and connections would stay"
        gc.collect()
        time.sleep(0.01)
    bench.close()


def test_a_shard_of_a_source_without_the_run_secret_is_refused(backend):
    """It knows all else: layout, version, formulas. The next version of the run is taken."""
    bench = Bench(backend)
    owned, aliases = share(values(1))
    right, announcement = packed(owned, aliases, version=0)
    forged = PackedShard(right.layout, 0, shard_keys("another secret"))
    forged.pack(ref(0), pack_of(right.layout, 0, dict(owned)))
    assert not (forged.sums == right.sums).any()
    result = bench.send(forged, announcement)
    assert (result.ok, result.reason) == (False, RefusalReason.HASH)
    bench.good(1)
    bench.close()


class SlowStores:
    """In place of ``CurveStore``: a receiver reaches no source before it is on the way to all ``n``."""

    def __init__(self, n):
        self.together = threading.Barrier(n, timeout=LONG_S)

    def __call__(self, *args):
        if threading.current_thread().name.startswith("join"):
            self.together.wait()
        return CurveStore(*args)


def listen(source, timeout_s=LONG_S):
    return GroupListener(
        source=source,
        bind="127.0.0.1",
        receivers=["worker 0 of server-0"],
        bucket_bytes=BUCKET_BYTES,
        backend="gloo",
        timeout_s=timeout_s,
        secret=SECRET,
    )


def test_the_groups_of_all_sources_are_formed_at_once_whatever_their_order(monkeypatch):
    monkeypatch.setattr(broadcast_groups, "CurveStore", SlowStores(4))
    receiver = AdapterReceiver(MemoryWriter(shapes_of), run=RUN, secret=SECRET, base_digest=BASE, on_staged=print)
    listeners = [listen(source) for source in (3, 0, 8, 5)]
    with ThreadPoolExecutor(len(listeners)) as pool:
        accepted = [pool.submit(listener.accept) for listener in listeners]
        receiver.join([listener.endpoint for listener in reversed(listeners)], 1, LONG_S)
        groups = [group.result() for group in accepted]
    assert set(receiver._links.above) == {0, 3, 5, 8}
    for group in groups:
        group.close()
    receiver.close()


def test_one_group_that_does_not_form_makes_a_receiver_leave_the_others():
    receiver = AdapterReceiver(MemoryWriter(shapes_of), run=RUN, secret=SECRET, base_digest=BASE, on_staged=print)
    good, gone = listen(0), listen(1)
    gone.close()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(good.accept)
        with pytest.raises(PublishError, match="source rank 1 cannot be reached"):
            receiver.join([good.endpoint, gone.endpoint], 1, LONG_S)
        group = accepted.result()
    assert receiver._links.above == {}
    group.close()


def test_begin_before_join_is_an_error():
    receiver = AdapterReceiver(MemoryWriter(shapes_of), run=RUN, secret=SECRET, base_digest=BASE, on_staged=print)
    with pytest.raises(PublishError, match="no group"):
        receiver.start(packed(*share(values(1)))[1].manifest, None, 0, 1.0)


def test_bfloat16_on_the_wire_reaches_the_writer_as_exact_float32(backend):
    bench = Bench(backend)
    full = values(3)
    result = bench.send(*packed(list(full.items()), dtype="bfloat16"), slot=0)
    assert result.ok
    for name, want in full.items():
        scale = np.float32(2.0 if ".lora_B." in name else 1.0)
        got = bench.writer.slots[0][name]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want.bfloat16().float().numpy() * scale)
    bench.close()


@pytest.mark.parametrize(
    ("backend", "when"), [("gloo", "between buckets"), ("gloo", "in the last bucket"), (SOCKETS, "in the last bucket")]
)
def test_bytes_that_changed_while_they_were_read_are_refused(backend, when):
    """A receiver that was given up goes on while the source already packs the next version.

    The last moment is the worst: fingerprints were taken before, and trailer and seal have not been touched yet.
    """
    bench = Bench(backend)
    full = values(1)
    shard, announcement = packed(list(full.items()))
    last = len(shard.shard.tensors)
    sent, packing, done = threading.Event(), threading.Event(), threading.Event()

    def next_version():
        shard.reset()
        shard.pack(ref(1), overwrite)

    def overwrite(flat):
        flat[:] = 7
        packing.set()
        assert done.wait(LONG_S)
        yield last

    def write(plan, slot, arrived, first, end, marks):
        marks.measure(arrived.base, first, end)
        if (first == 0 and when == "between buckets") or (end == last and when == "in the last bucket"):
            assert sent.wait(LONG_S)
            packer.start()
            assert packing.wait(LONG_S)
        plan.copy(arrived.base, bench.writer._images[slot].ctypes.data, tensors=(first, end))

    packer = threading.Thread(target=next_version)
    bench.writer.write = write
    bench.receiver.start(announcement.manifest, announcement.layout, 0, LONG_S)
    shard.send(bench.group, time.monotonic() + LONG_S)
    sent.set()
    result = bench.results.get(timeout=LONG_S)
    done.set()
    packer.join()
    if backend == SOCKETS:  # these bytes are the receiver's own
        assert result.ok
    else:
        assert (result.ok, result.reason) == (False, RefusalReason.WIRE)
        assert "another version" in result.detail
        assert bench.writer.slots[0] == {}
    del bench.writer.write
    bench.connect()
    bench.good(3)
    bench.close()


def test_a_shard_is_read_again_after_many_others(backend):
    """A source has a segment for each adapter: the first is still mapped after those of twenty others."""
    bench = Bench(backend)
    shards = [packed(*share(values(v)), version=v) for v in range(20)]
    for shard, announcement in shards:
        assert bench.send(shard, announcement).ok
    shard, announcement = shards[0]
    shard.reset()
    shard.pack(ref(99), pack_of(shard.layout, 0, dict(share(values(99))[0])))
    assert bench.send(shard, announce(shard.layout, version=99)).ok
    bench.close()
