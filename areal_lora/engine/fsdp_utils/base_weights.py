"""Weights of the frozen base: from a Hugging Face folder straight into one rank's shards.

Every rank reads the rows that it holds: no weight travels between ranks, and no rank ever holds the whole model.
transformers keeps the experts of a layer in one parameter and some modules under other names than the published
folders; its own table of conversions says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.errors import UnknownTensorError


class ParameterSource(Protocol):
    """Where the rows of a parameter come from."""

    def rows(self, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Plain:
    folder: ModelFolder
    name: str

    def rows(self, start: int, stop: int) -> Tensor:
        return self.folder.rows(self.name, start, stop)


@dataclass(frozen=True, slots=True)
class _ExpertStack:
    """Row e is the matrices ``names`` of expert e, one below the other; ``*`` stands for e."""

    folder: ModelFolder
    names: tuple[str, ...]

    def rows(self, start: int, stop: int) -> Tensor:
        experts = range(start, stop)
        return torch.stack(
            [torch.cat([self.folder.whole(name.replace("*", str(e))) for name in self.names]) for e in experts]
        )


class Sources:
    """The tensors of a model folder by transformers' names in memory."""

    def __init__(self, folder: ModelFolder, model_type: str, tied: dict[str, str]) -> None:
        """``tied`` maps a parameter that the folder may lack to the one with the same numbers."""
        self._folder, self._tied = folder, tied
        conversions: Sequence[Any] = get_checkpoint_conversion_mapping(model_type) or ()
        self._renamings = [
            (target, source)
            for c in conversions
            if isinstance(c, WeightRenaming)
            for source, target in zip(c.source_patterns, c.target_patterns, strict=True)
        ]
        self._stacks = [
            (c.target_patterns[0], tuple(c.source_patterns))
            for c in conversions
            if isinstance(c, WeightConverter) and _stacks_experts(c.operations)
        ]

    def of(self, name: str) -> ParameterSource:
        """Raises UnknownTensorError."""
        for known in (name, self._tied.get(name, name)):
            for candidate in self._published(known):
                if candidate in self._folder:
                    return _Plain(self._folder, candidate)
                for target, sources in self._stacks:
                    prefix = candidate.removesuffix(target)
                    names = tuple(prefix + source for source in sources)
                    if prefix != candidate and names[0].replace("*", "0") in self._folder:
                        return _ExpertStack(self._folder, names)
        raise UnknownTensorError(f"the model's parameter {name} is in no safetensors file of {self._folder.path}")

    def _published(self, name: str) -> Iterator[str]:
        yield name
        for target, source in self._renamings:
            if target in name:
                yield name.replace(target, source.replace("\\", ""))


def _stacks_experts(operations: Sequence[Any]) -> bool:
    """Whether a conversion makes one matrix of each expert and then one parameter of all experts."""
    merge, *others = operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(isinstance(op, Concatenate) and op.dim == 1 for op in others)
    )


def load_base(module: nn.Module, sources: Sources, rank: int, world_size: int) -> None:
    """Fill this rank's shard of every parameter. Raises UnknownTensorError for one that the folder lacks."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            start, stop = shard_rows(parameter.shape[0], rank, world_size)
            if tuple(shard.shape) != (stop - start, *parameter.shape[1:]):
                raise UnknownTensorError(f"{name}: rank {rank} holds {tuple(shard.shape)} of {tuple(parameter.shape)}")
            if stop > start:
                shard.copy_(sources.of(name).rows(start, stop))


def shard_rows(n: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows [start, stop) of ``n`` that `fully_shard` gives a rank: equal runs rounded up, the last ones shorter."""
    each = -(-n // world_size)
    return min(rank * each, n), min((rank + 1) * each, n)
