"""The job that this process is part of: its id, its requeues, its nodes, and the node of each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.config.sizing.slots import Pool
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.launcher.slurm import job_query
from areal_lora.run_folder.paths import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """``hosts`` by the plan's node number. ``restarts``: requeues of the job so far.

    ``components`` are the ids under which Slurm lists the steps: one for each component of a heterogeneous job.
    """

    job: str
    components: tuple[str, ...]
    restarts: int
    hosts: tuple[str, ...]


def allocation(environment: Mapping[str, str], pools: Sequence[Pool]) -> Allocation:
    """The allocation of this job. Raises EnvironmentError_ outside of a job, ConfigError for one with too few nodes."""
    try:
        job = environment["SLURM_JOB_ID"]
    except KeyError:
        raise EnvironmentError_("this is no Slurm job (fix: submit job.sbatch with sbatch)") from None
    hosts: list[str] = []
    for i, pool in enumerate(pools):
        nodelist = environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", environment.get("SLURM_JOB_NODELIST", ""))
        names = job_query.run("scontrol", "show", "hostnames", nodelist).split()
        if len(names) < pool.nodes:
            raise ConfigError(
                pool.key, f"the job has {len(names)} of {pool.nodes} nodes ({nodelist})", "submit it with more nodes"
            )
        hosts += names[: pool.nodes]
    components = tuple(environment.get(f"SLURM_JOB_ID_HET_GROUP_{i}", job) for i in range(len(pools)))
    return Allocation(
        job=job, components=components, restarts=int(environment.get("SLURM_RESTART_COUNT", "0")), hosts=tuple(hosts)
    )


_HOSTS, _RANKS = "hosts", "trainer"


def write_hosts(step: Path, hosts: Sequence[str]) -> Path:
    """Write the nodes of a step's tasks, in their order, as srun reads them."""
    path = step / _HOSTS
    path.write_text("".join(f"{host}\n" for host in hosts), encoding="ascii")
    return path


def placement(folder: RunFolder) -> dict[str, str]:
    """Node of each process in the newest start of its step; empty before the job has started a session."""
    files: dict[str, tuple[int, Path]] = {}
    for path in folder.step("any").parent.glob(f"*/{_HOSTS}"):
        unit, _, start = path.parent.name.rpartition(".")
        files[unit] = max(files.get(unit, (0, path)), (int(start), path))
    nodes: dict[str, str] = {}
    for unit, (_, path) in files.items():
        hosts = path.read_text(encoding="ascii").split()
        names = [f"{unit}-{rank}" for rank in range(len(hosts))] if unit == _RANKS else [unit]
        nodes |= dict(zip(names, hosts, strict=True))
    return nodes
