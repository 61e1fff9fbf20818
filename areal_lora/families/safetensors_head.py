"""The head of a safetensors file: names, shapes and places of its tensors. This module imports no torch.

The library writes tensors that are all in memory; checkpoints and exports are written piece by piece (`Disk`,
`peft_writer`, `write_merged`), behind the head that the library would write.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec


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
