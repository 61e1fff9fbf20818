"""Values at and beyond the edges of what a body may hold, and bodies with such values in places that a schema names."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

NUMBERS: list[Any] = [-1, 0, 1, 7, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30]
FLOATS: list[Any] = [0.5, -0.0, 5e-324, 1e-9, 1e308, math.inf, -math.inf, math.nan]
TEXTS: list[Any] = ["", "a", "\0", "ä", "\ud83d", "x" * 5000, "base", "math", "math@v0", "math@v" + "9" * 30]
OTHERS: list[Any] = [None, True, [], {}, [[]], [None], [10**30], [2**63], [-1], ["\udfff"], [[10**30]], [""], [5] * 300]
EDGES = st.sampled_from(NUMBERS + FLOATS + TEXTS + OTHERS)
RAW = [b"", b"[]", b"\xff\xfe{}", b"{" * 20_000, b"[" * 20_000, b'{"prompt":' + b"[" * 20_000, b'{"seed":1e999}']
"""Bodies that are no JSON object."""
LEFT_OUT = object()
CHANGES = st.lists(st.tuples(st.integers(0, 9999), EDGES | st.just(LEFT_OUT)), max_size=3)
"""What becomes of places by their numbers; see `changed`."""

Place = tuple[str | int, ...]
Schema = Mapping[str, Any]


def changed(body: Any, schema: Schema, changes: Sequence[tuple[int, Any]]) -> Any:
    """``body`` with other values: in what it has at any depth, and in what its JSON schema has beside that."""
    body = copy.deepcopy(body)
    for number, value in changes:
        found = [*places(body, schema, schema.get("$defs", {})), ("more",)]
        *above, last = found[number % len(found)]
        node = body
        for key in above:
            node = node[key]
        if value is not LEFT_OUT:
            node[last] = copy.deepcopy(value)
        elif isinstance(node, list) or last in node:
            del node[last]
    return body


def places(value: Any, schema: Schema, known: Schema, at: Place = ()) -> Iterator[Place]:
    here = _alternatives(schema, known)
    fields = {name: each for one in here for name, each in one.get("properties", {}).items()}
    items = next((one["items"] for one in here if one.get("items")), {})
    if isinstance(value, dict):
        for name in {**value, **fields}:
            yield (*at, name)
            yield from places(value.get(name), fields.get(name, {}), known, (*at, name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield (*at, i)
            yield from places(each, items, known, (*at, i))


def _alternatives(schema: Schema, known: Schema) -> list[Schema]:
    if "$ref" in schema:
        return _alternatives(known[schema["$ref"].rpartition("/")[2]], known)
    several = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, [])]
    return [schema, *(found for each in several for found in _alternatives(each, known))]


def written(body: Any) -> bytes:
    """As JSON, in which a number may be larger than any float."""
    return json.dumps(body).replace("Infinity", "1e999").encode()


# ------------------------------------------------------------ protobuf

_TOKENS = np.array([3, 4, 5, 6])
BYTES: list[bytes] = [
    *(b"", b"a", b"abc", b"\xff\xfe", "\ud83d".encode(errors="surrogatepass"), b"x" * 5000),
    *(_TOKENS.astype("<i4").tobytes(), _TOKENS.astype("<i8").tobytes(), _TOKENS.astype("<f4").tobytes()),
    *(np.array([value] * 4, "<i8").tobytes() for value in (-1, 2**31, 2**63 - 1)),
    *(np.array([value] * 4, "<f4").tobytes() for value in (math.nan, math.inf, 3e38, 1e-45)),
    *(b"cross_entropy", b"importance_sampling", b"ppo", b"cispo", b"gspo", b"logprobs", b"advantages", b"weights"),
]
_SCALARS: dict[type, list[Any]] = {
    int: [-(2**63), -(2**31), -1, 0, 1, 2, 3, 4, 5, 2**31 - 1, 2**63 - 1],
    float: FLOATS,
    bool: [False, True],
    bytes: BYTES,
}
MESSAGE_CHANGES = st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 9999)), max_size=3)


def change_message(message: Any, changes: Sequence[tuple[int, int]]) -> None:
    """Other values in fields of a protobuf message at any depth, whether they were sent or not."""
    for number, choice in changes:
        found = list(_fields(message))
        owner, field = found[number % len(found)]
        value = getattr(owner, field.name)
        if choice % 8 == 0:
            owner.ClearField(field.name)
        elif field.message_type is not None:
            if not field.is_repeated:
                value.SetInParent()
            elif (made := value.add()) is not None and choice % 2:
                made.CopyFrom(value[0])
        else:
            kind = int if field.is_repeated else type(value)
            edges = [each for each in _SCALARS[kind] if kind is not int or abs(each) < 2**31 or field.type in (3, 18)]
            edge = edges[choice % len(edges)]
            value.append(edge) if field.is_repeated else setattr(owner, field.name, edge)


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type is not None:
            value = getattr(message, field.name)
            for each in value if field.is_repeated else [value] if message.HasField(field.name) else []:
                yield from _fields(each)
