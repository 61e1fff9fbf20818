"""From a configuration to an algorithm: its advantages, its loss, the fields that a batch must carry."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from areal_lora.algorithms.advantages import ADVANTAGES, Advantage, Discount, Shaping
from areal_lora.algorithms.losses import ESTIMATORS, LOSSES, Behaviour, Clip, PolicyTerms
from areal_lora.algorithms.user_functions import own_advantage, own_loss
from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.types import Correction


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
    advantage = ADVANTAGES[config.advantage] if config.advantage in ADVANTAGES else own_advantage(config.advantage)
    return Algorithm(
        name=config.kind,
        advantage=advantage,
        shaping=shaping,
        terms=terms,
        needs_prox=minibatches > 1 and not in_ratio,
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
            Correction.GEOMETRIC: _behaviour(AlgorithmConfig(kind="geo_mis")),
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
