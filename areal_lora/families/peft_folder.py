"""Describe a PEFT LoRA folder without reading its numbers into memory.

The configuration rules check such folders before a run starts; `checkpoint.adapter_io` loads their tensors.
"""

import hashlib
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_lora.errors import AdapterError
from areal_lora.families.registry import kind_of, path_of, target_of
from areal_lora.families.safetensors_head import read_head
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


def describe(folder: Path) -> PeftFolder:
    """Raises AdapterError for anything that `checkpoint.adapter_io.load_peft` would refuse."""
    try:
        with (folder / TENSOR_FILE).open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            entries, start, metadata = read_head(f)
            if start + max((e.data_offsets[1] for e in entries.values()), default=0) != len(data):
                raise AdapterError(f"{folder} is not a readable PEFT adapter folder: {TENSOR_FILE} is not whole")
            digests = {}
            for name, entry in entries.items():
                first, end = (start + offset for offset in entry.data_offsets)
                digests[wire_name(folder, name)] = hashlib.blake2b(data[first:end], digest_size=16).digest()
    except (OSError, ValueError) as e:
        raise AdapterError(f"{folder} is not a readable PEFT adapter folder: {e}") from e
    shapes = {name: tuple(e.shape) for name, e in entries.items()}
    spec = declared_spec(folder, metadata.get(OWN_KEY), shapes)
    checked_modules(spec, shapes)
    return PeftFolder(spec=spec, shapes={wire_name(folder, n): s for n, s in shapes.items()}, digests=digests)


def declared_spec(folder: Path, own: str | None, names: Iterable[str]) -> AdapterSpec:
    """The specification stored with the tensors (``own``); for folders of other tools, one made from the configuration.

    Raises AdapterError for variants of LoRA that are not supported, and where the two files disagree about one of the
    tensors ``names``.
    """
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=_PeftConfig)
        declared = msgspec.json.decode(own, type=AdapterSpec) if own else None
    except (OSError, msgspec.MsgspecError) as e:
        raise AdapterError(f"{folder} is not a readable PEFT adapter folder: {e}") from e
    if odd := config.unsupported():
        raise AdapterError(f"{folder}: {'; '.join(odd)}; merge the adapter into its base, or retrain without it")
    modules = dict.fromkeys(module_of(name.removeprefix(FILE_PREFIX)) for name in names)
    if declared is not None:
        stated = config.spec(folder, ())
        for module in modules:
            found, wanted = ((spec.rank_of(module), spec.scale_of(module)) for spec in (stated, declared))
            if found != wanted:
                raise AdapterError(
                    f"{folder}: {CONFIG_FILE} states rank {found[0]} and scale {found[1]:g} for {module}, the tensors "
                    f"were saved with {wanted[0]} and {wanted[1]:g}; one of the files was changed"
                )
        return declared
    return config.spec(folder, tuple(sorted({_target(folder, module) for module in modules})))


def _target(folder: Path, module: str) -> str:
    """From the tensor's name: `target_modules` may be a regular expression, or paths of any length."""
    target = found[0] if (found := target_of(module)) else path_of(module)
    if target is None:
        raise AdapterError(f"{folder} adapts {module}: a router, or outside of the layers; retrain without it")
    return target


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

    def spec(self, folder: Path, targets: tuple[str, ...]) -> AdapterSpec:
        return AdapterSpec(
            name=folder.name,
            base_model=self.base_model_name_or_path or "",
            rank=self.r,
            alpha=self.lora_alpha,
            target_modules=targets,
            dropout=self.lora_dropout,
            rslora=self.use_rslora,
            rank_pattern=tuple((self.rank_pattern or {}).items()),
            alpha_pattern=tuple((self.alpha_pattern or {}).items()),
        )

    def unsupported(self) -> list[str]:
        """What makes the tensors something else than products B A added to the base's weights, and why."""
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
            f"target_parameters adapts fused parameters ({_first(self.target_parameters)}), whose tensors have other "
            "names than those of single projections": self.target_parameters,
            f"init_lora_weights {start!r} is not known to leave the base's own weights as they are": not plain,
        }
        return [reason for reason, found in odd.items() if found]


_LEAVES_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Of peft 0.21. The others subtract their start from the base, by spellings that peft compares loosely."""


def _is_set(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"null", b"false", b"{}", b"[]")


def _first(names: list[str] | None) -> str:
    return names[0] if names else ""
