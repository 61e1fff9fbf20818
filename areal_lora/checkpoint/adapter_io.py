"""Adapters as PEFT folders: what stock ``peft`` and stock vLLM load.

``adapter_config.json`` and ``adapter_model.safetensors``, whose names are the wire names
with the prefix ``base_model.model.``. Values are unscaled: the reader applies alpha / rank,
or what the configuration has instead.

transformers 5 has the experts of a layer as two parameters, ``gate_up_proj`` and ``down_proj``. peft turns an adapter
of single experts into one of these parameters when it loads it, with twice the rank for gate and up, and looks for
their numbers under their own names. So patterns of such modules are written a second time, for these names: one for
each number, since readers try all of them for every module.
"""

import json
import math
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from areal_lora.errors import AdapterError
from areal_lora.families import peft_folder
from areal_lora.families.family import Scope
from areal_lora.families.registry import target_of
from areal_lora.families.safetensors_head import head_of
from areal_lora.run_folder.paths import sync_folder, write_file
from areal_lora.types import AdapterSpec, matches

_EXPERT = re.compile(r"layers\.(\d+)\..*\.experts\.0\.[^.]+$")


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


def _fused_patterns(spec: AdapterSpec, names: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Ranks and alphas of fused expert parameters that differ from those that peft would derive."""
    ranks: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    alphas: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for module in sorted({peft_folder.module_of(name) for name in names}):
        found, target = _EXPERT.search(module), target_of(module)
        if found is None or target is None or target[1] is not Scope.EXPERT:
            continue
        fused, parts = ("gate_up_proj", 2) if target[0] == "linear_fc1" else ("down_proj", 1)
        ranks[fused, parts][found[1]] = rank = parts * spec.rank_of(module)
        alpha = spec.scale_of(module) * (math.sqrt(rank) if spec.rslora else rank)
        alphas[fused, parts][found[1]] = _number(alpha)
    return _patterns(ranks, spec.rank, spec.rank_pattern), _patterns(alphas, spec.alpha, spec.alpha_pattern)


def _patterns(
    numbers: Mapping[tuple[str, int], Mapping[str, float]], default: float, given: Sequence[tuple[str, float]]
) -> dict[str, float]:
    """One pattern for each number of (parameter, parts) by layer that readers find otherwise.

    They look for a fused name among the patterns ``given``, then derive its number from ``default``.
    """
    patterns: dict[str, float] = {}
    for (fused, parts), by_layer in numbers.items():
        for number in dict.fromkeys(by_layer.values()):
            layers = sorted((layer for layer, other in by_layer.items() if other == number), key=int)
            where = "" if len(layers) == len(by_layer) else rf"layers\.({'|'.join(layers)})\."
            fulls = [f"model.layers.{layer}.mlp.experts.{fused}" for layer in layers]
            found = [next((n for pattern, n in given if matches(pattern, full)), parts * default) for full in fulls]
            if not all(math.isclose(number, each) for each in found):
                patterns[rf"{where}mlp\.experts\.{fused}"] = number
    return patterns


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value  # peft declares an int


Shape = tuple[int, ...]
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder that gets the name ``target`` as a whole at the end of the block; nothing remains if the block raises.

    The block itself syncs its files. ``replace`` an earlier folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
        sync_folder(scratch)
        earlier = scratch.with_name(f"{scratch.name}.earlier") if replace and target.exists() else None
        if earlier is not None:
            target.rename(earlier)
        scratch.rename(target)
        sync_folder(target.parent)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def peft_writer(
    folder: str | os.PathLike[str],
    spec: AdapterSpec,
    shapes: Mapping[str, Shape],
    base_model_path: str,
    aliases: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    replace: bool = False,
    revision: str | None = None,
) -> Iterator[Callable[[str, torch.Tensor], None]]:
    """Write an adapter folder tensor by tensor, in any order; a crash leaves either no folder or a whole one.

    ``shapes`` by wire name: lora_A [r, in] and lora_B [out, r]. ``aliases`` (full name to wire name) are
    written out as tensors of their own, because readers may scale in place. ``replace`` an earlier folder.
    ``revision`` is the base's, if it is a hub model: peft's AutoPeft classes load that one. Where every tensor lies in
    the file follows from names and shapes: stock safetensors would write the same.

    Example::

        with peft_writer(folder, spec, {name: (8, 64), ...}, "path/of/the/base") as write:
            for name, tensor in tensors:
                write(name, tensor)  # by wire name, once

    Raises AdapterError if the folder exists, a lora_A or lora_B lacks its partner, a shape does not fit
    the rank that ``spec`` gives its module, or the tensors written are not those announced.
    """
    target, aliases = Path(folder), aliases or {}
    full = {peft_folder.FILE_PREFIX + name: tuple(shape) for name, shape in shapes.items()}
    full |= {peft_folder.FILE_PREFIX + name: tuple(shapes[wire]) for name, wire in aliases.items()}
    modules = peft_folder.checked_modules(spec, full)
    if target.exists() and not replace:
        raise AdapterError(f"{target} exists; adapter folders are written once, choose another name")
    sizes = ((name, DTYPES[dtype], shape, math.prod(shape) * dtype.itemsize) for name, shape in sorted(full.items()))
    header, offsets = head_of(sizes, {"format": "pt", peft_folder.OWN_KEY: msgspec.json.encode(spec).decode()})
    places = {name: [offsets[peft_folder.FILE_PREFIX + name]] for name in shapes}
    for name, wire in aliases.items():
        places[wire].append(offsets[peft_folder.FILE_PREFIX + name])

    with new_folder(target, replace=replace) as scratch:
        with (scratch / peft_folder.TENSOR_FILE).open("xb") as file:

            def write(name: str, tensor: torch.Tensor) -> None:
                if (tuple(tensor.shape), tensor.dtype) != (tuple(shapes.get(name, ())), dtype):
                    raise AdapterError(
                        f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}, announced was another one"
                    )
                if name not in places:
                    raise AdapterError(f"{name} comes twice")
                data = memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
                for place in places.pop(name):
                    file.seek(place)
                    file.write(data)

            yield write
            if places:
                raise AdapterError(f"{len(places)} tensors were not written, first {next(iter(places))}")
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        names = {name.removeprefix(peft_folder.FILE_PREFIX) for name in full}
        config = peft_config(spec, modules, names, base_model_path, revision)
        write_file(scratch / peft_folder.CONFIG_FILE, json.dumps(config, indent=2) + "\n", durable=True)


def save_peft(
    folder: str | os.PathLike[str],
    spec: AdapterSpec,
    tensors: Mapping[str, torch.Tensor],
    base_model_path: str,
    aliases: Mapping[str, str] | None = None,
    *,
    revision: str | None = None,
) -> None:
    """Write an adapter that is in memory, all tensors of one dtype; see `peft_writer`."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    dtype = next((t.dtype for t in tensors.values()), torch.float32)
    with peft_writer(folder, spec, shapes, base_model_path, aliases, dtype=dtype, revision=revision) as write:
        for name, tensor in tensors.items():
            write(name, tensor)


def load_peft(
    folder: str | os.PathLike[str], base: peft_folder.BaseOf = lambda _: None
) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """Read a PEFT LoRA folder: the specification and the tensors by wire name, on the host.

    Folders of other tools are read too: their name is the folder's, their targets are
    translated, their layout is per expert; fused experts have the names of the ``base``, which has to be given then.
    Raises AdapterError for variants of LoRA that are not supported, and for what is not whole.
    """
    source = Path(folder)
    try:
        with safe_open(source / peft_folder.TENSOR_FILE, framework="pt") as f:
            own = (f.metadata() or {}).get(peft_folder.OWN_KEY)
            full = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as e:
        raise AdapterError(f"{source} is not a readable PEFT adapter folder: {e}") from e
    spec, tensors = peft_folder.contents(source, own, full, base)
    return spec, {name: t.contiguous() for name, t in tensors.items()}
