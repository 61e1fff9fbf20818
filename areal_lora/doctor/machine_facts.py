"""What the probes find: plain values, so that checks are pure and a node's facts travel as JSON."""

from __future__ import annotations

import msgspec


class RoleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One role's interpreter. ``problem``: why it was not examined. ``packages`` are versions, absent ones missing.

    ``plugins`` are the names of the entry points ``vllm.general_plugins``; ``digest`` is over areal_lora's files.
    """

    role: str
    python: str
    problem: str = ""
    version: str = ""
    packages: dict[str, str] = {}
    plugins: list[str] = []
    digest: str = ""
    location: str = ""


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_mib: int
    driver: str


class FolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of the run root. Each problem is empty where the operation worked as it must."""

    path: str
    write: str = ""
    rename: str = ""
    fsync: str = ""
    flock: str = ""
    free_bytes: int = 0
    fsync_s: float = 0.0


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``clock_ahead_s`` is its clock minus that of the file system of the run root.

    ``resolved`` are the addresses of its own name; ``address`` is what processes of a run would bind to there.
    """

    host: str
    resolved: list[str] = []
    address: str = ""
    address_problem: str = ""
    blocked_ports: dict[int, str] = {}
    loop_problem: str = ""
    open_files: int = 0
    open_files_most: int = 0
    shared_memory_bytes: int = 0
    clock_ahead_s: float | None = None
    gpus: list[GpuFacts] = []
    folder: FolderFacts | None = None
    roles: list[RoleFacts] = []


class BandwidthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A broadcast between processes of the nodes. ``problem``: why there is no figure."""

    backend: str
    hosts: list[str]
    gbit_s: float = 0.0
    problem: str = ""


class CanaryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A perturbed adapter on its way from a real trainer to a real server; differences are of log-probabilities.

    ``skipped``: why it was not tried. ``problem``: the last error of ``side``.
    """

    skipped: str = ""
    side: str = ""
    problem: str = ""
    mean_abs: float | None = None
    max_abs: float | None = None
    changed_by: float | None = None
    ready_s: float = 0.0
    total_s: float = 0.0


class DoctorFacts(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[NodeFacts]
    missing_nodes: list[str] = []
    bandwidth: list[BandwidthFacts] = []
    canary: CanaryFacts = CanaryFacts(skipped="not requested")
