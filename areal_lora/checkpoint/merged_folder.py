"""Write a base model with an adapter merged into it as a Hugging Face folder, one tensor in memory at a time.

The files have the base's names and hold the same tensors; configuration and tokenizer are copied.

Any PEFT LoRA adapter as one that this model's layout holds, with every product B A unchanged.

Megatron has q, k, v (gate, up) in one layer with one lora_A; other tools train one lora_A each.
With the distinct ones stacked, each projection reads its own rows through its lora_B::

    lora_A = [Aq; Ak; Av; fresh]    B_q = [Bq 0 0 0]    B_k = [0 Bk 0 0]    B_v = [0 0 Bv 0]

so n distinct lora_A of rank r need rank n r. Rows beyond that are initial values with zero columns
of lora_B, like a new adapter: zeros on both sides would never get a gradient.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_lora.algorithms.merging import FLOATS, CastLoss, adapted_weights, merged
from areal_lora.checkpoint.adapter_io import DTYPES, new_folder
from areal_lora.config.recorded import wanted
from areal_lora.errors import AdapterError, ConfigError, UnknownTensorError
from areal_lora.families.peft_folder import misfits, module_of
from areal_lora.families.safetensors_head import INDEX_FILE, WEIGHT_FILE, Entry, head_of, read_head, weight_files
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.layout import AdapterLayout, WireTensor

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
    if not (files := weight_files(base)):
        raise ConfigError(str(base), f"it has no {WEIGHT_FILE}", "name the folder of the base model")
    heads = {file: _head(base / file) for file in files}
    names = {name for head in heads.values() for name in head}
    if absent := sorted(adapted_weights(adapter) - names):
        raise UnknownTensorError(
            f"{base} lacks {absent[0]} ({len(absent)} such): the adapter belongs to another base, or the file's names "
            "are not those of single experts"
        )
    loss = CastLoss()
    nbytes = 0
    with new_folder(out) as scratch:
        for file in files:
            own = {n: t for n, t in adapter.items() if n.rpartition(".lora_")[0] + ".weight" in heads[file]}
            stream = merged(_tensors(base / file, heads[file]), own, scale_of, dtype=dtype, loss=loss)
            nbytes += _write(scratch / file, heads[file], stream, dtype)
        _copy_rest(base, scratch, dtype, nbytes)
    return MergeReport(weights=len(adapted_weights(adapter)), nbytes=nbytes, dtype=dtype, bfloat16=loss)


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


def fused(
    tensors: Mapping[str, Tensor], spec: AdapterSpec, layout: AdapterLayout, initial: Callable[[WireTensor], Tensor]
) -> dict[str, Tensor]:
    """Every wire tensor of ``layout``, fp32, from the ``tensors`` of a folder whose specification is ``spec``.

    A difference of the two scales (`AdapterSpec.scale_of`) goes into lora_B: exact in fp32 where their ratio is a
    power of two, else rounded once. Projections that the folder adapts nowhere get a lora_B of zeros.
    What fits already comes out bit for bit. ``initial`` gives a tensor of a new adapter.

    Raises:
        UnknownTensorError: the folder adapts a module that ``layout`` does not, or a projection in
            some of its layers or experts only.
        AdapterError: ``layout`` has too small a rank (the message names the one needed), one adapter
            for experts that differ, or other sizes.
    """
    wire = {t.name: t for shard in layout.shards for t in shard.tensors}
    aliases = layout.aliases
    members: dict[str, list[str]] = {name: [module_of(name)] for name in wire if name.endswith("lora_A.weight")}
    for name, target in aliases.items():
        if name.endswith("lora_A.weight"):
            members[target].append(module_of(name))
    extra, absent = misfits(map(module_of, tensors), [m for modules in members.values() for m in modules])
    if extra or absent:
        what = f"{extra[0]} is adapted there only" if extra else f"{absent[0]} is missing, others like it are there"
        raise UnknownTensorError(f"the folder's adapter does not fit: {what} ({len(extra or absent)} such)")
    stacks: dict[str, _Stack] = {}
    for name, modules in members.items():
        leaders = [m for m in modules if f"{m}.lora_B.weight" in wire]
        _check_followers(tensors, [m for m in modules if m not in leaders], aliases)
        # An expert that only shares its lora_B with others has a lora_A to stack.
        stacked = [m for m in modules if m in leaders or f"{m}.lora_A.weight" in wire]
        stacks[name] = _Stack([m for m in stacked if f"{m}.lora_A.weight" in tensors], leaders, tensors)
    for name, stack in stacks.items():
        ranks, room = [part.shape[0] for part in stack.parts], wire[name].shape[0]
        if sum(ranks) > room:
            raise AdapterError(
                f"{spec.name} needs rank {sum(ranks)}, the adapter has {room} at {module_of(name)}: layers that "
                f"Megatron fuses have {len(ranks)} lora_A of rank {', '.join(map(str, ranks))} in the folder"
            )
    found: dict[str, Tensor] = {}
    for name, stack in stacks.items():
        found[name] = stack.lora_a(wire[name], initial)
        for module in stack.leaders:
            lora_b = wire[f"{module}.lora_B.weight"]
            ratio = spec.scale_of(module) / layout.structure.scale_of(module)
            found[lora_b.name] = stack.lora_b(module, lora_b, ratio, tensors)
    return {name: found[name] for name in wire}


class _Stack:
    """The lora_A of one Megatron layer: the distinct ones of its projections, and which is whose."""

    def __init__(self, modules: Sequence[str], leaders: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self.leaders = leaders
        self.parts: list[Tensor] = []
        self._first: dict[str, int] = {}  # row of the whole lora_A
        for module in modules:
            tensor = tensors[f"{module}.lora_A.weight"]
            at = next((i for i, part in enumerate(self.parts) if torch.equal(part, tensor)), len(self.parts))
            if at == len(self.parts):
                self.parts.append(tensor)
            self._first[module] = sum(part.shape[0] for part in self.parts[:at])

    def lora_a(self, target: WireTensor, initial: Callable[[WireTensor], Tensor]) -> Tensor:
        whole, at = initial(target), 0
        for part in self.parts:
            _check_size(target, part, 1)
            whole[at : at + part.shape[0]] = part
            at += part.shape[0]
        return whole

    def lora_b(self, module: str, target: WireTensor, ratio: float, tensors: Mapping[str, Tensor]) -> Tensor:
        whole = torch.zeros(target.shape)
        if module in self._first:
            tensor = tensors[target.name]
            _check_size(target, tensor, 0)
            start = self._first[module]
            whole[:, start : start + tensor.shape[1]] = (tensor.double() * ratio).float()
        return whole


def _check_followers(tensors: Mapping[str, Tensor], followers: Sequence[str], aliases: Mapping[str, str]) -> None:
    """What all experts share must be equal in the folder."""
    for module in followers:
        leader = module_of(aliases[f"{module}.lora_B.weight"])
        for side in ("lora_A.weight", "lora_B.weight"):
            mine = tensors.get(f"{module}.{side}") if f"{module}.{side}" in aliases else None
            if mine is not None and not torch.equal(mine, tensors[f"{leader}.{side}"]):
                raise AdapterError(
                    f"{module}.{side} differs from {leader}.{side}; this expert_layout has one for both, use per_expert"
                )


def _check_size(target: WireTensor, tensor: Tensor, axis: int) -> None:
    if tensor.shape[axis] != target.shape[axis]:
        raise AdapterError(
            f"{target.name} has shape {tuple(tensor.shape)} in the folder, which does not fit {target.shape}: "
            "it was trained on another model"
        )
