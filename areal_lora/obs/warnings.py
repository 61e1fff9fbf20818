"""What is wrong with a run, in words with the key that helps: rules over the newest steps of one adapter.

A rule describes the trouble of the last `NEEDED` steps, the last of all ``steps``, and returns None where there is
none: one step may be bad by chance. Thresholds are far from what healthy runs show.

`bill` has what makes trainer and servers differ: the part of each cause (`algorithms.mismatch`), and what removes it.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal_lora.obs.metrics.records import StepRecord

GAP, KL = "mismatch/", "mismatch_kl/"
"""Prefixes of the tags of each cause: nats per token of mean |trainer - rollout| logprob, and of their divergence."""
RECENT = 64  # measurements of which `bill` takes the mean


@dataclass(frozen=True, slots=True)
class MismatchCause:
    """``fix`` removes its part."""

    meaning: str
    fix: str


CAUSES: Mapping[str, MismatchCause] = {
    "flips": MismatchCause("experts of the trainer's own choice", "removed by behaviour.router_replay=rollout"),
    "truncation": MismatchCause("mass of the kept ids", "raise sampling.top_k, sampling.top_p"),
    "record": MismatchCause("another adapter or policy sampled than recorded", "see train/audit_gap"),
    "staleness": MismatchCause("versions since the sampling", "lower rollout.max_staleness"),
    "adapter": MismatchCause(
        "servers compute the adapter otherwise", "lower weight_sync.probe_tolerance to stop at such a publish"
    ),
    "weights": MismatchCause(
        "servers round or merge the weights",
        "leave out rollout.engine_args.quantization, set rollout.adapter_mode=unmerged",
    ),
    "numerics": MismatchCause("kernels, rounding, routing", "model.dtype=float32, behaviour.router_replay=rollout"),
}
"""In the order in which they are removed. ``adapter`` and ``weights`` are part of ``numerics`` unless measured."""


def bill(steps: Sequence[StepRecord]) -> dict[str, tuple[float, float]]:
    """The parts (gap, KL) of each cause, as means over the `RECENT` newest steps that have them; empty without any.

    Those of ``numerics`` are of steps that measured ``weights``, or ``adapter``, if any did.
    """
    found: dict[str, tuple[float, float]] = {}
    having = ([step for step in steps if GAP + cause in step.metrics] for cause in ("weights", "adapter"))
    apart = next(filter(None, having), steps)
    for cause in CAUSES:
        measured = apart if cause == "numerics" else steps
        rows = [(step.metrics.get(GAP + cause), step.metrics.get(KL + cause)) for step in measured]
        known = [(gap, kl) for gap, kl in rows if gap is not None and kl is not None][-RECENT:]
        if known:
            gaps, kls = zip(*known, strict=True)
            found[cause] = statistics.fmean(gaps), statistics.fmean(kls)
    return found


def bill_lines(adapter: str, parts: Mapping[str, tuple[float, float]]) -> list[str]:
    """Lines with each part, its share of the whole, and its fix."""
    gap, kl = (sum(column) for column in zip(*parts.values(), strict=True))
    lines = [f"mismatch of {adapter}: {gap:.3g} nats a token, KL {kl:.3g}"]
    for cause, (own, its_kl) in parts.items():
        shares = " ".join(f"{part / whole if whole else 0:6.0%}" for part, whole in ((own, gap), (its_kl, kl)))
        lines.append(f"  {cause:<10} {own:9.2e} {its_kl:9.2e} {shares}  {CAUSES[cause].meaning}: {CAUSES[cause].fix}")
    return lines


NEEDED = 3
Steps = Sequence[StepRecord]
_CONTROLLER_CORE = re.compile("machine/controller/.*/core_share")
_NO_FAULT = "staleness", "flips"  # causes: a setting that the user chose, and what is removed


def _values(steps: Steps, tag: str) -> list[float]:
    """A metric of the last steps; empty unless all have it."""
    found = [step.metrics.get(tag) for step in steps[-NEEDED:]]
    measured = [value for value in found if value is not None]
    return measured if len(measured) == len(found) else []


def _above(steps: Steps, tag: str, limit: float) -> float | None:
    """The mean of a metric that is above ``limit`` in all of the last steps."""
    values = _values(steps, tag)
    return statistics.fmean(values) if values and min(values) > limit else None


def _newest(steps: Steps, tag: str) -> list[float]:
    """The newest values of a metric that not every step has, up to `NEEDED`."""
    return [value for step in steps if (value := step.metrics.get(tag)) is not None][-NEEDED:]


def constant_reward(steps: Steps) -> str | None:
    spread, means = _values(steps, "train/reward_std"), set(_values(steps, "train/reward_mean"))
    if not spread or max(spread) > 0 or len(means) != 1:
        return None
    return f"every answer has the reward {means.pop():g}: check the reward and the answers (areal-lora samples RUN)"


def no_gradient(steps: Steps) -> str | None:
    if constant_reward(steps) or dropped_tokens(steps) or not all(step.flat for step in steps[-NEEDED:]):
        return None
    masked = all(step.metrics.get("train/truncated") == 1.0 for step in steps[-NEEDED:])
    why = "all answers are truncated" if masked else "the rewards of each group are equal"
    return f"no gradient: {why}: raise sampling.n_samples or max_new_tokens, or change the problems"


def dropped_tokens(steps: Steps) -> str | None:
    share = _above(steps, "extra/capped_fraction", 0.5)
    if share is None:
        return None
    fix = "see areal-lora doctor --run RUN, or set algorithm.behaviour_correction=truncate"
    return f"{share:.0%} of the tokens are dropped, w is outside of its bounds: {fix}"


def cut_answers(steps: Steps) -> str | None:
    share = _above(steps, "train/truncated", 0.5)
    if share is None:
        return None
    return f"{share:.0%} of the answers are cut off: raise sampling.max_new_tokens, or punish length (overlong_share)"


def stale_groups(steps: Steps) -> str | None:
    first, last = steps[-NEEDED], steps[-1]
    dropped = last.dropped.get("stale", 0) - first.dropped.get("stale", 0)
    used = (last.metrics.get("train/groups_consumed") or 0) - (first.metrics.get("train/groups_consumed") or 0)
    if not used or dropped <= 0.25 * (dropped + used):
        return None
    return f"{dropped / (dropped + used):.0%} of the groups are dropped as stale: raise max_staleness, or add servers"


def missing_routes(steps: Steps) -> str | None:
    tokens = _above(steps, "train/not_replayed", 0)
    if tokens is None:
        return None
    return f"{tokens:.0f} tokens a step have no routes to replay: see the servers' logs, or behaviour.router_replay=off"


def mismatch(steps: Steps) -> str | None:
    high = [
        cause for cause in CAUSES if cause not in _NO_FAULT and min(_newest(steps, GAP + cause), default=0.0) > 0.05
    ]
    if high:
        parts = bill(steps)
        cause = max(high, key=parts.__getitem__)
        known = CAUSES[cause]
        return f"{parts[cause][0]:.2g} nats a token between trainer and servers: {known.meaning}: {known.fix}"
    gap = _above(steps, "train/mismatch_fresh", 0.05)
    if gap is None:
        return None
    return f"trainer and servers differ by {gap:.2g} nats a token of one version: see if model.dtype=float32 ends it"


def fast_policy(steps: Steps) -> str | None:
    moved, exact = _above(steps, "train/mismatch_stale", 0.5), _values(steps, "train/mismatch_fresh")
    if moved is not None and exact and max(exact) < 0.05:
        return f"the policy moves {moved:.2g} nats a token between versions: lower optimizer.lr"
    before = [step.metrics.get("train/grad_norm") or 0.0 for step in steps[:-NEEDED]]
    usual = statistics.median(before) if len(before) >= NEEDED else 0.0
    norm = _above(steps, "train/grad_norm", 10 * usual) if usual else None
    return None if norm is None else f"the gradient norm is {norm / usual:.0f} times its median: lower optimizer.lr"


def not_finite(steps: Steps) -> str | None:
    if _above(steps, "extra/skipped", 0) is None:
        return None
    return f"the last {NEEDED} steps were skipped, their gradients are not finite: lower optimizer.lr"


def slow_reward(steps: Steps) -> str | None:
    seconds = _values(steps, "reward_cost/seconds")
    waiting = [
        took > 0.5 * step.step_s and (step.trainer_idle or 0.0) > 0.5
        for took, step in zip(seconds, steps[-NEEDED:], strict=False)
    ]
    if not waiting or not all(waiting):
        return None
    took = statistics.fmean(seconds)
    return f"the trainer waits, and scoring a group takes {took:.1f} s: raise reward.workers, or make the reward faster"


def busy_controller(steps: Steps) -> str | None:
    shares = [
        value
        for step in steps[-NEEDED:]
        for tag, value in step.metrics.items()
        if (step.trainer_idle or 0.0) > 0.5 and value is not None and _CONTROLLER_CORE.fullmatch(tag)
    ]
    if len(shares) < NEEDED or min(shares) <= 0.9:
        return None
    fix = "with task.format.kind=chat_append a turn takes less; more servers do not help"
    return f"the trainer waits, and the controller uses {statistics.fmean(shares):.0%} of its one core: {fix}"


_OF_ANSWERS = constant_reward, no_gradient, cut_answers, stale_groups, slow_reward, busy_controller
_OF_POLICIES = dropped_tokens, missing_routes, mismatch, fast_policy, not_finite


class Warnings:
    """The warnings of one adapter, each once."""

    def __init__(self) -> None:
        self._left: list[Callable[[Steps], str | None]] = [*_OF_ANSWERS, *_OF_POLICIES]

    def of(self, steps: Iterable[StepRecord]) -> list[str]:
        """Call after each step, with the newest steps in order."""
        found, known = [], [step for step in steps if not step.by_client]
        for rule in [*self._left] if len(known) >= NEEDED else ():
            if text := rule(known):
                self._left.remove(rule)
                found.append(text)
        return found
