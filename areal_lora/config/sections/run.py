"""The sections of a run and of its processes: limits, model, checkpoints; trainer, rollout servers, publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from pydantic.json_schema import SkipJsonSchema

from areal_lora.config.sections.section import NAME, NonNegFloat, NonNegInt, PositiveInt, Section


class RunConfig(Section):
    name: str = Field(pattern=NAME, description="Run name; also the folder below `root`.")
    root: Path = Field(Path("runs"), description="Folder that holds run folders.")
    seed: NonNegInt = Field(1, description="Seeds prompt order, adapter initialisation and sampling.")
    steps: PositiveInt = Field(
        description="Number of training steps; each trains on one batch and publishes one version."
    )
    max_restarts: NonNegInt = Field(
        3,
        description="Restarts after a failure: of the trainer, of the controller and of each server; requeues in a row "
        "of a Slurm job without a new checkpoint.",
    )
    stall_s: PositiveFloat = Field(
        900.0,
        description="Seconds without progress after which trainer rank 0, the controller's event loop or a server's "
        "engine counts as stuck: the stacks are written and it is restarted.",
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
    commit: SkipJsonSchema[str | None] = Field(
        None, description="Written by the launcher: the commit of a hub name that the run uses."
    )
    snapshot: SkipJsonSchema[str | None] = Field(
        None, description="Written by the launcher: the folder that holds this commit."
    )

    @property
    def folder(self) -> str:
        """The folder with the model files. ``path`` is the model's name for the user and in the exported adapter."""
        return self.snapshot or self.path


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(1, description="Steps between two checkpoints; the last step is always saved.")
    keep_last: Annotated[int, Field(ge=2)] = Field(2, description="Newest checkpoints kept; at least 2.")
    keep_every: NonNegInt = Field(
        0, description="Also keep checkpoints of versions that are a multiple of this; 0: none."
    )
    keep_best: bool = Field(
        True, description="Also keep the checkpoint with the best evaluation: by accuracy, then by mean reward."
    )


class EvalConfig(Section):
    every_steps: NonNegInt = Field(
        20, description="Steps between two evaluations of all sets, one at a time; 0: only first and last."
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
    wire_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Type in which versions are sent; if unset `model.dtype`, that of the servers' adapter slots."
    )
    timeout_s: PositiveFloat = Field(
        30.0, description="Seconds for a whole publish: transfer, exclusion of lost servers, second transfer."
    )
    rejoin_s: NonNegFloat = Field(
        120.0,
        description="Seconds that a publish with fewer than `cluster.min_servers` members waits for servers to rejoin.",
    )
    probe_tolerance: PositiveFloat | None = Field(
        None,
        description="Largest allowed mean |logp trainer - logp server|; if unset 1e-4 with `model.dtype` `float32`, "
        "0.15 with `bfloat16`.",
    )

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
