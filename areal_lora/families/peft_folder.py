"""Describe a PEFT LoRA folder without reading its numbers into memory.

The configuration rules check such folders before a run starts; `checkpoint.adapter_io` loads their tensors.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_lora.errors import AdapterError
from areal_lora.families.family import Scope
from areal_lora.families.registry import kind_of, path_of, target_of
from areal_lora.families.safetensors_head import read_head
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."
OWN_KEY = "areal_lora"
"""Key of the specification in the safetensors metadata; peft warns about unknown keys in the configuration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFolder:
    """``shapes`` [rows, columns] and ``digests`` are by wire name; equal bytes have equal digests."""

    spec: AdapterSpec
    shapes: Mapping[str, tuple[int, ...]]
    digests: Mapping[str, bytes]

    @property
    def modules(self) -> frozenset[str]:
        """Hugging Face paths of the adapted modules, ``model.layers.0.self_attn.q_proj``."""
        return frozenset(module_of(name) for name in self.shapes)


BaseOf = Callable[[str], ModelShape | None]
"""The base's shape by the name that a folder gives it; read only where the base decides names of tensors."""


def describe(folder: Path, base: BaseOf) -> PeftFolder:
    """Raises AdapterError for anything that `checkpoint.adapter_io.load_peft` would refuse."""
    path, arrays = folder / TENSOR_FILE, {}
    try:
        with path.open("rb") as f:
            entries, start, metadata = read_head(f)
        data = np.memmap(path, np.uint8, mode="r")
        if start + max((e.data_offsets[1] for e in entries.values()), default=0) != len(data):
            raise AdapterError(f"{folder} is not a readable PEFT adapter folder: {TENSOR_FILE} is not whole")
        for name, entry in entries.items():
            first, end = (start + offset for offset in entry.data_offsets)
            item = max(1, entry.nbytes // max(1, math.prod(entry.shape)))
            arrays[name] = data[first:end].view(f"V{item}").reshape(entry.shape)
    except (OSError, ValueError) as e:
        raise AdapterError(f"{folder} is not a readable PEFT adapter folder: {e}") from e
    spec, tensors = contents(folder, metadata.get(OWN_KEY), arrays, base)
    digests = {name: hashlib.blake2b(t.tobytes(), digest_size=16).digest() for name, t in tensors.items()}
    return PeftFolder(spec=spec, shapes={name: tuple(t.shape) for name, t in tensors.items()}, digests=digests)


def contents(
    folder: Path, own: str | None, tensors: Mapping[str, Any], base: BaseOf
) -> tuple[AdapterSpec, dict[str, Any]]:
    """The specification, and the ``tensors`` of the file (of torch or numpy) by wire name, as views.

    ``own`` is the specification stored with the tensors; that of a folder of another tool is made from its
    configuration and names.

    Raises AdapterError for variants of LoRA that are not supported, for a wrong pair or shape, and where the two files
    disagree about a tensor.
    """
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=_PeftConfig)
        declared = msgspec.json.decode(own, type=AdapterSpec) if own else None
    except (OSError, msgspec.MsgspecError) as e:
        raise AdapterError(f"{folder} is not a readable PEFT adapter folder: {e}") from e
    if odd := config.unsupported():
        raise AdapterError(f"{folder}: {'; '.join(odd)}; merge the adapter into its base, or retrain without it")
    stated, parts = config.spec(folder), {wire_name(folder, name): t for name, t in tensors.items()}
    if any(_FUSED.match(module_of(name)) for name in parts):
        stated, parts = _single_experts(config, stated, parts, base(stated.base_model))
    spec = _agreed(folder, declared, stated, dict.fromkeys(map(module_of, parts)))
    checked_modules(spec, {name: tuple(t.shape) for name, t in parts.items()})
    return spec, parts


def _agreed(folder: Path, declared: AdapterSpec | None, stated: AdapterSpec, modules: Iterable[str]) -> AdapterSpec:
    if declared is not None:
        for module in modules:
            found, wanted = ((spec.rank_of(module), spec.scale_of(module)) for spec in (stated, declared))
            if found != wanted:
                raise AdapterError(
                    f"{folder}: {CONFIG_FILE} states rank {found[0]} and scale {found[1]:g} for {module}, the tensors "
                    f"were saved with {wanted[0]} and {wanted[1]:g}; one of the files was changed"
                )
        return declared
    return replace(stated, target_modules=tuple(sorted({_target(folder, module) for module in modules})))


def _target(folder: Path, module: str) -> str:
    """From the tensor's name: `target_modules` may be a regular expression, or paths of any length."""
    target = found[0] if (found := target_of(module)) else path_of(module)
    if target is None:
        raise AdapterError(f"{folder} adapts {module}: a router, or outside of the layers; retrain without it")
    return target


_FUSED = re.compile(r"(?P<path>(?P<layer>.+?\.\d+)\.[a-z_.]*experts)(?P<inner>\.base_layer)?$")


def _single_experts(
    config: "_PeftConfig", stated: AdapterSpec, tensors: Mapping[str, Any], base: ModelShape | None
) -> tuple[AdapterSpec, dict[str, Any]]:
    """Cut the LoRA of fused parameters (peft's `ParamWrapper`) into that of single experts: the products are equal.

    lora_A is [experts x rank, in], lora_B [out, rank x experts]. Gate and up are the two halves of the outputs and have
    one lora_A. Two parameters of a module are nested. Ranks and alphas are stated under the parameter's name.
    """
    if base is None or not base.experts:
        raise AdapterError(f"{stated.name} adapts fused experts, which its base does not have; give the folder's base")
    found: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, tensor in tensors.items():
        module = module_of(name)
        if (at := _FUSED.match(module)) is None:
            found[name] = tensor
            continue
        outer = not at["inner"] and config.adapts_parameter(f"{at['path']}.down_proj")
        parameter = f"{at['path']}.{'down_proj' if outer else 'gate_up_proj'}"
        projections = base.family.projections("linear_fc2" if outer else "linear_fc1", Scope.EXPERT)
        n, rank, side = base.experts, stated.rank_of(parameter), name.removeprefix(module)
        axis = int(side != ".lora_A.weight")
        if len(tensor.shape) != 2 or tensor.shape[axis] != n * rank or axis * tensor.shape[0] % len(projections):
            raise AdapterError(f"{name} has shape {list(tensor.shape)}, which does not fit rank {rank} of {n} experts")
        for i, projection in enumerate(projections):
            whole = tensor.reshape(len(projections), -1, rank, n)[i] if axis else tensor.reshape(n, rank, -1)
            for e in range(n):
                found[f"{at['layer']}.{projection.format(e)}{side}"] = whole[..., e] if axis else whole[e]
            kind = f"{at['layer']}.{projection.format('*')}"
            ranks[kind], alphas[kind] = rank, stated.alpha_of(parameter)
    return replace(
        stated,
        rank_pattern=(*_patterns(ranks), *stated.rank_pattern),
        alpha_pattern=(*_patterns(alphas), *stated.alpha_pattern),
    ), found


def _patterns(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A pattern for all layers, behind those of layers that have another value: the first match counts."""
    common: dict[str, Any] = {}
    others = [(kind, value) for kind, value in values.items() if common.setdefault(kind_of(kind), value) != value]
    return [(re.escape(kind).replace(r"\*", r"\d+"), value) for kind, value in (*others, *common.items())]


def checked_modules(spec: AdapterSpec, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Last path components of all adapted modules, sorted. Raises AdapterError for a wrong pair or shape."""
    modules: set[str] = set()
    for name, shape in shapes.items():
        path, sep, rest = name.rpartition(".lora_")
        if not sep or rest not in ("A.weight", "B.weight"):
            raise AdapterError(f"{name} is not a lora_A.weight or lora_B.weight tensor")
        partner = f"{path}.lora_{'B' if rest[0] == 'A' else 'A'}.weight"
        if partner not in shapes:
            raise AdapterError(f"{name} lacks its partner {partner}")
        rank = spec.rank_of(path.removeprefix(FILE_PREFIX))
        if len(shape) != 2 or shape[0 if rest[0] == "A" else 1] != rank:
            raise AdapterError(f"{name} has shape {list(shape)}, which does not fit rank {rank}")
        modules.add(path.rpartition(".")[2])
    if not modules:
        raise AdapterError("an adapter without tensors cannot be saved or loaded")
    return sorted(modules)


def wire_name(folder: Path, name: str) -> str:
    """The name in the file without its prefix. Raises AdapterError for one that has none."""
    if not name.startswith(FILE_PREFIX):
        raise AdapterError(f"{folder}: {name} lacks the prefix {FILE_PREFIX!r}; save the adapter with peft")
    return name.removeprefix(FILE_PREFIX)


def module_of(tensor: str) -> str:
    """``x.q_proj`` of ``x.q_proj.lora_A.weight``."""
    return tensor.rpartition(".lora_")[0]


def misfits(have: Iterable[str], wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """(modules of the file that the trained adapter lacks, modules of a kind that the file adapts only elsewhere).

    A kind that the file does not adapt at all is no misfit: in a file that adapts q_proj and v_proj, k_proj
    is the base's.
    """
    file, adapter = set(have), set(wanted)
    kinds = {kind_of(module) for module in file}
    return sorted(file - adapter), sorted(m for m in adapter - file if kind_of(m) in kinds)


_NULL = msgspec.Raw(b"null")


class _PeftConfig(msgspec.Struct, kw_only=True):
    """The keys of ``adapter_config.json`` that determine the meaning of the tensors."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    lora_dropout: float = 0.0
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    alora_invocation_tokens: list[int] | None = None
    layer_replication: list[tuple[int, int]] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: msgspec.Raw = _NULL
    lora_bias: bool = False
    use_qalora: bool = False
    use_bdlora: msgspec.Raw = _NULL
    init_lora_weights: bool | str | None = True

    def spec(self, folder: Path) -> AdapterSpec:
        """Without targets: these follow from the tensors."""
        return AdapterSpec(
            name=folder.name,
            base_model=self.base_model_name_or_path or "",
            rank=self.r,
            alpha=self.lora_alpha,
            target_modules=(),
            dropout=self.lora_dropout,
            rslora=self.use_rslora,
            rank_pattern=tuple((self.rank_pattern or {}).items()),
            alpha_pattern=tuple((self.alpha_pattern or {}).items()),
        )

    def adapts_parameter(self, path: str) -> bool:
        return any(f".{path}".endswith(f".{end}") for end in self.target_parameters or ())

    def unsupported(self) -> list[str]:
        """What makes the tensors something else than products B A added to the base's weights, and why."""
        others = [p for p in self.target_parameters or () if not p.endswith(("gate_up_proj", "down_proj"))]
        start = self.init_lora_weights
        plain = not isinstance(start, str) or start.lower() in _LEAVES_THE_BASE
        odd = {
            f"peft_type {self.peft_type} is not LoRA": self.peft_type != "LORA",
            f"bias {self.bias} trains the base's biases, which servers take from the base": self.bias != "none",
            "use_dora scales each row by a trained magnitude, which vLLM does not serve": self.use_dora,
            "use_qalora pools the inputs, which vLLM does not compute": self.use_qalora,
            "use_bdlora cuts the products into blocks, which vLLM does not compute": _is_set(self.use_bdlora),
            "lora_bias adds a bias to lora_B, which vLLM does not serve": self.lora_bias,
            "fan_in_fan_out has transposed weights, which no supported model has": self.fan_in_fan_out,
            f"modules_to_save holds whole modules ({_first(self.modules_to_save)}) beside LoRA": self.modules_to_save,
            "trainable_token_indices changes rows of the embedding": _is_set(self.trainable_token_indices),
            "alora_invocation_tokens applies the adapter to a part of the text only": self.alora_invocation_tokens,
            "layer_replication repeats layers of the base": self.layer_replication,
            f"target_parameters adapts {_first(others)}: only projections of experts are taken, no router": others,
            f"init_lora_weights {start!r} is not known to leave the base's own weights as they are": not plain,
        }
        return [reason for reason, found in odd.items() if found]


_LEAVES_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Of peft 0.21. The others subtract their start from the base, by spellings that peft compares loosely."""


def _is_set(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"null", b"false", b"{}", b"[]")


def _first(names: list[str] | None) -> str:
    return names[0] if names else ""
