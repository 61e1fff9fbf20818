"""Modules imported at their first use: few files need them, and each lane's collection would import them."""

from importlib import import_module
from typing import Any


class Lazy:
    """``lazy.name`` is ``name`` of the module. Nothing can be set on it: patch the module itself."""

    __slots__ = ("_module",)

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # what pytest reads of every global it collects
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
