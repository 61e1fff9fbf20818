"""The section ``adapters[].algorithm``: one set of keys, and a table of what each ``kind`` sets.

An algorithm is data. ``kind`` chooses a row of `PRESETS`; a key that is set beside it overrides the row. The defaults
of the keys are those of ``grpo``, so a row holds only what differs. Sources of the values: docs/en/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from areal_lora.config.sections.section import NonNegFloat, PositiveInt, Section

Kind = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "gpg",
    "dapo",
    "gspo",
    "cispo",
    "tis",
    "mis",
    "icepop",
    "remax",
    "ppo",
]
AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "batch",
    "group_mean_batch_std",
    "remax",
    "gae",
]
LossName = Literal["ppo", "gspo", "cispo", "reinforce"]

PRESETS: Mapping[Kind, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "reduction": "constant"},
    "rloo": {"advantage": "rloo"},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl_estimator": "k1", "kl_in": "reward"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl_estimator": "k2"},
    "opo": {"advantage": "opo", "loss": "reinforce"},
    "gpg": {"advantage": "gpg", "loss": "reinforce"},
    "dapo": {"eps_clip_high": 0.28, "overlong_share": 0.2, "drop_uniform": True},
    "gspo": {"loss": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, "reduction": "sequence"},
    "cispo": {
        "loss": "cispo",
        "eps_clip": 1.0,
        "eps_clip_high": 4.0,
        "ratio": "rollout",
        "behaviour_correction": "none",
    },
    "tis": {"behaviour_correction": "truncate", "behaviour_cap": 2.0},
    "mis": {"behaviour_level": "sequence", "behaviour_cap": 2.0},
    "icepop": {"behaviour_floor": 0.5},
    "remax": {"advantage": "remax", "loss": "reinforce", "kl_estimator": "k1", "kl_in": "reward"},
    "ppo": {"advantage": "gae", "kl_estimator": "k1", "kl_in": "reward"},
}


class AlgorithmConfig(Section):
    """Decoupled PPO and its relatives over behaviour (rollout), proximal (start of step) and current policy."""

    kind: Kind = Field(description="Row of presets; what it sets is in docs/en/algorithms.md and in `--dry-run`.")
    advantage: AdvantageName = Field("grpo", description="How the answers' rewards become advantages.")
    loss: LossName = Field(
        "ppo",
        description="`ppo`: clipped ratio of each token; `gspo`: of each sequence; `cispo`: clipped weight of the "
        "log-probability; `reinforce`: no ratio.",
    )
    eps_clip: PositiveFloat = Field(0.2, description="Lower clip of the ratio: not below 1 - `eps_clip`.")
    eps_clip_high: PositiveFloat | None = Field(
        None, description="Upper clip: not above 1 + `eps_clip_high`; `eps_clip` if unset."
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="With a negative advantage A the objective is not below `dual_clip` x A; unset: no bound."
    )
    ratio: Literal["proximal", "rollout"] = Field(
        "proximal", description="The ratio is current/proximal, or current/rollout without a further correction."
    )
    behaviour_correction: Literal["mask", "truncate", "none"] = Field(
        "mask",
        description="Weight w = proximal/behaviour of a token: `mask`: 0 outside of the bounds; `truncate`: at most "
        "`behaviour_cap`; `none`: 1.",
    )
    behaviour_level: Literal["token", "sequence"] = Field(
        "token", description="w of each token, or the product over its sequence."
    )
    behaviour_cap: PositiveFloat = Field(5.0, description="Upper bound of w.")
    behaviour_floor: NonNegFloat = Field(0.0, description="Lower bound of w for `mask`.")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Discount of a reward for each token before it (`advantage: gae`)."
    )
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Weight of later values in an advantage; 1: returns minus values (`advantage: gae`)."
    )
    value_clip: PositiveFloat | None = Field(
        0.2, description="The value loss sees values at most so far from those before the step; unset: no bound."
    )
    critic_lr: PositiveFloat | None = Field(
        None, description="Learning rate of the critic, with the schedule of `optimizer`; 10 times its `lr` if unset."
    )
    critic_rank: PositiveInt | None = Field(
        None, description="Rank of the critic's adapter, at the policy's scale; if unset its rank and patterns."
    )
    kl_coef: NonNegFloat = Field(0.0, description="Weight of the KL divergence from the reference.")
    reference: Literal["base", "initial"] = Field(
        "base",
        description="`base`: the base model, adapter off; `initial`: the start of the run (`init_from`), or the "
        "version after `sft.steps`.",
    )
    reference_refresh_steps: PositiveInt | None = Field(
        None, description="Every so many versions the newest one becomes the reference; unset: never."
    )
    kl_target: PositiveFloat | None = Field(
        None,
        description="KL divergence per token to aim at: each step changes the weight by at most 2 %; unset: fixed.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Schulman's estimators of the KL divergence.")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Add the KL divergence to the loss, or subtract it from the reward."
    )
    entropy_coef: NonNegFloat = Field(0.0, description="Weight of the entropy bonus.")
    reduction: Literal["token", "sequence", "constant"] = Field(
        "token", description="Loss denominator: tokens, sequences, or sequences x max_new_tokens of the minibatch."
    )
    overlong_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Last part of `max_new_tokens` over which `overlong_penalty` grows; 0: no penalty."
    )
    overlong_penalty: NonNegFloat = Field(1.0, description="Largest amount taken off the reward of a long answer.")
    drop_uniform: bool = Field(
        False, description="Drop groups in which all answers have the same reward, and issue further prompts instead."
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        row = next((row for kind, row in PRESETS.items() if kind == data.get("kind")), {})
        return {**row, **data}

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether a version of the adapter is resident as the reference."""
        return self.kl_coef > 0 and self.reference == "initial"

    @property
    def has_baseline(self) -> bool:
        """Whether groups have a greedy answer beside those that are trained on."""
        return self.advantage == "remax"

    @property
    def clip_high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    def changed(self) -> dict[str, Any]:
        """The keys whose values are not those of the preset."""
        preset = AlgorithmConfig(kind=self.kind)
        return {name: value for name, value in self if value != getattr(preset, name)}
