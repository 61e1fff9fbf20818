"""The configuration tree. Unknown keys are errors; this package imports no torch, vLLM or Megatron.

Each entry of ``adapters`` holds all settings of one adapter (rank, task, reward, algorithm, optimizer, sampling), so
a further adapter is a further entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationInfo, field_validator, model_validator

from areal_lora.config.algorithm import AlgorithmConfig
from areal_lora.config.cluster import ClusterConfig
from areal_lora.config.evals import DEFAULT_SET, EvalSetConfig
from areal_lora.config.reward import NumericMatchReward, RewardConfig, RewardsConfig, labels
from areal_lora.config.section import NAME, Arguments, NonNegFloat, NonNegInt, Section
from areal_lora.config.service import ApiConfig
from areal_lora.config.task import TaskConfig
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterSpec, ExpertLayout


class RunConfig(Section):
    name: str = Field(pattern=NAME, description="Run name; also the folder below `root`.")
    root: Path = Field(Path("runs"), description="Folder that holds run folders.")
    seed: NonNegInt = Field(1, description="Seeds prompt order, adapter initialisation and sampling.")
    steps: PositiveInt = Field(
        description="Number of training steps; each trains on one batch and publishes one version."
    )
    stop_grace_s: Annotated[float, Field(gt=0, le=8)] = Field(
        8.0, description="Seconds between SIGTERM and SIGKILL; at most 8, so that a stop takes less than 10."
    )
    max_restarts: NonNegInt = Field(
        3, description="Restarts after a failure, for the trainer and for the controller each."
    )
    stall_s: PositiveFloat = Field(
        900.0,
        description="Seconds without progress after which trainer rank 0, the controller's event loop or a server's "
        "engine counts as stuck: the stacks are written and it is restarted.",
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        45.0,
        description="Seconds without a heartbeat after which a controller or server is restarted. "
        "A heartbeat is written once a second, however long a step takes.",
    )


class ModelConfig(Section):
    path: str = Field(
        description="Hugging Face model folder, or hub name `org/name`; an existing folder takes precedence."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub name; its main branch if unset.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type of the frozen base weights.")
    shared_memory: bool = Field(
        False,
        description="The trainer ranks of a node read the base from disk once, into shared memory that is kept while "
        "they run.",
    )
    commit: str | None = Field(None, description="Written by the launcher: the commit of a hub name that the run uses.")
    snapshot: str | None = Field(None, description="Written by the launcher: the folder that holds this commit.")

    @property
    def folder(self) -> str:
        """The folder with the model files. ``path`` is the model's name for the user and in the exported adapter."""
        return self.snapshot or self.path


class SingleTurnWorkflowConfig(Section):
    kind: Literal["single_turn"] = "single_turn"


class MultiTurnWorkflowConfig(Section):
    kind: Literal["multi_turn"] = "multi_turn"
    environment: str = Field(description="`package.module:name` or `file.py:name` of an Environment class or factory.")
    arguments: Arguments = Field(default_factory=dict, description="Keyword arguments of the environment.")
    max_turns: PositiveInt = Field(8, description="Largest number of model turns; a longer episode is cut there.")
    stop: list[str] = Field(
        default_factory=list, description="Texts that end an answer, for example the end of a tool call."
    )


class CustomWorkflowConfig(Section):
    kind: Literal["custom"] = "custom"
    path: str = Field(
        description="`package.module:name` or `file.py:name` of a factory: `factory(context, **arguments)`."
    )
    arguments: Arguments = Field(default_factory=dict, description="Keyword arguments of the factory.")


class AgentWorkflowConfig(Section):
    kind: Literal["agent"] = "agent"
    path: str = Field(
        description="`package.module:name` or `file.py:name` of `agent(task) -> float | None`, async or not, "
        "which calls the OpenAI endpoint in `task` with the key in `task`."
    )
    tool_parser: str | None = Field(
        None,
        description="What finds tool calls in answers: the name of one of vLLM's tool parsers (`hermes`, "
        "`llama3_json`, ...), or `package.module:name` or `file.py:name` of a subclass of vLLM's `ToolParser`. "
        "If unset, requests with tools are refused.",
    )
    conversations_mib: NonNegInt = Field(
        64, description="Bound of the conversations kept in the run folder, MiB; the oldest are dropped. 0: none."
    )


class ClientWorkflowConfig(Section):
    """A client of the service drives the adapter: no task, no rollouts, no steps of its own."""

    kind: Literal["client"] = "client"


WorkflowConfig = Annotated[
    SingleTurnWorkflowConfig
    | MultiTurnWorkflowConfig
    | CustomWorkflowConfig
    | AgentWorkflowConfig
    | ClientWorkflowConfig,
    Field(discriminator="kind"),
]


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
    timeout_s: PositiveFloat = Field(600.0, description="Seconds for one rollout; after that it is a `timeout`.")


CLIENT_KEYS = frozenset(
    {"name", "rank", "alpha", "rslora", "target_modules", "exclude_modules", "expert_layout", "weight", "seed"}
    | {"wire_dtype", "workflow"}
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
    wire_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Type in which this adapter is published; `weight_sync.wire_dtype` if unset."
    )
    task: TaskConfig
    workflow: WorkflowConfig = SingleTurnWorkflowConfig()
    reward: RewardsConfig = Field(
        NumericMatchReward(), description="One reward, or a list: their weighted sum; the first one states `correct`."
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


class TrainerConfig(Section):
    engine: Literal["megatron", "fsdp"] = Field(
        "megatron",
        description="`megatron`: Megatron-core, all parallel sizes. `fsdp`: transformers' model, frozen weights "
        "sharded over all ranks; `tp`, `pp`, `ep` and `etp` stay 1.",
    )
    world_size: PositiveInt = Field(description="Trainer processes (one per GPU).")
    tp: PositiveInt = Field(1, description="Tensor parallel size.")
    pp: PositiveInt = Field(1, description="Pipeline parallel size.")
    ep: PositiveInt = Field(1, description="Expert parallel size.")
    etp: PositiveInt = Field(1, description="Tensor parallel size inside experts.")
    pp_layers: list[PositiveInt] | None = Field(
        None, description="Layers of each pipeline stage; if unset, evenly distributed, earlier stages first."
    )
    max_tokens_per_microbatch: PositiveInt = Field(8192, description="Token budget of one packed micro-batch.")
    recompute: bool = Field(False, description="Recompute activations in the backward pass.")
    cpu_offload: bool = Field(
        False,
        description="Keep the frozen shards in host memory; a layer is copied to the GPU when it computes (fsdp).",
    )
    threads: PositiveInt = Field(1, description="OpenMP threads of each trainer process.")
    python: str | None = Field(None, description="Interpreter of the trainer role; this one if unset.")


class RolloutConfig(Section):
    servers: PositiveInt = Field(1, description="Replicas of the rollout server.")
    tp: PositiveInt = Field(1, description="Tensor parallel size of one replica.")
    expert_parallel: bool = Field(
        False, description="Distribute whole experts over the workers of a replica instead of splitting each expert."
    )
    max_staleness: NonNegInt = Field(2, description="Largest staleness of a trained token, in versions.")
    pacing: Literal["fresh", "full"] = Field(
        "fresh",
        description="`fresh`: groups are sampled as late as the trainer allows, so that it need not wait. `full`: as "
        "early as `max_staleness` allows.",
    )
    adapter_mode: Literal["unmerged", "merged"] = Field(
        "unmerged",
        description="What servers hold: the base and adapters in slots, or one version merged into the weights. "
        "`merged`: vLLM runs without LoRA, a publish sends all adapted weights in `model.dtype` and always interrupts "
        "running sequences.",
    )
    in_flight: Literal["finish", "interrupt"] = Field(
        "finish",
        description="At a publish, running sequences finish on their version, or are interrupted and continue on the "
        "newest one.",
    )
    deterministic: bool = Field(
        False, description="Run one sequence at a time without prefix cache, so no answer depends on another request."
    )
    max_lora_rank: PositiveInt = Field(32, description="Largest adapter rank a server accepts.")
    max_adapters: PositiveInt | None = Field(
        None, description="Adapters that a server holds at a time; decides its slots. If unset, those of the list."
    )
    max_model_len: PositiveInt = Field(4096, description="Longest sequence, prompt and answers together, in tokens.")
    max_num_seqs: PositiveInt = Field(256, description="Sequences that a replica samples at once.")
    max_num_batched_tokens: PositiveInt = Field(8192, description="Tokens of one step of a replica, prompts included.")
    gpu_memory_utilization: float = Field(
        0.85, gt=0, le=1, description="Share of a device's memory that a server claims."
    )
    kv_cache_gib: PositiveFloat | None = Field(
        None,
        description="KV cache of each worker, GiB. On GPUs, if unset, vLLM takes what `gpu_memory_utilization` leaves; "
        "`cluster.share_devices` requires it.",
    )
    enforce_eager: bool = Field(False, description="Run vLLM without CUDA graphs: slower, and less memory.")
    threads: PositiveInt = Field(1, description="OpenMP threads of a server's worker on CPU.")
    port: NonNegInt = Field(
        0, description="Data-plane port of server 0; server i uses `port + i`. 0: the system chooses."
    )
    max_restarts: NonNegInt = Field(3, description="Restarts of each server after a failure.")
    python: str | None = Field(None, description="Interpreter of the rollout role; this one if unset.")

    @property
    def interrupts(self) -> bool:
        """Whether a publish interrupts running sequences; with merged weights no other version exists."""
        return self.in_flight == "interrupt" or self.adapter_mode == "merged"

    @property
    def resident_versions(self) -> int:
        """Adapter slots for versions: every version that is still trainable, plus the incoming one."""
        return self.max_staleness + 2


class WeightSyncConfig(Section):
    backend: Literal["auto", "nccl", "hccl", "gloo"] = Field(
        "auto",
        description="What carries versions: `nccl` between GPUs, `hccl` between NPUs, `gloo` between hosts' memories. "
        "`auto`: that of `cluster.device`, and gloo where a trainer rank and a server share a device.",
    )
    bucket_mib: PositiveFloat = Field(256.0, description="Largest flat buffer of one broadcast, MiB.")
    wire_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type in which versions are sent.")
    timeout_s: PositiveFloat = Field(
        30.0, description="Seconds for a whole publish: transfer, exclusion of lost servers, second transfer."
    )
    rejoin_s: NonNegFloat = Field(
        120.0,
        description="Seconds that a publish with fewer than `cluster.min_servers` members waits for servers to rejoin.",
    )
    probe_sequences: PositiveInt = Field(4, description="Fixed sequences scored by trainer and server after a publish.")
    probe_tokens: PositiveInt = Field(32, description="Tokens per probe sequence.")
    probe_tolerance: PositiveFloat = Field(1e-4, description="Largest allowed mean |logp trainer - logp server|.")

    @property
    def attempt_s(self) -> float:
        """Time limit of one transfer, on both sides; a second transfer also fits into ``timeout_s``."""
        return 0.4 * self.timeout_s

    @property
    def ping_s(self) -> float:
        """Silence after which a server counts as dead."""
        return min(2.0, 0.1 * self.timeout_s)

    @property
    def slot_s(self) -> float:
        """Time that a publish waits while no server has an adapter slot for it."""
        return self.timeout_s + self.rejoin_s

    @property
    def answer_s(self) -> float:
        """Largest delay of a server's answer after the end of a transfer, so that its own diagnosis can arrive."""
        return 0.1 * self.attempt_s

    @property
    def verdict_s(self) -> float:
        """Time that rank 0 may need after the last transfer, which has ended by ``timeout_s``.

        It covers the last answers, then pings of failed servers, stop requests to some, and the probe. Instead of the
        last two, rank 0 may search for servers to send to.
        """
        return self.answer_s + 3 * self.ping_s

    @property
    def publish_s(self) -> float:
        """Largest time of a publish from its gate on, except that with too few members ``rejoin_s`` is added."""
        return self.timeout_s + self.verdict_s


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(1, description="Steps between two checkpoints; the last step is always saved.")
    keep_last: Annotated[int, Field(ge=2)] = Field(2, description="Newest checkpoints kept; at least 2.")
    keep_every: NonNegInt = Field(
        0, description="Also keep checkpoints of versions that are a multiple of this; 0: none."
    )
    keep_best: bool = Field(
        True, description="Also keep the checkpoint with the best evaluation: by accuracy, then by mean reward."
    )
    max_failures: NonNegInt = Field(
        3, description="Failed checkpoint writes in a row that the run tolerates; the next one stops the run."
    )


class EvalConfig(Section):
    every_steps: NonNegInt = Field(
        20, description="Steps between two evaluations of all sets, one at a time; 0: only first and last."
    )


class ServiceConfig(Section):
    """Adapters join and leave while the run works (`run_folder.desired`); it does not end without any."""

    target_modules: list[str] = Field(
        ["all-linear"],
        min_length=1,
        description="Modules that servers can adapt beside those of the listed adapters; a newcomer with others fails.",
    )
    api: ApiConfig | None = Field(
        None,
        description="HTTP API and inbox through which adapters come (`--serve`); without it a program of yours does.",
    )


class Config(Section):
    """The configuration of one run: YAML files merged in order, then dotted overrides."""

    run: RunConfig
    model: ModelConfig
    service: ServiceConfig | None = Field(
        None, description="If present, even as `{}`, adapters join and leave while the run works."
    )
    adapters: list[AdapterConfig] = Field(default_factory=list, validate_default=True)
    trainer: TrainerConfig
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("adapters")
    @classmethod
    def _trains_something(cls, adapters: list[AdapterConfig], info: ValidationInfo) -> list[AdapterConfig]:
        if not adapters and info.data.get("service") is None:
            raise ValueError("a run without a service has at least one adapter")
        return adapters

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.run.root / self.run.name)
