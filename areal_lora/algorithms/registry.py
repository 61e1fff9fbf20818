"""One row per algorithm: its advantages, its loss, the fields that a batch must carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from areal_lora.algorithms import advantages
from areal_lora.algorithms.losses import PolicyTerms
from areal_lora.config.models import AlgorithmConfig, GrpoConfig, PolicyLoss, RlooConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table. ``advantage(rewards [N], group_ids [N]) -> [N]``."""

    name: str
    advantage: Callable[[Tensor, Tensor], Tensor]
    terms: PolicyTerms
    needs_prox: bool
    needs_ref: bool
    needs_entropy: bool


def _terms(config: PolicyLoss) -> PolicyTerms:
    return PolicyTerms(
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip if config.eps_clip_high is None else config.eps_clip_high,
        behaviour_cap=config.behaviour_cap,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )


def build_algorithm(config: AlgorithmConfig, *, minibatches: int) -> Algorithm:
    """The row for a configuration.

    With one minibatch per step the proximal policy is the current one, so its
    log-probabilities are taken from the training forward pass and ``needs_prox`` is False.
    """
    match config:
        case GrpoConfig():
            normalize = config.normalize_std

            def advantage(rewards: Tensor, group_ids: Tensor) -> Tensor:
                return advantages.grpo(rewards, group_ids, normalize_std=normalize)

        case RlooConfig():
            advantage = advantages.rloo
    return Algorithm(
        name=config.kind,
        advantage=advantage,
        terms=_terms(config),
        needs_prox=minibatches > 1,
        needs_ref=config.kl_coef > 0,
        needs_entropy=config.entropy_coef > 0,
    )
