"""Arrays of protobuf bodies: what a client sends becomes numpy, with its reason where it cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from areal_lora.service.refused import RequestError
from areal_lora.service.tinker import protos

MAX_ELEMENTS = 1 << 24
"""Of one tensor when it is dense: a sparse one may claim any shape."""
_ELEMENTS = {protos.FLOAT32: "<f4", protos.INT64: "<i8", protos.INT32: "<i4"}
Array = npt.NDArray[Any]


def row(tensor: Any, path: str, n: int) -> Array:
    """The ``n`` elements of a tensor of one dimension, or of one column. Raises RequestError."""
    shape = list(tensor.shape)
    if shape not in ([], [n], [n, 1]):
        reason = f"its shape is {shape[:4]}, not [{n}]: there is one value for each input token"
        raise RequestError(422, path, reason, "send one value per token; several targets per token are not supported")
    found = _sparse(tensor.sparse_csr, tensor.dtype, path, n) if tensor.HasField("sparse_csr") else None
    values = _elements(tensor.dense, tensor.dtype, path) if found is None else found
    if len(values) != n:
        raise RequestError(422, path, f"it has {len(values)} values for {n} input tokens", "send one value per token")
    return values


def whole(values: Array, path: str) -> npt.NDArray[np.int32]:
    """``values`` as token ids."""
    if values.dtype.kind != "i":
        raise RequestError(422, path, "its elements are no whole numbers", "send token ids as int64")
    if ((values < 0) | (values > np.iinfo(np.int32).max)).any():
        raise RequestError(422, path, "an element is no token id", "send token ids of the base's tokenizer")
    return values.astype("<i4")


def finite(values: Array, path: str) -> npt.NDArray[np.float32]:
    numbers = values.astype("<f4")
    if not np.isfinite(numbers).all():
        raise RequestError(422, path, "an element is not finite", "send finite numbers")
    return numbers


def token_ids(data: bytes, path: str) -> Array:
    """The tokens of a chunk of text."""
    return whole(_elements(data, protos.INT32, path), path)


def _elements(data: bytes, dtype: int, path: str) -> Array:
    if (kind := _ELEMENTS.get(dtype)) is None:
        raise RequestError(422, path, f"elements of type {dtype} are not known", "send float32 or int64")
    if len(data) % np.dtype(kind).itemsize:
        raise RequestError(
            422, path, "its bytes are no whole number of elements", "send what its type and shape require"
        )
    return np.frombuffer(data, kind)


def _sparse(csr: Any, dtype: int, path: str, n: int) -> Array:
    """A column of ``n`` rows of which the rows named have a value, and the others 0."""
    values = _elements(csr.values, dtype, path)
    ends, columns = _elements(csr.crow_indices, protos.INT64, path), _elements(csr.col_indices, protos.INT64, path)
    counts = np.diff(ends)
    sound = len(ends) == n + 1 <= MAX_ELEMENTS and ends[0] == 0 and ends[-1] == len(values) == len(columns)
    if not sound or ((counts < 0) | (counts > 1)).any() or columns.any():
        raise RequestError(
            422, path, "it is no sparse tensor of this shape", "send what TensorData makes, or a dense one"
        )
    dense = np.zeros(n, values.dtype)
    dense[counts == 1] = values
    return dense
