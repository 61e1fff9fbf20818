"""The manifest of a publish: layout, wire form, and the checks that refuse a wrong one (contract C3).

A wire name is the Hugging Face module path without prefix, for example
``model.layers.3.mlp.experts.7.gate_proj.lora_A.weight`` with shape ``[rank, in]``, and
``...lora_B.weight`` with shape ``[out, rank]``. ``alpha / rank`` is not folded in.

Everything here is pure: no tensor is touched, nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from areal_lora.errors import ManifestError
from areal_lora.types import AdapterRef, AdapterShard, AdapterSpec, ShardManifest
from areal_lora.weight_sync.digests import shard_digest

ALIGN_BYTES = 64
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FILE_PREFIX = "base_model.model."
_MAGIC = b"ALM1"  # wire format version of an encoded manifest

Shape = tuple[int, ...]


class Refusal(StrEnum):
    """Why a publish was refused; the words of ``ManifestError.reason``."""

    MALFORMED = "malformed"  # the manifest itself cannot be read
    WRONG_RUN = "wrong_run"
    WRONG_BASE = "wrong_base"
    STALE_VERSION = "stale_version"  # older than the current one, or a parent that is not older
    DUPLICATE = "duplicate"  # the current version again, or one name twice
    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    PREFIX = "prefix"
    SHAPE = "shape"
    DTYPE = "dtype"
    RANK = "rank"
    ALPHA = "alpha"
    TARGETS = "targets"
    OVERLAP = "overlap"
    SIZE = "size"
    HASH = "hash"
    NON_FINITE = "non_finite"
    SLOT = "slot"  # no free place on the server, or the receiver is busy
    WIRE = "wire"  # the transfer broke or missed its deadline
    WRITE = "write"  # the engine failed to take the tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where one tensor lies in its shard; ``offset`` and ``nbytes`` in bytes."""

    name: str
    shape: Shape
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The flat buffer of one source rank: ``nbytes`` long, every tensor 64-byte aligned."""

    source: int
    dtype: str
    tensors: tuple[TensorPlace, ...]
    nbytes: int


def plan_shards(owned: Sequence[tuple[int, Sequence[tuple[str, Shape]]]], dtype: str) -> tuple[ShardLayout, ...]:
    """Lay out what each source owns, in the given order. ``owned`` holds (source, [(name, shape)]).

    Raises ManifestError (``dtype``, ``duplicate``) if a name or source comes twice.
    """
    if dtype not in ITEM_BYTES:
        raise ManifestError(Refusal.DTYPE, f"wire dtype {dtype!r} is not one of {sorted(ITEM_BYTES)}")
    seen: set[str] = set()
    layouts: dict[int, ShardLayout] = {}
    for source, tensors in owned:
        if source in layouts:
            raise ManifestError(Refusal.DUPLICATE, f"source rank {source} is listed twice")
        places, offset = [], 0
        for name, shape in tensors:
            if name in seen:
                raise ManifestError(Refusal.DUPLICATE, f"{name} is owned twice (again by source rank {source})")
            seen.add(name)
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            places.append(TensorPlace(name=name, shape=tuple(shape), offset=offset, nbytes=nbytes))
            offset += _aligned(nbytes)
        layouts[source] = ShardLayout(source=source, dtype=dtype, tensors=tuple(places), nbytes=offset)
    return tuple(layouts.values())


def bucket_ranges(nbytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """(start, end) bytes of the broadcasts that carry a shard; the same on both sides."""
    return [(i, min(i + bucket_bytes, nbytes)) for i in range(0, nbytes, bucket_bytes)]


def build_manifest(
    *, run: str, ref: AdapterRef, parent: AdapterRef | None, spec: AdapterSpec, base_digest: str,
    shards: Sequence[AdapterShard], aliases: Mapping[str, str],
) -> ShardManifest:
    """Assemble the parts of all sources. Raises ManifestError (``duplicate``, ``unknown_tensor``)."""
    wire: set[str] = set()
    for shard in shards:
        for t in shard.tensors:
            if t.name in wire or t.name in aliases:
                raise ManifestError(Refusal.DUPLICATE, f"{t.name} comes twice (again from source rank {shard.source})")
            wire.add(t.name)
    for name, target in aliases.items():
        if target not in wire:
            raise ManifestError(Refusal.UNKNOWN_TENSOR, f"alias {name} -> {target}: no rank owns {target}")
    return ShardManifest(
        run=run, ref=ref, parent=parent, spec=spec, base_digest=base_digest,
        shards=tuple(sorted(shards, key=lambda s: s.source)), aliases=dict(aliases),
    )


def encode(manifest: ShardManifest) -> bytes:
    return _MAGIC + msgspec.msgpack.encode(manifest)


def decode(data: bytes) -> ShardManifest:
    """Inverse of ``encode``, types checked. Raises ManifestError (``malformed``)."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise ManifestError(Refusal.MALFORMED, "not a manifest of this wire format; run one version of areal_lora")
    try:
        return msgspec.msgpack.decode(memoryview(data)[len(_MAGIC):], type=ShardManifest)
    except msgspec.MsgspecError as e:
        raise ManifestError(Refusal.MALFORMED, str(e)) from e


def check_successor(
    manifest: ShardManifest, current: AdapterRef | None, run: str, base_digest: str, spec: AdapterSpec | None
) -> None:
    """Whether ``manifest`` may follow ``current`` in this run on this base.

    ``spec`` is what the adapter was declared or first published as; None accepts any. Paths
    (``base_model``) and ``dropout`` may differ: they do not change what is served. Raises
    ManifestError.
    """
    ref, parent = manifest.ref, manifest.parent
    if manifest.run != run:
        raise ManifestError(Refusal.WRONG_RUN, f"published by run {manifest.run!r}, this is run {run!r}")
    if manifest.base_digest != base_digest:
        raise ManifestError(
            Refusal.WRONG_BASE,
            f"trained on base {manifest.base_digest}, served base is {base_digest}; use one checkpoint",
        )
    if manifest.spec.name != ref.name:
        raise ManifestError(Refusal.MALFORMED, f"specification of {manifest.spec.name!r} sent with {ref}")
    _check_spec(manifest.spec, spec, ref)
    if ref.version < 0:
        raise ManifestError(Refusal.STALE_VERSION, f"{ref}: versions start at 0")
    if parent is not None and (parent.name != ref.name or parent.version >= ref.version):
        raise ManifestError(Refusal.STALE_VERSION, f"{ref} cannot follow its parent {parent}")
    if current is None:
        return
    if ref == current:
        raise ManifestError(Refusal.DUPLICATE, f"{ref} was published already; versions are immutable")
    if ref.version < current.version:
        raise ManifestError(Refusal.STALE_VERSION, f"{ref} is older than {current}")


def check_cover(manifest: ShardManifest, expected: Mapping[str, Shape]) -> None:
    """Whether the tensors on the wire and the aliases cover ``expected`` exactly, each name once.

    ``expected`` maps every full name the engine serves to its shape at the manifest's rank.
    Also checks that tensors lie inside their shard without overlap. Raises ManifestError.
    """
    wire: dict[str, Shape] = {}
    sources: set[int] = set()
    for shard in manifest.shards:
        if shard.source in sources:
            raise ManifestError(Refusal.DUPLICATE, f"source rank {shard.source} sends two shards")
        sources.add(shard.source)
        _check_shard(shard)
        for t in shard.tensors:
            if t.name in wire:
                raise ManifestError(Refusal.DUPLICATE, f"{t.name} comes twice")
            wire[t.name] = t.shape
            _check_name(t.name, t.shape, expected)
    for name, target in manifest.aliases.items():
        if name in wire:
            raise ManifestError(Refusal.DUPLICATE, f"{name} is on the wire and also an alias of {target}")
        if target not in wire:
            raise ManifestError(Refusal.UNKNOWN_TENSOR, f"alias {name} -> {target}: {target} is not on the wire")
        _check_name(name, wire[target], expected)
    missing = expected.keys() - wire.keys() - manifest.aliases.keys()
    if missing:
        raise ManifestError(Refusal.MISSING_TENSOR, f"{len(missing)} tensors, first {min(missing)}")


def _check_spec(got: AdapterSpec, want: AdapterSpec | None, ref: AdapterRef) -> None:
    if got.rank < 1:
        raise ManifestError(Refusal.RANK, f"{ref}: rank {got.rank}")
    if not (math.isfinite(got.alpha) and got.alpha > 0):
        raise ManifestError(Refusal.ALPHA, f"{ref}: alpha {got.alpha}")
    if want is None:
        return
    if got.rank != want.rank:
        raise ManifestError(Refusal.RANK, f"{ref} has rank {got.rank}, this adapter has rank {want.rank}")
    if got.alpha != want.alpha:
        raise ManifestError(Refusal.ALPHA, f"{ref} has alpha {got.alpha}, this adapter has alpha {want.alpha}")
    if set(got.target_modules) != set(want.target_modules) or got.expert_layout != want.expert_layout:
        raise ManifestError(
            Refusal.TARGETS,
            f"{ref} targets {sorted(got.target_modules)} ({got.expert_layout}), "
            f"this adapter {sorted(want.target_modules)} ({want.expert_layout})",
        )


def _check_name(name: str, shape: Shape, expected: Mapping[str, Shape]) -> None:
    want = expected.get(name)
    if want is None:
        if name.startswith(FILE_PREFIX):
            raise ManifestError(Refusal.PREFIX, f"{name} carries the file prefix {FILE_PREFIX!r}; wire names do not")
        raise ManifestError(Refusal.UNKNOWN_TENSOR, f"{name} is nothing this engine serves")
    if shape == want:
        return
    rank_axis = 0 if ".lora_A." in name else 1
    off = [i for i in range(len(want)) if len(shape) == len(want) and shape[i] != want[i]]
    reason = Refusal.RANK if off == [rank_axis] else Refusal.SHAPE
    raise ManifestError(reason, f"{name} has shape {list(shape)}, served shape is {list(want)}")


def _check_shard(shard: AdapterShard) -> None:
    if len({t.dtype for t in shard.tensors}) > 1:
        raise ManifestError(Refusal.DTYPE, f"source rank {shard.source} mixes dtypes in one shard")
    end = 0
    for t in sorted(shard.tensors, key=lambda t: t.offset):
        if t.dtype not in ITEM_BYTES:
            raise ManifestError(Refusal.DTYPE, f"{t.name} has dtype {t.dtype!r}")
        if t.offset < 0 or t.offset % ALIGN_BYTES or any(d < 1 for d in t.shape):
            raise ManifestError(Refusal.SIZE, f"{t.name}: offset {t.offset}, shape {list(t.shape)}")
        if t.nbytes != math.prod(t.shape) * ITEM_BYTES[t.dtype] or t.offset + t.nbytes > shard.nbytes:
            raise ManifestError(Refusal.SIZE, f"{t.name}: {t.nbytes} bytes at {t.offset} of {shard.nbytes}")
        if t.offset < end:
            raise ManifestError(Refusal.OVERLAP, f"{t.name} begins at byte {t.offset}, inside a tensor ending at {end}")
        end = t.offset + t.nbytes
    if shard.nbytes > _aligned(end):
        raise ManifestError(Refusal.SIZE, f"shard of rank {shard.source}: {shard.nbytes} bytes, tensors end at {end}")
    if shard.digest != shard_digest(shard.tensors):
        raise ManifestError(Refusal.HASH, f"shard digest of source rank {shard.source} does not match its tensors")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
