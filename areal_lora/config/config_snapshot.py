"""Locate a hub model in the local cache and check that it is complete. Uses no network.

The layout is huggingface_hub's: ``models--org--name/{blobs,refs,snapshots/<commit>}``, with links from the
snapshot to the blobs. Its variables (``HF_HOME``, ``HF_HUB_CACHE`` and others) apply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A tokenizer needs one of these files."""
_WANTED = ("*.json", "*.jinja", "*.txt", "*.model", WEIGHT_FILE, "model-*.safetensors")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the cached folder of ``revision`` of hub model ``name``, complete or not; None if there is none."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).absolute().parent if isinstance(config, str) else None


def wanted(names: Iterable[str]) -> list[str]:
    """Select the files of a hub model that a run reads: configuration, tokenizer and safetensors in the top folder."""
    return [name for name in names if "/" not in name and any(fnmatch(name, pattern) for pattern in _WANTED)]


def missing_files(folder: Path) -> list[str]:
    """Return the missing files of a snapshot: shards in its index, weights, or a tokenizer. Empty: complete."""
    lacks = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return [*lacks, INDEX_FILE]
        lacks += [shard for shard in shards if not (folder / shard).is_file()]
    elif any(_SHARD.fullmatch(path.name) for path in folder.glob("*.safetensors")):
        lacks.append(INDEX_FILE)
    elif not (folder / WEIGHT_FILE).is_file():
        lacks.append(WEIGHT_FILE)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        lacks.append(TOKENIZER_FILES[0])
    return lacks
