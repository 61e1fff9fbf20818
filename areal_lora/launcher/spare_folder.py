"""What the run folder keeps about spare servers: their indices, each used once, and where they were started from.

``spares/server-<index>`` claims an index: no later server of the run gets it, in whichever session.
``spares/job-<id>`` and ``spares/local-<pid>`` name a Slurm job, or a process of one host, that runs spare servers.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from areal_lora.launcher.plan import SERVER
from areal_lora.launcher.run_lock import Owner
from areal_lora.run_folder.paths import RunFolder

JOB, LOCAL = "job", "local"


def claim_indices(run_folder: RunFolder, n: int, first: int) -> list[int]:
    """Claim ``n`` server indices that no server of the run has had. Those below ``first`` are the run's own."""
    folder = run_folder.spares
    folder.mkdir(parents=True, exist_ok=True)
    used = [int(path.name.partition("-")[2]) for path in folder.glob(f"{SERVER}-*")]
    index, claimed = max([first, *(i + 1 for i in used)]), list[int]()
    while len(claimed) < n:
        try:
            (folder / f"{SERVER}-{index}").open("x").close()
        except FileExistsError:  # another command claims, too
            pass
        else:
            claimed.append(index)
        index += 1
    return claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareStart:
    """One start of spare servers: Slurm job ``id``, or process ``id`` on ``host``."""

    kind: str
    id: str
    path: Path
    host: str = ""
    over: bool = False


def note_job(run_folder: RunFolder, job: str) -> None:
    run_folder.spares.mkdir(parents=True, exist_ok=True)
    (run_folder.spares / f"{JOB}-{job}").touch()


def note_process(run_folder: RunFolder) -> Path:
    """Name this process as one that runs spare servers; the caller removes the file at its end."""
    run_folder.spares.mkdir(parents=True, exist_ok=True)
    me = Owner.me()
    path = run_folder.spares / f"{LOCAL}-{me.host}-{me.pid}"
    path.write_bytes(me.encoded())
    return path


def starts(run_folder: RunFolder) -> list[SpareStart]:
    """All starts that were noted. A process is ``over`` only where that is certain."""
    found = []
    for path in sorted(run_folder.spares.glob(f"{JOB}-*")):
        found.append(SpareStart(kind=JOB, id=path.name.partition("-")[2], path=path))
    for path in sorted(run_folder.spares.glob(f"{LOCAL}-*")):
        owner = Owner.decoded(path.read_bytes())
        found.append(SpareStart(kind=LOCAL, id=str(owner.pid), path=path, host=owner.host, over=owner.is_over()))
    return found


def is_here(start: SpareStart) -> bool:
    return start.host == socket.gethostname()
