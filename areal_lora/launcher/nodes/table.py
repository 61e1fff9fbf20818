"""Messages between the launcher on node 0 and the agents of the other nodes, and what node 0 knows of these. Pure.

    agent of node K -- `AgentReport`, several times a second --> launcher: `NodeTable.answer`
                 ^---- `NodeOrders`: every start that it is to have ----'

Each message states everything, so one that is lost is made good by the next. A start has a number that never recurs.

A node is lost once its agent leaves, its connection ends, or it is silent for ``LOST_S``: all its processes count as
ended, and the next agent gets their next starts. An agent ends what is not in its orders before it starts what is new.
"""

import itertools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec

from areal_lora.config.sections.run import ClusterConfig
from areal_lora.errors import ConfigError
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import LONGEST_LOOK_S, ProcessExit

LAUNCHER = "launcher"
"""Role of node 0's endpoint, and of its end of the connections."""
VARIABLES = ("AREAL_LORA_NODE_RANK", "NODE_RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""Of the rank of a node; the first that is set counts. PyTorchJob sets the third, an Indexed Job the last."""
LOST_S = 30.0
JOIN_S = 1800.0
"""Time that the launcher waits for nodes without an agent, and an agent for the launcher."""


def node_rank(cluster: ClusterConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Rank of this node, 0 outside of ``cluster.kind = nodes``. Raises ConfigError where it is not one of the run."""
    if cluster.kind != "nodes":
        return 0
    last, name = cluster.nodes - 1, next((name for name in VARIABLES if environment.get(name)), None)
    if name is None:
        reason = f"cluster.kind = nodes needs the rank of this node in it, or in {', '.join(VARIABLES[1:])}"
        raise ConfigError(VARIABLES[0], reason, f"start the same command on each node, with 0 to {last}")
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and int(text) <= last):
        reason = f"{text!r} is no rank among cluster.nodes = {cluster.nodes}"
        raise ConfigError(name, reason, f"give each node another one, 0 to {last}")
    return int(text)


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """``agent`` identifies one stay of an agent. ``ended``: exit codes by start, until these are unwanted."""

    node: int
    agent: str
    host: str
    pid: int
    ended: dict[int, int] = {}
    leaves: bool = False

    @property
    def place(self) -> str:
        return f"{self.node} ({self.host}, process {self.pid})"


class NodeOrders(msgspec.Struct, frozen=True, kw_only=True):
    """``starts`` by number. ``stacks`` counts requests for stacks.

    ``code``: the run has ended so, and ``now`` leaves no time for it. ``refused``: why the agent is not to be there.
    """

    starts: dict[int, ProcessSpec] = {}
    stacks: int = 0
    code: int | None = None
    now: bool = False
    refused: str = ""


@dataclass(slots=True)
class _Node:
    report: AgentReport | None = None
    client: bytes = b""
    seen: float = 0.0
    rival: str = ""
    refused: str = ""
    starts: dict[int, ProcessSpec] = field(default_factory=dict)


class NodeTable:
    """Nodes 1 to ``nodes`` - 1. ``notes`` are lines for the user; ``log`` gives the path of a process's log."""

    def __init__(self, nodes: int, log: Callable[[str], Path]) -> None:
        self._nodes, self._log = {rank: _Node() for rank in range(1, nodes)}, log
        self._numbers, self._exits, self._looked = itertools.count(1), list[ProcessExit](), 0.0
        self.notes = list[str]()
        self.stacks, self.now = 0, False  # as of `NodeOrders`
        self.code: int | None = None

    def answer(self, report: AgentReport, now: float, client: bytes = b"") -> NodeOrders:
        """Take in ``report`` from the connection ``client``; returns what its agent is to do."""
        if (node := self._nodes.get(report.node)) is None:
            return NodeOrders(refused=f"this run has nodes 0 to {len(self._nodes)}, and the launcher is on node 0")
        if (known := node.report) is None:
            self.notes.append(f"node {report.place} is there")
        elif known.agent != report.agent:
            if report.agent == node.refused:
                return NodeOrders(refused=f"it is that of {known.host}, process {known.pid}")
            node.rival = report.agent  # waits: the other one may have been killed
            return NodeOrders()
        elif node.rival:
            node.refused, node.rival = node.rival, ""  # by this report: the other one is alive
        node.report, node.seen, node.client = report, now, client
        for number, code in report.ended.items():
            if (spec := node.starts.pop(number, None)) is not None:
                self._exits.append(ProcessExit(spec=spec, code=code, log=self._log(spec.name)))
        if report.leaves:
            self._lose(node, "the command there has ended")
        return NodeOrders(starts=node.starts, stacks=self.stacks, code=self.code, now=self.now)

    def look(self, now: float) -> None:
        """Find silent nodes. Time in which nothing looked is no silence: the launcher was stopped."""
        unseen, self._looked = max(0.0, now - self._looked - LONGEST_LOOK_S), now
        for node in self._nodes.values():
            node.seen += unseen
            if node.report is not None and now - node.seen > LOST_S:
                self._lose(node, f"nothing came from it for {now - node.seen:.0f} s")

    def disconnected(self, client: bytes) -> None:
        for node in self._nodes.values():
            if node.report is not None and node.client == client:
                self._lose(node, "the command there was killed, or its connection closed")

    def clients(self) -> list[bytes]:
        """Connections of the agents."""
        return [node.client for node in self._nodes.values() if node.report is not None]

    def missing(self) -> set[int]:
        """Nodes without an agent."""
        return {rank for rank, node in self._nodes.items() if node.report is None}

    def start(self, spec: ProcessSpec) -> None:
        self._nodes[spec.node].starts[next(self._numbers)] = spec

    def end(self, specs: Collection[ProcessSpec], why: str) -> None:
        """Count ``specs`` as ended; their agents kill them before they start anything else."""
        for node in self._nodes.values():
            self._drop(node, [number for number, spec in node.starts.items() if spec in specs], why=why)

    def running(self) -> list[ProcessSpec]:
        return [spec for node in self._nodes.values() for spec in node.starts.values()]

    def take_exits(self, only: Collection[ProcessSpec] | None = None) -> list[ProcessExit]:
        """Processes (of ``only``) that ended since the last call."""
        taken = [e for e in self._exits if only is None or e.spec in only]
        self._exits = [e for e in self._exits if e not in taken]
        return taken

    def _lose(self, node: _Node, why: str) -> None:
        assert node.report is not None
        place, node.report, node.rival = node.report.place, None, ""
        if self.code is None:
            self.notes.append(f"node {place} is lost: {why}")
        self._drop(node, list(node.starts), node=place, lost=True)

    def _drop(self, node: _Node, numbers: list[int], /, **how: Any) -> None:
        for spec in map(node.starts.pop, numbers):
            self._exits.append(ProcessExit(spec=spec, code=-SIGKILL, log=self._log(spec.name), **how))
