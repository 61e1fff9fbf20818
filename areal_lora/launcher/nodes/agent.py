"""What the command of a run does on the nodes after the first: start, end and report the processes placed there.

An agent follows the launcher on node 0 from one start of the run to the next. It ends its processes when the run ends,
when the launcher is silent for ``SILENT_S``, and when the run has another session; if it is killed, its guardian does.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import msgspec
import zmq

from areal_lora.config.models import Config
from areal_lora.errors import ConfigError, EnvironmentError_, ExitCode
from areal_lora.launcher.nodes.supervisor import PLANE, WIRE
from areal_lora.launcher.nodes.table import JOIN_S, LAUNCHER, LOST_S, AgentReport, NodeOrders
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.start import previous_run
from areal_lora.launcher.supervise import STOP_GRACE_S, Interrupts, Supervisor
from areal_lora.network.rpc import Connection, ConnectionLost
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint, read_secret

POLL_S, LOOK_S, ANSWER_S = 0.2, 1.0, 10.0
SILENT_S = 2 * LOST_S


def run_agent(config: Config, folder: RunFolder, node: int, *, fresh: bool, note: Callable[[str], None]) -> int:
    """Follow the run in ``folder`` until it ends; returns its exit code. ``note`` prints a line.

    Raises ConfigError where node 0 refuses this one.
    """
    note(f"Node {node} of {config.cluster.nodes}: waiting for the launcher on node 0, in {folder}")
    until = time.monotonic() + JOIN_S
    with Interrupts() as interrupts:
        while not interrupts.count:
            if (session := _session(folder)) and RunFolder(folder.path, session).secret.exists():
                stay = _Stay(RunFolder(folder.path, session), node, interrupts, note)
                if (code := stay.run()) is not None:
                    return code
                until = max(until, stay.heard_s + JOIN_S)
            with suppress(ConfigError, OSError):  # node 0 may be writing the folder
                if not fresh and (previous := previous_run(folder)) is not None and previous.finished(config):
                    note("This run is done.")
                    return ExitCode.DONE
            if time.monotonic() > until:
                note(f"error: no launcher was there for {JOIN_S:.0f} s (fix: start the same command on node 0)")
                return ExitCode.TEMPORARY
            time.sleep(LOOK_S)
    return ExitCode.INTERRUPTED


def _session(folder: RunFolder) -> str:
    with suppress(OSError):
        return RunFolder.current(folder).session
    return ""


class _Stay:
    """One stay of this agent in a session of the run. ``heard_s``: when its launcher answered last."""

    def __init__(self, folder: RunFolder, node: int, interrupts: Interrupts, note: Callable[[str], None]) -> None:
        self._folder, self._interrupts, self._note, self._context = folder, interrupts, note, zmq.Context()
        self._me = AgentReport(node=node, agent=uuid4().hex, host=socket.gethostname(), pid=os.getpid())
        self._connection: Connection | None = None
        self._has, self._ended, self._stacks, self.heard_s = dict[int, ProcessSpec](), dict[int, int](), 0, 0.0

    def run(self) -> int | None:
        """Returns the exit code of the run; None where its launcher is lost, or not there."""
        try:
            if self._exchange() is None:
                return None
            os.environ[SESSION_VARIABLE] = self._folder.session
            self._note(f"Following the launcher of {self._folder}, session {self._folder.session}")
            with Supervisor(self._folder.logs, STOP_GRACE_S) as supervisor:
                return self._follow(supervisor)
        finally:
            self._disconnect()
            self._context.term()

    def _follow(self, supervisor: Supervisor) -> int | None:
        code, until = None, 0.0
        while True:
            for e in supervisor.poll():
                self._ended |= {n: e.code for n, spec in self._has.items() if spec == e.spec and n not in self._ended}
            if self._interrupts.count:
                self._exchange(leaves=True)
                self._note("Interrupted: this node leaves the run (once more to kill at once).")
                supervisor.stop(interrupted=self._interrupts)
                return ExitCode.INTERRUPTED
            if (orders := self._exchange()) is None:
                if time.monotonic() - self.heard_s > SILENT_S or _session(self._folder) != self._folder.session:
                    self._note("The launcher is lost: its processes on this node are ended.")
                    return code
                time.sleep(LOOK_S)
            elif orders.code is None:
                self._obey(supervisor, orders)
            elif code is None:
                code, until = orders.code, time.monotonic() + STOP_GRACE_S
                supervisor.terminate()
            elif orders.now or not supervisor.running() or time.monotonic() > until:
                supervisor.stop(0.0)
                self._exchange(leaves=True)
                self._note(f"The run has ended with exit code {code}.")
                return code
            time.sleep(POLL_S)

    def _obey(self, supervisor: Supervisor, orders: NodeOrders) -> None:
        if orders.stacks > self._stacks:
            self._stacks = orders.stacks
            supervisor.ask_stacks()
        unwanted = self._has.keys() - orders.starts.keys()
        if ending := [self._has[number] for number in unwanted - self._ended.keys()]:
            supervisor.end(ending)
        for number in unwanted:
            del self._has[number]
            self._ended.pop(number, None)
        for number, spec in orders.starts.items():
            if number not in self._has:
                self._has[number] = spec
                try:
                    supervisor.start([spec])
                except EnvironmentError_ as error:
                    with self._folder.log(spec.name).open("a", encoding="utf-8") as file:
                        file.write(f"{type(error).__name__}: {error}\n")
                    self._ended[number] = error.exit_code

    def _exchange(self, *, leaves: bool = False) -> NodeOrders | None:
        """None where the launcher does not answer. Raises ConfigError where it refuses this agent."""
        report = msgspec.structs.replace(self._me, ended=self._ended, leaves=leaves)
        try:
            if self._connection is None:
                if (endpoint := read_endpoint(self._folder, LAUNCHER, 0)) is None:
                    return None
                secret = read_secret(self._folder)
                self._connection = Connection(self._context, endpoint.host, endpoint.ports[PLANE], secret, WIRE)
            reply = self._connection.exchange(msgspec.json.encode(report), ANSWER_S)
        except (ConnectionLost, OSError) as error:
            if not (isinstance(error, ConnectionLost) and error.late):  # else the launcher may only be slow
                self._disconnect()
            return None
        self.heard_s, orders = time.monotonic(), msgspec.json.decode(reply, type=NodeOrders)
        if orders.refused:
            reason = f"node 0 refuses node rank {self._me.node}: {orders.refused}"
            raise ConfigError("cluster.kind", reason, "give each node another rank, and node 0 the same cluster.nodes")
        return orders

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
