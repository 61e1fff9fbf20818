"""The truth check after a publish: trainer and server must score fixed sequences alike (contract C6).

Trainer and server use different kernels; the tolerance has to cover their rounding and hides an adapter with a smaller
effect. Within the server the kernels are the same, and what they round alike cancels: where the trainer's new version
scores differently from the base or the previous version, the server's scores must change, too::

    trainer   v - base, v - (v-1)     where, and how much, at the tokens with the largest differences
    server    v - base, v - (v-1)     must not be nothing there

In bfloat16 little cancels: other weights round otherwise, and a step moves some tokens of one side by ten times as
much as of the other. How much that makes is measured, where both sides have equal weights: by the change of their
disagreement from the base to the previous version.

A mixture of experts has ties: where two experts are equally good for a token, the rounding of a kernel chooses
between them, and what follows in that sequence differs by far more than rounding. Different weights show in most
sequences, a tie in one. So the comparisons leave out the sequences of a routed model in which both sides differ most,
one in `TIES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_lora.errors import ParityError
from areal_lora.types import AdapterRef

Rows = Sequence[Sequence[float]]

SMALLEST = 1e-5  # nats; what fp32 rounding makes of log-probabilities is a tenth of it
CLEAR = 4.0  # times the trainer's own noise: the smallest difference that counts
MOST = 32  # tokens that are compared, those with the largest differences
FEWEST = 16  # with fewer of them only exact equality counts
STILL = 0.25  # a token that moved by less than this part of the trainer's difference did not move
TIES = 4  # of so many sequences one may hold a tie between experts
SHARE = 0.75  # of the tokens that must not have moved; of a right server noise alone holds back at most an eighth


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeExpectation:
    """The trainer's scores of N probe sequences under the version that is published.

    ``logprobs[n][t]`` is that of token t given the tokens before it; entry 0 is unused. ``base`` are the
    scores under the trainer's base, ``before`` those under ``parent``, the previously published version; None if
    unknown. ``noise`` bounds the difference between two scorings of the same tokens by the trainer. ``routed``:
    the model chooses experts for each token. ``lossy``: the cast to the serving dtype loses much of the adapter, so
    a server that stays where it was is no proof that a version was lost on the way.
    """

    token_ids: list[list[int]]  # [N][T_n]
    logprobs: list[list[float]]  # [N][T_n]
    base: list[list[float]]  # [N][T_n]
    parent: AdapterRef | None = None
    before: list[list[float]] | None = None  # [N][T_n]
    noise: float = 0.0
    routed: bool = False
    lossy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Mean and largest |logp trainer - logp server| over all scored tokens.

    ``compared``: the mean without sequences that may hold a tie. ``differs``: other scores than its base's, or no base.
    """

    mean_abs: float
    compared: float
    max_abs: float
    differs: bool


def check_probe(
    ref: AdapterRef,
    server: str,
    expected: ProbeExpectation,
    served: Rows,
    base: Rows | None,
    tolerance: float,
    before: Rows | None = None,
) -> ProbeResult:
    """Compare one server's scores. All rows are [N][T_n] like ``expected.logprobs``.

    ``before`` are the server's scores of ``expected.parent``, None if unknown; ``base`` those of its base, None if it
    serves none. Raises ParityError if lengths differ, a value is not finite, the mean difference (see `TIES`) is above
    ``tolerance``, or the adapter should show but ``served`` still answers like ``base`` or ``before``.
    """
    lengths = [len(row) for row in expected.token_ids]
    given = [("trainer", expected.logprobs), ("trainer's base", expected.base), ("server", served)]
    given += [("base", base)] if base is not None else []
    for what, rows in given:
        if [len(row) for row in rows] != lengths:
            raise ParityError(f"{ref} on server {server}: {what} logprobs do not match the probe's lengths {lengths}")
    mine, theirs = _scored(expected.logprobs), _scored(served)
    if not len(mine):
        raise ParityError(f"{ref} on server {server}: the probe scores no token; give sequences of two tokens or more")
    differences = np.abs(mine - theirs)
    if not np.isfinite(differences).all():
        raise ParityError(f"{ref} on server {server}: the probe has logprobs that are not finite")
    others = [("its base", expected.base, base), (str(expected.parent), expected.before, before)]
    rounding = _rounding([(trainers, servers) for _, trainers, servers in others])
    for name, trainers, servers in others:
        if trainers is None or servers is None or expected.lossy:
            continue
        wanted, got = mine - _scored(trainers), theirs - _scored(servers)
        kept = _untied(expected, np.abs(wanted - got))
        if _stayed(wanted, got, kept, expected.noise, rounding):
            largest = np.abs(wanted[kept]).max()
            raise ParityError(
                f"{ref} on server {server}: the trainer's adapter changes the probe by up to {largest:.2g} nats, but "
                f"the server still answers like {name}; the adapter does not reach the sampler"
            )
    result = ProbeResult(
        mean_abs=float(differences.mean()),
        compared=float(differences[_untied(expected, differences)].mean()),
        max_abs=float(differences.max()),
        differs=base is None or not np.array_equal(theirs, _scored(base)),
    )
    if result.compared > tolerance:
        raise ParityError(
            f"{ref} on server {server}: mean |logp trainer - logp server| is {result.compared:.3g} "
            f"(max {result.max_abs:.3g}), above {tolerance:.3g}; trainer and server hold different policies"
        )
    return result


def _untied(expected: ProbeExpectation, differences: np.ndarray) -> np.ndarray:
    """Indices of the scored tokens [T] without those of sequences that may hold a tie between experts."""
    ends = np.cumsum([len(row) - 1 for row in expected.token_ids if len(row) > 1])
    rows = np.split(np.arange(len(differences)), ends[:-1])
    rows.sort(key=lambda row: float(differences[row].mean()))
    return np.concatenate(rows[: len(rows) - len(rows) // TIES] if expected.routed else rows)


def _rounding(pairs: Sequence[tuple[Rows | None, Rows | None]]) -> float:
    """Mean change of the disagreement between two versions that both sides have; ``pairs`` are (trainer's, server's).

    Of one version, or of two with the same scores, it is the disagreement itself.
    """
    known = [(_scored(mine), _scored(theirs)) for mine, theirs in pairs if mine is not None and theirs is not None]
    gaps = [mine - theirs for mine, theirs in known]
    if len(gaps) == 2 and (known[0][0] != known[1][0]).any():
        gaps = [gaps[0] - gaps[1]]
    return float(np.abs(gaps[0]).mean()) if gaps else 0.0


def _stayed(wanted: np.ndarray, got: np.ndarray, kept: np.ndarray, noise: float, rounding: float) -> bool:
    """Whether the server did not move although the trainer did; ``wanted`` and ``got`` are both sides' differences.

    Exact equality of all tokens is proof. Otherwise each token of ``kept`` above ``rounding`` votes by whether it
    moved, so that one with a large rounding error cannot decide. A server's noise cannot cancel what most tokens move.
    """
    floor, size = max(SMALLEST, CLEAR * noise), np.abs(wanted[kept])
    if (size <= floor).all():
        return False
    if not got.any():
        return True
    largest = np.argsort(-size, kind="stable")
    clear = largest[size[largest] > max(floor, CLEAR * rounding)][:MOST]
    still = int((np.abs(got[kept][clear]) <= STILL * size[clear]).sum())
    return len(clear) >= FEWEST and still >= SHARE * len(clear)


def _scored(rows: Rows) -> np.ndarray:
    """float64, without the first token of each row."""
    return np.array([x for row in rows for x in row[1:]])
