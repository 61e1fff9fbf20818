"""Config -> JobPlan: every process of a run, where it runs and with what. Pure: touches nothing.

Which process is on which node and device is decided in `config.sizing.slots`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.sections.run import Role
from areal_lora.config.sizing.memory import Memory, job_memory
from areal_lora.config.sizing.slots import Pool, Seats, has_tenants, pools_of, seats_of
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape
from areal_lora.obs.tracking.main import clients_of
from areal_lora.processes.startup import DEVICES_VARIABLE, VISIBLE
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder

TRAINER, CONTROLLER, SERVER, SERVICE = "trainer", "controller", "server", "service"
TRACKER, PAGE, REMOTE = "tracker", "page", "remote"
OBSERVERS = (TRACKER, PAGE)
"""The run does not depend on them."""
MODULES = {
    TRAINER: "areal_lora.trainer.main",
    CONTROLLER: "areal_lora.rollout.main",
    SERVER: "areal_lora.engine.vllm_ext.server.main",
    SERVICE: "areal_lora.service.main",
    TRACKER: "areal_lora.obs.tracking.main",
    PAGE: "areal_lora.obs.report.live",
    REMOTE: "areal_lora.engine.vllm_ext.remote.remote_gateway",
}
OWN_KEYS: dict[str, Role] = {TRAINER: "trainer", SERVER: "rollout"}
ROLES: dict[str, Role] = {role: OWN_KEYS.get(role, "controller") for role in MODULES}
"""Role of a process -> its name in the configuration."""


@dataclass(frozen=True, slots=True)
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
class JobPlan:
    """All that a launcher needs. ``processes`` are in starting order; their ``node`` counts over all ``pools``.

    There is one pool, or one for each component of a heterogeneous Slurm job, in its order. ``shape``: of the model.
    """

    run_folder: RunFolder
    pools: tuple[Pool, ...]
    processes: tuple[ProcessSpec, ...]
    memory: tuple[Memory, ...]
    shape: ModelShape

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
    scorers = sum(reward.workers for adapter in config.adapters for reward in adapter.rewards)
    here, beside = seats.controller.node, [(CONTROLLER, 1 + scorers)]
    beside += [(SERVICE, 1)] * has_tenants(config) + [(REMOTE, 1)] * (config.rollout.remote is not None)
    return JobPlan(
        run_folder=folder,
        pools=pools_of(config.cluster),
        # Servers take longest to come up.
        processes=(
            *_servers(config, folder, seats),
            *(ProcessSpec(role, 0, _argv(config, role, folder), _common_env(config, 1), here, n) for role, n in beside),
            *_observers(config, folder, here),
            *_trainers(config, folder, seats),
        ),
        memory=job_memory(config, shape),
        shape=shape,
    )


def _common_env(config: Config, threads: int) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.bind.startswith("127."):
        # Without these gloo, NCCL and vLLM listen on the interface of the host's name (contract C12).
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": config.cluster.bind}
    return env


def _argv(config: Config, role: str, folder: RunFolder, *more: str) -> tuple[str, ...]:
    own = {TRAINER: config.trainer.python, SERVER: config.rollout.python}
    python = own.get(role, config.cluster.controller_python)
    words = config.cluster.slurm.wrapper.get(ROLES[role], []) if config.cluster.kind == "slurm" else []
    return (*words, python or sys.executable, "-m", MODULES[role], "--run-folder", str(folder), *more)


def _observers(config: Config, folder: RunFolder, node: int) -> list[ProcessSpec]:
    """In this interpreter, whose packages were checked, and without the wrapper of a role."""

    def spec(role: str, index: int, *more: str) -> ProcessSpec:
        argv = (sys.executable, "-m", MODULES[role], "--run-folder", str(folder), *more)
        return ProcessSpec(role, index, argv, _common_env(config, 1), node)

    clients = enumerate(clients_of(config.run.trackers))
    trackers = [spec(TRACKER, i, "--index", str(i), "--tracker", name) for i, name in clients]
    return trackers + [spec(PAGE, 0)] * config.run.page


def _trainers(config: Config, folder: RunFolder, seats: Seats) -> list[ProcessSpec]:
    cluster, trainer = config.cluster, config.trainer
    specs = []
    for rank, seat in enumerate(seats.trainer):
        env = _common_env(config, cluster.threads) | {
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
        argv = _argv(config, TRAINER, folder)
        specs.append(ProcessSpec(TRAINER, rank, argv, env, seat.node, cluster.threads, seat.devices))
    return specs


def _servers(config: Config, folder: RunFolder, seats: Seats) -> list[ProcessSpec]:
    threads = config.cluster.server_threads
    specs = []
    for i, seat in enumerate(seats.servers):
        env = _common_env(config, threads)
        if seat.devices:
            env[DEVICES_VARIABLE] = ",".join(map(str, seat.devices))
        argv = _argv(config, SERVER, folder, "--index", str(i))
        specs.append(ProcessSpec(SERVER, i, argv, env, seat.node, server_cpus(config), seat.devices))
    return specs


def server_cpus(config: Config) -> int:
    """CPUs of a server. On devices each worker has a thread of its own, beside the engine's loop and the planes."""
    return config.cluster.server_threads * config.rollout.tp + 2 * (config.cluster.device != "cpu")


def spare_server(config: Config, folder: RunFolder, index: int, devices: Sequence[str], grace_s: float) -> ProcessSpec:
    """A server beyond those of the plan, on these ``devices``, that leaves within ``grace_s`` after SIGTERM."""
    env = _common_env(config, config.cluster.server_threads) | {SESSION_VARIABLE: folder.session}
    if devices:
        env[VISIBLE[config.cluster.device]] = ",".join(devices)
    argv = _argv(config, SERVER, folder, "--index", str(index), "--grace-s", f"{grace_s:g}")
    return ProcessSpec(SERVER, index, argv, env, cpus=server_cpus(config))
