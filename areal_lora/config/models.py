"""The configuration tree. Unknown keys are errors; this package imports no torch, vLLM or Megatron.

A list ``adapters`` owns everything that belongs to one adapter (rank, task, reward,
algorithm, optimizer, sampling), so that several adapters are only more entries.
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
    """A part of the configuration: immutable, unknown keys rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Run name; also the folder below `root`.")
    root: Path = Field(Path("runs"), description="Folder that holds run folders.")
    seed: NonNegInt = Field(1, description="Seeds prompt order, adapter initialisation and sampling.")
    steps: PositiveInt = Field(description="Training steps: each trains on one batch and publishes one version.")
    stop_grace_s: Annotated[float, Field(gt=0, le=8)] = Field(
        8.0, description="Seconds between a polite stop and a kill; at most 8, so that a stop takes less than 10."
    )
    max_restarts: NonNegInt = Field(
        3, description="How often the trainer and the controller each are started again after a failure."
    )
    stall_s: PositiveFloat = Field(
        900.0,
        description="Trainer rank 0, the controller's event loop or a server's engine is stuck if it does not "
        "get on for so long: stacks are written, it restarts.",
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        45.0,
        description="A controller or server without a heartbeat for so long is stopped or dead: it restarts. "
        "Heartbeats come once a second, however long a step takes.",
    )


class ModelConfig(Section):
    path: str = Field(description="Hugging Face model folder, or hub name `org/name`; a folder that exists wins.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub name; its main branch if unset.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type of the frozen base weights.")
    commit: str | None = Field(None, description="Written by the launcher: the commit of a hub name that the run uses.")
    snapshot: str | None = Field(None, description="Written by the launcher: the folder that holds this commit.")

    @property
    def folder(self) -> str:
        """Where the files are. ``path`` is how the user and the exported adapter call the model."""
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
    n_eval: PositiveInt = Field(1319, description="How many held-out problems an evaluation uses.")
    prompt_template: str = Field(
        "Question: {question}\nAnswer:", description="`{question}` is replaced; end answers with `#### n`."
    )


TaskConfig = Annotated[WordProblemsTask | Gsm8kTask, Field(discriminator="kind")]


class ScorerLimits(Section):
    """What every kind of reward has: scorers are killable child processes without a network."""

    timeout_s: PositiveFloat = Field(5.0, description="One answer that takes longer is a `timeout`, never reward 0.")
    workers: PositiveInt = Field(1, description="Scorer processes.")
    memory_mib: PositiveInt = Field(1024, description="Address space of a scorer process beyond what it starts with.")


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
        description="A reward from here on means a correct answer, where the function does not say so itself; "
        "without either an evaluation has a mean reward and no accuracy.",
    )


RewardConfig = Annotated[NumericMatchReward | MathVerifyReward | FunctionReward, Field(discriminator="kind")]


class SingleTurnWorkflowConfig(Section):
    kind: Literal["single_turn"] = "single_turn"


class MultiTurnWorkflowConfig(Section):
    kind: Literal["multi_turn"] = "multi_turn"
    environment: str = Field(description="`package.module:name` or `file.py:name` of an Environment class or factory.")
    arguments: Arguments = Field(default_factory=dict, description="Keyword arguments of the environment.")
    max_turns: PositiveInt = Field(8, description="Turns of the model; an episode that needs more ends there.")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer, such as a tool call's end.")


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
        "which talks to the OpenAI endpoint and key it is given."
    )


WorkflowConfig = Annotated[
    SingleTurnWorkflowConfig | MultiTurnWorkflowConfig | CustomWorkflowConfig | AgentWorkflowConfig,
    Field(discriminator="kind"),
]


class PolicyLoss(Section):
    """Decoupled PPO: behaviour (rollout), proximal (start of step) and current log-probabilities."""

    eps_clip: PositiveFloat = Field(0.2, description="Lower clip of the ratio current/proximal.")
    eps_clip_high: PositiveFloat | None = Field(None, description="Upper clip; `eps_clip` if unset.")
    behaviour_cap: PositiveFloat = Field(
        5.0, description="Tokens with proximal/behaviour above this are masked out of the loss."
    )
    kl_coef: NonNegFloat = Field(0.0, description="Weight of the KL to the base with the adapter off.")
    entropy_coef: NonNegFloat = Field(0.0, description="Weight of the entropy bonus.")
    reduction: Literal["token", "sequence", "constant"] = Field(
        "token", description="Loss denominator: tokens of the minibatch, sequences, or sequences x max_new_tokens."
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
    warmup_steps: NonNegInt = Field(0, description="Training steps in which the learning rate rises linearly to `lr`.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Learning rate from the end of the warm-up to `run.steps`, by training steps."
    )
    min_lr_ratio: NonNegFloat = Field(0.0, description="Where the schedule ends, as a fraction of `lr`.")


class SamplingConfig(Section):
    prompts_per_step: PositiveInt = Field(description="Prompt groups in one training step.")
    n_samples: PositiveInt = Field(description="Answers per prompt (the group size).")
    max_new_tokens: PositiveInt
    temperature: Annotated[float, Field(ge=0.01)] = Field(
        1.0, description="Divides the logits, on the servers and in the trainer; vLLM samples at no less than 0.01."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Below 1 sampling leaves out the tail, log-probabilities do not: a bias, see algorithms.md."
    )
    timeout_s: PositiveFloat = Field(600.0, description="A rollout that takes longer is a `timeout`.")
    drop_uniform: bool = Field(
        False, description="Drop groups whose answers all have the same reward, and issue further prompts instead."
    )


class AdapterConfig(Section):
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the adapter; versions are served as name@vN."
    )
    rank: PositiveInt = Field(description="Inner size of the low-rank product.")
    alpha: PositiveFloat = Field(description="The product is scaled by alpha / rank.")
    target_modules: list[str] = Field(
        min_length=1, description="What LoRA sits on: names, scopes, paths, wildcards or all-linear (see the top)."
    )
    exclude_modules: list[str] = Field(
        default_factory=list, description="What of `target_modules` it does not sit on; same spellings."
    )
    expert_layout: ExpertLayout = Field(
        ExpertLayout.PER_EXPERT, description="One adapter per expert, or one shared by a layer's experts."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Dropout on the adapter's input.")
    init_from: str | None = Field(None, description="PEFT LoRA folder whose adapter is version 0; a new one if unset.")
    minibatches: PositiveInt = Field(
        1, description="Optimizer steps per training step: parts of the batch, all at one learning rate."
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
        None, description="Layers of each pipeline stage; spread evenly, earlier stages first, if unset."
    )
    moe_grouped_gemm: bool = Field(
        False, description="A rank's experts of a layer as one grouped module instead of one module each."
    )
    max_tokens_per_microbatch: PositiveInt = Field(8192, description="Token budget of one packed micro-batch.")
    recompute: bool = Field(False, description="Recompute activations in the backward pass.")
    threads: PositiveInt = Field(1, description="OpenMP threads of each trainer process.")
    python: str | None = Field(None, description="Interpreter of the trainer role; this one if unset.")


class RolloutConfig(Section):
    servers: PositiveInt = Field(1, description="Replicas of the rollout server.")
    tp: PositiveInt = Field(1, description="Tensor parallel size of one replica.")
    expert_parallel: bool = Field(
        False, description="The workers of a replica share out whole experts instead of cutting each one."
    )
    max_staleness: NonNegInt = Field(2, description="A trained token is at most this many versions old.")
    in_flight: Literal["finish", "interrupt"] = Field(
        "finish",
        description="Running sequences finish on the version they began with, or are cut and go on with the newest.",
    )
    deterministic: bool = Field(
        False, description="One sequence at a time and no prefix cache: an answer depends on nothing else that runs."
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
        0, description="Data-plane port of server 0, the next ones follow; 0 lets the system choose."
    )
    max_restarts: NonNegInt = Field(3, description="How often a server that ended is started again, on this machine.")
    python: str | None = Field(None, description="Interpreter of the rollout role; this one if unset.")

    @property
    def resident_versions(self) -> int:
        """Adapter slots that hold versions: every version still trainable, plus the incoming one."""
        return self.max_staleness + 2


class WeightSyncConfig(Section):
    bucket_mib: PositiveFloat = Field(256.0, description="Largest flat buffer of one broadcast, MiB.")
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    timeout_s: PositiveFloat = Field(
        30.0, description="Bounds a whole publish: sending, giving up lost servers, sending again."
    )
    min_servers: PositiveInt = Field(1, description="A publish that fewer servers are left for waits, then fails.")
    rejoin_s: NonNegFloat = Field(
        120.0, description="How long a publish waits for servers to come back while fewer than min_servers are left."
    )
    probe_sequences: PositiveInt = Field(4, description="Fixed sequences scored by trainer and server after a publish.")
    probe_tokens: PositiveInt = Field(32, description="Tokens per probe sequence.")
    probe_tolerance: PositiveFloat = Field(1e-4, description="Largest allowed mean |logp trainer - logp server|.")

    @property
    def attempt_s(self) -> float:
        """Deadline of one transfer, on both sides; a second one fits into ``timeout_s`` too."""
        return 0.4 * self.timeout_s

    @property
    def ping_s(self) -> float:
        """A server that is silent for this long is taken for dead."""
        return min(2.0, 0.1 * self.timeout_s)

    @property
    def answer_s(self) -> float:
        """How much later than a transfer's end its answer may come: a server's own diagnosis is better than none."""
        return 0.1 * self.attempt_s

    @property
    def verdict_s(self) -> float:
        """What rank 0 may need after ``timeout_s``, by which the last transfer has ended.

        The last answers, then pings of those that failed, telling some to end, and the probe (or, instead of the
        last two, looking for servers to send to).
        """
        return self.answer_s + 3 * self.ping_s

    @property
    def publish_s(self) -> float:
        """No publish takes longer, from its gate on, unless too few servers are left (``rejoin_s``)."""
        return self.timeout_s + self.verdict_s


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(1, description="Save the training state every this many steps, and at the end.")
    keep_last: Annotated[int, Field(ge=2)] = Field(2, description="Newest checkpoints kept; at least 2.")
    keep_every: NonNegInt = Field(0, description="Also keep every checkpoint whose version is a multiple; 0: none.")
    keep_best: bool = Field(
        True, description="Also keep the checkpoint of the best evaluation: by accuracy, then by mean reward."
    )
    max_failures: NonNegInt = Field(
        3, description="Checkpoints in a row that may fail to be written before the run stops."
    )


class EvalConfig(Section):
    every_steps: NonNegInt = Field(
        20, description="Evaluate the held-out split every this many steps, one at a time; 0: only first and last."
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
        "that `interface` finds. Other than on loopback, the data plane speaks TLS and needs its key.",
    )
    interface: str = Field(
        "auto",
        description="With `bind: 0.0.0.0` or `::`, which address of a node the others reach: the name of an interface, "
        "a network such as `10.0.0.0/8`, or `auto`: the one on the route to the other nodes.",
    )
    slurm: SlurmConfig = SlurmConfig()


class Config(Section):
    """One run. Several YAML files are merged in order, then dotted overrides."""

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
