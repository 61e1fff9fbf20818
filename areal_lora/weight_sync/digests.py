"""Identity of the frozen base: BLAKE2b-128 from the standard library."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from areal_lora.errors import AdapterError

FULL_HASH_LIMIT_BYTES = 1 << 30  # larger checkpoints are sampled: reading 60 GB at every start costs minutes
SAMPLE_BYTES = 1 << 20
SAMPLES_PER_FILE = 32


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
