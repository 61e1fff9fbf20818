"""The sections of a run and of its processes: limits, model, checkpoints; trainer, rollout servers, publishes."""

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, PositiveFloat
from pydantic.json_schema import SkipJsonSchema

from areal_lora.config.sections.section import NAME, TIME_LIMIT, Count, LocalPath, NonNegInt, Port, PositiveInt, Section
from areal_lora.errors import ExitCode
from areal_lora.network.addresses import WILDCARDS, Place, find_place
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_hosts

TrackerName = Literal["wandb", "mlflow", "trackio", "swanlab", "tensorboard"]


def _off(value: object) -> object:
    """YAML reads a plain `off` as false."""
    return "off" if value is False else value


class RunConfig(Section):
    name: str = Field(pattern=NAME, description="Run name; also the folder below `root`.")
    root: LocalPath = Field(Path("runs"), description="Folder that holds run folders.")
    seed: NonNegInt = Field(1, description="Seeds prompt order, adapter initialisation and sampling.")
    steps: PositiveInt = Field(description="Training steps; each trains on one batch and publishes one version.")
    max_restarts: NonNegInt = 3
    """Restarts after a failure: of the trainer, of the controller and of each server; requeues in a row of a Slurm job
    without a new checkpoint."""
    stall_s: PositiveFloat = 900.0
    """Seconds without progress after which trainer rank 0, the controller's event loop or a server's engine counts as
    stuck: the stacks are written and it is restarted."""
    keep_rollouts_mib: NonNegInt = 1024
    """Largest size of `rollouts/`, which has every rollout; the oldest are removed. 0: none."""
    profile: list[PositiveInt] | None = None
    """Steps of each adapter, from 1, of which trainer rank 0 writes traces of torch's profiler to `profile/`."""
    trackers: list[TrackerName] = Field([])
    """Where the run is sent, each by its own process; the files for `tensorboard` are always written."""
    page: bool = Field(False, description="Serve the page of the run (`areal-lora page`) while it works.")


class ModelConfig(Section):
    path: str = Field(description="Hugging Face model folder, or hub name `org/name`; a folder takes precedence.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub name; its main branch if unset.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Type of the frozen base weights.")
    shared_memory: bool = False
    """The trainer ranks of a node read the base once, into shared memory kept while they run."""
    commit: SkipJsonSchema[str | None] = Field(None, description="Written by the launcher: the commit of a hub name.")
    snapshot: SkipJsonSchema[str | None] = Field(None, description="Written by the launcher: folder of this commit.")

    @property
    def folder(self) -> str:
        """The folder with the model files. ``path`` is the model's name for the user and in the exported adapter."""
        return self.snapshot or self.path


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(1, description="Steps between two checkpoints; the last step is always saved.")
    max_behind: NonNegInt = 0
    """Steps that training may be ahead of a slow disk: a crash repeats at most `every_steps` + `max_behind` steps."""
    keep_last: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept, at least 2, beside the one with the best evaluation: by accuracy, then by mean
    reward."""


class EvalConfig(Section):
    every_steps: NonNegInt = Field(20, description="Steps between two evaluations of all sets; 0: only first and last.")


Recompute = Literal["none", "selective", "full", "offload"]


class TrainerConfig(Section):
    engine: Literal["megatron", "fsdp"] = "megatron"
    """`megatron`: Megatron-core, all parallel sizes. `fsdp`: transformers' model, frozen weights sharded over
    ranks; `tp`, `pp`, `ep` and `etp` stay 1."""
    world_size: Count = Field(description="Trainer processes (one per GPU).")
    tp: PositiveInt = Field(1, description="Tensor parallel size.")
    cp: PositiveInt = Field(1, description="Context parallel size: ranks that divide each sequence.")
    pp: PositiveInt = Field(1, description="Pipeline parallel size.")
    ep: PositiveInt = Field(1, description="Expert parallel size.")
    etp: PositiveInt = Field(1, description="Tensor parallel size inside experts.")
    pp_layers: list[PositiveInt] | None = None
    """Layers of each pipeline stage, or of each virtual one (interleaved): a multiple of `pp` numbers. If unset, evenly
    distributed, earlier stages first."""
    moe_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """How GPUs send tokens to other ranks' experts (megatron). `deepep`, `hybridep`: Megatron's `flex`, over DeepEP."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Token budget of a rank in one packed micro-batch, whose row has `cp` times as many."""
    recompute: Recompute = "none"
    """What a layer keeps for the backward pass, which computes the rest again. `none`: all. `selective`: its input and
    what attention returns. `full`: its input. `offload`: its input, in host memory."""
    fsdp_shard: PositiveInt | None = None
    """Ranks that hold one copy of the base between them, such as those of a node (fsdp). If unset, all ranks."""
    cpu_offload: bool = Field(False, description="Keep the frozen shards in host memory and copy them by layer (fsdp).")
    python: str | None = Field(None, description="Interpreter of the trainer role; this one if unset.")

    @property
    def chunks(self) -> int:
        """Virtual stages of each pipeline stage; 0 where `pp_layers` does not divide into stages."""
        each, rest = divmod(len(self.pp_layers or range(self.pp)), self.pp)
        return 0 if rest or (each > 1 and self.pp == 1) else each


class BehaviourConfig(Section):
    """How the trainer's passes follow the policy that sampled."""

    router_replay: Annotated[Literal["off", "rollout", "old"], BeforeValidator(_off)] = "off"
    """`rollout`: all passes use servers' experts; `old`: updates use those of the proximal pass (several
    `minibatches`)."""


class RemoteConfig(Section):
    host: str = "127.0.0.1"
    """Address of the gateway; beyond loopback with `certificate`, or behind a proxy with TLS."""
    port: Port = Field(0, description="0: the system chooses.")
    certificate: LocalPath | None = None
    """PEM file with certificate chain and private key; plain HTTP if unset."""
    store: str | None = Field(None, pattern=r"^[a-z][a-z0-9+.-]*://")
    """fsspec URL, such as `s3://bucket/runs` (extra `s3`), through which versions go instead of the gateway."""


InFlight = Literal["finish", "interrupt", "keep"]
Quantised = Literal["fp8_per_channel", "fp8_per_tensor"]
"""vLLM's values of ``quantization`` whose rounding the trainer repeats."""
ServedAs = Literal["merged", Quantised]


class RolloutConfig(Section):
    servers: Count = Field(1, description="Replicas of the rollout server.")
    tp: PositiveInt = Field(1, description="Tensor parallel size of one replica.")
    expert_parallel: bool = False
    """Distribute whole experts over the workers of a replica instead of splitting each expert."""
    max_staleness: NonNegInt = Field(2, description="Largest staleness of a trained token, in versions.")
    pacing: Literal["fresh", "full"] = "fresh"
    """`fresh`: groups are sampled as late as the trainer allows, so that it need not wait. `full`: as early as
    `max_staleness` allows."""
    adapter_mode: Literal["unmerged", "merged"] = "unmerged"
    """What servers hold: the base and adapters in slots, or one version merged into the weights. `merged`: vLLM runs
    without LoRA, a publish sends all adapted weights in `model.dtype` and always interrupts running sequences."""
    in_flight: InFlight = "finish"
    """At a publish, sequences finish on their version or continue on the newest: prefilled again (`interrupt`), or
    with their KV cache (`keep`)."""
    deterministic: bool = False
    """Run one sequence at a time without prefix cache, and one client's pass, so nothing depends on other requests."""
    max_lora_rank: Count = Field(32, description="Largest adapter rank a server accepts.")
    max_adapters: Count | None = None
    """Adapters that a server holds at a time; decides its slots. If unset, those of the list."""
    max_model_len: PositiveInt = Field(4096, description="Longest sequence, prompt and answers together, in tokens.")
    max_num_seqs: PositiveInt = Field(256, description="Sequences that a replica samples at once.")
    max_num_batched_tokens: PositiveInt = Field(8192, description="Tokens of one step of a replica, prompts included.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of a device's memory for a server.")
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of each worker, GiB. On GPUs, if unset, vLLM takes what `gpu_memory_utilization` leaves;
    `cluster.share_devices` requires it."""
    engine_args: dict[str, Any] = Field({})
    """Further arguments of vLLM's engine, such as `{quantization: fp8_per_channel}`: the base in fp8."""
    python: str | None = Field(None, description="Interpreter of the rollout role; this one if unset.")
    remote: RemoteConfig | None = None
    """If present, even as `{}`, servers elsewhere join with `areal-lora serve-remote`."""

    @property
    def in_flight_policy(self) -> InFlight:
        """``in_flight``, except with merged weights, which have no other version."""
        return "interrupt" if self.adapter_mode == "merged" else self.in_flight

    @property
    def served_as(self) -> ServedAs | None:
        """How the weights that servers compute with differ from the trainer's; None: not, or in a way not known."""
        return "merged" if self.adapter_mode == "merged" else self.quantised

    @property
    def quantised(self) -> Quantised | None:
        """How vLLM rounds the base while it loads; None: not, or in a way that the trainer cannot repeat."""
        known: tuple[Quantised, ...] = get_args(Quantised)
        return next((kind for kind in known if kind == self.engine_args.get("quantization")), None)

    def in_fp8(self, argument: str) -> bool:
        return str(self.engine_args.get(argument)).startswith("fp8")

    @property
    def resident_versions(self) -> int:
        """Adapter slots for versions: every version that is still trainable, plus the incoming one."""
        return self.max_staleness + 2


class WeightSyncConfig(Section):
    backend: Literal["auto", "nccl", "hccl", "gloo"] = "auto"
    """What carries versions: `nccl` between GPUs, `hccl` between NPUs, `gloo` between hosts' memories. `auto`: that of
    `cluster.device`, and gloo where a trainer rank and a server share a device."""
    bucket_mib: float = Field(
        256.0, ge=1e-4, description="Largest flat buffer of a broadcast, MiB, of all sources together."
    )
    timeout_s: PositiveFloat = 30.0
    """Seconds for a publish, also with a second transfer. With fewer than `cluster.min_servers` members it waits four
    times as long for servers to rejoin."""
    probe_tolerance: PositiveFloat | None = None
    """Largest allowed mean |logp trainer - logp server|; if unset by type: 1e-4 in float32, 0.15 in bfloat16, 0.1 in
    float16, 0.3 in fp8."""

    form_s: ClassVar[float] = 30.0
    """Time limit of forming all broadcast groups once, which no transfer's limit counts: connecting takes longer than a
    transfer, and grows with members, not with bytes."""

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * 2**20)

    @property
    def attempt_s(self) -> float:
        """Time limit of one transfer, on both sides; a second transfer also fits into ``timeout_s``."""
        return 0.4 * self.timeout_s

    @property
    def ping_s(self) -> float:
        """Silence after which a server counts as dead."""
        return min(2.0, 0.1 * self.timeout_s)

    @property
    def rejoin_s(self) -> float:
        """Time that a publish with too few members waits for servers to rejoin."""
        return 4 * self.timeout_s

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
        """Largest time of a publish from its gate on, except that with too few members ``rejoin_s`` is added.

        Groups are formed twice in it: a second time after a loss.
        """
        return self.timeout_s + 2 * self.form_s + self.verdict_s


Role = Literal["trainer", "rollout", "controller", "environment"]
LINK_BITS = 100e9
"""Network bandwidth of a node in the estimates of ``--dry-run``, bit/s: one port of InfiniBand EDR or 100 GbE."""
Word = Annotated[str, Field(pattern=r"^\S+$")]
"""One word of a #SBATCH line."""
OwnWord = Annotated[str, Field(pattern=r"^\S*$")]
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGTkmgt]?$")]
"""An amount of memory as Slurm reads it: MiB without a unit."""


class SlurmComponent(Section):
    """One component of a heterogeneous job. What is unset is that of ``cluster.slurm``; an empty text is none."""

    roles: list[Role] = Field(min_length=1)
    """What runs on its nodes. `environment`: worker processes of workflows, which else run beside the controller."""
    nodes: Count = Field(1, description="Nodes of the component.")
    devices_per_node: NonNegInt | None = None
    """Unset: `cluster.devices_per_node`, or 0 for nodes without trainer and rollout."""
    partition: OwnWord | None = Field(None, description="Unset: that of `cluster.slurm`, as below. Empty: none.")
    gres_type: OwnWord | None = Field(None, description="Type of the GPUs.")
    mem: Memory | None = Field(None, description="sbatch --mem: host memory of each node.")
    extra: list[Line] = Field([], description="Further #SBATCH lines, without the prefix.")


def guarded(setup: Sequence[str], then: str = f"exit {int(ExitCode.MISSING)}") -> list[str]:
    """Shell lines of `SlurmConfig.setup`, of which one that fails is named, and followed by ``then``.

    Commands of a file that a line sources may fail: bash runs the trap for these, too.
    """
    failed = "CODE=$?; if [ ${#BASH_SOURCE[@]} -le $DEPTH ]; then trap - ERR; echo"
    failed += ' "error: cluster.slurm.setup: $BASH_COMMAND ended with code $CODE on $(hostname)'
    failed += f' (fix: run the lines on such a node)"; {then}; fi'
    return ["DEPTH=${#BASH_SOURCE[@]}", f"trap {shlex.quote(failed)} ERR", *setup, "trap - ERR"] if setup else []


class SlurmConfig(Section):
    partition: Word | None = Field(None, description="sbatch --partition.")
    time_limit: str = Field("24:00:00", pattern=TIME_LIMIT, description="sbatch --time.")
    mem: Memory | None = Field(None, description="sbatch --mem: host memory of each node, such as `800G`; `0`: all.")
    gres_type: Word | None = Field(None, description="Type of the GPUs, such as `h100` in `--gres=gpu:h100:8`.")
    extra: list[Line] = Field([])
    """Further #SBATCH lines of the job, or of its first component, such as `--account=me`, `--qos=high`,
    `--constraint=ib`, `--exclude=n7`, `--exclusive`, `--mail-type=END`."""
    setup: list[str] = Field([], description="Shell lines run on each node before a role starts.")
    srun_extra: dict[Role, list[Line]] = Field({})
    """Further srun options by role, such as `rollout: [--container-image=...]` (enroot and pyxis)."""
    wrapper: dict[Role, list[Line]] = Field({})
    """Words before the interpreter by role, such as `trainer: [apptainer, exec, --nv, image.sif]`."""
    components: list[SlurmComponent] = Field([])
    """Components of a heterogeneous job, each with nodes of its own; empty: one allocation."""

    def prefix(self, role: Role, **env: str) -> list[str]:
        """Words before the interpreter of ``role``: lines of `setup`, printing to stderr, ``env``, `wrapper`."""
        lines = ["{", *guarded(self.setup), "} >&2 </dev/null", 'exec "$@"']
        words = ["bash", "-c", "\n".join(lines), "bash"] if self.setup else []
        words += ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
        return [*words, *self.wrapper.get(role, [])]

    def step(self, role: Role, *options: str, **env: str) -> list[str]:
        """Words that start ``role`` as a step of the allocation, on nodes named by ``options`` of srun."""
        words = ["srun", "--overlap", *options, "--unbuffered", "--kill-on-bad-exit=1", "--mem=0", "--cpu-bind=none"]
        # srun may look for the program of a step on its own node (LaunchParameters=test_exec).
        return [*words, *self.srun_extra.get(role, []), *(self.prefix(role, **env) or ["env"])]


class ClusterConfig(Section):
    kind: Literal["local", "slurm", "nodes"] = "local"
    """This machine, a Slurm job, or nodes that start the same command."""
    device: Literal["cpu", "cuda", "npu"] = Field("cuda", description="What trainer ranks and servers compute on.")
    nodes: Count = Field(1, description="Nodes of the job; with `slurm.components` leave it out.")
    devices_per_node: PositiveInt = 8
    """Devices of each node. On CPUs: trainer ranks on a node, if the job has enough nodes."""
    threads: PositiveInt = Field(1, description="OpenMP threads of a trainer rank; on CPUs of a server's worker, too.")
    share_devices: bool = False
    """Servers use the devices of the trainer ranks: number the devices of a node from 0 for each role. A rank gets what
    `rollout.gpu_memory_utilization` leaves."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of one device, GiB. If unset, it is read where the devices are on this machine."""
    min_servers: PositiveInt = 1
    """Rollout servers that a run needs. With fewer a publish waits four times `weight_sync.timeout_s`, then fails; a
    job that has lost a node continues with as many."""
    controller_python: str | None = Field(None, description="Interpreter of the controller; this one if unset.")
    bind: str = "127.0.0.1"
    """Address that ports bind to; with `0.0.0.0` (or `::` for IPv6) each node binds to the one address that `interface`
    finds. Except on loopback, the data plane uses TLS and requires its key."""
    interface: str = "auto"
    """With `bind: 0.0.0.0` or `::`, the address of a node for the other nodes: the name of an interface, a network such
    as `10.0.0.0/8`, or `auto` for the address on the route to the other nodes."""
    slurm: SlurmConfig = SlurmConfig()

    @property
    def server_threads(self) -> int:
        """OpenMP threads of a server's worker: one that only drives a device has one."""
        return self.threads if self.device == "cpu" else 1

    @property
    def total_nodes(self) -> int:
        """Nodes of all components, or of the one allocation."""
        return sum(component.nodes for component in self.slurm.components) or self.nodes


def own_place(cluster: ClusterConfig, run_folder: RunFolder) -> Place:
    """Return the address that this process binds to until it exits. Raises ConfigError."""
    return _own_place(cluster.bind, cluster.interface, cluster.total_nodes, run_folder)


@cache  # endpoints published later must not move a process to another address
def _own_place(bind: str, interface: str, nodes: int, run_folder: RunFolder) -> Place:
    peers = published_hosts(run_folder) if bind in WILDCARDS else []
    return find_place(bind=bind, interface=interface, nodes=nodes, peers=peers)


CODE_REWARD = "code"


class ApiConfig(Section):
    """The HTTP API and the inbox of a run (`areal_lora.service`)."""

    port: Port = Field(0, description="Port of the HTTP API on loopback; 0: any.")
    data: LocalPath | None = None
    """Folder of the tenants' files: each may name those in its folder `TENANT/` and in `shared/`."""
    data_sets: list[str] = Field([], description="Hub data sets that tenants may name.")
    code: list[str] = Field([])
    """User code that tenants may name, like `package.module:name` or `/folder/file.py:name`, and `code` for the reward
    of that kind, whose tests are programs in the tenants' rows."""
    judges: dict[str, str | None] = Field({})
    """URLs of judges, reward models and teachers that tenants may use, each with the variable of its key, or null."""


class ServiceConfig(Section):
    """Adapters join and leave while the run works (`run_folder.paths`); it does not end without any."""

    target_modules: list[str] = Field(["all-linear"], min_length=1)
    """Modules that servers adapt beside those of the listed adapters; others cannot join."""
    api: ApiConfig | None = None
    """HTTP API and inbox through which adapters come (`--serve`); without it a program of yours does."""
