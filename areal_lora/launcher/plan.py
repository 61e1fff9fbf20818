"""Config -> JobPlan: every process of a run, where it runs and with what. Pure: touches nothing.

Which process is on which node and device is decided in `config.sizing.slots`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.config.facts import Facts, server_ports
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_run
from areal_lora.config.sections.run import Role
from areal_lora.config.sizing.memory import JobMemory, job_memory, kv_token_bytes, version_bytes
from areal_lora.config.sizing.slots import Pool, Seats, has_tenants, pools_of, seats_of
from areal_lora.config.sizing.what_if import WhatIf, what_if
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape, base_bytes
from areal_lora.families.sites import AdapterSize, adapter_size
from areal_lora.network.addresses import WILDCARDS
from areal_lora.network.tls import on_loopback
from areal_lora.processes.startup import DEVICES_VARIABLE, VISIBLE
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder

TRAINER, CONTROLLER, SERVER, SERVICE = "trainer", "controller", "server", "service"
MODULES = {
    TRAINER: "areal_lora.trainer.main",
    CONTROLLER: "areal_lora.rollout.main",
    SERVER: "areal_lora.engine.vllm_ext.server.main",
    SERVICE: "areal_lora.service.main",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process. ``env`` is added to the inherited environment; ``cpus`` are threads it computes with."""

    role: str
    index: int
    argv: tuple[str, ...]
    env: dict[str, str]
    node: int = 0
    cpus: int = 1
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Position of one trainer rank in the parallel layout (Megatron's order: tp fastest, then dp, then pp)."""

    rank: int
    tp: int
    pp: int
    dp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEstimate:
    """Sizes of one version of one adapter."""

    name: str
    size: AdapterSize
    file_bytes: int
    wire_bytes: int
    wire_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimates:
    """Sizes derived from config.json and the ranks. ``kv_token_bytes``: of one token in the KV cache of a device."""

    base_parameters: int
    base_bytes: int
    adapters: tuple[AdapterEstimate, ...]
    resident_versions: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """One listening socket: ``host`` is an address, or words where each node finds its own.

    ``port`` 0 is chosen by the system and published in ``rendezvous/``.
    """

    process: str
    plane: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """All that a launcher needs. ``processes`` are in starting order; their ``node`` counts over all ``pools``.

    There is one pool, or one for each component of a heterogeneous Slurm job, in its order.
    """

    run_folder: RunFolder
    pools: tuple[Pool, ...]
    processes: tuple[ProcessSpec, ...]
    ports: tuple[PortPlan, ...]
    files: tuple[str, ...]
    ranks: tuple[RankCoordinates, ...]
    estimates: SizeEstimates
    memory: JobMemory
    what_if: tuple[WhatIf, ...]

    @property
    def nodes(self) -> int:
        return sum(pool.nodes for pool in self.pools)

    def pool_of(self, node: int) -> int:
        """Number of the pool (and of the het group) that holds ``node``."""
        return next(i for i, pool in enumerate(self.pools) if node < pool.first_node + pool.nodes)

    def role(self, role: str) -> tuple[ProcessSpec, ...]:
        return tuple(p for p in self.processes if p.role == role)


def make_plan(config: Config, facts: Facts) -> JobPlan:
    """Plan a configuration that has passed the guardrails. Raises ConfigError where it does not fit its nodes."""
    folder = RunFolder(config.run_folder.path.absolute())
    seats = seats_of(config)
    if facts.hf_config is None:
        raise ConfigError("model.path", facts.model_problem)
    shape = ModelShape.from_hf(facts.hf_config, facts.checkpoint)
    return JobPlan(
        run_folder=folder,
        pools=pools_of(config.cluster),
        # Servers take longest to come up.
        processes=(
            *_servers(config, folder, seats),
            _controller(config, folder, seats),
            *_services(config, folder, seats),
            *_trainers(config, folder, seats),
        ),
        ports=_ports(config),
        files=_files(config, folder),
        ranks=tuple(rank_coordinates(config, rank) for rank in range(config.trainer.world_size)),
        estimates=_estimates(config, shape),
        memory=job_memory(config, shape),
        what_if=what_if(config, shape),
    )


def rank_coordinates(config: Config, rank: int) -> RankCoordinates:
    """Megatron's ``tp-cp-ep-dp-pp`` order; attention and expert layouts share only the pipeline stage."""
    t = config.trainer
    stage = t.world_size // t.pp
    within = rank % stage
    return RankCoordinates(
        rank=rank, pp=rank // stage, tp=within % t.tp, dp=within // t.tp, etp=within % t.etp, ep=within // t.etp % t.ep
    )


def _common_env(config: Config, threads: int) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.bind.startswith("127."):
        # Without these gloo, NCCL and vLLM listen on the interface of the host's name (contract C12).
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": config.cluster.bind}
    return env


def _argv(config: Config, role: str, folder: RunFolder, *more: str) -> tuple[str, ...]:
    python = {
        TRAINER: config.trainer.python,
        SERVER: config.rollout.python,
        CONTROLLER: config.cluster.controller_python,
        SERVICE: config.cluster.controller_python,
    }[role]
    names: dict[str, Role] = {TRAINER: "trainer", SERVER: "rollout", CONTROLLER: "controller", SERVICE: "controller"}
    words = config.cluster.slurm.wrapper.get(names[role], []) if config.cluster.kind == "slurm" else []
    return (*words, python or sys.executable, "-m", MODULES[role], "--run-folder", str(folder), *more)


def _trainers(config: Config, folder: RunFolder, seats: Seats) -> list[ProcessSpec]:
    cluster, trainer = config.cluster, config.trainer
    specs = []
    for rank, seat in enumerate(seats.trainer):
        env = _common_env(config, trainer.threads) | {
            "RANK": str(rank),
            "WORLD_SIZE": str(trainer.world_size),
            "LOCAL_RANK": str(seats.local_ranks[rank]),
        }
        if cluster.kind == "local":
            env["MASTER_ADDR"] = cluster.bind
        if seat.devices:
            # All of the role's devices on the node are visible, so that ranks can copy to each other directly.
            here = sorted(device for other in seats.trainer if other.node == seat.node for device in other.devices)
            env[DEVICES_VARIABLE] = ",".join(map(str, here))
        specs.append(
            ProcessSpec(
                role=TRAINER,
                index=rank,
                argv=_argv(config, TRAINER, folder),
                env=env,
                node=seat.node,
                cpus=trainer.threads,
                devices=seat.devices,
            )
        )
    return specs


def _servers(config: Config, folder: RunFolder, seats: Seats) -> list[ProcessSpec]:
    rollout = config.rollout
    specs = []
    for i, seat in enumerate(seats.servers):
        env = _common_env(config, rollout.threads)
        if seat.devices:
            env[DEVICES_VARIABLE] = ",".join(map(str, seat.devices))
        specs.append(
            ProcessSpec(
                role=SERVER,
                index=i,
                argv=_argv(config, SERVER, folder, "--index", str(i)),
                env=env,
                node=seat.node,
                # On a device each worker has a thread of its own; besides, there are the engine's loop and the planes.
                cpus=rollout.threads * rollout.tp + (2 if seat.devices else 0),
                devices=seat.devices,
            )
        )
    return specs


def spare_server(config: Config, folder: RunFolder, index: int, devices: Sequence[str], grace_s: float) -> ProcessSpec:
    """A server beyond those of the plan. It leaves the run in order within ``grace_s`` after SIGTERM.

    ``devices`` are the values that its device variable names.
    """
    env = _common_env(config, config.rollout.threads) | {SESSION_VARIABLE: folder.session}
    if devices:
        env[VISIBLE[config.cluster.device]] = ",".join(devices)
    return ProcessSpec(
        role=SERVER,
        index=index,
        argv=_argv(config, SERVER, folder, "--index", str(index), "--grace-s", f"{grace_s:g}"),
        env=env,
        cpus=config.rollout.threads * config.rollout.tp,
    )


def _controller(config: Config, folder: RunFolder, seats: Seats) -> ProcessSpec:
    return ProcessSpec(
        role=CONTROLLER,
        index=0,
        argv=_argv(config, CONTROLLER, folder),
        env=_common_env(config, 1),
        node=seats.controller.node,
        cpus=1 + sum(reward.workers for adapter in config.adapters for reward in adapter.rewards),
    )


def _services(config: Config, folder: RunFolder, seats: Seats) -> list[ProcessSpec]:
    """The service beside the controller, where the run is one."""
    if not has_tenants(config):
        return []
    argv, env = _argv(config, SERVICE, folder), _common_env(config, 1)
    return [ProcessSpec(role=SERVICE, index=0, argv=argv, env=env, node=seats.controller.node)]


def _ports(config: Config) -> tuple[PortPlan, ...]:
    bind, interface = config.cluster.bind, config.cluster.interface
    host = bind if bind not in WILDCARDS else "the node's address" + ("" if interface == "auto" else f" ({interface})")
    fixed = server_ports(config) or [0] * config.rollout.servers
    ports = [PortPlan(process=f"{TRAINER}-0", plane="store", host=host, port=0)]
    ports.append(PortPlan(process=f"{CONTROLLER}-0", plane="control", host=host, port=0))
    if config.service is not None and config.service.api is not None:
        ports.append(PortPlan(process=f"{SERVICE}-0", plane="api", host="127.0.0.1", port=config.service.api.port))
    for i, port in enumerate(fixed):
        ports.append(PortPlan(process=f"{SERVER}-{i}", plane="data", host=host, port=port))
        ports.append(PortPlan(process=f"{SERVER}-{i}", plane="admin", host=host, port=0))
    return tuple(ports)


def _files(config: Config, folder: RunFolder) -> tuple[str, ...]:
    process = "<role>-<index>"
    files = [folder.config, folder.secret, folder.endpoint(process), folder.status(process), folder.log(process)]
    folders = [folder.samples, folder.tensorboard, folder.adapter_export("<name>")]
    names = [*map(str, [*files, folder.metrics]), *(f"{path}/" for path in folders)]
    names += map(str, [folder.report, folder.summary])
    if not on_loopback(config.cluster.bind) or has_tenants(config):
        names += map(str, [folder.ca, folder.data_key])
    return tuple(names)


def _estimates(config: Config, shape: ModelShape) -> SizeEstimates:
    adapters = []
    for adapter in config.adapters:
        wire_dtype = adapter_run(config, adapter).wire_dtype
        size = adapter_size(shape, adapter.spec(""))
        adapters.append(
            AdapterEstimate(
                name=adapter.name,
                size=size,
                file_bytes=4 * size.file_parameters,
                wire_bytes=version_bytes(config, shape, adapter),
                wire_dtype=wire_dtype,
            )
        )
    return SizeEstimates(
        base_parameters=shape.parameters,
        base_bytes=base_bytes(shape, config.model.dtype),
        adapters=tuple(adapters),
        resident_versions=config.rollout.resident_versions,
        kv_token_bytes=kv_token_bytes(config, shape),
    )
