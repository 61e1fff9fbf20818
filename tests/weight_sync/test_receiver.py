"""Every fault is refused with its reason, nothing is written, and the next good version goes through."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import numpy as np
import pytest

from areal_lora.errors import ManifestError, PublishError
from areal_lora.weight_sync.digests import manifest_digest, shard_digest
from areal_lora.weight_sync.groups import GroupListener
from areal_lora.weight_sync.manifest import Refusal
from areal_lora.weight_sync.receiver import AdapterReceiver
from areal_lora.weight_sync.testing import MemoryWriter

from .helpers import BASE, RUN, packed, ref, shapes_of, share, spec, values

pytestmark = pytest.mark.slow
LORA_B = "model.layers.1.mlp.experts.2.up_proj.lora_B.weight"


class Bench:
    """One source and one receiver in this process, on a real gloo group."""

    def __init__(self, **options):
        self.writer = MemoryWriter(shapes_of)
        self.results = queue.Queue()
        self.receiver = AdapterReceiver(
            self.writer, run=RUN, base_digest=BASE, on_staged=self.results.put, **options
        )
        self.connect()

    def connect(self):
        listener = GroupListener(
            source=0, bind="127.0.0.1", world=2, bucket_bytes=1024, backend="gloo", timeout_s=10.0
        )
        thread = threading.Thread(target=self.receiver.join, args=([listener.endpoint], 1, 10.0))
        thread.start()
        self.group = listener.accept()
        thread.join()

    def send(self, buffer, manifest, slot=0, deadline_s=10.0):
        self.receiver.begin(manifest, slot, deadline_s)
        self.group.start(buffer.flat, time.monotonic() + deadline_s).wait()
        return self.results.get(timeout=deadline_s)

    def good(self, version, slot=1, seed=9):
        full = values(seed)
        owned, aliases = share(full)
        buffer, manifest = packed(owned, aliases, version=version)
        result = self.send(buffer, manifest, slot)
        assert result.ok, result
        assert result.digest == manifest_digest(manifest)
        for name, want in full.items():
            scale = 2.0 if ".lora_B." in name else 1.0
            np.testing.assert_array_equal(self.writer.slots[slot][name], want.numpy() * np.float32(scale), err_msg=name)

    def close(self):
        self.group.close()
        self.receiver.close()


@pytest.fixture(scope="module")
def shared_bench():
    bench = Bench(declared={"a": spec()})
    bench.version = 0
    yield bench
    bench.close()


@pytest.fixture
def bench(shared_bench):
    shared_bench.writer.touched.clear()
    shared_bench.writer.writes = 0
    return shared_bench


def rename(manifest, old, new):
    shard = manifest.shards[0]
    tensors = tuple(dataclasses.replace(t, name=new) if t.name == old else t for t in shard.tensors)
    return dataclasses.replace(
        manifest, shards=(dataclasses.replace(shard, tensors=tensors, digest=shard_digest(tensors)),)
    )


def faulty(kind, version):
    """(buffer, manifest, reason) of one broken publish."""
    full = values(5)
    owned, aliases = share(full)
    make = {"version": version}
    if kind == "flipped bit":
        buffer, manifest = packed(owned, aliases, **make)
        meta = next(t for t in manifest.shards[0].tensors if t.name == LORA_B)
        buffer.flat[meta.offset + meta.nbytes - 1] ^= 1
        return buffer, manifest, Refusal.HASH
    if kind == "swapped gate and up":
        buffer, manifest = packed(owned, aliases, **make)
        flat = {t.name: buffer.flat[t.offset : t.offset + t.nbytes] for t in manifest.shards[0].tensors}
        up, gate = flat[LORA_B], flat[LORA_B.replace("up", "gate")]
        kept = up.clone()
        up.copy_(gate)
        gate.copy_(kept)
        return buffer, manifest, Refusal.HASH
    if kind == "NaN":
        full[LORA_B][0, 0] = float("nan")
        return *packed(owned, aliases, **make), Refusal.NON_FINITE
    if kind == "missing layer":
        kept = [(n, t) for n, t in owned if ".layers.1." not in n]
        aliases = {a: w for a, w in aliases.items() if ".layers.1." not in a}
        return *packed(kept, aliases, **make), Refusal.MISSING_TENSOR
    if kind == "missing expert":
        return *packed([(n, t) for n, t in owned if n != LORA_B], aliases, **make), Refusal.MISSING_TENSOR
    if kind == "wrong alpha":
        return *packed(owned, aliases, s=spec(alpha=16.0), **make), Refusal.ALPHA
    if kind == "wrong targets":
        return *packed(owned, aliases, s=spec(targets=("linear_qkv",)), **make), Refusal.TARGETS
    if kind == "wrong shape":
        full[LORA_B] = full[LORA_B].t().contiguous()
        return *packed([(n, full[n]) for n, _ in owned], aliases, **make), Refusal.SHAPE
    if kind == "tensors of rank + 1":
        return *packed(share(values(5, rank=5))[0], aliases, **make), Refusal.RANK
    if kind == "all of rank + 1":
        return *packed(share(values(5, rank=5))[0], aliases, s=spec(rank=5), **make), Refusal.RANK
    if kind == "file prefix":
        buffer, manifest = packed(owned, aliases, **make)
        return buffer, rename(manifest, LORA_B, "base_model.model." + LORA_B), Refusal.PREFIX
    if kind == "unknown tensor":
        buffer, manifest = packed(owned, aliases, **make)
        return buffer, rename(manifest, LORA_B, LORA_B.replace("experts.2", "experts.200")), Refusal.UNKNOWN_TENSOR
    if kind == "other run":
        return *packed(owned, aliases, run="run-2", **make), Refusal.WRONG_RUN
    if kind == "other base":
        return *packed(owned, aliases, base="other", **make), Refusal.WRONG_BASE
    if kind == "replay":
        return *packed(owned, aliases, version=version - 1), Refusal.DUPLICATE
    assert kind == "older"
    return *packed(owned, aliases, version=version - 2), Refusal.STALE_VERSION


@pytest.mark.parametrize(
    "kind",
    [
        "flipped bit", "swapped gate and up", "NaN", "missing layer", "missing expert", "wrong alpha", "wrong targets",
        "wrong shape", "tensors of rank + 1", "all of rank + 1", "file prefix", "unknown tensor", "other run",
        "other base", "replay", "older",
    ],
)
def test_a_broken_publish_is_refused_and_nothing_is_written(bench, kind):
    bench.good(bench.version)
    bench.good(bench.version + 1)
    bench.version += 2
    bench.writer.touched.clear()
    bench.writer.writes = 0
    buffer, manifest, reason = faulty(kind, bench.version)
    result = bench.send(buffer, manifest, slot=2)
    assert (result.ok, result.reason, result.digest) == (False, reason, ""), result
    assert result.detail
    assert bench.writer.touched == set()
    assert bench.writer.writes == 0
    bench.good(bench.version)  # the group is still in step and the version was not burnt
    bench.version += 1


def test_without_a_slot_the_transfer_is_drained_and_refused(bench):
    buffer, manifest = packed(*share(values(1)), version=bench.version)
    result = bench.send(buffer, manifest, slot=None)
    assert (result.ok, result.reason, result.slot) == (False, Refusal.SLOT, -1)
    bench.good(bench.version)
    bench.version += 1


def test_a_discarded_version_may_come_again(bench):
    bench.good(bench.version)
    bench.receiver.discard(ref(bench.version))
    bench.good(bench.version)
    bench.version += 1


def test_the_first_version_declares_the_adapter_if_the_configuration_did_not():
    bench = Bench()
    bench.good(0)
    result = bench.send(*packed(*share(values(1)), version=1, s=spec(alpha=4.0)))
    assert result.reason == Refusal.ALPHA
    bench.close()


def test_a_writer_that_fails_leaves_no_half_written_slot():
    bench = Bench()
    write, calls = bench.writer.write, []

    def failing(slot, name, tensor, scale):
        calls.append(name)
        if len(calls) == 10:
            raise IndexError("engine says no")
        write(slot, name, tensor, scale)

    bench.writer.write = failing
    result = bench.send(*packed(*share(values(1))), slot=0)
    assert (result.ok, result.reason) == (False, Refusal.WRITE)
    assert "engine says no" in result.detail
    assert bench.writer.slots[0] == {}
    bench.close()


def test_an_engine_that_cannot_serve_the_rank_refuses():
    bench = Bench()

    def expected(s):
        raise ManifestError(Refusal.RANK, f"rank {s.rank} is above max_lora_rank 2")

    bench.writer.expected = expected
    assert bench.send(*packed(*share(values(1)))).reason == Refusal.RANK
    bench.close()


def test_a_source_that_stays_silent_is_reported_at_the_deadline_and_rejoining_works():
    bench = Bench()
    _, manifest = packed(*share(values(1)))
    began = time.monotonic()
    bench.receiver.begin(manifest, 0, 0.5)
    with pytest.raises(PublishError, match="busy"):
        bench.receiver.begin(manifest, 1, 0.5)
    result = bench.results.get(timeout=5.0)
    assert time.monotonic() - began < 5.0
    assert (result.ok, result.reason) == (False, Refusal.WIRE)
    assert bench.writer.touched == set()
    bench.connect()
    bench.good(0)
    bench.close()


def test_begin_before_join_is_an_error():
    receiver = AdapterReceiver(MemoryWriter(shapes_of), run=RUN, base_digest=BASE, on_staged=print)
    with pytest.raises(PublishError, match="no group"):
        receiver.begin(packed(*share(values(1)))[1], 0, 1.0)


def test_bfloat16_on_the_wire_reaches_the_writer_as_exact_float32():
    bench = Bench()
    full = values(3)
    result = bench.send(*packed(list(full.items()), dtype="bfloat16"), slot=0)
    assert result.ok
    for name, want in full.items():
        scale = np.float32(2.0 if ".lora_B." in name else 1.0)
        got = bench.writer.slots[0][name]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want.bfloat16().float().numpy() * scale)
    bench.close()
