"""Query Slurm about a job: ``scontrol``, and where it has forgotten the job ``sacct``. Nothing else queries jobs."""

import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.config.sizing.slots import Pool
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.launcher.slurm.states import JobRecord
from areal_lora.run_folder.paths import RunFolder

ANSWER_S, AGAIN_S = 20.0, 2.0
_FORGOTTEN = "Invalid job id"
_SACCT_FIELDS = ("JobID", "State", "Reason", "ExitCode", "NodeList", "Start", "End")


def look(job: str, tries: int = 1) -> JobRecord:
    """What Slurm knows about ``job``. Of a heterogeneous job: its first component, with the nodes of all.

    Never raises: ``why`` states what is missing. Tries ``tries`` times where Slurm does not answer.
    """
    output, problem = query("scontrol", "-o", "show", "job", job)
    while tries > 1 and problem and _FORGOTTEN not in problem:
        time.sleep(AGAIN_S)
        tries -= 1
        output, problem = query("scontrol", "-o", "show", "job", job)
    if records := list(parse_scontrol(output, job)):
        return records[0]
    if problem and _FORGOTTEN not in problem:
        return JobRecord(id=job, why=problem)
    output, _ = query("sacct", "-n", "-X", "-P", "-j", job, "-o", ",".join(_SACCT_FIELDS))
    if records := list(parse_sacct(output, job)):
        return records[-1]
    return JobRecord(id=job, forgotten=True, why="it ended some minutes ago, and there is no accounting")


def submitted_job(folder: RunFolder) -> str | None:
    """Id of the job that was submitted for ``folder`` last; None where none was."""
    return folder.job_id.read_text(encoding="ascii").strip() if folder.job_id.exists() else None


def hosts(nodes: str) -> list[str]:
    """Expand Slurm's list of nodes, such as ``n[1-3],m1``; empty where scontrol does not answer."""
    if not nodes:
        return []
    output, _ = query("scontrol", "show", "hostnames", nodes)
    return output.split()


def parse_scontrol(text: str, job: str) -> Iterator[JobRecord]:
    """The records of ``scontrol -o show job``: one line each; the first has the nodes of all."""
    rows = [dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(.*?)(?=\s[A-Za-z:/]+=|\s*$)", line)) for line in text.splitlines()]
    rows = [row for row in rows if "JobState" in row]
    nodes = ",".join(row["NodeList"] for row in rows if row.get("NodeList", "(null)") not in ("", "(null)"))
    for row in rows:
        code, _, number = row.get("ExitCode", "0:0").partition(":")
        yield JobRecord(
            id=job,
            state=row["JobState"],
            reason=row.get("Reason", ""),
            code=int(code),
            number=int(number or 0),
            restarts=int(row.get("Restarts", "0")),
            nodes=nodes,
            start=row.get("StartTime", ""),
            end=row.get("EndTime", ""),
        )


def parse_sacct(text: str, job: str) -> Iterator[JobRecord]:
    """The records of ``sacct -n -X -P`` with ``_SACCT_FIELDS``; a requeued job has one for each start."""
    for restarts, line in enumerate(line for line in text.splitlines() if line.count("|") == len(_SACCT_FIELDS) - 1):
        row = dict(zip(_SACCT_FIELDS, line.split("|"), strict=True))
        state, _, by = row["State"].partition(" by ")
        code, _, number = row["ExitCode"].partition(":")
        yield JobRecord(
            id=job,
            state=state.split()[0].rstrip("+") if state else "",
            reason=row["Reason"],
            code=int(code or 0),
            number=int(number or 0),
            restarts=restarts,
            nodes=row["NodeList"] if row["NodeList"] != "None assigned" else "",
            start=row["Start"],
            end=row["End"],
            by=by,
        )


def query(
    program: str,
    *arguments: str,
    answer_s: float | None = ANSWER_S,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """Output of a Slurm command, and why there is none."""
    command = [program, *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=answer_s, env=env)
    except FileNotFoundError:
        return "", f"{program} is not on this machine"
    except subprocess.TimeoutExpired:
        return "", f"{program} gave no answer within {answer_s:g} s"
    return (done.stdout, "") if done.returncode == 0 else ("", " ".join(done.stderr.split()) or "it failed")


def cancel(job: str, *, now: bool = False) -> None:
    """Have Slurm end ``job`` for good: its steps stop in order first, unless ``now``. Raises EnvironmentError_."""
    if now:
        query("scancel", "--signal=KILL", "--full", job)
    _, problem = query("scancel", job)
    if problem and _FORGOTTEN not in problem:
        raise EnvironmentError_(f"job {job} cannot be cancelled: {problem} (fix: run scancel {job} where it works)")


COMMAND_S = 60.0
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
_OF_SCRIPT = ("SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_SIGNAL")
"""sbatch prefers these to the script's own lines, on which the job depends."""
_LOST = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")
_MARKS = "*~#!%$@^-"  # behind a state: Slurm 20.11 and older write DOWN* for a node that does not answer


def run(program: str, *arguments: str, fix: str = "see to it that it works on this machine") -> str:
    """Return the output of a command. Raises EnvironmentError_ if it is missing, fails or does not answer."""
    output, problem = query(program, *arguments, answer_s=COMMAND_S)
    if problem:
        raise EnvironmentError_(f"{' '.join((program, *arguments))}: {problem} (fix: {fix})")
    return output.strip()


def submit(script: str, *options: str) -> str:
    """Give ``script`` to sbatch. Returns the job's id; raises EnvironmentError_, or ConfigError for another cluster.

    Without the options of an allocation that it is called in, which srun would take for the job's.
    """
    if there := os.environ.get("SBATCH_CLUSTERS"):
        reason = f"{there!r} makes a job of another cluster, where its queries do not find it"
        fix = "unset it, and submit on a machine of that cluster, or with its SLURM_CONF"
        raise ConfigError("SBATCH_CLUSTERS", reason, fix)
    inside = "SLURM_JOB_ID" in os.environ
    kept = {n: v for n, v in os.environ.items() if n not in _OF_SCRIPT}
    own = {n: v for n, v in kept.items() if n in _OF_CLUSTER or not (inside and n.startswith("SLURM_"))}
    output, problem = query("sbatch", "--parsable", *options, answer_s=None, stdin=script, env=own)
    if problem:
        raise EnvironmentError_(f"sbatch refused the job: {problem} (fix: see cluster.slurm)")
    return output.strip().partition(";")[0]


def step_ids(jobs: Collection[str]) -> dict[str, str]:
    """``{"trainer.1": "17.4"}``: the ids of the jobs' steps by name. Empty where Slurm does not answer."""
    output, _ = query("squeue", "-h", "-s", "-j", ",".join(jobs), "-o", "%i %j", answer_s=COMMAND_S)
    return {name: step for step, _, name in (row.strip().partition(" ") for row in output.splitlines())}


def lost_nodes(hosts: Collection[str]) -> set[str]:
    """Those of ``hosts`` that Slurm has lost. Empty where Slurm does not answer."""
    lost, output = set[str](), ""
    if hosts:
        output, _ = query("scontrol", "-o", "show", "node", ",".join(sorted(hosts)), answer_s=COMMAND_S)
    for row in output.splitlines():
        fields = {key: value for key, _, value in (word.partition("=") for word in row.split())}
        if any(flag.rstrip(_MARKS) in _LOST for flag in fields.get("State", "").split("+")):
            lost.add(fields.get("NodeName", ""))
    return lost & set(hosts)


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
        names = run("scontrol", "show", "hostnames", nodelist).split()
        if len(names) < pool.nodes:
            reason = f"the job has {len(names)} of {pool.nodes} nodes ({nodelist})"
            raise ConfigError(pool.key, reason, "submit it with more nodes")
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
    for path in folder.steps.glob(f"*/{_HOSTS}"):
        unit, _, start = path.parent.name.rpartition(".")
        files[unit] = max(files.get(unit, (0, path)), (int(start), path))
    nodes: dict[str, str] = {}
    for unit, (_, path) in files.items():
        hosts = path.read_text(encoding="ascii").split()
        names = [f"{unit}-{rank}" for rank in range(len(hosts))] if unit == _RANKS else [unit]
        nodes |= dict(zip(names, hosts, strict=True))
    return nodes
