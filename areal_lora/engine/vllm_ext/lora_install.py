"""Write a received adapter into an inactive slot of a worker's stacked LoRA buffers.

Runs in the receiver's background thread while the model generates, so host memory is
written with numpy only (no OpenMP). Knows wire names and shapes; where vLLM keeps the
buffers is ``compat``'s business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from areal_lora.errors import ManifestError
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.manifest import Refusal

# Which Megatron target holds a Hugging Face projection.
TARGET_OF = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
}
# Which of vLLM's modules hold the projections of a Megatron target.
VLLM_MODULES = {
    "linear_qkv": ("qkv_proj",), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_up_proj", "experts"), "linear_fc2": ("down_proj", "experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One ``lora_A`` or ``lora_B`` of the model as one worker holds it.

    ``stacked`` is ``[S, max_rank, in_part]`` (A) or ``[S, out_part, max_rank]`` (B), or None
    where another worker holds it (expert parallel). The part is ``begin`` onwards of an
    in- or output dimension that is ``full`` long (tensor parallel).
    """

    name: str
    stacked: torch.Tensor | None
    begin: int
    full: int

    @property
    def is_a(self) -> bool:
        return ".lora_A." in self.name

    def shape(self, rank: int) -> tuple[int, int]:
        return (rank, self.full) if self.is_a else (self.full, rank)

    @property
    def target(self) -> str:
        return TARGET_OF.get(self.name.split(".")[-3], "")


class StackedSlotWriter:
    """The ``weight_sync.receiver.SlotWriter`` of a vLLM worker."""

    def __init__(self, matrices: Iterable[Matrix], max_rank: int) -> None:
        self._matrices = {m.name: m for m in matrices if m.target}
        self._max_rank = max_rank
        self._places = {m.name: _place(m.stacked) for m in self._matrices.values() if m.stacked is not None}

    @property
    def names(self) -> list[str]:
        return sorted(self._matrices)

    def expected(self, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Full names and shapes for ``spec``. Raises ManifestError (``rank``, ``targets``)."""
        if spec.rank > self._max_rank:
            raise ManifestError(
                Refusal.RANK, f"{spec.name} has rank {spec.rank}, this server holds up to {self._max_rank}; "
                "raise rollout.max_lora_rank",
            )
        wanted = set(spec.target_modules)
        served = {m.target for m in self._matrices.values()}
        if not wanted or not wanted <= served:
            raise ManifestError(Refusal.TARGETS, f"{spec.name} targets {sorted(wanted)}, served are {sorted(served)}")
        return {m.name: m.shape(spec.rank) for m in self._matrices.values() if m.target in wanted}

    def write(self, slot: int, name: str, tensor: np.ndarray, scale: float) -> None:
        """Store ``tensor * scale`` (float32 ``[r, in]`` or ``[out, r]``) in ``slot``; the rest stays as zeroed."""
        matrix, place = self._matrices[name], self._places.get(name)
        if place is None:
            return
        held = place.shape[2] if matrix.is_a else place.shape[1]
        span = slice(matrix.begin, matrix.begin + held)
        if matrix.is_a:
            part, into = tensor[:, span], np.s_[slot, : tensor.shape[0], :]
        else:
            part, into = tensor[span], np.s_[slot, :, : tensor.shape[1]]
        _store(place, into, part if scale == 1.0 else part * np.float32(scale))

    def zero(self, slot: int) -> None:
        """Clear ``slot`` on this worker."""
        for place in self._places.values():
            place[slot] = 0


def _place(stacked: torch.Tensor) -> np.ndarray | torch.Tensor:
    """A numpy view of host memory (bfloat16 as bit patterns); device memory as it is."""
    if stacked.device.type != "cpu":
        return stacked
    return stacked.view(torch.uint16).numpy() if stacked.dtype == torch.bfloat16 else stacked.numpy()


def _store(place: np.ndarray | torch.Tensor, into: tuple[int | slice, ...], values: np.ndarray) -> None:
    if isinstance(place, torch.Tensor):
        place[into].copy_(torch.from_numpy(np.ascontiguousarray(values)))
    elif place.dtype == np.uint16:
        np.copyto(place[into], to_bfloat16(values))
    else:
        np.copyto(place[into], values)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bit patterns (uint16) of finite float32 values rounded to nearest even bfloat16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
