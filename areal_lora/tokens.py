"""Columns of tokens: what travels of them from a server to the trainer. `areal_lora.types` has them, too."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np

ArrayLike: TypeAlias = "Sequence[float] | np.ndarray"


def first_routes(held: bytes, given: bytes, width: int) -> tuple[bytes, int]:
    """``given`` with the routes that its first tokens have in ``held``, ``width`` bytes each; the first without."""
    rows = _array(given, "<u1").reshape(-1, width).copy()
    before = _array(held, "<u1").reshape(-1, width)
    known = (before != 255).any(axis=1)
    rows[: len(before)][known] = before[known]
    missing = (rows == 255).all(axis=1)
    return rows.tobytes(), int(missing.argmax()) if missing.any() else len(rows)


def _array(values: bytes, dtype: str) -> np.ndarray:
    import numpy as np  # on use: a process that scores starts in two thirds of the time without it

    return np.frombuffer(values, dtype)


class RouteShape(msgspec.Struct, frozen=True):
    """Sizes of the routes of a token: each of ``layers`` sparse layers chooses ``per_token`` of ``experts``.

    As bytes, [L, K] of ``dtype``: the highest value is no expert, so that bytes 255 are no route in either type.
    """

    layers: int
    per_token: int
    experts: int

    @property
    def dtype(self) -> str:
        return "<u1" if self.experts < 256 else "<u2"

    @property
    def n_bytes(self) -> int:
        return self.layers * self.per_token * int(self.dtype[-1])


MOST_KEPT = 256
"""Ids of a truncated distribution: more would be a kilobyte of each token."""


class TokenColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """T tokens as little-endian arrays, in which they travel from a server to the trainer: 8 bytes a token.

    ``versions`` are runs: pairs of a version and the number of tokens that it sampled. Tokens of version -1 were not
    sampled, and have the log-probability 0. ``routes`` are the experts of each token where the server returned them
    (`RouteShape`). A truncated distribution sampled token t from ``n_kept[t]`` of the ids ``kept``, which follow each
    other token after token, with ``log_mass[t]`` the log of their probability in the whole one; 0: it was not
    truncated. Raises ValueError for arrays that are not of the same T tokens.
    """

    token_ids: bytes  # [T] int32
    logprobs: bytes  # [T] float32, of the behaviour policy
    versions: bytes  # [R, 2] int32
    routes: bytes = b""  # [T, L, K] uint8 or uint16; empty: of no token
    teacher: bytes = b""  # [T] float32, its log-probabilities; empty without one
    n_kept: bytes = b""  # [T] uint16; empty: no token is of a truncated distribution
    kept: bytes = b""  # [sum of n_kept] int32
    log_mass: bytes = b""  # [T] float32, as ``n_kept``

    def __post_init__(self) -> None:
        runs = memoryview(self.versions).cast("i").tolist() if len(self.versions) % 8 == 0 else [0, 0]
        sizes = len(self.token_ids), len(self.logprobs), 4 * sum(runs[1::2]), len(self.teacher or self.logprobs)
        if len(set(sizes)) != 1 or min(runs[::2], default=0) < -1 or min(runs[1::2], default=1) < 1:
            raise ValueError(f"token ids, log-probabilities and versions are not of the same tokens: bytes {sizes}")
        if self.routes and (not len(self) or len(self.routes) % len(self)):
            raise ValueError(f"{len(self.routes)} bytes of routes are not of the same {len(self)} tokens")
        if self.n_kept or self.kept or self.log_mass:
            n_ids = sum(memoryview(self.n_kept).cast("H")) if len(self.n_kept) == 2 * len(self) else -1
            if 4 * n_ids != len(self.kept) or len(self.log_mass) != len(self.token_ids):
                raise ValueError(f"{len(self.kept)} bytes of kept ids are not of the same {len(self)} tokens")

    @classmethod
    def of(
        cls,
        token_ids: ArrayLike,
        logprobs: ArrayLike,
        versions: ArrayLike,
        routes: bytes = b"",
        kept: Sequence[Sequence[int]] = (),
        log_mass: ArrayLike = (),
    ) -> TokenColumns:
        """Of three arrays [T], their ``routes``, and the ids ``kept`` of each token with their ``log_mass`` [T]."""
        import numpy as np

        runs = [(version, len(list(each))) for version, each in groupby(versions)]
        return cls(
            np.array(token_ids, "<i4").tobytes(),
            np.array(logprobs, "<f4").tobytes(),
            np.array(runs, "<i4").tobytes(),
            routes,
            n_kept=np.array([len(ids) for ids in kept], "<u2").tobytes() if kept else b"",
            kept=np.array(list(chain.from_iterable(kept)), "<i4").tobytes() if kept else b"",
            log_mass=np.array(log_mass, "<f4").tobytes(),
        )

    @classmethod
    def unsampled(cls, token_ids: Sequence[int]) -> TokenColumns:
        ids = array("i", token_ids).tobytes()
        return cls(ids, bytes(len(ids)), array("i", [-1, len(token_ids)] if ids else []).tobytes())

    @classmethod
    def joined(cls, parts: Sequence[TokenColumns]) -> TokenColumns:
        """In turn, a version in one run. Where some have routes or kept ids, the others' tokens have none."""
        each = {name: b"".join([getattr(part, name) for part in parts]) for name in cls.__struct_fields__}
        runs = memoryview(each["versions"]).cast("i").tolist()
        versions = groupby(zip(runs[::2], runs[1::2], strict=True), lambda run: run[0])
        each["versions"] = array("i", [n for v, found in versions for n in (v, sum(run[1] for run in found))]).tobytes()
        if width := max([len(part.routes) // len(part) for part in parts if part.routes], default=0):
            each["routes"] = b"".join([part.routes or b"\xff" * (width * len(part)) for part in parts])
        if each["n_kept"]:
            each["n_kept"] = b"".join([part.n_kept or bytes(2 * len(part)) for part in parts])
            each["log_mass"] = b"".join([part.log_mass or bytes(4 * len(part)) for part in parts])
        return cls(**each)

    def routed(self, routes: bytes) -> TokenColumns:
        """With ``routes`` of the same tokens. Raises ValueError for another number."""
        return msgspec.structs.replace(self, routes=routes)

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @property
    def ids(self) -> np.ndarray:  # [T] int32
        return _array(self.token_ids, "<i4")

    @property
    def scores(self) -> np.ndarray:  # [T] float32
        return _array(self.logprobs, "<f4")

    @property
    def kept_counts(self) -> np.ndarray:  # [T] uint16
        return _array(self.n_kept or bytes(2 * len(self)), "<u2")

    @property
    def masses(self) -> np.ndarray:  # [T] float32, ``log_mass``
        return _array(self.log_mass or bytes(4 * len(self)), "<f4")

    @property
    def runs(self) -> np.ndarray:  # [R, 2] int32
        return _array(self.versions, "<i4").reshape(-1, 2)

    @property
    def sampled(self) -> list[tuple[int, int]]:
        """The runs of tokens that the model sampled."""
        runs = memoryview(self.versions).cast("i").tolist()  # few: numpy takes five times as long
        return [(version, n) for version, n in zip(runs[::2], runs[1::2], strict=True) if version >= 0]

    @property
    def span(self) -> tuple[int, int]:
        """The oldest and the newest version that sampled a token; ValueError if none did."""
        versions = [version for version, _ in self.sampled]
        return min(versions), max(versions)

    @property
    def n_sampled(self) -> int:
        return sum(n for _, n in self.sampled)

    @property
    def each_version(self) -> np.ndarray:  # [T] int32
        return self.runs[:, 0].repeat(self.runs[:, 1])
