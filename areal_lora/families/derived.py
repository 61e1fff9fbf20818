"""A family without a row: what a checkpoint's safetensors headers say about the linear layers of its model.

Every two-dimensional ``weight`` of a numbered layer is a linear layer under its published name, except routers. It
is adapted alone, with a lora_A of its own, as PEFT does. Experts that are published one by one as gate, up and down
projections under names that a row of the table uses are adapted like those of that row.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_lora.families.family import Experts, Family, GatedMlp, Scope
from areal_lora.families.registry import kind_of, path_of, target_of

PREFIX = "model.layers"
"""Where all families with experts have their layers."""
_LAYER = re.compile(r"^(?P<prefix>.+?)\.(?P<layer>\d+)\.(?P<rest>.+)$")
_EXPERT = re.compile(r"^(?P<before>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)$")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One projection in all of its layers: ``{prefix}.{layer}.{path}`` has ``inputs`` and ``outputs``."""

    path: str  # `self_attn.qkv_proj`
    prefix: str  # `model.layers`
    layers: tuple[int, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The projections that LoRA can adapt, and sizes in elements. ``experts`` is None unless they can be adapted.

    ``expert_layers`` are the layers with ``n_experts`` of width ``expert_ffn``. ``largest_layer`` counts the
    parameters of one layer.
    """

    linears: tuple[Linear, ...]
    experts: GatedMlp | None
    expert_layers: tuple[int, ...]
    n_experts: int
    expert_ffn: int
    parameters: int
    largest_layer: int

    def family(self, model_type: str) -> Family:
        """What a row would state of the experts; nothing else of it is read for a family without a row."""
        return Family(model_type=model_type, experts=Experts(mlp=self.experts) if self.experts else None)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the headers of all safetensors files; None where there are none. Raises OSError, ValueError."""
    tensors: dict[str, Shape] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        tensors |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return derive(tensors) if tensors else None


def derive(tensors: Mapping[str, Shape]) -> Checkpoint:
    """``tensors`` has the shape of every tensor of the checkpoint by name."""
    per_layer: dict[str, int] = defaultdict(int)
    kinds: dict[str, list[tuple[str, int, Shape]]] = defaultdict(list)
    experts: dict[str, set[tuple[int, int]]] = defaultdict(set)
    widths: dict[str, Shape] = {}
    for name, shape in tensors.items():
        if (found := _LAYER.match(name)) is None:
            continue
        per_layer[f"{found['prefix']}.{found['layer']}"] += math.prod(shape)
        if not name.endswith(".weight") or len(shape) != 2:
            continue
        rest, layer = found["rest"].removesuffix(".weight"), int(found["layer"])
        if (expert := _EXPERT.match(rest)) is not None:
            if found["prefix"] != PREFIX:
                continue
            path = f"{expert['before']}.{{}}.{expert['leaf']}"
            experts[path].add((layer, int(expert["expert"])))
            widths[path] = shape
        elif path_of(f"{found['prefix']}.{layer}.{rest}"):
            kinds[rest].append((found["prefix"], layer, shape))
    mlp = _gated(experts)
    layers = sorted({layer for layer, _ in experts[mlp.down]}) if mlp else []
    return Checkpoint(
        linears=tuple(linear for path, places in sorted(kinds.items()) if (linear := _linear(path, places))),
        experts=mlp,
        expert_layers=tuple(layers),
        n_experts=1 + max(expert for _, expert in experts[mlp.down]) if mlp else 0,
        expert_ffn=widths[mlp.down][1] if mlp else 0,
        parameters=sum(map(math.prod, tensors.values())),
        largest_layer=max(per_layer.values(), default=0),
    )


def _linear(path: str, places: Iterable[tuple[str, int, Shape]]) -> Linear | None:
    """None for a name that stands for several things: other sizes or other stacks of layers."""
    if len({(prefix, shape) for prefix, _, shape in places}) != 1:
        return None
    prefix, _, (outputs, inputs) = next(iter(places))
    layers = tuple(sorted(layer for _, layer, _ in places))
    return Linear(path=path, prefix=prefix, layers=layers, inputs=inputs, outputs=outputs)


def _gated(experts: Mapping[str, set[tuple[int, int]]]) -> GatedMlp | None:
    """The experts' projections, if every one has all three and servers know their names."""
    for before in {path.rpartition(".")[0] for path in experts}:
        for names in _GATED:
            paths = [f"{before}.{leaf}" for leaf in names]
            known = [target_of(kind_of(f"{PREFIX}.0.{path.format(0)}")) for path in paths]
            same = len({frozenset(experts.get(path, ())) for path in paths}) == 1 and experts.get(paths[0])
            if same and all(found is not None and found[1] is Scope.EXPERT for found in known):
                return GatedMlp(gate=paths[0], up=paths[1], down=paths[2])
    return None
