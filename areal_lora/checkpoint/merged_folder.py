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

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_lora.algorithms.merging import FLOATS, CastLoss, adapted_weights, merged
from areal_lora.checkpoint.adapter_io import DTYPES
from areal_lora.checkpoint.safetensors_head import Entry, head_of, read_head
from areal_lora.config.config_snapshot import INDEX_FILE, WEIGHT_FILE, wanted
from areal_lora.errors import ConfigError, UnknownTensorError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
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
) -> MergeReport:
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
    return MergeReport(weights=len(adapted_weights(adapter)), nbytes=nbytes, dtype=dtype, bfloat16=loss)


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


def _head(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name, in the order of their bytes."""
    try:
        with file.open("rb") as f:
            return read_head(f)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), f"it is no safetensors file: {error}") from None


def _tensors(file: Path, head: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in head:
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(str(file), f"it is no safetensors file: {error}") from None


def _write(
    file: Path, head: Mapping[str, Entry], tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> int:
    """Write the tensors behind one another; returns their bytes."""
    cast = {} if dtype is None else {DTYPES[each]: (DTYPES[dtype], dtype.itemsize) for each in FLOATS}
    written = []
    for name, entry in head.items():
        kind, size = entry.dtype, entry.nbytes
        if kind in cast:
            kind, size = cast[kind][0], math.prod(entry.shape) * cast[kind][1]
        written.append((name, kind, entry.shape, size))
    with file.open("xb") as f:
        f.write(head_of(written, {"format": "pt"})[0])
        for _, tensor in tensors:
            f.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return sum(size for *_, size in written)


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
