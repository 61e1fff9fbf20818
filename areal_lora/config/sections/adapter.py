"""An entry of ``adapters``: all settings of one adapter, so a further adapter is a further entry.

An algorithm is data. ``kind`` chooses a row of `PRESETS`; a key that is set beside it overrides the row. The defaults
of the keys are those of ``grpo``, so a row holds only what differs. Sources of the values: docs/en/algorithms.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from areal_lora.config.sections import task as tasks
from areal_lora.config.sections.section import NAME, Count, NonNegFloat, NonNegInt, PositiveInt, Section, ServedModel
from areal_lora.types import MOST_KEPT, MOST_STOPS, STOP_CHARACTERS, AdapterSpec, ExpertLayout

# fmt: off
Kind = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "dapo", "gspo", "cispo", "tis",
    "mis", "geo_mis", "icepop", "sapo", "dppo", "kpop", "maxrl", "gdpo", "remax", "ppo", "distill",
]
AdvantageName = Literal[
    "grpo", "dr_grpo", "gdpo", "maxrl", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline", "batch",
    "group_mean_batch_std", "remax", "gae", "none",
]
# fmt: on
Difficulty = Literal["uniform", "learnability"]
LossName = Literal["ppo", "gspo", "cispo", "reinforce", "sapo", "dppo", "kpop"]
UserFunction = Annotated[str, Field(pattern=r":"), Tag(tasks.USER)]
"""`package.module:name` or `file.py:name`."""
named_or_path = Discriminator(lambda value: tasks.USER if isinstance(value, str) and ":" in value else tasks.NAMED)
named_or_section = Discriminator(lambda value: tasks.NAMED if isinstance(value, str) else tasks.SECTION)

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
    "cispo": {"loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0, "behaviour_correction": "in_ratio"},
    "tis": {"behaviour_correction": "truncate", "behaviour_cap": 2.0},
    "mis": {"behaviour_level": "sequence", "behaviour_cap": 2.0},
    "geo_mis": {"behaviour_level": "geometric", "behaviour_cap": 1.01, "behaviour_floor": 0.99},
    "icepop": {"behaviour_floor": 0.5},
    "sapo": {"loss": "sapo"},
    "dppo": {"loss": "dppo", "eps_clip": 0.15, "behaviour_correction": "in_ratio"},
    "kpop": {"loss": "kpop", "eps_clip": 0.1, "behaviour_correction": "in_ratio"},
    "maxrl": {"advantage": "maxrl"},
    "gdpo": {"advantage": "gdpo"},
    "remax": {"advantage": "remax", "loss": "reinforce", "kl_estimator": "k1", "kl_in": "reward"},
    "ppo": {"advantage": "gae", "kl_estimator": "k1", "kl_in": "reward"},
    "distill": {"advantage": "none", "kl_coef": 1.0, "kl_estimator": "k1", "kl_in": "advantage"},
}


class AlgorithmConfig(Section):
    """Decoupled PPO and its relatives over behaviour (rollout), proximal (start of step) and current policy."""

    kind: Kind = Field(description="Row of presets; what it sets is in docs/en/algorithms.md and in `--dry-run`.")
    advantage: Annotated[AdvantageName, Tag(tasks.NAMED)] | UserFunction = Field("grpo", discriminator=named_or_path)
    """How the answers' rewards become advantages: a row of its table, or `file.py:name` of a function."""
    loss: Annotated[LossName, Tag(tasks.NAMED)] | UserFunction = Field("ppo", discriminator=named_or_path)
    """`ppo`: clipped ratio of each token; `gspo`: of each sequence; `cispo`: clipped weight of the log-probability;
    `reinforce`: no ratio; `sapo`: a smooth gate of the ratio; `dppo`: the clip bounds the probability's change;
    `kpop`: its divergence; or `file.py:name` of a function."""
    eps_clip: PositiveFloat = Field(0.2, description="Lower clip of the ratio: not below 1 - `eps_clip`.")
    eps_clip_high: PositiveFloat | None = Field(None, description="Not above 1 + `eps_clip_high`; `eps_clip` if unset.")
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage A the objective is not below `dual_clip` x A; unset: no bound."""
    behaviour_correction: Literal["mask", "truncate", "none", "in_ratio", "auto"] = "mask"
    """Weight w = proximal/behaviour of a token beside the ratio current/proximal: `mask`: 0 outside of the bounds;
    `truncate`: at most `behaviour_cap`; `none`: 1; `in_ratio`: 1, and the ratio is current/behaviour;
    `auto`: by the mismatch of the step before."""
    behaviour_level: Literal["token", "sequence", "geometric"] = "token"
    """w of each token, or the product over its sequence, or the geometric mean."""
    behaviour_cap: PositiveFloat = Field(5.0, description="Upper bound of w.")
    behaviour_floor: NonNegFloat = Field(0.0, description="Lower bound of w for `mask`.")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Discount per token (`advantage: gae`).")
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of later values in an advantage; 1: returns minus values (`advantage: gae`)."""
    critic_lr: PositiveFloat | None = None
    """The critic's learning rate; 10 x `optimizer.lr` if unset."""
    kl_coef: NonNegFloat = Field(0.0, description="Weight of the KL divergence from the reference.")
    reference: Annotated[Literal["base", "initial"], Tag(tasks.NAMED)] | Annotated[ServedModel, Tag(tasks.SECTION)] = (
        Field("base", discriminator=named_or_section)
    )
    """`base`: the base model, adapter off; `initial`: the start of the run (`init_from`), or the version after
    `sft.steps`; a section: a teacher of the same vocabulary, on a server."""
    reference_refresh_steps: PositiveInt | None = None
    """Every so many versions the newest one becomes the reference; unset: never."""
    kl_target: PositiveFloat | None = None
    """KL divergence per token to aim at: each step changes the weight by at most 2 %; unset: fixed."""
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Schulman's estimators of the KL divergence.")
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """Add the KL divergence to the loss, or subtract it from the reward, or token by token from the advantage."""
    entropy_coef: NonNegFloat = Field(0.0, description="Weight of the entropy bonus.")
    reduction: Literal["token", "sequence", "constant"] = "token"
    """Loss denominator: tokens, sequences, or sequences x max_new_tokens of the minibatch."""
    mask_truncated: bool = False
    """Samples that a limit of tokens, turns or time ended leave the loss, but not the baselines."""
    overlong_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Last part of `max_new_tokens` over which `overlong_penalty` grows; 0: no penalty."""
    overlong_penalty: NonNegFloat = Field(1.0, description="Largest amount taken off the reward of a long answer.")
    drop_uniform: bool = Field(False, description="Replace groups in which all answers have the same reward by others.")

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

    def needs_prox(self, minibatches: int) -> bool:
        """Whether a step of so many ``minibatches`` has a pass for the log-probabilities of the proximal policy."""
        return minibatches > 1 and self.behaviour_correction != "in_ratio"

    @property
    def has_reference(self) -> bool:
        """Whether a version of the adapter is resident as the reference."""
        return self.kl_coef > 0 and self.reference == "initial"

    @property
    def teacher(self) -> ServedModel | None:
        """The reference, if it is a model that others serve."""
        return self.reference if self.kl_coef > 0 and isinstance(self.reference, ServedModel) else None

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
        return {name: value for name, value in self.model_dump().items() if value != getattr(preset, name)}


class SftConfig(Section):
    steps: NonNegInt = 0
    """Groups issued with one of the first so many versions are the data set's answers, trained on with cross-entropy;
    later ones are rollouts. `run.steps`: no rollouts."""
    column: str | None = Field(None, description="Column with the answer, text or messages; the gold answer if unset.")


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(description="Learning rate after the warm-up; of lora_A where `lora_plus_ratio` is set.")
    lora_plus_ratio: PositiveFloat = Field(1.0, description="LoRA+: the learning rate of lora_B is `lr` times this.")
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.95], description="Adam's decay of its moments."
    )
    weight_decay: NonNegFloat = Field(0.0, description="Decoupled weight decay (AdamW).")
    max_grad_norm: PositiveFloat | None = 1.0
    """Norm above which the adapter's gradient is scaled down; null: never."""
    warmup_steps: NonNegInt = Field(0, description="Training steps of linear learning-rate warm-up to `lr`.")
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate from the end of the warm-up; the others end with `min_lr_ratio` x `lr` at `run.steps`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="Last learning rate over `lr`.")


Stages = dict[str, dict[NonNegInt, dict[str, NonNegFloat]]]


@dataclass(frozen=True)
class StagedDifficulty:
    """Shares of prompts by the value of a column: ``stages`` by first training step, ascending from 0."""

    column: str
    stages: tuple[tuple[int, Mapping[str, float]], ...]


class SamplingConfig(Section):
    prompts_per_step: PositiveInt = Field(description="Prompt groups in one training step.")
    n_samples: PositiveInt = Field(description="Answers per prompt (the group size).")
    max_new_tokens: PositiveInt = Field(description="Longest answer, in tokens.")
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Divides the logits, on the servers and in the trainer; vLLM's minimum is 0.01."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens with this share of the probability; needs `top_k`, see algorithms.md."""
    top_k: Annotated[int, Field(ge=0, le=MOST_KEPT)] = 0
    """Sample from so many likeliest tokens; 0: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Omit tokens with less than this share of the likeliest one's probability; needs `top_k`."""
    min_tokens: NonNegInt = 0
    """An answer does not end before so many tokens; without `top_k` a bias where the model would have ended it."""
    difficulty: Annotated[Difficulty, Tag(tasks.NAMED)] | Annotated[Stages, Tag(tasks.SECTION)] = Field(
        "uniform", discriminator=named_or_section
    )
    """`learnability`: with p of a prompt's last answers correct, draw it in an epoch with probability 4 p (1 - p). A
    map: a column (or field in one) to first training steps to shares of prompts by the column's value."""
    stop: list[Annotated[str, Field(pattern=r"[\s\S]", max_length=STOP_CHARACTERS)]] = Field([], max_length=MOST_STOPS)
    """Texts that end an answer; their tokens are trained on, the reward gets the answer without them."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for one episode of an environment, agent or workflow, or one request of an evaluation; after that it is a
    `timeout`. A single-turn rollout is repeated after 20 times as long."""

    @model_validator(mode="after")
    def _stages_draw(self) -> Self:
        if isinstance(self.difficulty, dict) and len(self.difficulty) != 1:
            raise ValueError("difficulty goes by one column: {column: {0: {value: weight}, step: {...}}}")
        if self.staged and not (self.staged.stages and self.staged.stages[0][0] == 0):
            raise ValueError("the first stage of difficulty starts at step 0")
        for first, weights in self.staged.stages if self.staged else ():
            if not any(weights.values()):
                raise ValueError(f"difficulty draws nothing from step {first} on: give a value a weight above 0")
        return self

    @property
    def staged(self) -> StagedDifficulty | None:
        if isinstance(self.difficulty, str):
            return None
        ((column, stages),) = self.difficulty.items()
        return StagedDifficulty(column, tuple(sorted(stages.items())))

    @property
    def truncates(self) -> bool:
        """Whether servers sample from a truncated distribution (`algorithm` rules: one of at most `top_k` tokens)."""
        return self.top_k > 0


CLIENT_SECTIONS: Mapping[str, Any] = {
    "task": {"kind": "word_problems", "n_train": 1, "n_eval": 1},
    "algorithm": {"kind": "grpo"},
    "optimizer": {"lr": 1.0},
    "sampling": {"prompts_per_step": 1, "n_samples": 2, "max_new_tokens": 1},
}
"""In place of the sections that are required and that the adapter of a client does not use."""


def _formatted(chosen: Any, how: Any) -> Any:
    match chosen:
        case {"task": {"kind": "dataset", **fields} as task} if "format" not in fields:
            return {**chosen, "task": {**task, "format": how}}
    return chosen


class AdapterConfig(Section):
    name: str = Field(pattern=NAME, description="Name of the adapter; versions are served as name@vN.")
    rank: Count = Field(description="Inner size of the low-rank product.")
    alpha: PositiveFloat = Field(description="The product is scaled by alpha / rank, or see `rslora`.")
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead (rsLoRA).")
    rank_pattern: dict[str, Count] = Field({})
    """Other ranks: regular expression for Hugging Face module paths, as in PEFT, to rank."""
    alpha_pattern: dict[str, PositiveFloat] = Field({}, description="Other values of `alpha`, in the same way.")
    target_modules: list[str] = Field(min_length=1)
    """Modules with LoRA: names, scopes, paths, wildcards or all-linear (see the top)."""
    exclude_modules: list[str] = Field([], description="Modules removed from `target_modules`; same spellings.")
    expert_layout: ExpertLayout = ExpertLayout.PER_EXPERT
    """One adapter per expert, one shared by a layer's experts, or lora_A of gate and up and lora_B of down shared
    (`shared_outer`)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of lora_A that a training pass leaves out; scores never do."""
    init_from: str | None = Field(None, description="PEFT LoRA folder to load as version 0; a new adapter if unset.")
    minibatches: PositiveInt = 1
    """Optimizer steps per training step, one per part of the batch, all at one learning rate."""
    weight: PositiveFloat = 1.0
    """Part of the trained tokens relative to the other adapters', while several have a batch ready."""
    steps: PositiveInt | None = Field(None, description="Training steps of this adapter; `run.steps` if unset.")
    seed: NonNegInt | None = Field(None, description="Seed of this adapter; `run.seed` if unset.")
    max_staleness: NonNegInt | None = Field(None, description="Largest staleness; `rollout.max_staleness` if unset.")
    task: tasks.TaskConfig
    workflow: tasks.WorkflowConfig = tasks.SingleTurnWorkflowConfig()
    reward: tasks.RewardsConfig = tasks.BuiltInReward()
    """One reward, or a list: their weighted sum; the first one states `correct`."""
    reward_weights: list[float] = Field([], description="Factors of the rewards in the sum; each 1 if empty.")
    algorithm: AlgorithmConfig
    sft: SftConfig = SftConfig()
    optimizer: OptimizerConfig
    sampling: SamplingConfig
    evals: list[tasks.EvalSetConfig] = Field([])
    """Sets of an evaluation; the first one decides the best checkpoint. If empty, one set `held-out`: greedy single
    answers to the held-out split."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_client(cls, data: Any) -> Any:
        """Sections that a client's adapter does not use, so that it has what every adapter has."""
        workflow = data.get("workflow") if isinstance(data, Mapping) else None
        kind = workflow.get("kind") if isinstance(workflow, Mapping) else getattr(workflow, "kind", None)
        return {**CLIENT_SECTIONS, **data} if kind == "client" else data

    @model_validator(mode="before")
    @classmethod
    def _format_sets(cls, data: Any) -> Any:
        """A set with rows of its own and no format has that of the adapter's task."""
        match data:
            case {"task": {"format": how}, "evals": [*sets]}:
                return {**data, "evals": [_formatted(each, how) for each in sets]}
        return data

    @property
    def is_client(self) -> bool:
        """Whether a client of the service drives it."""
        return isinstance(self.workflow, tasks.ClientWorkflowConfig)

    @property
    def rewards(self) -> list[tasks.RewardConfig]:
        """The rewards, at least one; of those that apply to an answer the first states what is correct."""
        return self.reward if isinstance(self.reward, list) else [self.reward]

    @property
    def has_reward(self) -> bool:
        return any(reward.kind != "none" for reward in self.rewards)

    @property
    def weights_by_name(self) -> dict[str, float]:
        """Of several rewards; empty for one."""
        names = tasks.labels(self.rewards) if len(self.rewards) > 1 else []
        return dict(zip(names, self.reward_weights or [1.0] * len(names), strict=True))

    @model_validator(mode="after")
    def _a_weight_each(self) -> Self:
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            counts = f"{len(self.reward_weights)} weights for {len(self.rewards)} rewards"
            raise ValueError(f"reward_weights has {counts}: give one for each, or leave it out")
        return self

    def served_models(self, at: str = "") -> list[tuple[str, ServedModel]]:
        """What its rewards and reference request, with the key of each below ``at`` (empty, or with a dot last)."""
        rewards = [(k, each) for k, each in tasks.reward_keys(at, self.reward) if isinstance(each, ServedModel)]
        teacher = self.algorithm.teacher
        return rewards + ([(f"{at}algorithm.reference", teacher)] if teacher else [])

    @property
    def eval_sets(self) -> list[tasks.EvalSetConfig]:
        """The sets of an evaluation, at least one."""
        return self.evals or [tasks.EvalSetConfig(name=tasks.DEFAULT_SET, workflow="single_turn")]

    def spec(self, base_model: str) -> AdapterSpec:
        return AdapterSpec(
            name=self.name,
            base_model=base_model,
            rank=self.rank,
            alpha=self.alpha,
            target_modules=tuple(self.target_modules),
            expert_layout=self.expert_layout,
            dropout=self.dropout,
            rslora=self.rslora,
            rank_pattern=tuple(self.rank_pattern.items()),
            alpha_pattern=tuple(self.alpha_pattern.items()),
        )
