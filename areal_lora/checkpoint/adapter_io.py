"""Adapters as PEFT folders: what stock ``peft`` and stock vLLM load.

``adapter_config.json`` and ``adapter_model.safetensors``, whose names are the wire names
with the prefix ``base_model.model.``. Values are unscaled: the reader applies alpha / rank.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal_lora.config.peft_folder import (
    CONFIG_FILE,
    FILE_PREFIX,
    OWN_KEY,
    TENSOR_FILE,
    checked_modules,
    declared_spec,
    wire_name,
)  # fmt: skip
from areal_lora.errors import AdapterError
from areal_lora.types import AdapterSpec


def save_peft(
    folder: str | os.PathLike[str], spec: AdapterSpec, tensors: Mapping[str, torch.Tensor], base_model_path: str,
    aliases: Mapping[str, str] | None = None, *, revision: str | None = None,
) -> None:
    """Write an adapter so that a crash leaves either no folder or a whole one.

    ``tensors`` maps wire names to lora_A [r, in] and lora_B [out, r]; ``aliases`` (full name to
    wire name) are written out as tensors of their own, because readers may scale in place. ``revision``
    is the base's, if it is a hub model: peft's AutoPeft classes load that one.
    Raises AdapterError if the folder exists, a lora_A or lora_B lacks its partner, or a
    shape does not fit ``spec.rank``.
    """
    target = Path(folder)
    full = {FILE_PREFIX + name: _owned(t) for name, t in tensors.items()}
    full.update((FILE_PREFIX + name, _owned(tensors[wire])) for name, wire in (aliases or {}).items())
    modules = checked_modules(spec.rank, {name: tuple(t.shape) for name, t in full.items()})
    if target.exists():
        raise AdapterError(f"{target} exists; adapter folders are written once, choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        scratch.chmod(0o755)
        metadata = {"format": "pt", OWN_KEY: msgspec.json.encode(spec).decode()}
        save_file(full, scratch / TENSOR_FILE, metadata=metadata)
        config = _config(spec, modules, base_model_path, revision)
        (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        for path in (scratch / TENSOR_FILE, scratch / CONFIG_FILE, scratch):
            _fsync(path)
        scratch.rename(target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def load_peft(folder: str | os.PathLike[str]) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """Read a PEFT LoRA folder: the specification and the tensors by wire name, on the host.

    Folders of other tools are read too: their name is the folder's, their targets are
    translated, their layout is per expert. Raises AdapterError for anything that is not plain
    LoRA or not whole.
    """
    source = Path(folder)
    try:
        with safe_open(source / TENSOR_FILE, framework="pt") as f:
            own = (f.metadata() or {}).get(OWN_KEY)
            full = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as e:
        raise AdapterError(f"{source} is not a readable PEFT adapter folder: {e}") from e
    spec = declared_spec(source, own)
    checked_modules(spec.rank, {name: tuple(t.shape) for name, t in full.items()})
    return spec, {wire_name(source, name): t for name, t in full.items()}


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _config(spec: AdapterSpec, modules: list[str], base_model_path: str, revision: str | None) -> dict[str, object]:
    alpha = int(spec.alpha) if spec.alpha.is_integer() else spec.alpha  # peft declares an int
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model_path,
        "revision": revision,
        "r": spec.rank, "lora_alpha": alpha, "lora_dropout": spec.dropout, "target_modules": modules,
        "bias": "none", "inference_mode": True, "fan_in_fan_out": False, "use_rslora": False, "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
