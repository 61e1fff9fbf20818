"""Columns of tokens, against lists."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_lora.tokens import TokenColumns


@pytest.mark.parametrize("_", range(3))
def test_columns_hold_what_lists_held(_: int) -> None:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    rng, parts, want, routes = random.Random(seed), [], list[tuple[int, float, int]](), b""
    kept, masses = list[list[int]](), list[float]()
    width = rng.choice((0, 3))
    for _ in range(rng.randrange(6)):
        ids = [rng.randrange(200_000) for _ in range(rng.randrange(5))]
        if rng.random() < 0.5:
            parts.append(TokenColumns.unsampled(ids))
            rows = [(token, 0.0, -1) for token in ids]
        else:
            rows = [(token, float(np.float32(-rng.random())), rng.randrange(3)) for token in ids]
            parts.append(TokenColumns.of(*zip(*rows, strict=True)) if rows else TokenColumns.of([], [], []))
        sets, own = [[] for _ in rows], [0.0] * len(rows)
        if rows and rng.random() < 0.5:
            sets = [[rng.randrange(200_000) for _ in range(rng.randrange(4))] for _ in rows]
            own = [float(np.float32(-rng.random())) for _ in rows]
            parts[-1] = TokenColumns.of(*zip(*rows, strict=True), b"", sets, own)
        want, kept, masses = want + rows, kept + sets, masses + own
        if rows and width and rng.random() < 0.7:
            parts[-1] = parts[-1].routed(rng.randbytes(width * len(rows)))
        routes += parts[-1].routes or b"\xff" * (width * len(parts[-1]))
    made = TokenColumns.joined(parts)
    assert made.routes in (routes, b"")
    assert bool(made.routes) == any(part.routes for part in parts)
    for columns in (made, msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=TokenColumns)):
        assert list(zip(columns.ids.tolist(), columns.scores.tolist(), columns.each_version.tolist())) == want
        assert (len(columns), columns.routes) == (len(want), made.routes)
        assert columns.kept_counts.tolist() == [len(ids) for ids in kept]
        assert np.frombuffer(columns.kept, "<i4").tolist() == [token for ids in kept for token in ids]
        assert columns.masses.tolist() == masses
        assert columns.n_sampled == sum(version >= 0 for _, _, version in want)
        found = [version for _, _, version in want if version >= 0]
        assert len(columns.runs) == sum(a != b for a, b in pairwise([None, *(version for _, _, version in want)]))
        assert sorted(version for version, n in columns.sampled for _ in range(n)) == sorted(found)
        assert not found or columns.span == (min(found), max(found))


@pytest.mark.parametrize("wrong", [{"kept": bytes(4)}, {"n_kept": bytes(2)}, {"log_mass": bytes(4)}], ids=str)
def test_kept_ids_of_other_tokens_are_refused(wrong: dict[str, bytes]) -> None:
    made = TokenColumns.of([5, 6], [-0.1, -0.2], [0, 0], b"", [[5], [6, 7]], [-0.3, -0.4])
    with pytest.raises(ValueError, match="bytes of kept ids are not of the same 2 tokens"):
        msgspec.structs.replace(made, **wrong)


def test_versions_take_no_space_per_token() -> None:
    assert TokenColumns.of(range(1000), [0.0] * 1000, [-1] * 400 + [3] * 600).runs.tolist() == [[-1, 400], [3, 600]]
    assert TokenColumns.of([5, 6], [-0.1, -0.2], [0, 0]).runs.tolist() == [[0, 2]]


def test_columns_without_routes_take_no_space_for_them_and_old_records_are_read() -> None:
    made = TokenColumns.of([5, 6], [-0.1, -0.2], [0, 0])
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(made))
    assert record.keys() == {"token_ids", "logprobs", "versions"}
    assert msgspec.convert(record, TokenColumns) == made
    assert made.routed(b"12") != made
    for routes in (b"123", b"1"):
        with pytest.raises(ValueError, match="routes are not of the same 2 tokens"):
            made.routed(routes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": b"12345678"},
        {"token_ids": b"123456", "logprobs": b"123456"},
        {"logprobs": b""},
        {"versions": b""},
        {"versions": b"1234567"},
        {"versions": np.array([(3, 2), (4, -1)], "<i4").tobytes()},
        {"versions": np.array([(-2, 1)], "<i4").tobytes()},
        {"teacher": b"12345678"},
        {"versions": np.array([(3, 2)], "<i4").tobytes()},
    ],
)
def test_arrays_of_different_tokens_are_refused(wrong: dict[str, Any]) -> None:
    good = {"token_ids": b"1234", "logprobs": b"1234", "versions": np.array([(3, 1)], "<i4").tobytes()}
    TokenColumns(**good)
    with pytest.raises(ValueError, match="not of the same tokens"):
        TokenColumns(**good | wrong)
    with pytest.raises(msgspec.ValidationError, match="not of the same tokens"):
        msgspec.convert(good | wrong, TokenColumns)
