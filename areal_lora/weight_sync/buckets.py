"""The flat buffers of a publish: packed by the source, received and read by the workers.

Buffers are allocated once and reused; page faults would cost more than the copy itself.
The receiving half uses numpy and hashlib only: an OpenMP copy in a background thread
slows down the model that is generating in the same process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from areal_lora.errors import ManifestError
from areal_lora.types import AdapterShard, TensorMeta
from areal_lora.weight_sync.digests import shard_digest, tensor_hash
from areal_lora.weight_sync.manifest import ITEM_BYTES, Refusal, ShardLayout, plan_shards

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PAGE_BYTES = 4096
_YIELD_EVERY = 32  # tensors between two offers of the GIL to the generating thread


class PackBuffer:
    """Source side: copies tensors into one flat host buffer and describes them.

    ``flat`` (uint8 [nbytes], host) is valid until the next ``pack``. Values are converted to
    the wire dtype; nothing of the caller's storage is kept.
    """

    def __init__(self, source: int, dtype: str) -> None:
        self._source, self._dtype = source, dtype
        self._layout: ShardLayout | None = None
        self._device = torch.device("cpu")
        self._views: list[torch.Tensor] = []
        self._packed = self.flat = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def pack(self, owned: Sequence[tuple[str, torch.Tensor]]) -> AdapterShard:
        """Pack unique tensors of one device in the given order. Raises ManifestError (``duplicate``, ``dtype``)."""
        layout = plan_shards([(self._source, [(n, tuple(t.shape)) for n, t in owned])], self._dtype)[0]
        device = owned[0][1].device if owned else torch.device("cpu")
        if layout != self._layout or device != self._device:
            self._allocate(layout, device)
        if owned:
            torch._foreach_copy_(self._views, [t for _, t in owned])
        if self._packed is not self.flat:
            self.flat.copy_(self._packed)
        data = memoryview(self.flat.numpy())
        tensors = tuple(
            TensorMeta(
                name=p.name, shape=p.shape, dtype=self._dtype, offset=p.offset, nbytes=p.nbytes,
                hash=tensor_hash(data[p.offset : p.offset + p.nbytes]),
            )
            for p in layout.tensors
        )
        return AdapterShard(source=self._source, tensors=tensors, nbytes=layout.nbytes, digest=shard_digest(tensors))

    def _allocate(self, layout: ShardLayout, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self.flat = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=not on_host)
        # One device-side buffer turns tens of thousands of small device-to-host copies into one.
        self._packed = self.flat if on_host else torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        dtype = _TORCH[layout.dtype]
        self._views = [self._packed[p.offset : p.offset + p.nbytes].view(dtype).view(p.shape) for p in layout.tensors]
        self._layout, self._device = layout, device


class StagingBuffer:
    """Receiver side: host memory for one source's shard, grown once, then reused."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, dtype=np.uint8)

    def sized(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes]; earlier views become invalid."""
        if self._memory.size < nbytes:
            self._memory = np.zeros(nbytes, dtype=np.uint8)
            self._memory[::_PAGE_BYTES] = 0  # fault the pages in now, not while the wire waits
        return self._memory[:nbytes]


def typed_view(flat: np.ndarray, meta: TensorMeta) -> np.ndarray:
    """One tensor inside a uint8 buffer, no copy: float32, or uint16 bit patterns for bfloat16."""
    raw = flat[meta.offset : meta.offset + meta.nbytes]
    return raw.view(np.float32 if meta.dtype == "float32" else np.uint16).reshape(meta.shape)


def as_float32(view: np.ndarray) -> np.ndarray:
    """float32 values of a ``typed_view``. Exact: a bfloat16 is the upper half of a float32."""
    if view.dtype == np.float32:
        return view
    wide = view.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def read_shard(flat: np.ndarray, shard: AdapterShard) -> Iterator[tuple[TensorMeta, np.ndarray]]:
    """Every tensor of a shard as ``typed_view``, giving way to other threads now and then."""
    for i, meta in enumerate(shard.tensors):
        if i % _YIELD_EVERY == 0:
            time.sleep(0)
        yield meta, typed_view(flat, meta)


def verify_shard(flat: np.ndarray, shard: AdapterShard) -> None:
    """Whether the received bytes are the announced ones and finite. ``flat`` is uint8 [shard.nbytes].

    Raises ManifestError (``hash``, ``non_finite``), naming the tensor.
    """
    data = flat.data
    for i, meta in enumerate(shard.tensors):
        if i % _YIELD_EVERY == 0:
            time.sleep(0)
        if tensor_hash(data[meta.offset : meta.offset + meta.nbytes]) != meta.hash:
            raise ManifestError(Refusal.HASH, f"{meta.name} from source rank {shard.source} arrived changed")
    for meta in _non_finite(flat, shard):
        raise ManifestError(Refusal.NON_FINITE, f"{meta.name} from source rank {shard.source} holds NaN or infinity")


def _non_finite(flat: np.ndarray, shard: AdapterShard, chunk: int = 1 << 20) -> Iterator[TensorMeta]:
    """Tensors with a NaN or infinity. Scans the buffer in chunks first: per tensor costs 10x more."""
    if not shard.tensors:
        return
    dtype = shard.tensors[0].dtype
    item = ITEM_BYTES[dtype]
    whole = flat[: shard.nbytes // item * item].view(np.float32 if dtype == "float32" else np.uint16)
    if all(_finite(whole[i : i + chunk]) for i in range(0, whole.size, chunk)):
        return
    yield from (meta for meta in shard.tensors if not _finite(typed_view(flat, meta)))


def _finite(values: np.ndarray) -> bool:
    if values.dtype == np.float32:
        return bool(np.isfinite(values).all())
    return not bool(((values & 0x7F80) == 0x7F80).any())  # bfloat16: all exponent bits set


def wire_nbytes(shapes: Sequence[tuple[int, ...]], dtype: str) -> int:
    """Bytes of one adapter on the wire without alignment, for plans and dry runs."""
    return sum(math.prod(s) for s in shapes) * ITEM_BYTES[dtype]
