"""Config -> JobPlan: every process of a run, where it runs and with what. Pure: touches nothing.

Nodes are numbered from 0. Trainer ranks fill nodes first, in rank order; each server takes
``rollout.tp`` devices of one node; the controller sits beside trainer rank 0, the process it
talks to.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from areal_lora.config.facts import Facts, server_ports
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.families.adapter_size import AdapterSize, adapter_size
from areal_lora.families.shape import ModelShape, base_bytes
from areal_lora.network.addresses import WILDCARDS
from areal_lora.network.tls import on_loopback
from areal_lora.run_folder.paths import RunFolder

TRAINER, CONTROLLER, SERVER = "trainer", "controller", "server"
MODULES = {
    TRAINER: "areal_lora.trainer.main",
    CONTROLLER: "areal_lora.rollout.main",
    SERVER: "areal_lora.engine.vllm_ext.server",
}
_DEVICE_VARIABLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Sizes derived from config.json and the ranks."""

    base_parameters: int
    base_bytes: int
    adapters: tuple[AdapterEstimate, ...]
    resident_versions: int


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
    """All that a launcher needs. ``processes`` are in starting order."""

    run_folder: RunFolder
    nodes: int
    processes: tuple[ProcessSpec, ...]
    ports: tuple[PortPlan, ...]
    files: tuple[str, ...]
    ranks: tuple[RankCoordinates, ...]
    estimates: Estimates

    def role(self, role: str) -> tuple[ProcessSpec, ...]:
        return tuple(p for p in self.processes if p.role == role)


def make_plan(config: Config, facts: Facts) -> JobPlan:
    """Plan a configuration that has passed the guardrails. Raises ConfigError where it does not fit its nodes."""
    folder = RunFolder(config.run_folder.path.absolute())
    trainers = _trainers(config, folder)
    servers = _servers(config, folder, used=config.trainer.world_size)
    if facts.hf_config is None:
        raise ConfigError("model.path", facts.model_problem)
    return JobPlan(
        run_folder=folder,
        nodes=config.cluster.nodes,
        # Servers take longest to come up.
        processes=(*servers, _controller(config, folder), *trainers),
        ports=_ports(config),
        files=_files(config, folder),
        ranks=tuple(rank_coordinates(config, rank) for rank in range(config.trainer.world_size)),
        estimates=_estimates(config, ModelShape.from_hf(facts.hf_config)),
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
    python = {TRAINER: config.trainer.python, SERVER: config.rollout.python, CONTROLLER: None}[role]
    return (python or sys.executable, "-m", MODULES[role], "--run-folder", str(folder), *more)


def _trainers(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    cluster, trainer = config.cluster, config.trainer
    on_cpu = cluster.device == "cpu"
    per_node = -(-trainer.world_size // cluster.nodes) if on_cpu else cluster.devices_per_node
    specs = []
    for rank in range(trainer.world_size):
        node, local_rank = divmod(rank, per_node)
        env = _common_env(config, trainer.threads) | {
            "RANK": str(rank),
            "WORLD_SIZE": str(trainer.world_size),
            "LOCAL_RANK": str(local_rank),
        }
        if cluster.kind == "local":
            env["MASTER_ADDR"] = cluster.bind
        if not on_cpu:
            # All of the role's devices on the node are visible, so that ranks can copy to each other directly.
            here = min(per_node, trainer.world_size - node * per_node)
            env[_DEVICE_VARIABLE[cluster.device]] = ",".join(map(str, range(here)))
        specs.append(
            ProcessSpec(
                role=TRAINER,
                index=rank,
                argv=_argv(config, TRAINER, folder),
                env=env,
                node=node,
                cpus=trainer.threads,
                devices=() if on_cpu else (local_rank,),
            )
        )
    return specs


def _servers(config: Config, folder: RunFolder, used: int) -> list[ProcessSpec]:
    """Servers on the devices after the first ``used``; one that would straddle two nodes starts on the next."""
    cluster, rollout = config.cluster, config.rollout
    next_device = used
    specs = []
    for i in range(rollout.servers):
        env = _common_env(config, rollout.threads)
        node, devices = 0, tuple[int, ...]()
        if cluster.device == "cpu":
            node = cluster.nodes - 1
        else:
            per_node = cluster.devices_per_node
            if next_device % per_node + rollout.tp > per_node:
                next_device += per_node - next_device % per_node
            node, first = divmod(next_device, per_node)
            next_device += rollout.tp
            if node >= cluster.nodes:
                raise ConfigError(
                    "cluster.nodes",
                    f"server {i} of {rollout.tp} devices has no room on {cluster.nodes} nodes",
                    "raise cluster.nodes, or choose sizes that fill nodes evenly",
                )
            devices = tuple(range(first, first + rollout.tp))
            env[_DEVICE_VARIABLE[cluster.device]] = ",".join(map(str, devices))
        specs.append(
            ProcessSpec(
                role=SERVER,
                index=i,
                argv=_argv(config, SERVER, folder, "--index", str(i)),
                env=env,
                node=node,
                cpus=rollout.threads * rollout.tp,
                devices=devices,
            )
        )
    return specs


def _controller(config: Config, folder: RunFolder) -> ProcessSpec:
    return ProcessSpec(
        role=CONTROLLER,
        index=0,
        argv=_argv(config, CONTROLLER, folder),
        env=_common_env(config, 1),
        cpus=1 + sum(adapter.reward.workers for adapter in config.adapters),
    )


def _ports(config: Config) -> tuple[PortPlan, ...]:
    bind, interface = config.cluster.bind, config.cluster.interface
    host = bind if bind not in WILDCARDS else "the node's address" + ("" if interface == "auto" else f" ({interface})")
    fixed = server_ports(config) or [0] * config.rollout.servers
    ports = [PortPlan(process=f"{TRAINER}-0", plane="store", host=host, port=0)]
    ports.append(PortPlan(process=f"{CONTROLLER}-0", plane="control", host=host, port=0))
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
    if not on_loopback(config.cluster.bind):
        names += map(str, [folder.ca, folder.data_key])
    return tuple(names)


def _estimates(config: Config, shape: ModelShape) -> Estimates:
    adapters = []
    for adapter in config.adapters:
        size = adapter_size(shape, adapter.rank, adapter.target_modules, adapter.expert_layout)
        adapters.append(
            AdapterEstimate(
                name=adapter.name,
                size=size,
                file_bytes=4 * size.file_parameters,
                wire_bytes=size.nbytes(config.weight_sync.wire_dtype),
            )
        )
    return Estimates(
        base_parameters=shape.parameters,
        base_bytes=base_bytes(shape, config.model.dtype),
        adapters=tuple(adapters),
        resident_versions=config.rollout.resident_versions,
    )
