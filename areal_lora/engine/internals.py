"""How an engine states which names of another package it relies on. Data; nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """``name`` of ``module``; an empty name is the module itself.

    ``members`` are attributes of a class, or names of a module. ``calls`` are methods (``()``: the function itself)
    with parameters that we pass or that our override receives. ``on``: where it is imported.
    """

    module: str
    name: str = ""
    members: tuple[str, ...] = ()
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    on: Literal["all", "cpu", "gpu"] = "all"
