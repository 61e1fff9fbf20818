"""An entry of ``adapters``: all settings of one adapter, so a further adapter is a further entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, TypeAdapter, model_validator

from areal_lora.config.sections.algorithm import AlgorithmConfig
from areal_lora.config.sections.reward import BuiltInReward, RewardConfig, RewardsConfig, labels
from areal_lora.config.sections.section import NAME, NonNegFloat, NonNegInt, PositiveInt, Section
from areal_lora.config.sections.task import (
    DEFAULT_SET,
    ClientWorkflowConfig,
    EvalSetConfig,
    SingleTurnWorkflowConfig,
    TaskConfig,
    WorkflowConfig,
)
from areal_lora.types import AdapterSpec, ExpertLayout


class SftConfig(Section):
    steps: NonNegInt = Field(
        0,
        description="Groups issued with one of the first so many versions are the data set's answers, trained on with "
        "cross-entropy; later ones are rollouts. `run.steps`: no rollouts.",
    )
    column: str | None = Field(
        None, description="Column of the data set with the answer's text; the gold answer if unset."
    )


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(description="Learning rate after the warm-up; of lora_A where `lora_plus_ratio` is set.")
    lora_plus_ratio: PositiveFloat = Field(
        1.0, description="LoRA+: the learning rate of lora_B is `lr` times this, that of lora_A is `lr`."
    )
    beta1: NonNegFloat = Field(0.9, description="Adam's decay of the first moment.")
    beta2: NonNegFloat = Field(0.95, description="Adam's decay of the second moment.")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of Adam's second moment.")
    weight_decay: NonNegFloat = Field(0.0, description="Decoupled weight decay (AdamW).")
    max_grad_norm: PositiveFloat = Field(
        1.0, description="Largest norm of the adapter's gradient; a larger one is scaled down."
    )
    warmup_steps: NonNegInt = Field(0, description="Training steps of linear learning-rate warm-up to `lr`.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Learning-rate schedule from the end of the warm-up to `run.steps`."
    )
    min_lr_ratio: NonNegFloat = Field(0.0, description="Final learning rate as a fraction of `lr`.")


class SamplingConfig(Section):
    prompts_per_step: PositiveInt = Field(description="Prompt groups in one training step.")
    n_samples: PositiveInt = Field(description="Answers per prompt (the group size).")
    max_new_tokens: PositiveInt = Field(description="Longest answer, in tokens.")
    temperature: Annotated[float, Field(ge=0.01)] = Field(
        1.0, description="Divides the logits, on the servers and in the trainer; vLLM's minimum is 0.01."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Below 1 sampling omits the tail, but log-probabilities do not: a bias, see algorithms.md."
    )
    top_k: NonNegInt = Field(
        0, description="Sample from the so many likeliest tokens, 0: from all; a bias like `top_p`."
    )
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Omit tokens with less than this share of the likeliest one's probability; a bias like `top_p`.",
    )
    min_tokens: NonNegInt = Field(
        0, description="An answer does not end before so many tokens; a bias where the model would have ended it."
    )
    stop: list[str] = Field(
        default_factory=list,
        description="Texts that end an answer; their tokens are trained on, the reward gets the answer without them.",
    )
    timeout_s: PositiveFloat = Field(
        600.0,
        description="Seconds for one episode of an environment, agent or workflow, or one request of an evaluation; "
        "after that it is a `timeout`. A single-turn rollout is repeated after ten times as long.",
    )


CLIENT_KEYS = frozenset(
    {"name", "rank", "alpha", "rslora", "target_modules", "exclude_modules", "expert_layout", "weight", "seed"}
    | {"workflow"}
)
"""What the adapter of a client may set."""
CLIENT_SECTIONS: Mapping[str, Any] = {
    "task": {"kind": "word_problems", "n_train": 1, "n_eval": 1},
    "algorithm": {"kind": "grpo"},
    "optimizer": {"lr": 1.0},
    "sampling": {"prompts_per_step": 1, "n_samples": 2, "max_new_tokens": 1},
}
"""In place of the sections that are required and that the adapter of a client does not use."""


def _workflow_kind(workflow: Any) -> str | None:
    if isinstance(workflow, Mapping):
        return workflow.get("kind")
    return getattr(workflow, "kind", None)


class AdapterConfig(Section):
    name: str = Field(pattern=NAME, description="Name of the adapter; versions are served as name@vN.")
    rank: PositiveInt = Field(description="Inner size of the low-rank product.")
    alpha: PositiveFloat = Field(description="The product is scaled by alpha / rank, or see `rslora`.")
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead (rsLoRA).")
    rank_pattern: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="Other ranks: regular expression for Hugging Face module paths, as in PEFT, to rank.",
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="Other values of `alpha`, in the same way."
    )
    target_modules: list[str] = Field(
        min_length=1, description="Modules with LoRA: names, scopes, paths, wildcards or all-linear (see the top)."
    )
    exclude_modules: list[str] = Field(
        default_factory=list, description="Modules removed from `target_modules`; same spellings."
    )
    expert_layout: ExpertLayout = Field(
        ExpertLayout.PER_EXPERT,
        description="One adapter per expert, one shared by a layer's experts, or lora_A of gate and up and lora_B of "
        "down shared (`shared_outer`).",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the inputs of lora_A that a training pass leaves out; scores never do."
    )
    init_from: str | None = Field(None, description="PEFT LoRA folder to load as version 0; a new adapter if unset.")
    minibatches: PositiveInt = Field(
        1, description="Optimizer steps per training step, one per part of the batch, all at one learning rate."
    )
    weight: PositiveFloat = Field(
        1.0, description="Part of the trained tokens relative to the other adapters', while several have a batch ready."
    )
    steps: PositiveInt | None = Field(None, description="Training steps of this adapter; `run.steps` if unset.")
    seed: NonNegInt | None = Field(None, description="Seed of this adapter; `run.seed` if unset.")
    max_staleness: NonNegInt | None = Field(
        None, description="Largest staleness of this adapter's tokens; `rollout.max_staleness` if unset."
    )
    eval_every_steps: NonNegInt | None = Field(
        None, description="Steps between two evaluations of this adapter; `eval.every_steps` if unset."
    )
    checkpoint_every_steps: PositiveInt | None = Field(
        None, description="Steps between two checkpoints of this adapter; `checkpoint.every_steps` if unset."
    )
    task: TaskConfig
    workflow: WorkflowConfig = SingleTurnWorkflowConfig()
    reward: RewardsConfig = Field(
        BuiltInReward(), description="One reward, or a list: their weighted sum; the first one states `correct`."
    )
    algorithm: AlgorithmConfig
    sft: SftConfig = SftConfig()
    optimizer: OptimizerConfig
    sampling: SamplingConfig
    evals: list[EvalSetConfig] = Field(
        default_factory=list,
        description="Sets of an evaluation; the first one counts for `keep_best`. If empty, one set `held-out`: "
        "greedy single answers to the held-out split.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_client(cls, data: Any) -> Any:
        """Sections that a client's adapter does not use, so that it has what every adapter has."""
        if isinstance(data, Mapping) and _workflow_kind(data.get("workflow")) == "client":
            return {**CLIENT_SECTIONS, **data}
        return data

    @model_validator(mode="after")
    def _only_what_a_client_uses(self) -> Self:
        if self.is_client:
            unused = sorted(key for key in type(self).model_fields.keys() - CLIENT_KEYS if self._deviates(key))
            if unused:
                raise ValueError(f"an adapter of a client has no {unused[0]}: leave it out")
        return self

    def _deviates(self, key: str) -> bool:
        """Whether the value at ``key`` is another one than that of an adapter that leaves it out."""
        field = type(self).model_fields[key]
        value = getattr(self, key)
        if key in CLIENT_SECTIONS:
            return bool(value != TypeAdapter(field.rebuild_annotation()).validate_python(CLIENT_SECTIONS[key]))
        return bool(value != field.get_default(call_default_factory=True))

    @property
    def is_client(self) -> bool:
        """Whether a client of the service drives it."""
        return isinstance(self.workflow, ClientWorkflowConfig)

    @property
    def rewards(self) -> list[RewardConfig]:
        """The rewards, at least one; the first one states what is correct."""
        return self.reward if isinstance(self.reward, list) else [self.reward]

    @model_validator(mode="after")
    def _reward_names(self) -> Self:
        names = labels(self.rewards)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two rewards are called {twice[0]!r}: give each a name of its own")
        return self

    @property
    def eval_sets(self) -> list[EvalSetConfig]:
        """The sets of an evaluation, at least one."""
        return self.evals or [EvalSetConfig(name=DEFAULT_SET, workflow="single_turn")]

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
