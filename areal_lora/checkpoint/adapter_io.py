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

from areal_lora.config.architectures import HF_TO_MEGATRON
from areal_lora.errors import AdapterError
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.manifest import FILE_PREFIX

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_OWN_KEY = "areal_lora"  # in the safetensors metadata: unknown keys in the configuration file make peft warn


def save_peft(
    folder: str | os.PathLike[str], spec: AdapterSpec, tensors: Mapping[str, torch.Tensor], base_model_path: str,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write an adapter so that a crash leaves either no folder or a whole one.

    ``tensors`` maps wire names to lora_A [r, in] and lora_B [out, r]; ``aliases`` (full name to
    wire name) are written out as tensors of their own, because readers may scale in place.
    Raises AdapterError if the folder exists, a lora_A or lora_B lacks its partner, or a
    shape does not fit ``spec.rank``.
    """
    target = Path(folder)
    full = {FILE_PREFIX + name: _owned(t) for name, t in tensors.items()}
    full.update((FILE_PREFIX + name, _owned(tensors[wire])) for name, wire in (aliases or {}).items())
    modules = _checked_modules(spec.rank, full)
    if target.exists():
        raise AdapterError(f"{target} exists; adapter folders are written once, choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        scratch.chmod(0o755)
        metadata = {"format": "pt", _OWN_KEY: msgspec.json.encode(spec).decode()}
        save_file(full, scratch / TENSOR_FILE, metadata=metadata)
        (scratch / CONFIG_FILE).write_text(json.dumps(_config(spec, modules, base_model_path), indent=2) + "\n")
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
        config = msgspec.json.decode((source / CONFIG_FILE).read_bytes(), type=_PeftConfig)
        with safe_open(source / TENSOR_FILE, framework="pt") as f:
            own = (f.metadata() or {}).get(_OWN_KEY)
            full = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
        declared = msgspec.json.decode(own, type=AdapterSpec) if own else None
    except (OSError, msgspec.MsgspecError, SafetensorError) as e:
        raise AdapterError(f"{source} is not a readable PEFT adapter folder: {e}") from e
    spec = _spec(source, config, declared)
    foreign = [name for name in full if not name.startswith(FILE_PREFIX)]
    if foreign:
        raise AdapterError(f"{source}: {foreign[0]} lacks the prefix {FILE_PREFIX!r}; save the adapter with peft")
    _checked_modules(spec.rank, full)
    return spec, {name.removeprefix(FILE_PREFIX): t for name, t in full.items()}


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _checked_modules(rank: int, full: Mapping[str, torch.Tensor]) -> list[str]:
    """Last path components of all adapted modules, sorted; checks pairs and shapes."""
    modules: set[str] = set()
    for name, tensor in full.items():
        path, sep, rest = name.rpartition(".lora_")
        if not sep or rest not in ("A.weight", "B.weight"):
            raise AdapterError(f"{name} is not a lora_A.weight or lora_B.weight tensor")
        partner = f"{path}.lora_{'B' if rest[0] == 'A' else 'A'}.weight"
        if partner not in full:
            raise AdapterError(f"{name} lacks its partner {partner}")
        if tensor.dim() != 2 or tensor.shape[0 if rest[0] == "A" else 1] != rank:
            raise AdapterError(f"{name} has shape {list(tensor.shape)}, which does not fit rank {rank}")
        modules.add(path.rpartition(".")[2])
    if not modules:
        raise AdapterError("an adapter without tensors cannot be saved or loaded")
    return sorted(modules)


def _config(spec: AdapterSpec, modules: list[str], base_model_path: str) -> dict[str, object]:
    alpha = int(spec.alpha) if spec.alpha.is_integer() else spec.alpha  # peft declares an int
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model_path,
        "r": spec.rank, "lora_alpha": alpha, "lora_dropout": spec.dropout, "target_modules": modules,
        "bias": "none", "inference_mode": True, "fan_in_fan_out": False, "use_rslora": False, "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }


class _PeftConfig(msgspec.Struct, kw_only=True):
    """The part of ``adapter_config.json`` that decides what the tensors mean."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str]
    base_model_name_or_path: str | None = None
    lora_dropout: float = 0.0
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def unsupported(self) -> list[str]:
        odd = {
            "peft_type": self.peft_type != "LORA", "bias": self.bias != "none", "use_rslora": self.use_rslora,
            "use_dora": self.use_dora, "fan_in_fan_out": self.fan_in_fan_out, "modules_to_save": self.modules_to_save,
            "rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern,
        }
        return [key for key, value in odd.items() if value]


def _spec(source: Path, config: _PeftConfig, declared: AdapterSpec | None) -> AdapterSpec:
    """The specification stored with the tensors; for other tools' folders, one made from the configuration."""
    if odd := config.unsupported():
        raise AdapterError(f"{source}: {', '.join(odd)} beyond plain LoRA; merge or retrain without it")
    if declared is not None:
        if (declared.rank, declared.alpha) != (config.r, config.lora_alpha):
            raise AdapterError(
                f"{source}: {CONFIG_FILE} says r {config.r}, lora_alpha {config.lora_alpha}, the tensors were saved "
                f"with {declared.rank}, {declared.alpha}; one of the files was changed"
            )
        return declared
    unknown = [m for m in config.target_modules if m not in HF_TO_MEGATRON]
    if unknown:
        raise AdapterError(f"{source}: target module {unknown[0]!r} is none of {sorted(HF_TO_MEGATRON)}")
    targets = tuple(sorted({HF_TO_MEGATRON[m] for m in config.target_modules}))
    return AdapterSpec(
        name=source.name, base_model=config.base_model_name_or_path or "", rank=config.r, alpha=config.lora_alpha,
        target_modules=targets, dropout=config.lora_dropout,
    )


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
