"""Hashes of tensors, shards, adapters and the frozen base: BLAKE2b-128 from the standard library.

``adapter_digest`` speaks of full names and values only, so it does not depend on how the
trainer was sharded or which tensors were shared on the wire (contracts C4 and C5).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from areal_lora.errors import AdapterError
from areal_lora.types import ShardManifest, TensorMeta

FULL_HASH_LIMIT_BYTES = 1 << 30  # larger checkpoints are sampled: reading 60 GB at every start costs minutes
SAMPLE_BYTES = 1 << 20
SAMPLES_PER_FILE = 32


def tensor_hash(data: memoryview | bytes) -> str:
    """Hash of a tensor's raw little-endian bytes, 32 hex characters."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def shard_digest(tensors: Iterable[TensorMeta]) -> str:
    """Hash over names, places and hashes of a shard's tensors in wire order."""
    h = hashlib.blake2b(digest_size=16)
    for t in tensors:
        h.update(f"{t.name}\0{t.shape}\0{t.dtype}\0{t.offset}\0{t.hash}\n".encode())
    return h.hexdigest()


def adapter_digest(hashes: Mapping[str, str], aliases: Mapping[str, str]) -> str:
    """Hash over sorted (full name, tensor hash). ``hashes`` maps wire names, ``aliases`` full to wire names."""
    full = dict(hashes)
    full.update((name, hashes[wire]) for name, wire in aliases.items())
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(full):
        h.update(f"{name}\0{full[name]}\n".encode())
    return h.hexdigest()


def manifest_digest(manifest: ShardManifest) -> str:
    """``adapter_digest`` of what a manifest announces."""
    return adapter_digest({t.name: t.hash for s in manifest.shards for t in s.tensors}, manifest.aliases)


def base_digest(model_path: str | os.PathLike[str]) -> str:
    """Identity of a frozen base: ``config.json`` and every ``*.safetensors`` file of a Hugging Face folder.

    File names, sizes, headers and contents count; above ``FULL_HASH_LIMIT_BYTES`` in total the
    contents are sampled in evenly spaced blocks. Equal folders at different paths agree. The
    result is cached for as long as sizes and modification times stay. Raises AdapterError if
    the folder is not a checkpoint.
    """
    folder = Path(model_path)
    config = folder / "config.json"
    files = sorted(folder.glob("*.safetensors"))
    if not config.is_file() or not files:
        raise AdapterError(
            f"{folder}: no config.json with *.safetensors files, so the base cannot be identified; "
            "give the folder of a Hugging Face checkpoint saved as safetensors"
        )
    stats = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in [config, *files])
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
                _feed(h, f, length)
    return h.hexdigest()


def _blocks(first: bytes, size: int, full: bool) -> list[tuple[int, int]]:
    """(start, length) of what is hashed of one file; the safetensors header always in whole."""
    if full or size <= SAMPLES_PER_FILE * SAMPLE_BYTES:
        return [(0, size)]
    header = min(8 + int.from_bytes(first, "little"), size)
    last = max(size - SAMPLE_BYTES, header)
    step = (last - header) / (SAMPLES_PER_FILE - 1)
    return [(0, header), *((header + int(i * step), SAMPLE_BYTES) for i in range(SAMPLES_PER_FILE))]


def _feed(h: hashlib.blake2b, f: BinaryIO, length: int) -> None:
    while length > 0:
        chunk = f.read(min(length, 8 << 20))
        if not chunk:
            return
        h.update(chunk)
        length -= len(chunk)
