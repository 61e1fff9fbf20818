"""Write a base model with an adapter merged into it as a Hugging Face folder, one tensor in memory at a time.

The files have the base's names and hold the same tensors; configuration and tokenizer are copied.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_lora.algorithms.merging import FLOATS, CastLoss, adapted_weights, merged
from areal_lora.config.snapshot import INDEX_FILE, WEIGHT_FILE, wanted
from areal_lora.errors import ConfigError, UnknownTensorError

CONFIG_FILE = "config.json"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """``weights`` were changed; ``nbytes`` of tensors were written as ``dtype``, or as the base has them if None."""

    weights: int
    nbytes: int
    dtype: torch.dtype | None
    bfloat16: CastLoss


def write_merged(
    base: Path,
    adapter: Mapping[str, Tensor],
    scale_of: Callable[[str], float],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
) -> Merged:
    """Write the model folder ``base`` with ``adapter`` (see `merged`) to ``out``, which appears as a whole.

    Raises ConfigError if ``out`` exists or ``base`` is no model folder, UnknownTensorError if the adapter does not fit.
    """
    if out.exists():
        raise ConfigError(str(out), "it exists", "name a folder that does not")
    files = _files(base)
    heads = {file: _head(base / file) for file in files}
    names = {name for head in heads.values() for name in head}
    if absent := sorted(adapted_weights(adapter) - names):
        raise UnknownTensorError(
            f"{base} lacks {absent[0]} ({len(absent)} such): the adapter belongs to another base, or the file's names "
            "are not those of single experts"
        )
    loss = CastLoss()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        nbytes = 0
        for file in files:
            own = {n: t for n, t in adapter.items() if n.rpartition(".lora_")[0] + ".weight" in heads[file]}
            stream = merged(_tensors(base / file, heads[file]), own, scale_of, dtype=dtype, loss=loss)
            nbytes += _write(scratch / file, heads[file], stream, dtype)
        _copy_rest(base, scratch, dtype, nbytes)
        scratch.chmod(0o755)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Merged(weights=len(adapted_weights(adapter)), nbytes=nbytes, dtype=dtype, bfloat16=loss)


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _files(base: Path) -> list[str]:
    try:
        index = json.loads((base / INDEX_FILE).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        if not (base / WEIGHT_FILE).is_file():
            raise ConfigError(str(base), f"it has no {WEIGHT_FILE}", "name the folder of the base model") from None
        return [WEIGHT_FILE]
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(str(base / INDEX_FILE), f"it is no index of tensors: {error!r}") from None


def _head(file: Path) -> dict[str, _Entry]:
    """The tensors of a safetensors file by name, in the order of their bytes."""
    try:
        with file.open("rb") as f:
            head = msgspec.json.decode(f.read(int.from_bytes(f.read(8), "little")), type=dict[str, msgspec.Raw])
        head.pop("__metadata__", None)
        found = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in head.items()}
    except (OSError, msgspec.MsgspecError, MemoryError, OverflowError) as error:
        raise ConfigError(str(file), f"it is no safetensors file: {error}") from None
    return dict(sorted(found.items(), key=lambda item: item[1].data_offsets))


def _tensors(file: Path, head: Mapping[str, _Entry]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in head:
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(str(file), f"it is no safetensors file: {error}") from None


def _write(
    file: Path, head: Mapping[str, _Entry], tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> int:
    """Write the tensors behind one another; returns their bytes."""
    floats = {_NAMES[each] for each in FLOATS}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, entry in head.items():
        size, kind = entry.data_offsets[1] - entry.data_offsets[0], entry.dtype
        if dtype is not None and kind in floats:
            size, kind = math.prod(entry.shape) * dtype.itemsize, _NAMES[dtype]
        entries[name] = {"dtype": kind, "shape": entry.shape, "data_offsets": (at, at + size)}
        at += size
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    with file.open("xb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            f.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return at


def _copy_rest(base: Path, out: Path, dtype: torch.dtype | None, nbytes: int) -> None:
    for name in wanted(path.name for path in base.iterdir() if path.is_file()):
        if not name.endswith(".safetensors"):
            shutil.copyfile(base / name, out / name)
    if (out / INDEX_FILE).is_file():
        index = json.loads((out / INDEX_FILE).read_text(encoding="utf-8"))
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": nbytes}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if dtype is not None:
        config = json.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
        (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
