"""The request to Slurm, as text: the ``#SBATCH`` lines of a job and the srun options of a role. Pure.

A heterogeneous job has one block of lines for each component, with ``#SBATCH hetjob`` between them. Slurm hands some
options of the first component (memory, account) to the others and some not (GPUs), so each block has all that concerns
its nodes; what concerns the job is in the first only.
"""

from __future__ import annotations

from areal_lora.config.models import Config
from areal_lora.config.sections.cluster import Role, SlurmComponent, SlurmConfig
from areal_lora.config.sizing.pools import Pool
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, JobPlan

SIGNAL_LEAD_S = 60
"""Time between Slurm's signal to the script and the time limit."""
ROLES: dict[str, Role] = {TRAINER: "trainer", SERVER: "rollout", CONTROLLER: "controller"}
"""Role of a process -> its name in the configuration."""
_GRES = {"cuda": "gpu", "npu": "npu"}


def directives(config: Config, plan: JobPlan) -> list[str]:
    """The ``#SBATCH`` lines, in blocks of one component each."""
    slurm = config.cluster.slurm
    components: list[SlurmComponent | None] = [*slurm.components] or [None]
    lines: list[str] = []
    for i, (pool, component) in enumerate(zip(plan.pools, components, strict=True)):
        if i:
            lines += ["", "#SBATCH hetjob"]
        options = [] if i else _of_the_job(config, plan)
        options += _of_the_nodes(config, plan, pool, component)
        if not i:
            options += slurm.extra
        options += component.extra if component else []
        lines += [f"#SBATCH {option}" for option in options]
    return lines


def step_options(config: Config, plan: JobPlan, role: str) -> list[str]:
    """Words for an srun that starts processes of ``role``: all but nodes, tasks, output and the command.

    ``--mem=0`` gives the step the memory of its job: a cluster's default memory per CPU would give it less.
    ``--gpu-bind=none``: the plan chooses the devices of a process, by their number on the node. ``--cpu-bind=none``:
    steps overlap, and one that binds may bind to the cores of another step of its node.
    """
    specs = plan.role(role)
    words = [f"--het-group={plan.pool_of(specs[0].node)}"] if len(plan.pools) > 1 else []
    words += [f"--cpus-per-task={max(spec.cpus for spec in specs)}", "--mem=0"]
    words.append("--cpu-bind=none")
    if config.cluster.device != "cpu":
        words.append("--gpu-bind=none")
    return [*words, *config.cluster.slurm.srun_extra.get(ROLES[role], [])]


def quoted(text: str) -> str:
    """A value of a ``#SBATCH`` line: sbatch reads double quotes and backslashes much as a shell does."""
    if all(c.isalnum() or c in "/._-%+=:,@" for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _of_the_job(config: Config, plan: JobPlan) -> list[str]:
    """What the whole job has: its name, its log, how it is requeued."""
    # In a file name % starts a replacement.
    log = str(plan.run_folder.log("job-JOB")).replace("%", "%%").replace("job-JOB", "job-%j")
    return [
        f"--job-name={config.run.name}",
        f"--output={quoted(log)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{SIGNAL_LEAD_S}",
    ]


def _of_the_nodes(config: Config, plan: JobPlan, pool: Pool, component: SlurmComponent | None) -> list[str]:
    """What the nodes of one pool have to offer, and whose they are."""
    slurm = config.cluster.slurm
    nodes = range(pool.first_node, pool.first_node + pool.nodes)
    here = [[spec for spec in plan.processes if spec.node == node] for node in nodes]
    options = [
        f"--nodes={pool.nodes}",
        f"--ntasks-per-node={max(len(specs) for specs in here)}",
        f"--mincpus={max(sum(spec.cpus for spec in specs) for specs in here)}",
    ]
    if pool.devices_per_node:
        kind = _of(component, slurm, "gres_type")
        words = [_GRES[config.cluster.device], *([kind] if kind else []), str(pool.devices_per_node)]
        options.append(f"--gres={':'.join(words)}")
    named = {
        "mem": _of(component, slurm, "mem"),
        "time": slurm.time_limit,
        "partition": _of(component, slurm, "partition"),
        "account": slurm.account,
    }
    options += [f"--{name}={quoted(value)}" for name, value in named.items() if value]
    # The job outlives a lost node, where enough servers remain.
    return options + (["--no-kill"] if plan.nodes > 1 else [])


def _of(component: SlurmComponent | None, slurm: SlurmConfig, key: str) -> str | None:
    """The component's value of ``key``, that of the job where it is unset; empty: none."""
    values = [section.model_dump()[key] for section in (component, slurm) if section is not None]
    return next((str(value) for value in values if value is not None), None)
