"""Scalars as TensorBoard event files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_HEAD_BYTES = 1 << 16


def has_tag(folder: Path, prefix: str) -> bool:
    """Whether a tag that begins with ``prefix`` is among the first ones of an event file in ``folder``.

    A resumed run continues the curves of its earlier sessions. Event files hold tags as plain text, after a byte with
    their length.
    """
    for path in folder.glob("events.out.tfevents.*"):
        with path.open("rb") as file:
            if re.search(
                rb"[\x00-\x7f]" + re.escape(prefix.encode()) + rb"(train|publish|eval|checkpoint)/",
                file.read(_HEAD_BYTES),
            ):
                return True
    return False


class TensorBoardSink:
    """Writes scalars to ``folder``. The first scalar imports TensorBoard (about a second)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write ``{tag: value}`` at ``step``."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=10)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
