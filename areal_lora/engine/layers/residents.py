"""Which of the adapters of one base a model computes with.

A layer that adapters extend is wrapped once. It holds its part of each resident adapter by name, and takes
from one `ActiveAdapter`, which all layers share, for the one that counts. None counts outside of `ActiveAdapter.using`:
a forward pass that names no adapter is one of the frozen base (contract C11).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from areal_lora.engine.layers.dropout import Dropout


class ActiveAdapter:
    """The name of the adapter in use; None is the frozen base.

    ``dropout`` are the masks of its inputs, None while nothing is trained; ``keys`` [t] then those of the tokens that a
    layer computes (`dropout.text_keys`).
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.dropout: Dropout | None = None
        self.keys: Tensor | None = None

    @contextmanager
    def using(self, name: str | None, dropout: Dropout | None = None) -> Iterator[None]:
        """Compute with ``name`` until the context ends, backward passes and recomputation included."""
        before = self.name, self.dropout, self.keys
        self.name, self.dropout, self.keys = name, dropout, None
        try:
            yield
        finally:
            self.name, self.dropout, self.keys = before

    def keep(self, site: int, features: int, first: int = 0) -> Tensor | None:
        """[t, features] of a dense site's input, see `Dropout.keep`; None where nothing is dropped."""
        if self.dropout is None:
            return None
        assert self.keys is not None
        return self.dropout.keep(self.keys, site, features, first)

    @property
    def factor(self) -> float:
        """What multiplies the adapter's product because of dropout."""
        return 1.0 if self.dropout is None else self.dropout.factor
