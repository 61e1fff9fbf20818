"""Hub models made of the shipped tiny model, and a cache folder as huggingface_hub lays it out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save

from tests.support.launcher.fake_hub import commit_id
from tests.support.paths import TINY_MODEL

NAME = "some-lab/tiny-moe"
FIRST, SECOND = commit_id("first"), commit_id("second")


def tiny_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in TINY_MODEL.iterdir() if path.is_file()}


def sharded(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same model with its weights in two shards and an index."""
    tensors = load_file(TINY_MODEL / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    made = {file: save({name: tensors[name] for name in part}, {"format": "pt"}) for file, part in halves.items()}
    rest = {name: content for name, content in files.items() if name != "model.safetensors"}
    return {**rest, **made, "model.safetensors.index.json": json.dumps(index).encode()}


def fill_cache(
    cache: Path, files: Mapping[str, bytes], *, name: str = NAME, commit: str = FIRST, ref: str | None = "main"
) -> Path:
    """Lay ``files`` out as ``commit`` of ``name``; returns the snapshot folder."""
    root = cache / ("models--" + name.replace("/", "--"))
    snapshot = root / "snapshots" / commit
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        blob = root / "blobs" / hashlib.sha1(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file).symlink_to(Path("..", "..", "blobs", blob.name))
    if ref is not None:
        (root / "refs" / ref).write_text(commit)
    return snapshot
