"""Train one batch into one new version: minibatches, forward-backward, optimizer steps."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_lora.algorithms.advantages import token_credit
from areal_lora.algorithms.losses import denominator, gradient_scale, policy_loss, spread, token_counts, token_weights
from areal_lora.algorithms.mismatch import after_change, is_shifted, shift_votes
from areal_lora.config.models import OptimizerConfig
from areal_lora.config.sections.run import ServedAs
from areal_lora.data.collate import HOST, split_minibatches
from areal_lora.engine.base import LossFn, LossSums, MicroBatch
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.errors import AlignmentError, NonFiniteError
from areal_lora.processes.log import get_logger
from areal_lora.trainer.adapter import Adapter, TrainingState
from areal_lora.trainer.companions import critic_of, improve, reference_of, renew, trained_mask
from areal_lora.types import Correction, TrainBatch

ALIGNMENT_LIMITS = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}
"""Largest mean |logp - old logp| that rounding explains, by the type of the base weights (contract C10)."""

CAUSES_STEPS = 16
"""Every so many steps audited sequences are also scored without what may be a cause of the mismatch."""
EVIDENCE = 0.1
"""Part of the limit of alignment below which the base is not scored: a mismatch that rounding explains. Where servers
round the base by themselves, any is of interest."""

MAX_SKIPPED = 3  # training steps in a row; one may be an outlier batch, three mean a broken run

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Log-probabilities [T] fp32 of the policy before the step, of audited sequences and those of their micro-batches,
    0 for others; None: not measured, the cause has no evidence.

    With the experts of its ``own`` choice, from which the routes differ in ``flips``; over the ``whole`` vocabulary,
    where sampling truncated, and both (``free``); of the ``base``, along no routes; and by the weights that servers
    ``served``: of the base, or of the policy where they merge it.
    """

    own: Tensor | None = None
    flips: float | None = None
    free: Tensor | None = None
    whole: Tensor | None = None
    base: Tensor | None = None
    served: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnReport:
    """Sums over the batch's trained tokens (``sums``), the mean ``grad_norm`` of the optimizer steps that were taken.

    The sum ``loss`` has the reduction's weights; it belongs to ``divisors``, the sum of the steps' denominators.
    ``skipped`` is the fraction of optimizer steps that were skipped because a gradient was not finite. ``entropies``
    [T] fp32 are the policy's where the algorithm needs them, in the pass that trained the token. ``logprobs`` [T] fp32
    are those of the policy before the step, of the sequences whose tokens the rank has, None where they were not
    measured. ``truncated``: they are normalised over kept ids, ``replayed``: along servers' routes. ``correction`` is
    the step's, where it is not fixed.
    """

    sums: dict[str, float]
    grad_norm: float
    lr: float
    skipped: float
    entropies: Tensor | None = None
    logprobs: Tensor | None = None
    truncated: bool = False
    replayed: bool = False
    variants: Variants = Variants()
    correction: Correction | None = None

    def per_token(self, name: str) -> float | None:
        return self.mean(name, "tokens")

    def per_sampled_token(self, name: str) -> float | None:
        """Given answers have no ratio and no divergence: their tokens do not count."""
        return self.mean(name, "sampled_tokens")

    def mean(self, name: str, count: str) -> float | None:
        """The sum ``name`` divided by the sum ``count``; None if it was not measured."""
        return self.sums[name] / max(self.sums[count], 1.0) if name in self.sums else None


def measures_causes(version: int) -> bool:
    """Whether the step of ``version`` scores `Variants`. Version 0 is the base, and the next ones are hardly stale."""
    return version % CAUSES_STEPS == 3


def annotate(engine: AdapterEngine, adapter: Adapter, batch: TrainBatch, *, record: bool = False) -> TrainBatch:
    """Add advantages [T] and, if the algorithm needs them, proximal and reference log-probabilities and values [T].

    ``record``: a proximal pass that it needs also adds its routes, for the policy's update passes alone.

    The reference is the base model with the adapter off, or a frozen version (contract C11). A teacher has scored its
    batches before. Given answers alone have neither divergence nor values. Collective over all ranks.
    """
    temperature, n, old_routes = adapter.config.sampling.temperature, adapter.config.minibatches, None
    # With dropout the training pass is no score of the policy: what is compared with the record needs one.
    if adapter.algorithm.needs_prox and record:
        prox, old_routes = engine.recorded(batch, n, adapter=adapter.name, temperature=temperature)
        batch = replace(batch, prox_logprobs=prox)
    elif adapter.algorithm.needs_prox or adapter.config.dropout:
        batch = replace(batch, prox_logprobs=engine.logprobs(batch, adapter=adapter.name, temperature=temperature))
    rewarded = not bool(batch.given.all())
    if rewarded and adapter.algorithm.needs_ref and batch.ref_logprobs is None:
        reference = reference_of(adapter)
        batch = replace(batch, ref_logprobs=engine.logprobs(batch, adapter=reference, temperature=temperature))
    if rewarded and (critic := critic_of(adapter)):
        batch = replace(batch, values=engine.values(batch, adapter=critic.name))
    credit = token_credit(adapter.algorithm.advantage, adapter.algorithm.shaping, batch)
    credited = replace(batch, advantages=credit.advantages, returns=credit.returns, turn_rewards=None)
    return replace(credited, old_routes=old_routes)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of training step ``step`` (from 0) of ``total_steps``: linear warm-up, then schedule.

    A pure function: it needs no state in a checkpoint, skipped steps do not delay it, and a run with a higher
    ``run.steps`` follows the longer schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


def make_loss(
    adapter: Adapter,
    version: int,
    *,
    scale: float = 1.0,
    moved: bool = False,
    kept_caches: bool = False,
    served_routes: bool = False,
) -> LossFn:
    """Build the adapter's objective for the engine, times ``scale``. ``version`` is the version in training.

    ``moved``: its training step has taken an optimizer step. Before that dropout and rounding clip no ratio.
    ``kept_caches``: servers keep KV caches of older versions. The objective takes the record of a token after a change
    as the policy that sampled it, which no version is; the trainer's log-probabilities are of one version throughout.
    ``served_routes``: those of the batch are the servers'.
    """
    algorithm, reduction = adapter.algorithm, adapter.config.algorithm.reduction

    def loss(micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
        assert micro.advantages is not None, "annotate() comes before learning"
        weights = token_weights(trained_mask(micro, adapter), micro.cu_seqlens, reduction)
        sums = policy_loss(
            algorithm.terms,
            logprobs=logprobs,
            prox_logprobs=micro.prox_logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            advantages=micro.advantages,
            weights=weights,
            cu_seqlens=micro.cu_seqlens,
            given=micro.given,
            ref_logprobs=micro.ref_logprobs,
            entropy=entropy,
            unmoved=not moved,
        )
        current = logprobs.detach()
        before = current if micro.prox_logprobs is None else micro.prox_logprobs
        votes = shift_votes(before, micro.rollout_logprobs, micro.loss_mask)
        # With dropout a training pass is no score.
        gap = torch.zeros_like(current) if adapter.config.dropout else (current - before).abs()
        found = {"moved": torch.where(micro.loss_mask, gap, 0.0).sum(), **votes}
        mismatch = _mismatch(micro, before, version, kept_caches, served_routes)
        return LossSums(loss=sums.loss * scale, stats={**sums.stats, **mismatch, **found})

    return loss


def _mismatch(
    micro: MicroBatch, before: Tensor, version: int, kept_caches: bool, served_routes: bool
) -> dict[str, Tensor]:
    """Sum |before - behaviour| [T] separately over fresh tokens (sampled by ``version`` alone) and all others.

    Along servers' routes an answer's tokens of older versions have those of theirs, and the server's caches newer ones.
    """
    gap = (before - micro.rollout_logprobs).abs()
    fresh = micro.loss_mask & (micro.versions == version)
    if kept_caches:
        fresh &= ~after_change(micro.versions, micro.loss_mask)
    if served_routes:
        older = token_counts(micro.loss_mask & ~fresh, micro.cu_seqlens) > 0
        fresh &= ~spread(older, micro.cu_seqlens, len(gap))
    stale = micro.loss_mask & ~fresh
    # Not indexed by a mask: that would wait for a GPU.
    return {
        "fresh_tokens": fresh.sum().float(),
        "fresh_gap": torch.where(fresh, gap, 0.0).sum(),
        "stale_tokens": stale.sum().float(),
        "stale_gap": torch.where(stale, gap, 0.0).sum(),
    }


def learn(
    engine: AdapterEngine,
    adapter: Adapter,
    batch: TrainBatch,
    *,
    version: int,
    base_dtype: str,
    lr: float,
    kept_caches: bool = False,
    served_as: ServedAs | None = None,
    audited: Sequence[int] = (),
) -> LearnReport:
    """Take all optimizer steps on one annotated batch at rate ``lr``, starting from ``version``. Collective.

    A critic takes its own on the same minibatches; a reference may be renewed. A minibatch without trained tokens takes
    none. ``served_as`` is the weights' part in a mismatch, whose causes are measured of the sequences ``audited``.

    Raises:
        AlignmentError: the batch's log-probabilities are shifted by one token, or, before any weight has moved, they
            differ from those of the same policy by more than rounding (contract C10). No optimizer step uses a
            minibatch with a fault, and one whose sums are not finite is skipped.
    """
    served_routes, reduction = batch.routes is not None, adapter.config.algorithm.reduction
    replays_old = batch.old_routes is not None
    updates = replace(batch, routes=batch.old_routes, old_routes=None) if replays_old else batch
    batch = replace(batch, old_routes=None)
    totals: Counter[str] = Counter(divisors=0)
    steps = list[Mapping[str, float]]()
    temperature, need_entropy = adapter.config.sampling.temperature, adapter.algorithm.needs_entropy
    only = torch.zeros(batch.n_sequences, dtype=torch.bool, device=HOST)
    only[[*audited]] = True
    sample = replace(batch, only=only) if audited else None
    variants = unmoved(engine, adapter, sample, served_as) if sample else Variants()
    scores, before = None, batch.prox_logprobs
    if need_entropy or (before is None and adapter.config.minibatches == 1):
        scores = batch.rewards.new_zeros(batch.n_tokens, *(2,) * need_entropy)
    start = 0
    for index, minibatch in enumerate(split_minibatches(updates, adapter.config.minibatches)):
        trained = trained_mask(minibatch, adapter)
        scale, moved = gradient_scale(trained, minibatch.cu_seqlens, reduction), not all(s["skipped"] for s in steps)
        loss = make_loss(
            adapter, version, scale=scale, moved=moved, kept_caches=kept_caches, served_routes=served_routes
        )
        sums = engine.forward_backward(
            minibatch,
            loss,
            temperature=temperature,
            need_entropy=need_entropy,
            scores=None if scores is None else scores[start : start + minibatch.n_tokens],
        )
        start += minibatch.n_tokens
        if index == 0:
            _assert_aligned(sums, ALIGNMENT_LIMITS[base_dtype])
        if is_shifted(sums):
            raise AlignmentError(
                f"rollout logprobs are shifted by one token: of the decisive tokens {sums['late']:.0f} have the "
                f"record of the next one, {sums['early']:.0f} that of the one before, {sums['late_own']:.0f} their own"
            )
        compared = not moved or before is not None  # with the policy before the step
        found = {name: x for name, x in sums.items() if compared or not name.startswith(("fresh_", "stale_"))}
        totals.update(found | {"loss": sums["loss"] / scale})
        if not bool(trained.any()):  # momentum alone would move the adapter
            engine.discard_gradients(adapter.name)
            continue
        longest = adapter.config.sampling.max_new_tokens
        divisor = denominator(trained, minibatch.cu_seqlens, reduction, longest)
        totals.update({"divisors": divisor})
        # A token whose forward pass is not finite may have left the loss, and no NaN in the gradient.
        finite = all(map(math.isfinite, sums.values()))
        steps.append(engine.optim_step(adapter.name, scale * divisor if finite else math.nan, lr).values)
        # The values before the step are along the critic's own routes.
        totals.update(improve(engine, adapter, replace(minibatch, routes=None) if replays_old else minibatch, lr))
    renew(engine, adapter, version + 1)
    least = EVIDENCE * ALIGNMENT_LIMITS[base_dtype] if served_as is None else 0.0
    differs = totals["behaviour_abs"] > least * totals["sampled_tokens"]
    if sample and differs and served_as != "merged":  # such servers have no base
        bare = replace(sample, kept=None, routes=None)
        variants = replace(variants, base=engine.logprobs(bare, adapter=None, temperature=temperature))
        if served_as is not None:
            served = engine.served(bare, served_as, adapter=None, temperature=temperature)
            variants = replace(variants, served=served)
    if before is None and scores is not None and adapter.config.minibatches == 1:
        before = scores[:, 0] if need_entropy else scores
    norms = [step["grad_norm"] for step in steps if not step["skipped"]]
    return LearnReport(
        sums=dict(totals),
        grad_norm=sum(norms) / len(norms) if norms else math.nan if steps else 0.0,
        lr=lr,
        skipped=sum(step["skipped"] for step in steps) / max(len(steps), 1),
        entropies=scores[:, 1] if scores is not None and need_entropy else None,
        logprobs=before,
        truncated=batch.kept is not None,
        replayed=batch.routes is not None,
        variants=variants,
        correction=adapter.algorithm.correction,
    )


def unmoved(engine: AdapterEngine, adapter: Adapter, batch: TrainBatch, served_as: ServedAs | None) -> Variants:
    """The variants that need the policy before the step. Collective."""
    temperature, own, flips, free, whole, served = adapter.config.sampling.temperature, None, None, None, None, None
    if batch.routes is not None:
        own, flips = engine.own_choice(batch, adapter=adapter.name, temperature=temperature)
        free = own
    if batch.kept is not None:
        untruncated = replace(batch, kept=None)
        whole = engine.logprobs(untruncated, adapter=adapter.name, temperature=temperature)
        if batch.routes is not None:
            free, _ = engine.own_choice(untruncated, adapter=adapter.name, temperature=temperature)
    if served_as == "merged":
        served = engine.served(replace(batch, kept=None), served_as, adapter=adapter.name, temperature=temperature)
    return Variants(own=own, flips=flips, free=free, whole=whole, served=served)


def check_finite(state: TrainingState, report: LearnReport) -> None:
    """Warn about skipped optimizer steps in the training step that produced ``state.version``.

    Raises:
        NonFiniteError: the ``MAX_SKIPPED``-th training step in a row in which every optimizer step was skipped.
    """
    if not report.skipped:
        return
    broken = [name for name, value in report.sums.items() if not math.isfinite(value)]
    what = f"sums that are not finite: {', '.join(sorted(broken)) or 'none, only the gradient'}"
    where = f"step {state.version - 1} of {state.name}"
    log.warning("%s: %.0f %% of its optimizer steps skipped; %s", where, 100 * report.skipped, what)
    if state.skipped_steps >= MAX_SKIPPED:
        raise NonFiniteError(
            f"{state.name}: the gradients of {state.skipped_steps} training steps in a row were not finite ({what}); "
            "lower optimizer.lr or algorithm.kl_coef, or look at the answers of these steps"
        )


def _assert_aligned(sums: dict[str, float], limit: float) -> None:
    """What is not finite is no shift: `learn` skips such a minibatch."""
    for name, total, count in (
        ("proximal", sums["moved"], sums["fresh_tokens"] + sums["stale_tokens"]),
        ("rollout (same version)", sums["fresh_gap"], sums["fresh_tokens"]),
    ):
        if count and limit < total / count < math.inf:
            raise AlignmentError(
                f"mean |logp - {name} logp| is {total / count:.3g} over {count:.0f} tokens of an unmoved policy, "
                f"limit {limit:g}: per-token arrays are shifted, or trainer and server compute different policies"
            )
