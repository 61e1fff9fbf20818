"""The job that this process is part of: its id, how often it was requeued, the names of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_lora.config.sizing.pools import Pool
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.launcher.slurm import commands


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
        names = commands.run("scontrol", "show", "hostnames", nodelist).split()
        if len(names) < pool.nodes:
            raise ConfigError(
                pool.key, f"the job has {len(names)} of {pool.nodes} nodes ({nodelist})", "submit it with more nodes"
            )
        hosts += names[: pool.nodes]
    components = tuple(environment.get(f"SLURM_JOB_ID_HET_GROUP_{i}", job) for i in range(len(pools)))
    return Allocation(
        job=job, components=components, restarts=int(environment.get("SLURM_RESTART_COUNT", "0")), hosts=tuple(hosts)
    )
