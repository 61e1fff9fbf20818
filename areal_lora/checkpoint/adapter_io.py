"""Adapters as PEFT folders: what stock ``peft`` and stock vLLM load.

``adapter_config.json`` and ``adapter_model.safetensors``, whose names are the wire names
with the prefix ``base_model.model.``. Values are unscaled: the reader applies alpha / rank,
or what the configuration has instead.

transformers 5 has the experts of a layer as two parameters, ``gate_up_proj`` and ``down_proj``. peft turns an adapter
of single experts into one of these parameters when it loads it, with twice the rank for gate and up, and looks for
their numbers under their own names. So patterns of such modules are written a second time, for these names.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from areal_lora.errors import AdapterError
from areal_lora.families.family import Scope
from areal_lora.families.peft_folder import (
    CONFIG_FILE,
    FILE_PREFIX,
    OWN_KEY,
    TENSOR_FILE,
    checked_modules,
    declared_spec,
    module_of,
    wire_name,
)
from areal_lora.families.registry import target_of
from areal_lora.families.safetensors_head import head_of
from areal_lora.types import AdapterSpec

_EXPERT = re.compile(r"(layers\.\d+\.).*\.experts\.0\.[^.]+$")


def peft_config(
    spec: AdapterSpec, modules: Sequence[str], names: Iterable[str], base_model_path: str, revision: str | None
) -> dict[str, object]:
    """The file's content. ``modules`` are the last parts of the adapted paths, ``names`` all wire names."""
    ranks, alphas = _fused_patterns(spec, names)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_path,
        "revision": revision,
        "r": spec.rank,
        "lora_alpha": _number(spec.alpha),
        "lora_dropout": spec.dropout,
        "target_modules": list(modules),
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": False,
        "use_rslora": spec.rslora,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {**ranks, **dict(spec.rank_pattern)},
        "alpha_pattern": {**alphas, **{pattern: _number(alpha) for pattern, alpha in spec.alpha_pattern}},
    }


def _fused_patterns(spec: AdapterSpec, names: Iterable[str]) -> tuple[dict[str, int], dict[str, float]]:
    """Ranks and alphas of fused expert parameters that differ from those that peft would derive."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module in sorted({module_of(name) for name in names}):
        found, target = _EXPERT.search(module), target_of(module)
        if found is None or target is None or target[1] is not Scope.EXPERT:
            continue
        fused, parts = ("gate_up_proj", 2) if target[0] == "linear_fc1" else ("down_proj", 1)
        path = re.escape(f"{found[1]}mlp.experts.{fused}")
        rank = parts * spec.rank_of(module)
        alpha = spec.scale_of(module) * (math.sqrt(rank) if spec.rslora else rank)
        if rank != parts * spec.rank:
            ranks[path] = rank
        if not math.isclose(alpha, parts * spec.alpha):
            alphas[path] = _number(alpha)
    return ranks, alphas


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value  # peft declares an int


Shape = tuple[int, ...]
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class PeftWriter:
    """An adapter folder that is written tensor by tensor, in any order.

    A crash leaves either no folder or a whole one. Where every tensor lies in the file follows from names and
    shapes: stock safetensors would write the same.

    Example::

        with PeftWriter(folder, spec, {name: (8, 64), ...}, "path/of/the/base") as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        spec: AdapterSpec,
        shapes: Mapping[str, Shape],
        base_model_path: str,
        aliases: Mapping[str, str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        replace: bool = False,
        revision: str | None = None,
    ) -> None:
        """``shapes`` by wire name: lora_A [r, in] and lora_B [out, r]. ``aliases`` (full name to wire name) are
        written out as tensors of their own, because readers may scale in place. ``replace`` an earlier folder.
        ``revision`` is the base's, if it is a hub model: peft's AutoPeft classes load that one.

        Raises AdapterError if the folder exists, a lora_A or lora_B lacks its partner, or a shape does not fit
        the rank that ``spec`` gives its module.
        """
        self._target, self._spec, self._dtype = Path(folder), spec, dtype
        self._base, self._revision = base_model_path, revision
        self._shapes = dict(shapes)
        full = {FILE_PREFIX + name: tuple(shape) for name, shape in shapes.items()}
        full |= {FILE_PREFIX + name: tuple(shapes[wire]) for name, wire in (aliases or {}).items()}
        self._full = frozenset(full)
        self._modules = checked_modules(spec, full)
        if self._target.exists() and not replace:
            raise AdapterError(f"{self._target} exists; adapter folders are written once, choose another name")
        metadata = {"format": "pt", OWN_KEY: msgspec.json.encode(spec).decode()}
        sizes = (
            (name, DTYPES[dtype], shape, math.prod(shape) * dtype.itemsize) for name, shape in sorted(full.items())
        )
        self._header, offsets = head_of(sizes, metadata)
        self._places = {name: [offsets[FILE_PREFIX + name]] for name in shapes}
        for name, wire in (aliases or {}).items():
            self._places[wire].append(offsets[FILE_PREFIX + name])

    def __enter__(self) -> PeftWriter:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=f".{self._target.name}.", dir=self._target.parent))
        self._scratch.chmod(0o755)
        self._fd = os.open(self._scratch / TENSOR_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor by its wire name, once. Raises AdapterError if it is not one of those announced."""
        if (tuple(tensor.shape), tensor.dtype) != (tuple(self._shapes.get(name, ())), self._dtype):
            raise AdapterError(f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}, announced was another one")
        if name not in self._places:
            raise AdapterError(f"{name} comes twice")
        data = memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
        for place in self._places.pop(name):
            self._put(data, place)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._fd)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _finish(self) -> None:
        if self._places:
            raise AdapterError(f"{len(self._places)} tensors were not written, first {next(iter(self._places))}")
        self._put(self._header, 0)
        names = {name.removeprefix(FILE_PREFIX) for name in self._full}
        config = peft_config(self._spec, self._modules, names, self._base, self._revision)
        (self._scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        for path in (self._scratch / TENSOR_FILE, self._scratch / CONFIG_FILE, self._scratch):
            _fsync(path)
        if not self._target.exists():
            self._scratch.rename(self._target)
            _fsync(self._target.parent)
            return
        earlier = self._scratch.with_name(f"{self._scratch.name}.earlier")
        self._target.rename(earlier)
        self._scratch.rename(self._target)
        _fsync(self._target.parent)
        shutil.rmtree(earlier, ignore_errors=True)

    def _put(self, data: bytes | memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], at + done)


def save_peft(
    folder: str | os.PathLike[str],
    spec: AdapterSpec,
    tensors: Mapping[str, torch.Tensor],
    base_model_path: str,
    aliases: Mapping[str, str] | None = None,
    *,
    revision: str | None = None,
) -> None:
    """Write an adapter that is in memory, all tensors of one dtype; see `PeftWriter`."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    dtype = next((t.dtype for t in tensors.values()), torch.float32)
    with PeftWriter(folder, spec, shapes, base_model_path, aliases, dtype=dtype, revision=revision) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def load_peft(folder: str | os.PathLike[str]) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """Read a PEFT LoRA folder: the specification and the tensors by wire name, on the host.

    Folders of other tools are read too: their name is the folder's, their targets are
    translated, their layout is per expert. Raises AdapterError for variants of LoRA that are not
    supported, and for what is not whole.
    """
    source = Path(folder)
    try:
        with safe_open(source / TENSOR_FILE, framework="pt") as f:
            own = (f.metadata() or {}).get(OWN_KEY)
            full = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as e:
        raise AdapterError(f"{source} is not a readable PEFT adapter folder: {e}") from e
    spec = declared_spec(source, own, full)
    checked_modules(spec, {name: tuple(t.shape) for name, t in full.items()})
    return spec, {wire_name(source, name): t for name, t in full.items()}


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
