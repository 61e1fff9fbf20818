"""The safetensors files of a model folder, and their heads: names, shapes and places of tensors. It imports no torch.

The library writes tensors that are all in memory; checkpoints and exports are written piece by piece (`Disk`,
`peft_writer`, `write_merged`), behind the head that the library would write.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from areal_lora.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILE = "model.safetensors"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[str]:
    """The files of the model's weights: those of its index, else ``model.safetensors``, else all; sorted.

    Published folders hold the same weights under other names too (Mistral's ``consolidated.safetensors``). Raises
    ConfigError for an index that is none, or that names a file which is not there.
    """
    index, fix = folder / INDEX_FILE, "give the whole folder of the model"
    try:
        files = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except FileNotFoundError:
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        return [WEIGHT_FILE] if WEIGHT_FILE in found else found
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(str(index), f"it is no index of tensors: {error}", fix) from None
    if absent := [file for file in files if not (folder / file).is_file()]:
        raise ConfigError(str(index), f"it names {absent[0]}, which is not there", fix)
    return files


class Entry(msgspec.Struct, frozen=True):
    """``data_offsets``: first byte and end, from the end of the head."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


def head_of(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The head for ``tensors`` (name, type, shape, bytes) back to back, and where in the file each starts."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    places: dict[str, int] = {}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = Entry(dtype=dtype, shape=list(shape), data_offsets=(at, at + nbytes))
        places[name], at = at, at + nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in places.items()}


def read_head(file: BinaryIO) -> tuple[dict[str, Entry], int, dict[str, str]]:
    """The tensors by name in the order of their bytes, where in the file the first starts, and the metadata.

    Raises ValueError.
    """
    try:
        length = int.from_bytes(file.read(8), "little")
        head = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(head.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        found = {name: msgspec.json.decode(raw, type=Entry) for name, raw in head.items()}
    except (msgspec.MsgspecError, MemoryError, OverflowError) as error:
        raise ValueError(f"no head of a safetensors file: {error}") from error
    return dict(sorted(found.items(), key=lambda item: item[1].data_offsets)), 8 + length, metadata
