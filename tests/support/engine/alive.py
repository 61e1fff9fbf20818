"""Bytes of the tensors that are alive, without a GPU's allocator."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):  # type: ignore[misc]
    """Of the tensors that operations have returned: their bytes ``now``, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out
