"""From a configuration to an algorithm: its advantages, its loss, the fields that a batch must carry.

A user's own objective or advantage, named by path, takes the place of a row of the tables. Each is called on random
samples before anything is trained, on every rank: what a table's row guarantees is checked, because packing,
micro-batches and data-parallel ranks depend on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from areal_lora.algorithms import losses
from areal_lora.algorithms.advantages import ADVANTAGES, Advantage, Discount, Samples, Shaping, token_credit
from areal_lora.algorithms.losses import ESTIMATORS, LOSSES, Behaviour, Clip, Loss, Objective, PolicyTerms, Tokens
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.errors import ConfigError
from areal_lora.processes.loading import load_import_path
from areal_lora.processes.log import get_logger
from areal_lora.types import Correction, TrainBatch

STEP, TOLERANCE = 1e-6, 1e-4  # of central differences in float64, relative to the largest gradient
ROUNDING = 1e-12  # an advantage below it is that of equal rewards, up to rounding
LENGTHS = (5, 1, 8)  # of the random sequences
FAULTS = (ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)

log = get_logger(__name__)


def own_loss(path: str, clip: Clip) -> Loss:
    """The objective ``function(clip: Clip, tokens: Tokens) -> Tensor [t]`` at ``path``: maximised for each token.

    A gradient that central differences contradict is logged: a stopped gradient is meant, a mistake is not.

    Raises:
        ConfigError: it cannot be imported or fails; its result has another shape, is not finite, has no gradient, or
            differs from call to call; a sequence's values depend on the others of its micro-batch.
    """
    function = load_import_path(path)

    def loss(clip: Clip, tokens: Tokens) -> Objective:
        return Objective(value=function(clip, tokens), clipped=torch.zeros_like(tokens.on))

    tokens = _tokens()
    value = _checked(path, function, clip, tokens, like=tokens.logprobs)
    if not value.requires_grad:
        _refuse(path, "its result has no gradient", "compute it from tokens.logprobs with torch")
    [gradient] = torch.autograd.grad(value.sum(), tokens.logprobs)
    if not gradient.isfinite().all():
        _refuse(path, "its gradient is not finite", "bound the ratio, as areal_lora.algorithms.losses.ratio_of does")
    for start, end in zip(tokens.cu_seqlens[:-1].tolist(), tokens.cu_seqlens[1:].tolist(), strict=True):
        alone = _checked(path, function, clip, _part(tokens, start, end), like=tokens.logprobs[start:end])
        if not torch.allclose(alone, value[start:end], rtol=1e-9, atol=1e-12):
            fix = "reduce over a sequence at most: areal_lora.algorithms.losses has sequence_sums and spread"
            _refuse(path, "a sequence's values depend on the other sequences of its micro-batch", fix)
    far = (gradient - _differences(function, clip, tokens)).abs() > TOLERANCE * gradient.abs().max()
    if far.any():
        n = int(far.sum())
        log.warning(
            "%s: its gradient is not that of its value at %d of %d random tokens: correct if it stops a gradient "
            "(detach), a mistake otherwise",
            path,
            n,
            len(far),
        )
    return loss


def own_advantage(path: str, *, drop_uniform: bool) -> Advantage:
    """The advantage ``function(samples: Samples) -> Tensor [S]`` at ``path``; ``drop_uniform``: of groups that differ.

    Raises:
        ConfigError: it cannot be imported or fails; its result has another shape, is not finite, differs from call to
            call or depends on the order of the samples.
    """
    function = load_import_path(path)
    generator, n = torch.Generator().manual_seed(0), 12
    samples = Samples(
        rewards=torch.randn(n, generator=generator, dtype=torch.float64),
        group_ids=torch.arange(n) // 4,
        lengths=torch.randint(1, 9, (n,), generator=generator).double(),
        baselines=torch.zeros(n, dtype=torch.float64),
    )
    values = _checked(path, function, samples, like=samples.rewards)
    order = torch.randperm(n, generator=generator)
    mixed = {name: getattr(samples, name)[order] for name in ("rewards", "group_ids", "lengths", "baselines")}
    if not torch.allclose(_checked(path, function, replace(samples, **mixed), like=values), values[order]):
        _refuse(path, "its result depends on the order of the samples", "tell groups apart by samples.group_ids")
    for equal in () if drop_uniform else (samples.group_ids == 0, samples.group_ids >= 0):  # in nearly every batch
        alike = replace(samples, rewards=samples.rewards.masked_fill(equal, 0.0))
        _checked(path, function, alike, like=values, on="a group of equal rewards")
    return Advantage(of=function)


def _checked(
    path: str, function: Callable[..., Any], *arguments: object, like: Tensor, on: str = "random samples"
) -> Tensor:
    try:
        value, again = function(*arguments), function(*arguments)
    except FAULTS as error:
        raise ConfigError(path, f"it fails on {on}: {type(error).__name__}: {error}", "correct it") from error
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        _refuse(path, f"it returns {found} in place of {like.dtype} {list(like.shape)}", "return one value for each")
    if not value.isfinite().all():
        _refuse(path, f"its result is not finite on {on}", "correct it")
    if not torch.equal(value, again):
        _refuse(path, "its result differs from call to call", "draw no random numbers: ranks would differ")
    return value


def _refuse(path: str, reason: str, fix: str) -> NoReturn:
    raise ConfigError(path, reason, fix)


def _tokens() -> Tokens:
    """Random sequences; the last token of each is off the mask where there are others."""
    generator, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    on = torch.ones(n, dtype=torch.bool)
    on[cu_seqlens[1:] - 1] = torch.tensor(LENGTHS) == 1
    old, moved, advantages = (
        torch.where(on, x, 0.0) for x in torch.randn(3, n, generator=generator, dtype=torch.float64)
    )
    logprobs = (-1.0 - old.abs() + 0.2 * moved).where(on, 0.0)
    return Tokens(
        logprobs=logprobs.requires_grad_(),
        old=(-1.0 - old.abs()).where(on, 0.0),
        advantages=advantages,
        on=on,
        cu_seqlens=cu_seqlens,
    )


def _part(tokens: Tokens, start: int, end: int) -> Tokens:
    """The sequence that is ``tokens[start:end]``."""
    arrays = {name: getattr(tokens, name)[start:end] for name in ("logprobs", "old", "advantages", "on")}
    return Tokens(**arrays, cu_seqlens=torch.tensor([0, end - start]))


def _differences(function: Callable[..., Tensor], clip: Clip, tokens: Tokens) -> Tensor:
    """The gradient of the summed value by central differences. [t]"""
    shifts = STEP * torch.eye(tokens.logprobs.numel(), dtype=torch.float64)
    with torch.no_grad():
        sums = [
            function(clip, replace(tokens, logprobs=tokens.logprobs + sign * shift)).sum()
            for shift in shifts
            for sign in (1, -1)
        ]
    return torch.stack(sums).view(-1, 2) @ torch.tensor([1.0, -1.0], dtype=torch.float64) / (2 * STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTerms:
    """The reference is an earlier version: ``first``, and from there on every ``every``-th version."""

    first: int
    every: int | None

    def renewed_at(self, version: int) -> bool:
        """Whether ``version`` becomes the reference once it is made."""
        since = version - self.first
        return since == 0 or (self.every is not None and since > 0 and since % self.every == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What a run does with a batch: ``shaping`` and ``advantage`` before learning, ``terms`` in the loss.

    Without ``reference`` the reference is the base or a teacher. With ``critic`` one is trained beside the policy.
    ``corrections``: what a choice for a step means, and ``correction`` the choice in ``terms``; none where it is fixed.
    """

    name: str
    advantage: Advantage
    shaping: Shaping
    terms: PolicyTerms
    needs_prox: bool
    needs_ref: bool
    needs_entropy: bool
    kl_target: float | None = None
    critic: bool = False
    reference: ReferenceTerms | None = None
    corrections: Mapping[Correction, Behaviour] | None = None
    correction: Correction | None = None

    def with_kl_scale(self, scale: float) -> "Algorithm":
        """The same with ``scale`` times the KL coefficient, in the loss and in the reward."""
        return replace(
            self,
            shaping=replace(self.shaping, kl_coef=scale * self.shaping.kl_coef),
            terms=replace(self.terms, kl_coef=scale * self.terms.kl_coef),
        )

    def zero_advantage(self, batch: TrainBatch) -> Tensor | None:
        """[N] bool: sequences of which no term of the loss has a gradient, as those of groups with equal rewards.

        None where other terms than the advantages have one. It needs no token columns.
        """
        terms = self.terms
        if self.critic or self.needs_ref or terms.entropy_coef or terms.loss not in LOSSES.values():
            return None
        advantages = token_credit(self.advantage, self.shaping, batch).advantages
        return (losses.token_counts(advantages.abs() > ROUNDING, batch.cu_seqlens) == 0) & ~batch.given

    def with_correction(self, chosen: Correction) -> "Algorithm":
        """The same with the ``chosen`` correction, unless it is fixed."""
        if self.corrections is None:
            return self
        return replace(self, terms=replace(self.terms, behaviour=self.corrections[chosen]), correction=chosen)


def build_algorithm(
    config: AlgorithmConfig,
    *,
    minibatches: int,
    max_new_tokens: int,
    given_steps: int = 0,
    weights: Mapping[str, float] | None = None,
) -> Algorithm:
    """Look the configuration's names up, and load functions given by path. Raises ConfigError.

    ``given_steps``: so many versions are trained on given answers first. ``weights``: of several rewards, by name.
    With one minibatch per step the proximal policy is the current one, so its log-probabilities are taken from the
    training forward pass and ``needs_prox`` is False. So it is where nothing refers to the proximal policy.
    """
    in_reward, in_ratio = config.kl_in != "loss", config.behaviour_correction == "in_ratio"
    kl, behaviour = ESTIMATORS[config.kl_estimator], _behaviour(config)
    clip = Clip(low=config.eps_clip, high=config.clip_high, dual=config.dual_clip)
    terms = PolicyTerms(
        loss=LOSSES[config.loss] if config.loss in LOSSES else own_loss(config.loss, clip),
        clip=clip,
        ratio="rollout" if in_ratio else "proximal",
        behaviour=behaviour,
        kl=kl,
        kl_coef=0.0 if in_reward else config.kl_coef,
        entropy_coef=config.entropy_coef,
    )
    shaping = Shaping(
        kl=kl,
        kl_coef=config.kl_coef if in_reward else 0.0,
        kl_own=config.kl_in == "advantage",
        overlong_from=(1.0 - config.overlong_share) * max_new_tokens,
        overlong_penalty=config.overlong_penalty,
        max_new_tokens=max_new_tokens,
        discount=Discount(gamma=config.gamma, lam=config.gae_lambda),
        weights=weights or {},
    )
    advantage = (
        ADVANTAGES[config.advantage]
        if config.advantage in ADVANTAGES
        else own_advantage(config.advantage, drop_uniform=config.drop_uniform)
    )
    return Algorithm(
        name=config.kind,
        advantage=advantage,
        shaping=shaping,
        terms=terms,
        needs_prox=config.needs_prox(minibatches),
        needs_ref=config.kl_coef > 0,
        needs_entropy=config.entropy_coef > 0,
        kl_target=config.kl_target,
        critic=advantage.critic,
        reference=ReferenceTerms(first=given_steps, every=config.reference_refresh_steps)
        if config.has_reference
        else None,
        corrections={
            Correction.NONE: replace(behaviour, correction="none"),
            Correction.TRUNCATE: behaviour,
            Correction.MASK: replace(_behaviour(AlgorithmConfig(kind="icepop")), cap=behaviour.cap),
        }
        if config.behaviour_correction == "auto"
        else None,
    )


def _behaviour(config: AlgorithmConfig) -> Behaviour:
    """With ``auto``, truncation: what bounds a mismatch that is not known yet, and drops nothing."""
    key = config.behaviour_correction
    return Behaviour(
        correction="none" if key == "in_ratio" else "truncate" if key == "auto" else key,
        level=config.behaviour_level,
        cap=config.behaviour_cap,
        floor=config.behaviour_floor,
    )
