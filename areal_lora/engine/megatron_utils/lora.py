"""LoRA on Megatron modules through Bridge's PEFT. The only file that knows Bridge's module names.

Bridge matches the target modules and wraps them (``LoRALinear``); the adapter inside is
`ParallelAdapter`, ours, for two reasons: it stays in fp32 on a bf16 base, and its gradients
are exact under tensor parallelism. Bridge's own adapter splits lora_A over the rank and, in
experts with expert tensor parallelism, never sums the gradient that flows back through it.

One rule holds for every layout: a tensor that is split over (expert) tensor-parallel ranks has
its whole gradient there; a tensor that is replicated over them has a part of it on each.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from enum import StrEnum

import torch
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import get_adapter_attributes_from_linear, is_expert_linear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.errors import ConfigError, UnknownTensorError
from areal_lora.types import AdapterSpec


class Linear(StrEnum):
    """Megatron's adaptable linear layers."""

    QKV = "linear_qkv"
    PROJ = "linear_proj"
    FC1 = "linear_fc1"
    FC2 = "linear_fc2"


class ParallelAdapter(nn.Module):
    """``scale * B A x`` next to a parallel linear layer, fp32 parameters, computed in the input's type.

    Column-parallel base (qkv, fc1): ``lora_A`` [r, in] replicated, ``lora_B`` [out / tp, r] split.
    Row-parallel base (proj, fc2): ``lora_A`` [r, in / tp] split, ``lora_B`` [out, r] replicated.
    Inside experts the output of a row-parallel layer stays partial, like the base layer's: the
    token dispatcher sums it.
    """

    def __init__(
        self, *, in_features: int, out_features: int, spec: AdapterSpec, row_parallel: bool, sequence_parallel: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.scale = spec.scale
        self.row_parallel = row_parallel
        self.sequence_parallel = sequence_parallel
        self.lora_A = nn.Parameter(torch.zeros(spec.rank, in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(out_features, spec.rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel and not self.row_parallel:
            x = gather_from_sequence_parallel_region(x)
        hidden = functional.linear(x, self.lora_A.to(x.dtype))
        if self.sequence_parallel and self.row_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden)
        return functional.linear(hidden, self.lora_B.to(x.dtype)) * self.scale


@dataclass(kw_only=True)
class ExactLoRA(LoRA):
    """Bridge's LoRA with its matching and wrapping, and `ParallelAdapter` inside."""

    spec: AdapterSpec

    def transform(self, module: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        if isinstance(module, LoRALinear) or (found := self.match(module, name, prefix)) is None:
            return module
        path = found[1]
        expert = is_expert_linear(path)
        facts = get_adapter_attributes_from_linear(module, is_expert=expert)
        weight = module.weight
        row = facts.input_is_parallel
        adapter = ParallelAdapter(
            # The local weight [out, in] already has the shape of this rank's part.
            in_features=weight.shape[1], out_features=weight.shape[0], spec=self.spec, row_parallel=row,
            sequence_parallel=module.config.sequence_parallel and not expert, device=weight.device,
        )
        return LoRALinear(module, adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """One adapted linear layer of this rank, with global layer and expert numbers.

    ``a_split`` and ``b_split`` say which dimension of lora_A and lora_B is split over the
    (expert) tensor-parallel ranks; None: replicated.
    """

    linear: Linear
    layer: int
    expert: int | None
    module: ParallelAdapter

    @property
    def a_split(self) -> int | None:
        return 1 if self.module.row_parallel else None

    @property
    def b_split(self) -> int | None:
        return None if self.module.row_parallel else 0


_SITE = re.compile(
    r"decoder\.layers\.(?P<layer>\d+)\."
    r"(?:self_attention\.(?P<attention>linear_qkv|linear_proj)"
    r"|mlp\.(?:experts\.local_experts\.(?P<expert>\d+)\.)?(?P<mlp>linear_fc1|linear_fc2))\.adapter"
)


def match_targets(targets: tuple[str, ...]) -> set[Linear]:
    """The linear layers that target patterns name.

    Raises ConfigError for a pattern that names none of them.
    """
    chosen: set[Linear] = set()
    for pattern in targets:
        found = {linear for linear in Linear if fnmatch.fnmatchcase(linear, pattern)}
        if not found:
            raise ConfigError(
                "adapters.target_modules", f"{pattern!r} matches no layer of this model",
                f"choose among {', '.join(Linear)}",
            )
        chosen |= found
    return chosen


def attach(model: nn.Module, spec: AdapterSpec) -> nn.Module:
    """Freeze ``model``, wrap its target layers, and leave only adapter parameters trainable."""
    targets = sorted(match_targets(spec.target_modules))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    lora = ExactLoRA(spec=spec, target_modules=list(targets), dim=spec.rank, alpha=spec.alpha)
    wrapped = lora([model], training=True)[0]
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_(".adapter." in name)
    return wrapped


def find_sites(model: nn.Module, *, first_layer: int, first_expert: int) -> list[AdapterSite]:
    """Every adapted layer of this rank, ordered by layer, kind and expert.

    ``first_layer`` is the global number of the rank's local layer 0 (pipeline), ``first_expert``
    that of its local expert 0 (expert parallelism).
    """
    sites = []
    for path, module in model.named_modules():
        if not isinstance(module, ParallelAdapter):
            continue
        found = _SITE.search(path)
        if found is None:
            raise UnknownTensorError(f"adapter at {path}: no converter knows this module")
        expert = found["expert"]
        sites.append(
            AdapterSite(
                linear=Linear(found["attention"] or found["mlp"]), layer=first_layer + int(found["layer"]),
                expert=None if expert is None else first_expert + int(expert), module=module,
            )
        )
    return sorted(sites, key=lambda s: (s.layer, list(Linear).index(s.linear), -1 if s.expert is None else s.expert))


def set_enabled(model: nn.Module, enabled: bool) -> None:
    """Switch all adapters of this rank on or off; off is the frozen base (contract C11)."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            if enabled:
                module.enable_adapter_layers()
            else:
                module.disable_adapter_layers()
