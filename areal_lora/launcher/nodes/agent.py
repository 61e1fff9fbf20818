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
from areal_lora.launcher.nodes.supervisor import AGENTS, WIRE
from areal_lora.launcher.nodes.table import JOIN_S, LAUNCHER, LOST_S, AgentReport, Wanted
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.start import previous_run, with_absolute_root
from areal_lora.launcher.supervise import STOP_GRACE_S, Interrupts, Supervisor
from areal_lora.network.rpc import Connection, ConnectionLost
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint, read_secret

POLL_S, LOOK_S = 0.2, 1.0
ANSWER_S = 10.0
SILENT_S = 2 * LOST_S


def run_agent(config: Config, node: int, *, fresh: bool, say: Callable[[str], None]) -> int:
    """Follow the run until it ends; returns its exit code. Raises ConfigError where node 0 refuses this one."""
    folder, config = with_absolute_root(config).run_folder, with_absolute_root(config)
    say(f"Node {node} of {config.cluster.nodes}: waiting for the launcher on node 0, in {folder}")
    until = time.monotonic() + JOIN_S
    with Interrupts() as interrupts:
        while not interrupts.count and time.monotonic() < until:
            current = RunFolder(folder.path, _session(folder))
            if current.session and current.secret.exists():
                stay = _Stay(current, node, interrupts, say)
                code, joined = stay.run()
                if code is not None:
                    return code
                if joined:
                    until = time.monotonic() + JOIN_S
            if not fresh and _is_done(config, folder):
                say("This run is done.")
                return ExitCode.DONE
            time.sleep(LOOK_S)
    if interrupts.count:
        return ExitCode.INTERRUPTED
    say(f"error: no launcher of this run was there for {JOIN_S:.0f} s (fix: start the same command on node 0)")
    return ExitCode.TEMPORARY


def _session(folder: RunFolder) -> str:
    with suppress(OSError):
        return RunFolder.current(folder).session
    return ""


def _is_done(config: Config, folder: RunFolder) -> bool:
    """False also while node 0 writes the folder."""
    with suppress(ConfigError, OSError):
        previous = previous_run(folder)
        return previous is not None and previous.finished(config)
    return False


class _Stay:
    """One stay of this agent in a session of the run."""

    def __init__(self, folder: RunFolder, node: int, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        self._folder, self._node, self._interrupts, self._say = folder, node, interrupts, say
        self._id, self._context = uuid4().hex, zmq.Context()
        self._connection: Connection | None = None
        self._has, self._ended = dict[int, ProcessSpec](), dict[int, int]()
        self._stacks = 0

    def run(self) -> tuple[int | None, bool]:
        """Returns the code of the run, None where its launcher is lost or not there, and whether it was there."""
        try:
            if self._exchange() is None:
                return None, False
            os.environ[SESSION_VARIABLE] = self._folder.session
            self._say(f"Following the launcher of {self._folder}, session {self._folder.session}")
            with Supervisor(self._folder.logs, STOP_GRACE_S) as supervisor:
                return self._follow(supervisor), True
        finally:
            self._disconnect()
            self._context.term()

    def _follow(self, supervisor: Supervisor) -> int | None:
        heard = time.monotonic()
        code: int | None = None
        term_s = 0.0
        while True:
            for e in supervisor.poll():
                self._note(e.spec, e.code)
            leaves = self._interrupts.count > 0
            wanted = self._exchange(leaves=leaves)
            now = time.monotonic()
            if leaves:
                self._say("Interrupted: this node leaves the run (once more to kill at once).")
                supervisor.stop(interrupted=self._interrupts)
                return ExitCode.INTERRUPTED
            if wanted is None:
                if code is not None:
                    return code
                if now - heard > SILENT_S or _session(self._folder) != self._folder.session:
                    self._say("The launcher is lost: its processes on this node are ended.")
                    return None
                time.sleep(LOOK_S)
                continue
            heard = now
            if wanted.code is not None and code is None:
                code, term_s = wanted.code, now
                supervisor.terminate()
            if code is None:
                self._obey(supervisor, wanted)
            elif wanted.now or not supervisor.running() or now - term_s > STOP_GRACE_S:
                supervisor.stop(0.0)
                self._exchange(leaves=True)
                self._say(f"The run has ended with exit code {code}.")
                return code
            time.sleep(POLL_S)

    def _obey(self, supervisor: Supervisor, wanted: Wanted) -> None:
        if wanted.stacks > self._stacks:
            self._stacks = wanted.stacks
            supervisor.ask_stacks()
        unwanted = [number for number in self._has if number not in wanted.starts]
        for number in {*unwanted, *wanted.kill} & (self._has.keys() - self._ended.keys()):
            for e in supervisor.end([self._has[number]]):
                self._note(e.spec, e.code)
        for number in unwanted:
            del self._has[number]
            self._ended.pop(number, None)
        for number, spec in wanted.starts.items():
            if number not in self._has:
                self._has[number] = spec
                try:
                    supervisor.start([spec])
                except EnvironmentError_ as error:
                    with self._folder.log(spec.name).open("a", encoding="utf-8") as file:
                        file.write(f"{type(error).__name__}: {error}\n")
                    self._ended[number] = error.exit_code

    def _note(self, spec: ProcessSpec, code: int) -> None:
        self._ended |= {n: code for n, known in self._has.items() if known == spec and n not in self._ended}

    def _exchange(self, *, leaves: bool = False) -> Wanted | None:
        """None where the launcher does not answer. Raises ConfigError where it refuses this agent."""
        report = AgentReport(
            node=self._node,
            agent=self._id,
            host=socket.gethostname(),
            pid=os.getpid(),
            ended=self._ended,
            leaves=leaves,
        )
        try:
            if self._connection is None:
                endpoint = read_endpoint(self._folder, LAUNCHER, 0)
                if endpoint is None:
                    return None
                secret = read_secret(self._folder)
                self._connection = Connection(self._context, endpoint.host, endpoint.ports[AGENTS], secret, WIRE)
            reply = self._connection.exchange(msgspec.json.encode(report), ANSWER_S)
        except (ConnectionLost, OSError) as error:
            if not (isinstance(error, ConnectionLost) and error.late):  # else the launcher may only be slow
                self._disconnect()
            return None
        wanted = msgspec.json.decode(reply, type=Wanted)
        if wanted.refused:
            reason = f"node 0 refuses node rank {self._node}: {wanted.refused}"
            raise ConfigError("cluster.kind", reason, "give each node another rank, and node 0 the same cluster.nodes")
        return wanted

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
