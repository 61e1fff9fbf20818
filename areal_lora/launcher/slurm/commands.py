"""Slurm's commands, and what the job reads of its steps and nodes."""

from __future__ import annotations

from collections.abc import Collection

from areal_lora.errors import EnvironmentError_
from areal_lora.launcher.slurm.job_query import query

ANSWER_S = 60.0
_LOST = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")
_MARKS = "*~#!%$@^-"  # behind a state: Slurm 20.11 and older write DOWN* for a node that does not answer


def run(program: str, *arguments: str) -> str:
    """Return the output of a command. Raises EnvironmentError_ if it is missing, fails or does not answer."""
    output, problem = query(program, *arguments, answer_s=ANSWER_S)
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
