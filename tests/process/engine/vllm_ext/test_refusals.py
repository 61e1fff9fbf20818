"""What a real server refuses, by name, while the version before goes on serving (contract C3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from areal_lora.errors import ManifestError, PublishError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.manifest import Announcement, base_digest, encode, shard_keys
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.engine.vllm_ext.serving import RANK, RunningServer, Tensors
from tests.support.weight_sync.adapters import pack_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "model.layers.1.mlp.experts.5.gate_proj.lora_A.weight"
TWIN = NAME.replace("experts.5", "experts.6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """``tensors`` and ``how`` of a publish that is wrong, made from a right one, and the word it is refused with."""

    reason: str
    tensors: Callable[[Tensors], Tensors] = dict
    how: Callable[[RunningServer], dict[str, Any]] = lambda server: {}


def flip(shard: PackedShard) -> None:
    """One bit of one tensor's bytes, after they were fingerprinted: as a broken wire would."""
    place = next(t for t in shard.shard.tensors if t.name == NAME)
    shard.flat[place.offset + 13] ^= 4


def swap(shard: PackedShard) -> None:
    a, b = (next(t for t in shard.shard.tensors if t.name == name) for name in (NAME, TWIN))
    nbytes = 4 * a.shape[0] * a.shape[1]
    first = shard.flat[a.offset : a.offset + nbytes].clone()
    shard.flat[a.offset : a.offset + nbytes] = shard.flat[b.offset : b.offset + nbytes]
    shard.flat[b.offset : b.offset + nbytes] = first


def damage_trailer(shard: PackedShard) -> None:
    shard._trailer[3] ^= 1


def poisoned(tensors: Tensors) -> Tensors:
    out = {n: t.clone() for n, t in tensors.items()}
    out[NAME][0, 0] = float("nan")
    return out


def wider(tensors: Tensors) -> Tensors:
    """The adapter at rank + 1."""
    return {
        n: t.new_zeros((RANK + 1, t.shape[1]) if "lora_A" in n else (t.shape[0], RANK + 1)) for n, t in tensors.items()
    }


CORRUPTIONS = {
    "flipped bit": Corruption(reason="hash", how=lambda _: {"damage": flip}),
    "NaN": Corruption(reason="non_finite", tensors=poisoned),
    "missing layer": Corruption(
        reason="missing_tensor", tensors=lambda ts: {n: t for n, t in ts.items() if ".layers.1." not in n}
    ),
    "two tensors swapped": Corruption(reason="hash", how=lambda _: {"damage": swap}),
    "wrong alpha": Corruption(
        reason="alpha", how=lambda server: {"spec": replace(server.spec, alpha=2 * server.spec.alpha)}
    ),
    "wrong shape": Corruption(reason="shape", tensors=lambda ts: ts | {NAME: ts[NAME][:, :-1]}),
    "wrong prefix": Corruption(reason="prefix", tensors=lambda ts: {f"base_model.model.{n}": t for n, t in ts.items()}),
    "rank + 1": Corruption(
        reason="rank", tensors=wider, how=lambda server: {"spec": replace(server.spec, rank=RANK + 1)}
    ),
    "one tensor at rank + 1": Corruption(reason="rank", tensors=lambda ts: ts | {NAME: wider(ts)[NAME]}),
    "older version replayed": Corruption(
        reason="stale_version", how=lambda server: {"version": server.newest.version - 1}
    ),
    "oldest version replayed": Corruption(reason="stale_version", how=lambda _: {"version": 0}),
    "other run's manifest": Corruption(reason="wrong_run", how=lambda _: {"run": "another"}),
    "other base": Corruption(reason="wrong_base", how=lambda _: {"base": "0" * 32}),
    "other targets": Corruption(
        reason="targets", how=lambda server: {"spec": replace(server.spec, target_modules=("linear_qkv",))}
    ),
    "unknown tensor": Corruption(
        reason="unknown_tensor", tensors=lambda ts: ts | {"model.norm.lora_A.weight": ts[NAME]}
    ),
    "damaged trailer": Corruption(reason="hash", how=lambda _: {"damage": damage_trailer}),
}


@pytest.fixture
def good(server: RunningServer) -> Iterator[AdapterRef]:
    """A version that serves, and one before it."""
    server.publish(server.adapter(7))
    yield server.publish(server.adapter(8))
    server.source.close()


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_corrupt_publish_is_refused_and_nothing_else_happens(
    server: RunningServer, good: AdapterRef, case: str
) -> None:
    corruption = CORRUPTIONS[case]
    before, refs = server.score(good), server.admin.info(120.0).refs
    with pytest.raises(ManifestError) as e:
        server.publish(corruption.tensors(server.adapter(9)), **corruption.how(server))
    assert e.value.reason == corruption.reason, e.value
    assert server.admin.info(120.0).refs == refs
    assert server.score(good) == before
    # The groups are still in step: the next version goes over the same connection.
    tensors = server.adapter(10)
    following = server.publish(tensors)
    want = server.logprobs(tensors, list(range(5, 40)))
    assert max(abs(a - b) for a, b in zip(server.score(following, list(range(5, 40))), want, strict=True)) < 1e-4
    assert server.score(good) == before


def announcement(server: RunningServer, ref: AdapterRef, tensors: Tensors, known: bool = False) -> bytes:
    layout = server.layout(tensors)
    manifest = ShardManifest(
        run="test", ref=ref, parent=None, base_digest=base_digest(server.model), layout=layout.digest
    )
    return encode(Announcement(manifest=manifest, layout=None if known else layout, timeout_s=150.0))


def test_bytes_of_another_version_are_refused(server: RunningServer, good: AdapterRef) -> None:
    """A shard that is right in itself, broadcast under a newer name."""
    tensors = server.adapter(9)
    layout = server.layout(tensors)

    def reseal(shard: PackedShard) -> None:
        shard.pack(good, pack_of(layout, 0, tensors))

    def again(shard: PackedShard) -> None:
        shard.reset()
        reseal(shard)

    with pytest.raises(ManifestError) as e:
        server.publish(tensors, damage=again)
    assert e.value.reason == "hash"


def test_what_is_no_announcement_is_malformed(server: RunningServer, good: AdapterRef) -> None:
    body = announcement(server, replace(good, version=good.version + 1), server.adapter(1))
    for wrong in (b"", b"ALM1" + body[4:], body[:-5], b"ALM2" + b"\x90", body[4:]):
        with pytest.raises(ManifestError) as e:
            server.admin.publish(wrong, 120.0)
        assert e.value.reason == "malformed"


def test_a_layout_never_sent_is_asked_for(server: RunningServer, good: AdapterRef) -> None:
    fewer = {n: t for n, t in server.adapter(1).items() if ".layers.1." not in n}
    with pytest.raises(ManifestError) as e:
        server.admin.publish(announcement(server, replace(good, version=good.version + 1), fewer, known=True), 120.0)
    assert e.value.reason == "unknown_layout"


def test_the_newest_version_again_is_acknowledged_again(server: RunningServer, good: AdapterRef) -> None:
    """The trainer may have missed the first answer; other numbers under the same name change nothing."""
    before = server.score(good)
    layout, base = server.layout(server.adapter(8)), base_digest(server.model)
    replies = [server.source.publish(good, layout, server.adapter(seed), base=base) for seed in (8, 8, 11)]
    assert replies[0] == replies[1] == replies[2]
    assert replies[0].ref == str(good)
    assert {"wire", "verify", "write", "stage", "commit", "commit_wait"} <= replies[0].phases.keys()
    assert server.score(good) == before
    server.source.close()  # without a group there is nothing to take off the wire
    assert server.admin.publish(announcement(server, good, server.adapter(8)), 120.0) == replies[0]
    server.publish(server.adapter(12))


def test_a_source_that_dies_midway_is_a_broken_wire(server: RunningServer, good: AdapterRef) -> None:
    before = server.score(good)
    tensors, ref = server.adapter(9), replace(good, version=good.version + 1)
    layout = server.layout(tensors)
    group = server.source.connect()
    answer: list[Exception] = []

    def post() -> None:
        try:
            server.admin.publish(announcement(server, ref, tensors), 200.0)
        except (ManifestError, PublishError) as e:
            answer.append(e)

    thread = threading.Thread(target=post)
    thread.start()
    shard = PackedShard(layout, 0, shard_keys(server.source.secret))
    packing = pack_of(layout, 0, tensors)

    def half(flat: Any) -> Iterator[int]:
        for done in packing(flat):
            yield done
            if done == len(tensors) // 2:
                raise PublishError("the trainer dies here")

    with pytest.raises(PublishError, match="dies here"):
        shard.pack(ref, half)
    with pytest.raises(PublishError):
        shard.send(group, time.monotonic() + 2.0)
    began = time.monotonic()
    server.source.close()
    thread.join(200.0)
    assert time.monotonic() - began < 75, "not the whole deadline: a closed connection is known at once"
    assert isinstance(answer[0], ManifestError)
    assert answer[0].reason == "wire"
    assert str(ref) not in server.admin.info(120.0).refs
    assert server.score(good) == before
    assert server.publish(tensors) == ref, "the same version, whole this time"
