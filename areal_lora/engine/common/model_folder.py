"""The safetensors files of a Hugging Face model folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from areal_lora.config.models import ModelConfig
from areal_lora.engine.common.shared_base import share
from areal_lora.errors import UnknownTensorError


class ModelFolder:
    """The tensors of a model folder by name, in pieces. ``files`` are its safetensors files or copies of them."""

    def __init__(self, path: str, files: Sequence[Path]) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    @classmethod
    def of(cls, model: ModelConfig) -> ModelFolder:
        """With ``model.shared_memory`` the node's copy, which this process then holds until it ends."""
        if not model.shared_memory:
            return cls.at(model.folder)
        files = share(_files(model.folder), first=int(os.environ.get("LOCAL_RANK", "0")))
        return cls(model.folder, files)

    @classmethod
    def at(cls, path: str) -> ModelFolder:
        """The folder's own files."""
        return cls(path, _files(path))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._slice(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        return self._slice(name)[:, start:stop]

    def whole(self, name: str) -> Tensor:
        return self._slice(name)[:]

    def _slice(self, name: str) -> Any:
        """Raises UnknownTensorError."""
        if name not in self._files:
            raise UnknownTensorError(f"model tensor {name} is in no safetensors file of the model folder")
        return self._files[name].get_slice(name)


def _files(path: str) -> list[Path]:
    return sorted(Path(path).glob("*.safetensors"))
