"""How many kernels a device would start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = (
    "aten.as_strided.default",
    "aten.view.dtype",
    "aten.view.default",
    "aten.unbind.int",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.detach.default",
    "aten.alias.default",
)


class Launches(TorchDispatchMode):
    """Counts operations that are kernels on a device: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) not in VIEWS
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], object]) -> int:
    run()  # plans are made once
    with Launches() as mode:
        run()
    return mode.count
