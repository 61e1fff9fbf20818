"""The processes of a run as steps of its Slurm job: one step for each unit, so that each can end and start alone.

An `arbitrary` distribution puts every task on the node that the plan chose. Steps are signalled with scancel: srun,
when signalled, kills its tasks without a grace.

Spare servers are an ordinary job of one node, never requeued: its script becomes the process that supervises them
(``launcher.spares``) and ends with the run.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGTERM

from areal_lora.config.models import Config
from areal_lora.config.sections.run import guarded
from areal_lora.errors import ConfigError, EnvironmentError_, ExitCode
from areal_lora.launcher.plan import JobPlan, ProcessSpec, server_cpus
from areal_lora.launcher.restarts import ProcessExit, note_restart, unit_of
from areal_lora.launcher.slurm import job_query, request_stacks
from areal_lora.launcher.slurm.script import FIRST, STARTED, STEP, node_options, quoted, step_options, task_script
from areal_lora.launcher.slurm.states import TaskRecords, causes
from areal_lora.launcher.supervise import STOP_GRACE_S
from areal_lora.launcher.watch import EARLY_END_S
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.run_folder.paths import RunFolder

POLL_S = 0.2
RECORD_S = 1.0
"""A code may be seen so long after srun has ended: file systems keep old views of folders."""
KILL_S, SRUN_S = 15.0, 5.0
ASK_S = 15.0
# Meant for a step of as many tasks on each node as sbatch was given.
_OF_THE_JOB = (
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_HOSTFILE",
    "SLURM_EXPORT_ENV",  # NONE, where sbatch was to export nothing to the script: tasks need the script's own variables
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    name: str
    specs: tuple[ProcessSpec, ...]
    folder: Path
    srun: subprocess.Popen[bytes]


class SlurmSteps(contextlib.AbstractContextManager["SlurmSteps"]):
    """Implements ``watch.Processes``. Use as a context manager: leaving it stops everything."""

    def __init__(self, config: Config, plan: JobPlan, job: job_query.Allocation) -> None:
        self._config, self._plan, self._job = config, plan, job
        self._folder = plan.run_folder
        self._steps: list[_Step] = []
        self._starts: Counter[str] = Counter()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        units: dict[str, list[ProcessSpec]] = {}
        for spec in specs:
            units.setdefault(unit_of(spec), []).append(spec)
        for unit, members in units.items():
            self._start(unit, tuple(members))

    def poll(self) -> list[ProcessExit]:
        """Slurm and the tasks' scripts kill and remove what the tasks leave."""
        over = [step for step in self._steps if step.srun.poll() is not None]
        self._steps = [step for step in self._steps if step not in over]
        until = time.monotonic() + RECORD_S  # of all: 500 servers that are killed leave no codes
        return [ended for step in over for ended in self._ended(step, until)]

    def end(self, specs: Collection[ProcessSpec], grace_s: float = 0.0, why: str = "") -> list[ProcessExit]:
        mine = [step for step in self._steps if any(spec in specs for spec in step.specs)]
        _wait(mine, grace_s)
        alive = {spec.name for step in mine if step.srun.poll() is None for spec in step.specs}
        self._kill([step for step in mine if step.srun.poll() is None])
        self._steps = [step for step in self._steps if step not in mine]
        until = time.monotonic() + RECORD_S
        ended = [e for step in mine for e in self._ended(step, until)]
        return [replace(e, why=why) if e.spec.name in alive and not e.lost else e for e in ended]

    def running(self) -> list[ProcessSpec]:
        return [spec for step in self._steps for spec in step.specs]

    def ask_stacks(self) -> None:
        """One task on each node; a component of a heterogeneous job has an srun of its own."""
        pools: dict[int, set[str]] = {}
        for spec in self.running():
            pools.setdefault(self._plan.pool_of(spec.node), set()).add(self._job.hosts[spec.node])
        for pool, hosts in pools.items():
            if there := sorted(hosts - job_query.lost_nodes(hosts)):
                self._ask(pool, there)

    def _ask(self, pool: int, hosts: Sequence[str]) -> None:
        het = [f"--het-group={pool}"] if len(self._plan.pools) > 1 else []
        nodes = [f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}"]
        command = ["srun", "--overlap", *het, *nodes, "--ntasks-per-node=1", "--job-name=stacks"]
        command += [sys.executable, "-m", request_stacks.__name__]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S)

    def stop(self) -> None:
        """Have every process end, wait up to `STOP_GRACE_S`, then kill the remaining ones."""
        self._signal("TERM", self._steps)
        _wait(self._steps, STOP_GRACE_S)
        self._kill([step for step in self._steps if step.srun.poll() is None])
        self._steps = []

    def _start(self, unit: str, specs: tuple[ProcessSpec, ...]) -> None:
        self._starts[unit] += 1
        name = f"{unit}.{self._starts[unit]}"
        folder = self._folder.steps / name
        folder.mkdir(parents=True)
        script = folder / "task.sh"
        script.write_text(task_script(specs, self._config.cluster.slurm.setup, self._folder, folder), encoding="utf-8")
        hosts = [self._job.hosts[spec.node] for spec in specs]
        hosts_file = job_query.write_hosts(folder, hosts)
        for spec in specs:
            note_restart(self._folder.log(spec.name), spec.name)
        # srun's pattern for the logs of the processes, whose indices count from 0 or are one.
        process = specs[0].name if len(specs) == 1 else f"{specs[0].role}-%t"
        output = str(self._folder.log("PROCESS")).replace("%", "%%").replace("PROCESS", process)
        command = [
            "srun",
            *STEP,
            f"--wait={EARLY_END_S:.0f}",
            f"--nodes={len(set(hosts))}",
            f"--ntasks={len(specs)}",
            f"--job-name={name}",
            f"--output={output}",
            *step_options(self._config, self._plan, specs[0].role),
            "bash",
            str(script),
        ]
        environment = _environment() | {"SLURM_HOSTFILE": str(hosts_file)}
        with self._folder.log(f"srun-{unit}").open("ab") as log:
            try:
                srun = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            except FileNotFoundError:
                raise EnvironmentError_("srun is not on this node (fix: add Slurm's programs to PATH)") from None
        self._steps.append(_Step(name=name, specs=specs, folder=folder, srun=srun))

    def _ended(self, step: _Step, until: float) -> list[ProcessExit]:
        code = step.srun.poll()
        records = _read_records(step, until)
        hosts = {spec.name: self._job.hosts[spec.node] for spec in step.specs}
        failed = any(records.codes.get(name) != ExitCode.DONE for name in hosts)
        return causes(
            step.specs,
            hosts,
            records,
            srun_code=ExitCode.FAILED if code is None else abs(code),
            lost=job_query.lost_nodes(set(hosts.values())) if failed else (),
            logs={name: self._folder.log(name) for name in hosts},
            srun_log=self._folder.log(f"srun-{unit_of(step.specs[0])}"),
        )

    def _signal(self, signal: str, steps: Sequence[_Step]) -> None:
        if not any(step.srun.poll() is None for step in steps):
            return
        ids = job_query.step_ids(self._job.components)
        targets = [ids[step.name] for step in steps if step.name in ids]
        if targets:
            # Slurm refuses it for a step that has ended meanwhile.
            with contextlib.suppress(EnvironmentError_):
                job_query.run("scancel", f"--signal={signal}", *targets)

    def _kill(self, steps: Sequence[_Step]) -> None:
        self._signal("KILL", steps)
        _wait(steps, KILL_S if steps else 0.0)
        for signal in (SIGTERM, SIGKILL):  # to those that wait for a node that does not answer, or has not started
            for step in steps:
                step.srun.send_signal(signal)
            _wait(steps, SRUN_S)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_JOB}


def _wait(steps: Sequence[_Step], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(step.srun.poll() is None for step in steps) and time.monotonic() < deadline:
        time.sleep(0.05)


def _read_records(step: _Step, until: float) -> TaskRecords:
    """What the tasks have recorded; waits at most ``until`` then (time.monotonic) for tasks that have not."""
    while True:
        # A change of our own makes a network file system look at the folder again.
        mark = step.folder / ".look"
        mark.touch()
        mark.unlink()
        names = [path.name for path in step.folder.iterdir()]
        codes = {name: int(code) for name, _, code in (n.rpartition(".") for n in names) if name and code.isdecimal()}
        if len(codes) >= len(step.specs) or time.monotonic() > until:
            break
        time.sleep(0.2)
    first = None
    with contextlib.suppress(FileNotFoundError):
        first = os.readlink(step.folder / FIRST).rpartition(".")[0]
    started = frozenset(name.removesuffix(STARTED) for name in names if name.endswith(STARTED))
    return TaskRecords(codes=codes, started=started, first=first)


KILL_WAIT_S = 30.0
"""Slurm's default time between the SIGTERM of a cancelled job and SIGKILL (``KillWait``)."""
LEAD_S = 90
"""Time between Slurm's signal to the script and the time limit."""


@dataclass(frozen=True, slots=True)
class SpareJob:
    """One job on one node. ``time_limit`` and ``partition`` replace those of the run's configuration if set."""

    servers: int
    grace_s: float
    time_limit: str = ""
    partition: str = ""


def spare_script(config: Config, run_folder: RunFolder, job: SpareJob) -> str:
    """The script, for a node like those of the run's servers. Raises ConfigError where their container is missing."""
    cluster, rollout, slurm = config.cluster, config.rollout, config.cluster.slurm
    if any("container" in option for option in slurm.srun_extra.get("rollout", ())) and "rollout" not in slurm.wrapper:
        here = f"areal-lora add-servers {shlex.quote(str(run_folder))} --here"
        fix = f"set cluster.slurm.wrapper.rollout, or submit `srun OPTIONS {here}` yourself"
        reason = "the job of added servers has no srun: they would start without this container"
        raise ConfigError("cluster.slurm.srun_extra.rollout", reason, fix)
    devices = 0 if cluster.device == "cpu" else job.servers * rollout.tp
    nodes = next((component for component in slurm.components if "rollout" in component.roles), None)
    log = str(run_folder.log("servers-JOB")).replace("%", "%%").replace("servers-JOB", "servers-%j")
    options = [
        f"--job-name={config.run.name}-servers",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={job.servers * server_cpus(config)}",
        *node_options(config, nodes, devices, time=job.time_limit, partition=job.partition),
        f"--output={quoted(log)}",
        "--open-mode=append",
        "--no-requeue",
        f"--signal=B:TERM@{LEAD_S}",
        *slurm.extra,
        *(nodes.extra if nodes else []),
    ]
    command = [sys.executable, "-m", "areal_lora", "add-servers", str(run_folder), "--here"]
    command += ["--servers", str(job.servers), "--grace-s", f"{job.grace_s:g}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    lines.append(f"cd {shlex.quote(str(Path.cwd()))} || exit 69")
    # The address towards the run's nodes, not only towards this job's own.
    lines.append(f'export {NODES_VARIABLE}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr "\\n" " ")"')
    lines += [*guarded(slurm.setup), "# One process supervises the servers. Slurm's signals reach it first."]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])
