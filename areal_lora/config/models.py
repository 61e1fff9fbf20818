"""The configuration tree. Unknown keys are errors; this package imports no torch, vLLM or Megatron.

Each entry of ``adapters`` holds all settings of one adapter (rank, task, reward, algorithm, optimizer, sampling), so
a further adapter is a further entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterSpec, ExpertLayout

NonNegInt = Annotated[int, Field(ge=0)]
Arguments = dict[str, str | int | float | bool]
NonNegFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base class of all sections: immutable, unknown keys rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Run name; also the folder below `root`.")
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
    commit: str | None = Field(None, description="Written by the launcher: the commit of a hub name that the run uses.")
    snapshot: str | None = Field(None, description="Written by the launcher: the folder that holds this commit.")

    @property
    def folder(self) -> str:
        """The folder with the model files. ``path`` is the model's name for the user and in the exported adapter."""
        return self.snapshot or self.path


class WordProblemsTask(Section):
    kind: Literal["word_problems"] = "word_problems"
    n_train: PositiveInt = Field(4096, description="Size of the generated training split.")
    n_eval: PositiveInt = Field(256, description="Size of the held-out split (disjoint from training).")
    seed: NonNegInt = 0


class Gsm8kTask(Section):
    kind: Literal["gsm8k"] = "gsm8k"
    train: str = Field("openai/gsm8k", description="JSONL file of question/answer rows, or a hub data set name.")
    eval: str = Field("openai/gsm8k", description="Held-out JSONL file, or a hub data set name (its test split).")
    n_eval: PositiveInt = Field(1319, description="Held-out problems of one evaluation.")
    prompt_template: str = Field(
        "Question: {question}\nAnswer:", description="`{question}` is replaced; end answers with `#### n`."
    )


TaskConfig = Annotated[WordProblemsTask | Gsm8kTask, Field(discriminator="kind")]


class ScorerLimits(Section):
    """Settings of every kind of reward: scorers are killable child processes without network access."""

    timeout_s: PositiveFloat = Field(5.0, description="Seconds for one answer; after that a `timeout`, never reward 0.")
    workers: PositiveInt = Field(1, description="Scorer processes.")
    memory_mib: PositiveInt = Field(
        1024, description="Address space of a scorer process, MiB beyond its size after loading."
    )


class NumericMatchReward(ScorerLimits):
    kind: Literal["numeric_match"] = "numeric_match"


class MathVerifyReward(ScorerLimits):
    kind: Literal["math_verify"] = "math_verify"


class FunctionReward(ScorerLimits):
    kind: Literal["function"] = "function"
    path: str = Field(
        description="`package.module:name` or `file.py:name` of `reward(completion, answer)`; it returns a number, "
        'a bool, or `{"reward": number, "correct": bool}`.'
    )
    correct_threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Smallest reward of a correct answer, where the function does not return `correct` itself; "
        "without either, an evaluation has a mean reward and no accuracy.",
    )


RewardConfig = Annotated[NumericMatchReward | MathVerifyReward | FunctionReward, Field(discriminator="kind")]


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


WorkflowConfig = Annotated[
    SingleTurnWorkflowConfig | MultiTurnWorkflowConfig | CustomWorkflowConfig | AgentWorkflowConfig,
    Field(discriminator="kind"),
]


class PolicyLoss(Section):
    """Decoupled PPO over behaviour (rollout), proximal (start of step) and current log-probabilities."""

    eps_clip: PositiveFloat = Field(0.2, description="Lower clip of the ratio current/proximal.")
    eps_clip_high: PositiveFloat | None = Field(None, description="Upper clip; `eps_clip` if unset.")
    behaviour_cap: PositiveFloat = Field(
        5.0, description="Tokens with a larger ratio proximal/behaviour are masked out of the loss."
    )
    kl_coef: NonNegFloat = Field(0.0, description="Weight of the KL divergence from the base model (adapter off).")
    entropy_coef: NonNegFloat = Field(0.0, description="Weight of the entropy bonus.")
    reduction: Literal["token", "sequence", "constant"] = Field(
        "token", description="Loss denominator: tokens, sequences, or sequences x max_new_tokens of the minibatch."
    )


class GrpoConfig(PolicyLoss):
    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(True, description="Divide group advantages by the group's standard deviation.")


class RlooConfig(PolicyLoss):
    kind: Literal["rloo"] = "rloo"


AlgorithmConfig = Annotated[GrpoConfig | RlooConfig, Field(discriminator="kind")]


class OptimizerConfig(Section):
    lr: PositiveFloat
    beta1: NonNegFloat = 0.9
    beta2: NonNegFloat = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: NonNegInt = Field(0, description="Training steps of linear learning-rate warm-up to `lr`.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Learning-rate schedule from the end of the warm-up to `run.steps`."
    )
    min_lr_ratio: NonNegFloat = Field(0.0, description="Final learning rate as a fraction of `lr`.")


class SamplingConfig(Section):
    prompts_per_step: PositiveInt = Field(description="Prompt groups in one training step.")
    n_samples: PositiveInt = Field(description="Answers per prompt (the group size).")
    max_new_tokens: PositiveInt
    temperature: Annotated[float, Field(ge=0.01)] = Field(
        1.0, description="Divides the logits, on the servers and in the trainer; vLLM's minimum is 0.01."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Below 1 sampling omits the tail, but log-probabilities do not: a bias, see algorithms.md."
    )
    timeout_s: PositiveFloat = Field(600.0, description="Seconds for one rollout; after that it is a `timeout`.")
    drop_uniform: bool = Field(
        False, description="Drop groups in which all answers have the same reward, and issue further prompts instead."
    )


class AdapterConfig(Section):
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the adapter; versions are served as name@vN."
    )
    rank: PositiveInt = Field(description="Inner size of the low-rank product.")
    alpha: PositiveFloat = Field(description="The product is scaled by alpha / rank.")
    target_modules: list[str] = Field(
        min_length=1, description="Modules with LoRA: names, scopes, paths, wildcards or all-linear (see the top)."
    )
    exclude_modules: list[str] = Field(
        default_factory=list, description="Modules removed from `target_modules`; same spellings."
    )
    expert_layout: ExpertLayout = Field(
        ExpertLayout.PER_EXPERT, description="One adapter per expert, or one shared by a layer's experts."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Dropout on the adapter's input.")
    init_from: str | None = Field(None, description="PEFT LoRA folder to load as version 0; a new adapter if unset.")
    minibatches: PositiveInt = Field(
        1, description="Optimizer steps per training step, one per part of the batch, all at one learning rate."
    )
    task: TaskConfig
    workflow: WorkflowConfig = SingleTurnWorkflowConfig()
    reward: RewardConfig = NumericMatchReward()
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    sampling: SamplingConfig

    def spec(self, base_model: str) -> AdapterSpec:
        return AdapterSpec(
            name=self.name,
            base_model=base_model,
            rank=self.rank,
            alpha=self.alpha,
            target_modules=tuple(self.target_modules),
            expert_layout=self.expert_layout,
            dropout=self.dropout,
        )


class TrainerConfig(Section):
    backend: Literal["megatron"] = "megatron"
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
    in_flight: Literal["finish", "interrupt"] = Field(
        "finish",
        description="At a publish, running sequences finish on their version, or are interrupted and continue on the "
        "newest one.",
    )
    deterministic: bool = Field(
        False, description="Run one sequence at a time without prefix cache, so no answer depends on another request."
    )
    max_lora_rank: PositiveInt = Field(32, description="Largest adapter rank a server accepts.")
    max_model_len: PositiveInt = 4096
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 8192
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    kv_cache_gib: PositiveFloat | None = Field(None, description="KV cache size on CPU, GiB.")
    enforce_eager: bool = False
    threads: PositiveInt = Field(1, description="OpenMP threads of a server's worker on CPU.")
    port: NonNegInt = Field(
        0, description="Data-plane port of server 0; server i uses `port + i`. 0: the system chooses."
    )
    max_restarts: NonNegInt = Field(3, description="Restarts of each server after a failure (`cluster.kind: local`).")
    python: str | None = Field(None, description="Interpreter of the rollout role; this one if unset.")

    @property
    def resident_versions(self) -> int:
        """Adapter slots for versions: every version that is still trainable, plus the incoming one."""
        return self.max_staleness + 2


class WeightSyncConfig(Section):
    bucket_mib: PositiveFloat = Field(256.0, description="Largest flat buffer of one broadcast, MiB.")
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    timeout_s: PositiveFloat = Field(
        30.0, description="Seconds for a whole publish: transfer, exclusion of lost servers, second transfer."
    )
    min_servers: PositiveInt = Field(1, description="With fewer members a publish waits for `rejoin_s`, then fails.")
    rejoin_s: NonNegFloat = Field(
        120.0, description="Seconds that a publish with fewer than `min_servers` members waits for servers to rejoin."
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
        20, description="Steps between two evaluations of the held-out split, one at a time; 0: only first and last."
    )


class SlurmConfig(Section):
    partition: str | None = None
    account: str | None = None
    time_limit: str = Field("24:00:00", description="sbatch --time.")
    extra: list[str] = Field(default_factory=list, description="Further #SBATCH lines, without the prefix.")
    setup: list[str] = Field(default_factory=list, description="Shell lines run on each node before a role starts.")


class ClusterConfig(Section):
    kind: Literal["local", "slurm"] = "local"
    device: Literal["cpu", "cuda", "npu"] = "cuda"
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 8
    bind: str = Field(
        "127.0.0.1",
        description="Address that ports bind to; with `0.0.0.0` (or `::` for IPv6) each node binds to the one address "
        "that `interface` finds. Except on loopback, the data plane uses TLS and requires its key.",
    )
    interface: str = Field(
        "auto",
        description="With `bind: 0.0.0.0` or `::`, the address of a node for the other nodes: the name of an "
        "interface, a network such as `10.0.0.0/8`, or `auto` for the address on the route to the other nodes.",
    )
    slurm: SlurmConfig = SlurmConfig()


class Config(Section):
    """The configuration of one run: YAML files merged in order, then dotted overrides."""

    run: RunConfig
    model: ModelConfig
    adapters: list[AdapterConfig] = Field(min_length=1)
    trainer: TrainerConfig
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.run.root / self.run.name)
