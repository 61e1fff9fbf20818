"""The processes of a run on several nodes, as the launcher on node 0 supervises them.

Those of its own node are its children. A unit with processes elsewhere starts once each of its nodes has an agent: at
first all nodes, later those of the unit. A server whose node is lost is excluded from the run until then. The trainer
does not start with fewer servers than the run needs.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from areal_lora.config.models import Config
from areal_lora.config.sections.run import own_place
from areal_lora.errors import ProcessFailed
from areal_lora.launcher.nodes.table import JOIN_S, LAUNCHER, VARIABLES, AgentReport, NodeOrders, NodeTable
from areal_lora.launcher.plan import SERVER, TRAINER, JobPlan, ProcessSpec
from areal_lora.launcher.restarts import ProcessExit, unit_of
from areal_lora.launcher.supervise import STOP_GRACE_S, Interrupts, Supervisor
from areal_lora.network.rpc import RpcServer, Wire
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.rendezvous import forget_endpoint, publish_endpoint, read_secret

PLANE = "nodes"
WIRE = Wire(server=LAUNCHER, client="node-agent", max_request_bytes=1 << 20, max_reply_bytes=1 << 20)
PING_S, PING = 1.0, bytes(8)
"""It has the number of no request, so agents ignore it: only whether it can be sent counts."""
REMIND_S = 60.0
SLACK_S = 10.0
"""For agents to end after their own grace."""


class NodeSupervisor(Supervisor):
    """Implements ``watch.Processes``. ``note`` prints a line."""

    def __init__(self, config: Config, plan: JobPlan, note: Callable[[str], None]) -> None:
        super().__init__(plan.run_folder.logs, STOP_GRACE_S)
        self._folder, self._note, self._lock = plan.run_folder, note, threading.Lock()
        self._table, self._complete = NodeTable(plan.nodes, plan.run_folder.log), False
        self._waiting = list[tuple[ProcessSpec, ...]]()
        self._spare = max(0, len(plan.role(SERVER)) - config.cluster.min_servers)
        self._needed_s = self._reminded_s = self._pinged_s = 0.0
        self._host, secret = own_place(config.cluster, self._folder).address, read_secret(self._folder)
        lost = self._disconnected
        self._server = RpcServer(self._host, secret, WIRE, self._take, lost=lost, linger_s=1.0)

    def __enter__(self) -> Supervisor:
        watched_thread("node-agents", self._server.run)
        publish_endpoint(self._folder, LAUNCHER, 0, {PLANE: self._server.port}, self._host)
        return super().__enter__()

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        units: dict[str, list[ProcessSpec]] = {}
        for spec in specs:
            units.setdefault(unit_of(spec), []).append(spec)
        if not self._waiting:
            self._needed_s, self._reminded_s = time.monotonic(), -REMIND_S
        self._waiting += map(tuple, units.values())
        self._look()
        for spec in (spec for unit in self._waiting if self._complete for spec in unit if spec.role == SERVER):
            self._folder.excluded(spec.name).touch()

    def poll(self, only: Collection[ProcessSpec] | None = None) -> list[ProcessExit]:
        """As `Supervisor.poll`. Raises ProcessFailed for a node that the run needs and that does not come."""
        self._look()
        with self._lock:
            ended = self._table.take_exits(only)
        return [*super().poll(only), *ended]

    def end(self, specs: Collection[ProcessSpec], grace_s: float = 0.0, why: str = "") -> list[ProcessExit]:
        until = time.monotonic() + grace_s
        while time.monotonic() < until and any(spec.node and spec in specs for spec in self.running()):
            self._look()
            time.sleep(0.02)
        with self._lock:
            self._table.end(specs, why)
        return super().end(specs, max(0.0, until - time.monotonic()), why)

    def running(self) -> list[ProcessSpec]:
        with self._lock:
            return [*super().running(), *self._table.running()]

    def ask_stacks(self) -> None:
        super().ask_stacks()
        self._table.stacks += 1

    def stop(self, grace_s: float | None = None, interrupted: Interrupts | None = None) -> None:
        """As `Supervisor.stop`, on all nodes. Agents end with ``code``; one that does not answer is not waited for."""
        self._waiting.clear()
        self._table.code, signals_before = self.code, interrupted.count if interrupted else 0
        super().stop(grace_s, interrupted)
        until = time.monotonic() + STOP_GRACE_S + SLACK_S
        while self._table.clients() and time.monotonic() < until:
            with self._lock:
                self._table.now = interrupted is not None and interrupted.count > signals_before
                self._table.look(time.monotonic())
            time.sleep(0.05)
        self._server.close()
        forget_endpoint(self._folder, LAUNCHER, 0)

    def _take(self, client: bytes, number: bytes, payload: bytes) -> None:
        try:
            report = msgspec.json.decode(payload, type=AgentReport)
        except msgspec.DecodeError as error:
            reply = msgspec.json.encode(NodeOrders(refused=f"its report cannot be read: {error}"))
        else:
            with self._lock:
                reply = msgspec.json.encode(self._table.answer(report, time.monotonic(), client))
        self._server.send(client, number, reply)

    def _disconnected(self, client: bytes) -> None:
        with self._lock:
            self._table.disconnected(client)

    def _look(self) -> None:
        """Notice lost nodes, and start what waits for none."""
        now = time.monotonic()
        if now > self._pinged_s + PING_S:
            self._pinged_s = now
            for client in self._table.clients():
                self._server.send(client, PING, b"")
        with self._lock:
            self._table.look(now)
            missing, notes, self._table.notes = self._table.missing(), self._table.notes, []
            self._complete = self._complete or not missing
            there = [unit for unit in self._waiting if self._complete and missing.isdisjoint(s.node for s in unit)]
            away = sum(unit[0].role == SERVER for unit in self._waiting if unit not in there)
            ready = [unit for unit in there if away <= self._spare or unit[0].role != TRAINER]
            self._waiting = [unit for unit in self._waiting if unit not in ready]
            started = [spec for unit in ready for spec in unit]
            for spec in (spec for spec in started if spec.node):
                self._table.start(spec)
        for note in notes:
            self._note(note)
        for spec in (spec for spec in started if spec.role == SERVER):
            self._folder.excluded(spec.name).unlink(missing_ok=True)
        if self._waiting:
            self._remind(missing, now)
        super().start([spec for spec in started if not spec.node])

    def _remind(self, missing: set[int], now: float) -> None:
        """Name the nodes that are waited for. The run continues without those of servers alone."""
        away = missing.intersection(s.node for unit in self._waiting for s in unit) if self._complete else missing
        if self._complete and all(unit[0].role == SERVER for unit in self._waiting):
            self._needed_s = now
        nodes, fix = ", ".join(map(str, sorted(away))), f"start the same command there, with {VARIABLES[0]}"
        if now - self._needed_s > JOIN_S:
            raise ProcessFailed(f"node {nodes} did not join within {JOIN_S:.0f} s (fix: {fix})")
        if now - self._reminded_s > REMIND_S:
            self._reminded_s = now
            self._note(f"waits for node {nodes}: {fix}")
