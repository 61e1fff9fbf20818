"""Where a hub model's files lie on this machine, and whether they are all there. Asks no network.

The layout is huggingface_hub's: ``models--org--name/{blobs,refs,snapshots/<commit>}``, with links from the
snapshot to the blobs. ``HF_HOME``, ``HF_HUB_CACHE`` and the like have its meaning.
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
"""One of these is enough for a tokenizer."""
_WANTED = ("*.json", "*.jinja", "*.txt", "*.model", WEIGHT_FILE, "model-*.safetensors")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of ``revision`` of hub model ``name`` in the cache, complete or not; None where there is none."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).absolute().parent if isinstance(config, str) else None


def wanted(names: Iterable[str]) -> list[str]:
    """The files of a hub model that a run reads: configuration, tokenizer and safetensors, of the top folder."""
    return [name for name in names if "/" not in name and any(fnmatch(name, pattern) for pattern in _WANTED)]


def missing_files(folder: Path) -> list[str]:
    """What a snapshot lacks: shards that its index lists, weights, or a tokenizer. Empty: it is complete."""
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
