"""Where the processes of a job are: each step has a file with the node of every task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_lora.run_folder.paths import RunFolder

_HOSTS, _RANKS = "hosts", "trainer"


def write_hosts(step: Path, hosts: Sequence[str]) -> Path:
    """Write the nodes of a step's tasks, in their order, as srun reads them."""
    path = step / _HOSTS
    path.write_text("".join(f"{host}\n" for host in hosts), encoding="ascii")
    return path


def placement(folder: RunFolder) -> dict[str, str]:
    """Node of each process in the newest start of its step; empty before the job has begun a session."""
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
