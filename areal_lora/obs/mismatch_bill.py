"""What makes trainer and servers differ: the part of each cause (`algorithms.mismatch`), and what removes it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_lora.obs.metrics.records import StepRecord

GAP, KL = "mismatch/", "mismatch_kl/"
"""Prefixes of the tags of each cause: nats per token of mean |trainer - rollout| logprob, and of their divergence."""
RECENT = 64  # measurements of which `bill` takes the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCause:
    """``fix`` removes its part."""

    meaning: str
    fix: str


CAUSES: Mapping[str, MismatchCause] = {
    "flips": MismatchCause(
        meaning="experts of the trainer's own choice", fix="removed by behaviour.router_replay=rollout"
    ),
    "truncation": MismatchCause(meaning="mass of the kept ids", fix="raise sampling.top_k, sampling.top_p"),
    "record": MismatchCause(meaning="another adapter or policy sampled than recorded", fix="see train/audit_gap"),
    "staleness": MismatchCause(meaning="versions since the sampling", fix="lower rollout.max_staleness"),
    "adapter": MismatchCause(
        meaning="servers compute the adapter otherwise",
        fix="lower weight_sync.probe_tolerance to stop at such a publish",
    ),
    "weights": MismatchCause(
        meaning="servers round or merge the weights",
        fix="leave out rollout.engine_args.quantization, set rollout.adapter_mode=unmerged",
    ),
    "numerics": MismatchCause(
        meaning="kernels, rounding, routing", fix="model.dtype=float32, behaviour.router_replay=rollout"
    ),
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
