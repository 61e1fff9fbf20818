"""Query Slurm about a job: ``scontrol``, and where it has forgotten the job ``sacct``. Nothing else queries jobs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Iterator

from areal_lora.errors import EnvironmentError_
from areal_lora.launcher.slurm.states import JobRecord

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
    if output:
        records = list(parse_scontrol(output, job))
        if records:
            return records[0]
    if problem and _FORGOTTEN not in problem:
        return JobRecord(id=job, why=problem)
    output, _ = query("sacct", "-n", "-X", "-P", "-j", job, "-o", ",".join(_SACCT_FIELDS))
    records = list(parse_sacct(output, job))
    if records:
        return records[-1]
    return JobRecord(id=job, forgotten=True, why="it ended some minutes ago, and there is no accounting")


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


def query(program: str, *arguments: str, answer_s: float = ANSWER_S) -> tuple[str, str]:
    """Output of a Slurm command, and why there is none."""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=answer_s)
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
_LOST = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")
_MARKS = "*~#!%$@^-"  # behind a state: Slurm 20.11 and older write DOWN* for a node that does not answer


def run(program: str, *arguments: str) -> str:
    """Return the output of a command. Raises EnvironmentError_ if it is missing, fails or does not answer."""
    output, problem = query(program, *arguments, answer_s=COMMAND_S)
    if problem:
        command = " ".join((program, *arguments))
        raise EnvironmentError_(f"{command}: {problem} (fix: see to it that Slurm's programs work on this machine)")
    return output.strip()


def step_ids(jobs: Collection[str]) -> dict[str, str]:
    """``{"trainer.1": "17.4"}``: the ids of the jobs' steps by name. Empty where Slurm does not answer."""
    try:
        rows = run("squeue", "-h", "-s", "-j", ",".join(jobs), "-o", "%i %j").splitlines()
    except EnvironmentError_:
        return {}
    return {name: step for step, _, name in (row.strip().partition(" ") for row in rows)}


def lost_nodes(hosts: Collection[str]) -> set[str]:
    """Those of ``hosts`` that Slurm has lost. Empty where Slurm does not answer."""
    if not hosts:
        return set()
    try:
        rows = run("scontrol", "-o", "show", "node", ",".join(sorted(hosts))).splitlines()
    except EnvironmentError_:
        return set()
    lost = set()
    for row in rows:
        fields = {key: value for key, _, value in (word.partition("=") for word in row.split())}
        if any(flag.rstrip(_MARKS) in _LOST for flag in fields.get("State", "").split("+")):
            lost.add(fields.get("NodeName", ""))
    return lost & set(hosts)
