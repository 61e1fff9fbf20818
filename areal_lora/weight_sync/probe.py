"""The truth check after a publish: trainer and server must score fixed sequences alike (contract C6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.errors import ParityError
from areal_lora.types import AdapterRef

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeExpectation:
    """What the trainer says about N probe sequences under the version being published.

    ``logprobs[n][t]`` speaks of token t given the tokens before it; entry 0 carries nothing.
    ``differs`` says that the trainer's own adapter differs from its own base by more than the
    tolerance: the server must then differ from its base too.
    """

    token_ids: list[list[int]]  # [N][T_n]
    logprobs: list[list[float]]  # [N][T_n]
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Mean and largest |logp trainer - logp server| over all scored tokens.

    ``differs`` says whether the server scores differently from its own base.
    """

    mean_abs: float
    max_abs: float
    differs: bool


def check_probe(
    ref: AdapterRef, server: str, expected: ProbeExpectation, served: Rows, base: Rows, tolerance: float
) -> ProbeResult:
    """Compare one server's answer. ``served`` and ``base`` are [N][T_n] like ``expected.logprobs``.

    Raises ParityError if lengths differ, a value is not finite, the mean difference is above
    ``tolerance``, or the adapter should show but ``served`` equals ``base`` bit for bit.
    """
    lengths = [len(row) for row in expected.token_ids]
    for what, rows in (("trainer", expected.logprobs), ("server", served), ("base", base)):
        if [len(row) for row in rows] != lengths:
            raise ParityError(f"{ref} on server {server}: {what} logprobs do not match the probe's lengths {lengths}")
    mine, theirs, plain = _scored(expected.logprobs), _scored(served), _scored(base)
    if not mine:
        raise ParityError(f"{ref} on server {server}: the probe scores no token; give sequences of two tokens or more")
    differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise ParityError(f"{ref} on server {server}: the probe has logprobs that are not finite")
    if expected.differs and theirs == plain:
        raise ParityError(
            f"{ref} on server {server}: the trainer's adapter changes the probe, but the server scores exactly like "
            "its base; the adapter does not reach the sampler"
        )
    result = ProbeResult(
        mean_abs=sum(differences) / len(differences), max_abs=max(differences), differs=theirs != plain
    )
    if result.mean_abs > tolerance:
        raise ParityError(
            f"{ref} on server {server}: mean |logp trainer - logp server| is {result.mean_abs:.3g} "
            f"(max {result.max_abs:.3g}), above {tolerance:.3g}; trainer and server hold different policies"
        )
    return result


def differ(mine: Rows, base: Rows, tolerance: float) -> bool:
    """Whether the trainer's own scores [N][T_n] differ from its base's by more than ``tolerance`` in the mean."""
    differences = [abs(a - b) for a, b in zip(_scored(mine), _scored(base), strict=True)]
    return bool(differences) and sum(differences) / len(differences) > tolerance


def _scored(rows: Rows) -> list[float]:
    return [x for row in rows for x in row[1:]]
