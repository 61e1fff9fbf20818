"""Why a step ended: from the codes that its tasks have recorded and what Slurm knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.errors import ExitCode
from areal_lora.launcher.ended import ProcessExit
from areal_lora.launcher.plan import ProcessSpec

KILLED = 9
_SIGNALS = range(129, 193)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecords:
    """What the tasks of a step have written. ``first`` names the first process that failed."""

    codes: Mapping[str, int]
    started: frozenset[str]
    first: str | None = None


def causes(
    specs: Sequence[ProcessSpec],
    hosts: Mapping[str, str],
    records: TaskRecords,
    srun_code: int,
    lost: Collection[str],
    logs: Mapping[str, Path],
    srun_log: Path,
) -> list[ProcessExit]:
    """How each process of a step ended. The first cause has no ``why``.

    Args:
        hosts: Node of each process, by name.
        srun_code: srun's own code, used where a task could not record its own. It is 0 also when the only node of
            the step was lost.
        lost: Nodes that Slurm has lost.
        logs: Log of each process, by name; ``srun_log`` holds the output of srun.
    """
    started = records.started or frozenset(records.codes)
    lost_here = [
        spec.name for spec in specs if hosts[spec.name] in lost and records.codes.get(spec.name) != ExitCode.DONE
    ]
    first = lost_here[0] if lost_here else records.first
    silent = [spec.name for spec in specs if spec.name not in records.codes]
    if first is None and silent:
        first = silent[0]
    return [
        ProcessExit(
            spec=spec,
            code=_code(records.codes.get(spec.name), srun_code),
            log=logs[spec.name] if spec.name in started else srun_log,
            node=hosts[spec.name],
            lost=spec.name == first and bool(lost_here),
            never_started=spec.name == first and not started,
            why="" if spec.name == first or records.codes.get(spec.name) == ExitCode.DONE else "was ended",
        )
        for spec in specs
    ]


def _code(recorded: int | None, srun_code: int) -> int:
    """As ``subprocess`` has it: negative for a signal."""
    code = recorded if recorded is not None else srun_code or ExitCode.FAILED
    return 128 - code if code in _SIGNALS else code
