"""A slot writer into host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.kernels import Block, Marks, TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.inbox import BucketBytes
from areal_lora.weight_sync.messages import LORA_B

Shapes = Mapping[str, tuple[int, ...]]


class MemoryWriter:
    """Keep float32 arrays by slot and name: a ``SlotWriter``.

    ``touched`` holds the slots that were written or cleared. ``on_write()``, if set, runs before
    every bucket: a test can wait there in the middle of a transfer, or raise.
    """

    on_device = False

    def __init__(self, shapes: Callable[[AdapterStructure], Shapes]) -> None:
        self._shapes = shapes
        self.slots: dict[int, dict[str, np.ndarray]] = {}
        self._images: dict[int, np.ndarray] = {}
        self.touched: set[int] = set()
        self.on_write: Callable[[], None] | None = None

    def expected(self, structure: AdapterStructure) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes(structure))

    def plan(self, layout: AdapterLayout) -> list[TensorBlocks]:
        """Plan copies into a slot's image, which holds full names in sorted order; offsets from its start."""
        places, _ = _image(self._shapes(layout.structure))
        copies: dict[str, list[str]] = {}
        for name, wire in layout.aliases.items():
            copies.setdefault(wire, []).append(name)
        return [
            TensorBlocks.of(
                [
                    [
                        Block(
                            src=t.offset,
                            src_pitch=0,
                            dst=places[name],
                            dst_pitch=0,
                            rows=1,
                            cols=math.prod(t.shape),
                            scale=layout.structure.scale_of(name.removesuffix(LORA_B))
                            if name.endswith(LORA_B)
                            else 1.0,
                        )
                        for name in (t.name, *copies.get(t.name, ()))
                    ]
                    for t in shard.tensors
                ],
                layout.dtype,
                "float32",
            )
            for shard in layout.shards
        ]

    def prepare(self, slot: int, layout: AdapterLayout) -> None:
        self.touched.add(slot)
        shapes = self._shapes(layout.structure)
        places, nbytes = _image(shapes)
        image = self._images[slot] = np.zeros(nbytes // 4, dtype=np.float32)
        self.slots[slot] = {
            name: image[at // 4 : at // 4 + math.prod(shapes[name])].reshape(shapes[name])
            for name, at in places.items()
        }

    def write(self, plan: TensorBlocks, slot: int, arrived: BucketBytes, first: int, last: int, marks: Marks) -> None:
        if self.on_write is not None:
            self.on_write()
        plan.copy(arrived.base, self._images[slot].ctypes.data, tensors=(first, last), marks=marks)

    def flush(self, slot: int) -> None:
        """Do nothing: host memory is written at once."""

    def zero(self, slot: int) -> None:
        self.touched.add(slot)
        self.slots[slot] = {}


def _scale(layout: AdapterLayout, name: str) -> float:
    return layout.structure.scale_of(name.removesuffix(LORA_B)) if name.endswith(LORA_B) else 1.0


def _image(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Return the byte offset of every name, and all bytes, of a slot of float32 tensors in sorted order."""
    places, at = {}, 0
    for name in sorted(shapes):
        places[name] = at
        at += 4 * math.prod(shapes[name])
    return places, at
