"""Summarize the scored answers of an evaluation.

- pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1): for c correct ones of n answers
  ``1 - C(n - c, k) / C(n, k)``, averaged over the problems.
- majority@n is the share of problems whose most frequent answer is correct (Wang et al. 2022, arXiv:2203.11171); ties
  are split evenly, which is their mean over random orders.
- The 95 % interval of an accuracy is Wilson's, of as many independent answers as have the variance over problems;
  that of a reward is a percentile bootstrap over problems. Answers to one problem are not independent.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

from areal_lora.obs.metrics.records import Estimates
from areal_lora.tasks.reward_calls import Score
from areal_lora.tasks.rewards import braced, extract_answer, marked_answer
from areal_lora.types import Outcome

Z_95 = 1.959963984540054
RESAMPLES = 2000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer with its score; ``n_tokens`` were sampled for it."""

    text: str
    score: Score
    n_tokens: int = 0
    finish_reason: str = ""


class Tally(Estimates, frozen=True, kw_only=True):
    """``accuracy`` is None if any of the answers with a reward is ``ungraded``."""

    ungraded: int


def estimate(problems: Sequence[Sequence[Answer]], reward_kind: str) -> Tally:
    """Summarize the answers to each problem, of which there is one at least."""
    answers = [answer for problem in problems for answer in problem]
    scored = [answer.score for answer in answers if answer.score.outcome is Outcome.OK]
    ungraded = sum(score.correct is None for score in scored)
    ruled = not ungraded
    n = min(len(problem) for problem in problems)
    scores = [[answer.score for answer in problem] for problem in problems]
    correct = [[score.correct is True for score in problem] for problem in scores]
    rewards = [[score.reward for score in problem if score.outcome is Outcome.OK] for problem in scores]
    pass_at, most_frequent = dict[int, float](), None
    if ruled and n > 1:
        pass_at = {k: fmean([pass_at_k(len(flags), sum(flags), k) for flags in correct]) for k in ks(n)}
        voted = [
            [vote_of(reward_kind, a.text) if a.score.outcome is Outcome.OK else None for a in problem]
            for problem in problems
        ]
        most_frequent = fmean([majority(list(zip(*each, strict=True))) for each in zip(voted, correct, strict=True)])
    return Tally(
        accuracy=fmean([flag for flags in correct for flag in flags]) if ruled else None,
        reward_mean=fmean([score.reward for score in scored]) if scored else None,
        unscored=len(answers) - len(scored),
        ungraded=ungraded,
        accuracy_95=of_problems([fmean(flags) for flags in correct], len(answers)) if ruled else None,
        reward_95=bootstrap([fmean(values) for values in rewards if values]),
        interval="wilson" if ruled else "",
        pass_at=pass_at,
        majority=most_frequent,
        answer_tokens=fmean([answer.n_tokens for answer in answers]),
        truncated=fmean([answer.finish_reason == "length" for answer in answers]),
    )


def ks(n: int) -> list[int]:
    """The k of which pass@k is reported: powers of two up to ``n``, and ``n``."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of ``k`` answers, drawn without replacement from ``n`` with ``correct`` ones, is correct."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Whether the most frequent vote is correct: 1 or 0, or a fraction for ties. An answer without a vote has none.

    If answers with one vote differ in their correctness, their share of correct ones counts.
    """
    cast: dict[str, list[bool]] = defaultdict(list)
    for vote, correct in votes:
        if vote is not None:
            cast[vote].append(correct)
    most = max((len(flags) for flags in cast.values()), default=0)
    return fmean([sum(flags) / len(flags) for flags in cast.values() if len(flags) == most]) if cast else 0.0


def of_problems(shares: Sequence[float], answers: int) -> Interval:
    """The 95 % interval of the mean of ``shares``, the correct part of the answers to each problem.

    Of the effective sample size (Korn and Graubard 1998): at least the number of problems, at most that of ``answers``.
    """
    n, share = len(shares), fmean(shares)
    spread, alone = variance(shares) / n if n > 1 else 0.0, share * (1 - share)
    effective = min(answers, max(n, alone / spread)) if spread else answers if alone and n > 1 else n
    return wilson(share * effective, effective)


def wilson(successes: float, n: float) -> Interval:
    """The 95 % score interval of a proportion (Wilson 1927)."""
    share, z2 = successes / n, Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float]) -> Interval | None:
    """The 95 % percentile interval of the mean, from ``RESAMPLES`` resamples; the same at every call. None of none."""
    if not values:
        return None
    draw, numbers = np.random.default_rng(0), np.asarray(values, dtype=np.float64)
    means = [numbers[draw.integers(len(numbers), size=len(numbers))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def vote_of(reward_kind: str, text: str) -> str | None:
    r"""The answer that ``text`` states, as text; None if it states none.

    For the reward ``numeric_match`` it is the number that the reward compares. For others it is the `marked_answer`,
    else the content of the last ``\boxed{}``, else one word after the last ``####``, else the last line, without white
    space around it.
    """
    if reward_kind == "numeric_match":
        number = extract_answer(text)
        return None if number is None else str(number)
    if (final := marked_answer(text)) is not None:
        return final.strip() or None
    _, marker, tail = text.rpartition(r"\boxed{")
    if marker and "}" in tail:
        content = braced("{" + tail)
        return (tail if content is None else content).strip() or None
    _, marker, tail = text.rpartition("####")
    word = tail.partition("\n")[0].strip()
    return word if marker and word.isalpha() else text.strip().rpartition("\n")[2].strip() or None
