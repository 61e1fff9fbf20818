"""The manifest of a publish: its wire form, and the checks that refuse a wrong one (contract C3).

All functions are pure: they touch no tensor and send nothing.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from areal_lora.errors import AdapterError, ManifestError, RefusalReason
from areal_lora.families.peft_folder import FILE_PREFIX
from areal_lora.families.safetensors_head import weight_files
from areal_lora.network.tls import derived_key
from areal_lora.types import AdapterRef, AdapterStructure, ShardManifest
from areal_lora.weight_sync.kernels import ITEM_BYTES, N_KEYS, multipliers
from areal_lora.weight_sync.layout import AdapterLayout, Shape, ShardLayout

LORA_A, LORA_B = ".lora_A.", ".lora_B."
_MAGIC = b"ALM8"  # wire format version of an encoded announcement


A = TypeVar("A")
L = TypeVar("L")
"""A layout, or None if the server knows it; or either encoded, once for several servers: it takes a few megabytes."""


class Announcement(msgspec.Struct, Generic[L], frozen=True, kw_only=True):
    """Body of ``POST /admin/publish``.

    ``timeout_s`` is the time from sending the request to the end of the transfer: a duration, because clocks of two
    machines differ. The server must drop a transfer that has not ended by then.
    """

    manifest: ShardManifest
    layout: L
    timeout_s: float


def encode(announcement: Announcement[Any]) -> bytes:
    return _MAGIC + msgspec.msgpack.encode(announcement)


def decode(data: bytes) -> Announcement[AdapterLayout | None]:
    """Decode and check the types of an announcement. Raises ManifestError (``malformed``)."""
    announcement = _decoded(data, _ANNOUNCED)
    if not 0.0 < announcement.timeout_s < math.inf:
        text = f"timeout_s is {announcement.timeout_s}, it must be positive and finite"
        raise ManifestError(RefusalReason.MALFORMED, text)
    return announcement


def sent_later(data: bytes, seconds: float) -> bytes:
    """An announcement as a relay sends it on ``seconds`` after it came. Raises ManifestError (``malformed``)."""
    announcement = _decoded(data, _SENT_ON)
    return encode(msgspec.structs.replace(announcement, timeout_s=announcement.timeout_s - seconds))


# Made once: threads that decode a generic type for the first time, all at once, end the process.
_ANNOUNCED = msgspec.msgpack.Decoder(Announcement[AdapterLayout | None])
_SENT_ON = msgspec.msgpack.Decoder(Announcement[msgspec.Raw])


def _decoded(data: bytes, decoder: msgspec.msgpack.Decoder[A]) -> A:
    if data[: len(_MAGIC)] != _MAGIC:
        text = "not a manifest of this wire format; run one version of areal_lora"
        raise ManifestError(RefusalReason.MALFORMED, text)
    try:
        return decoder.decode(memoryview(data)[len(_MAGIC) :])
    except msgspec.MsgspecError as e:
        raise ManifestError(RefusalReason.MALFORMED, str(e)) from e


def check_successor(
    manifest: ShardManifest,
    structure: AdapterStructure,
    current: AdapterRef | None,
    run: str,
    base_digest: str,
    declared: AdapterStructure | None,
) -> None:
    """Raise ManifestError unless ``manifest`` of an adapter of ``structure`` may follow ``current`` in this run.

    ``declared`` is the declared or first published structure of the adapter; None accepts any.
    """
    ref, parent = manifest.ref, manifest.parent
    if manifest.run != run:
        raise ManifestError(RefusalReason.WRONG_RUN, f"published by run {manifest.run!r}, this is run {run!r}")
    if manifest.base_digest != base_digest:
        text = f"trained on base {manifest.base_digest}, served base is {base_digest}; use one checkpoint"
        raise ManifestError(RefusalReason.WRONG_BASE, text)
    _check_structure(structure, declared, ref)
    if ref.version < 0:
        raise ManifestError(RefusalReason.STALE_VERSION, f"{ref}: versions start at 0")
    if parent is not None and (parent.name != ref.name or parent.version >= ref.version):
        raise ManifestError(RefusalReason.STALE_VERSION, f"{ref} cannot follow its parent {parent}")
    if current is None:
        return
    if ref == current:
        raise ManifestError(RefusalReason.DUPLICATE, f"{ref} was published already; versions are immutable")
    if ref.version < current.version:
        raise ManifestError(RefusalReason.STALE_VERSION, f"{ref} is older than {current}")


def check_layout(layout: AdapterLayout, expected: Mapping[str, Shape]) -> None:
    """Raise ManifestError unless the tensors on the wire and the aliases cover ``expected`` exactly, each name once.

    ``expected`` maps every full name the engine serves to its shape at the layout's rank.
    Also checks that tensors lie back to back in their shard.
    """
    if layout.dtype not in ITEM_BYTES:
        raise ManifestError(RefusalReason.DTYPE, f"wire dtype {layout.dtype!r} is not one of {sorted(ITEM_BYTES)}")
    wire: dict[str, Shape] = {}
    sources: set[int] = set()
    for shard in layout.shards:
        if shard.source in sources:
            raise ManifestError(RefusalReason.DUPLICATE, f"source rank {shard.source} sends two shards")
        sources.add(shard.source)
        _check_shard(shard, ITEM_BYTES[layout.dtype])
        for t in shard.tensors:
            if t.name in wire:
                raise ManifestError(RefusalReason.DUPLICATE, f"{t.name} is declared twice")
            wire[t.name] = t.shape
            _check_name(t.name, t.shape, expected)
    for name, target in layout.aliases.items():
        if name in wire:
            raise ManifestError(RefusalReason.DUPLICATE, f"{name} is on the wire and also an alias of {target}")
        if target not in wire:
            raise ManifestError(RefusalReason.UNKNOWN_TENSOR, f"alias {name} -> {target}: {target} is not on the wire")
        _check_name(name, wire[target], expected)
    missing = expected.keys() - wire.keys() - layout.aliases.keys()
    if missing:
        raise ManifestError(RefusalReason.MISSING_TENSOR, f"{len(missing)} tensors, first {min(missing)}")


def _check_structure(got: AdapterStructure, want: AdapterStructure | None, ref: AdapterRef) -> None:
    for rank in (got.rank, *dict(got.rank_pattern).values()):
        if rank < 1:
            raise ManifestError(RefusalReason.RANK, f"{ref}: rank {rank}")
    for alpha in (got.alpha, *dict(got.alpha_pattern).values()):
        if not (math.isfinite(alpha) and alpha > 0):
            raise ManifestError(RefusalReason.ALPHA, f"{ref}: alpha {alpha}")
    for pattern, _ in (*got.rank_pattern, *got.alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as e:
            raise ManifestError(RefusalReason.MALFORMED, f"{ref}: {pattern!r} is no regular expression: {e}") from None
    if want is None:
        return
    for reason, what, mine, declared in (
        (RefusalReason.RANK, "rank", got.rank, want.rank),
        (RefusalReason.RANK, "ranks", got.rank_pattern, want.rank_pattern),
        (RefusalReason.ALPHA, "alpha", got.alpha, want.alpha),
        (RefusalReason.ALPHA, "alphas", got.alpha_pattern, want.alpha_pattern),
        (RefusalReason.ALPHA, "rslora", got.rslora, want.rslora),
        (RefusalReason.TARGETS, "targets", sorted(set(got.target_modules)), sorted(set(want.target_modules))),
        (RefusalReason.TARGETS, "expert layout", str(got.expert_layout), str(want.expert_layout)),
    ):
        if mine != declared:
            raise ManifestError(reason, f"{ref} has {what} {mine}, this adapter has {what} {declared}")


def _check_name(name: str, shape: Shape, expected: Mapping[str, Shape]) -> None:
    want = expected.get(name)
    if want is None:
        if name.startswith(FILE_PREFIX):
            text = f"{name} carries the file prefix {FILE_PREFIX!r}; wire names do not"
            raise ManifestError(RefusalReason.PREFIX, text)
        raise ManifestError(RefusalReason.UNKNOWN_TENSOR, f"{name} is not served by this engine")
    if shape == want:
        return
    rank_axis = 0 if LORA_A in name else 1 if LORA_B in name else None
    off = [i for i in range(len(want)) if len(shape) == len(want) and shape[i] != want[i]]
    reason = RefusalReason.RANK if off == [rank_axis] else RefusalReason.SHAPE
    raise ManifestError(reason, f"{name} has shape {list(shape)}, served shape is {list(want)}")


def _check_shard(shard: ShardLayout, item: int) -> None:
    end = 0
    for t in shard.tensors:
        if any(d < 1 for d in t.shape) or t.offset != end:
            text = f"{t.name}: shape {list(t.shape)} at byte {t.offset}, tensors before it end at {end}"
            raise ManifestError(RefusalReason.SIZE, text)
        end += math.prod(t.shape) * item
    if shard.nbytes != end:
        text = f"shard of rank {shard.source}: {shard.nbytes} bytes, tensors end at {end}"
        raise ManifestError(RefusalReason.SIZE, text)


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """Keys of a run: ``multipliers`` of fingerprints (uint64 [N_KEYS]); of ``seal`` and ``mask``, 32 bytes each."""

    multipliers: np.ndarray
    seal: bytes
    mask: bytes


KEY_BYTES = 32


def shard_key_bytes(secret: str) -> bytes:
    """The three keys one after another: the part of the run secret that a remote server is given."""
    return b"".join(derived_key(secret, f"shard {use}", KEY_BYTES) for use in ("fingerprint", "seal", "mask"))


@lru_cache(maxsize=8)
def expanded(keys: bytes) -> ShardKeys:
    """``ShardKeys`` of ``shard_key_bytes``."""
    hashing, sealing, masking = (keys[i : i + KEY_BYTES] for i in range(0, 3 * KEY_BYTES, KEY_BYTES))
    return ShardKeys(multipliers("fingerprint", N_KEYS, hashing), sealing, masking)


def shard_keys(secret: str) -> ShardKeys:
    """Derive them from the run secret: without it no changed shard can be given fingerprints and a seal that fit."""
    return expanded(shard_key_bytes(secret))


SEAL_BYTES = 16
LINE_BYTES = 64  # cache line; fingerprints are aligned to it


def shard_sum(layout: AdapterLayout, shard: int, sums: np.ndarray) -> int:
    """Combine all fingerprints (uint64 [tensors]) of a shard, given by its index, into 64 bits.

    Multilinear like the fingerprints themselves: sum_i low_i * weights[i, 0] + high_i * weights[i, 1] mod 2^64. Halves,
    because a sum of keys may be even: times 2 it would lose the highest bit of a whole value. A cryptographic hash of
    300 kB would take longer than comparing them.
    """
    low, high = sums & np.uint64(0xFFFFFFFF), sums >> np.uint64(32)
    return int((low * layout.weights[shard][:, 0] + high * layout.weights[shard][:, 1]).sum(dtype=np.uint64))


def seal(ref: AdapterRef, layout_digest: str, shard_sum: int, key: bytes) -> bytes:
    """Tie the fingerprints of a shard to their version, layout and run; ``SEAL_BYTES`` long."""
    head = f"{ref}\0{layout_digest}\0".encode()
    return hashlib.blake2b(head + shard_sum.to_bytes(8, "little"), digest_size=SEAL_BYTES, key=key).digest()


def masked(sums: np.ndarray, sealed: bytes, key: bytes) -> np.ndarray:
    """Exclusive or of fingerprints (uint64 [n]) and a stream of ``key`` and their seal; its own inverse.

    Fingerprints are linear: multipliers follow from enough of them in clear beside the tensors. The seal takes the
    place of a nonce, because other fingerprints have another one (synthetic initialisation vector, RFC 5297).
    """
    found: np.ndarray = sums ^ np.frombuffer(hashlib.shake_256(key + sealed).digest(8 * len(sums)), dtype="<u8")
    return found


def trailer_part(shard: ShardLayout) -> tuple[int, int]:
    """(start, end) of the trailer in the memory of a packed shard, after the tensors.

    It is the last broadcast of the shard: a masked fingerprint of 8 bytes per tensor, and the seal.
    """
    start = -(-shard.nbytes // LINE_BYTES) * LINE_BYTES
    return start, start + 8 * len(shard.tensors) + SEAL_BYTES


def adapter_digest(layout: AdapterLayout, shard_sums: Iterable[int]) -> str:
    """Digest of an adapter's names and values, independent of how the trainer was sharded (contract C4).

    ``shard_sums`` of all shards. Equal adapters in equal wire dtypes agree.
    """
    total = sum(shard_sums) % 2**64
    return hashlib.blake2b(layout.names_digest.encode() + total.to_bytes(8, "little"), digest_size=16).hexdigest()


FULL_HASH_LIMIT_BYTES = 1 << 30  # larger checkpoints are sampled: reading 60 GB at every start costs minutes
SAMPLE_BYTES = 1 << 20
SAMPLES_PER_FILE = 32


def base_digest(model_path: str | os.PathLike[str]) -> str:
    """Identity of a frozen base: ``config.json`` and the weight files of a Hugging Face folder.

    File names, sizes, headers and contents count; above ``FULL_HASH_LIMIT_BYTES`` in total the contents are sampled in
    evenly spaced blocks. Cached while sizes and modification times stay. Raises AdapterError for no checkpoint,
    ConfigError for one that is not whole.
    """
    folder = Path(model_path)
    config = folder / "config.json"
    files = weight_files(folder)
    if not config.is_file() or not files:
        raise AdapterError(
            f"{folder}: no config.json with *.safetensors files, so the base cannot be identified; "
            "give the folder of a Hugging Face checkpoint saved as safetensors"
        )
    stats = tuple((name, (stat := (folder / name).stat()).st_size, stat.st_mtime_ns) for name in [config.name, *files])
    return _folder_digest(str(folder.resolve()), stats)


@lru_cache(maxsize=8)
def _folder_digest(folder: str, stats: tuple[tuple[str, int, int], ...]) -> str:
    full = sum(size for _, size, _ in stats) <= FULL_HASH_LIMIT_BYTES
    h = hashlib.blake2b(digest_size=16)
    for name, size, _ in stats:
        h.update(f"{name}\0{size}\n".encode())
        with open(os.path.join(folder, name), "rb") as f:
            for start, length in _blocks(f.read(8), size, full):
                f.seek(start)
                while length > 0 and (chunk := f.read(min(length, 8 << 20))):
                    h.update(chunk)
                    length -= len(chunk)
    return h.hexdigest()


def _blocks(first: bytes, size: int, full: bool) -> list[tuple[int, int]]:
    """(start, length) of what is hashed of one file; the safetensors header always in whole."""
    if full or size <= SAMPLES_PER_FILE * SAMPLE_BYTES:
        return [(0, size)]
    header = min(8 + int.from_bytes(first, "little"), size)
    last = max(size - SAMPLE_BYTES, header)
    step = (last - header) / (SAMPLES_PER_FILE - 1)
    return [(0, header), *((header + int(i * step), SAMPLE_BYTES) for i in range(SAMPLES_PER_FILE))]
