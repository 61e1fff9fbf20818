"""A real Slurm on this machine: munged, slurmctld, and slurmd that stand for nodes, or one in each host.

Debian's packages ``slurm-wlm`` and ``munge``, installed with apt where they are missing and this is root. Sockets,
ports, keys and state are the cluster's own, in a temporary folder; nothing outside it is read or written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from areal_lora.processes import stacks
from tests.support.launcher.namespaces import Host
from tests.support.packages import missing, search_path

NODES = 8
WAIT_S, STOP_S, REVOKED_S = 150.0, 60.0, 1.5
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIGURATION = """\
ClusterName=t
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n.spool
SlurmUser=root
StateSaveLocation={folder}/state
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
KillWait=5
SlurmdTimeout=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,default_queue_depth=10
{nodes}
PartitionName=low Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=2
"""
# Slurm's own listeners take any address, unless the host name resolves to the right one (NoInAddrAny).
PROCESSES = {"slurmctld", "slurmd", "slurmstepd", "srun", "sbatch"}


def why_not() -> str:
    """Why a real Slurm cannot run here; empty where it can. Installs the packages where that is possible."""
    if os.geteuid() != 0:
        return "a real Slurm needs root here"
    return missing(PROGRAMS, ("slurm-wlm", "munge"))


class Slurm:
    """Commands of the cluster; ``environment`` is what a program needs to talk to it.

    Given hosts, the first is the login node with slurmctld, and the others are the nodes.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host] = ()) -> None:
        self.folder = folder
        self.login = hosts[0] if hosts else None
        self.nodes: dict[str, Host | None] = {host.name: host for host in hosts[1:]}
        self.nodes = self.nodes or {f"n{node}": None for node in range(1, NODES + 1)}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._restarting = threading.Lock()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": search_path(),
        }

    def run(self, *command: str, check: bool = True, timeout_s: float = WAIT_S) -> str:
        done = self._done(command, timeout_s)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def outcome(self, *command: str) -> str:
        """All that a command prints, whether it succeeds or not."""
        done = self._done(command)
        return done.stdout + done.stderr

    def _done(self, command: Sequence[str], timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        command = self.login.command(*command) if self.login else command
        environment = self.environment
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s)

    def until_signals_are_kept(self, job: str) -> None:
        """Wait until the batch script of ``job`` has run its first commands."""

        def caught() -> bool:
            for process in self.processes():
                with contextlib.suppress(psutil.Error, OSError):
                    if process.environ().get("SLURM_JOB_ID") == job and stacks.can_dump(process.pid):
                        return True
            return False

        self.until("the traps of the batch script", caught)

    def state(self, job: str) -> str:
        """``RUNNING``, ``COMPLETED``, ... as slurmctld has it."""
        return self.job(job)["JobState"]

    def job(self, job: str) -> dict[str, str]:
        fields = (word.partition("=") for word in self.run("scontrol", "-o", "show", "job", job).split())
        return {key: value for key, _, value in fields}

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self._restart_crashed_nodes()
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{self.logs()}"
            time.sleep(0.1)

    def jobs(self) -> set[str]:
        """Ids of all jobs that are not over."""
        return set(self.run("squeue", "-h", "-a", "-o", "%A").split())

    def cancel(self, jobs: set[str]) -> None:
        """As after a failed test: a job that no test ends would keep its nodes from the next one."""
        if jobs:
            self.run("scancel", "--full", *sorted(jobs), check=False)

    def until_over(self, job: str, timeout_s: float = WAIT_S) -> dict[str, str]:
        """Wait until ``job`` neither waits nor runs any more."""
        going = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
        # Twice: a requeued job may show the end of its earlier start for a moment.
        for _ in range(2):
            self.until(f"the end of job {job}", lambda: self.state(job) not in going, timeout_s)
            time.sleep(0.3)
        return self.job(job)

    def start(self, name: str, *command: str, host: Host | None = None) -> None:
        command = tuple(host.command(*command)) if host else command
        with (self.folder / f"daemon-{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node, host=self.nodes[node])

    def _restart_crashed_nodes(self) -> None:
        """Debian's slurmd crashes now and then; its steps outlive it, and a new one finds them."""
        with self._restarting:
            for node in self.nodes:
                daemon = self.daemons.get(node)
                if daemon is not None and (code := daemon.poll()) is not None:
                    print(f"slurmd of {node} ended with {code}; it is restarted")
                    self.start_node(node)

    def start_controller(self) -> None:
        self.start("slurmctld", "slurmctld", "-D", host=self.login)

    def lose_node(self, node: str) -> None:
        """As if its power had failed: its slurmd and all of its processes are gone.

        slurmctld would notice that by itself after SlurmdTimeout, and is told to save the time.
        """
        with self._restarting:
            daemon = self.daemons.pop(node)
        for _ in range(2):  # what began meanwhile
            for process in self.processes():
                with contextlib.suppress(psutil.Error, ProcessLookupError):  # it may end at any moment
                    if process.environ().get("SLURMD_NODENAME") == node:
                        parent = process.parent()
                        if parent is not None and parent.name() == "slurmstepd":
                            parent.kill()
                        process.kill()
            daemon.kill()
            daemon.wait()
        for _ in range(4):  # a late answer of the daemon's returns the node to service
            self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
            time.sleep(0.5)

    def processes(self) -> list[psutil.Process]:
        """All that jobs have started. Daemons aside, each has the cluster's folder in its environment."""
        daemons, found = {daemon.pid for daemon in [*self.daemons.values()]}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                of_a_job = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if of_a_job and not {process.pid, process.ppid()} & daemons:
                    found.append(process)
        return found

    def processes_of(self, job: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.environ().get("SLURM_JOB_ID") == job:
                    found.append(process)
        return found

    def until_requeued(self, job: str) -> None:
        """Wait until ``job`` was requeued, and let it begin: Slurm would wait for two minutes more."""
        self.until(f"job {job} to be requeued", lambda: self.job(job)["Restarts"] == "1")
        self.until(f"job {job} to be over", lambda: self.state(job) != "COMPLETING")
        # slurmd refuses what was signed in the second in which it was told of the end, or before.
        time.sleep(REVOKED_S)

        def begun() -> bool:
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            return self.state(job) != "PENDING"

        self.until(f"job {job} to begin again", begun)

    def until_idle(self) -> None:
        idle = " ".join(["idle"] * len(self.nodes))
        self.until(
            "idle nodes",
            lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t", check=False).replace("\n", " ") == idle,
        )

    def logs(self) -> str:
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n" + path.read_text(errors="replace")[-1500:] for path in paths)


@contextlib.contextmanager
def started(hosts: Sequence[Host] = ()) -> Iterator[Slurm]:
    """Start the daemons; end them and whatever jobs have left when the context ends."""
    # A socket's path has to be short, so not pytest's folder.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    slurm = Slurm(folder, hosts)
    try:
        _configure(slurm)
        _start_munged(slurm)
        slurm.start_controller()
        for node in slurm.nodes:
            slurm.start_node(node)
        slurm.until_idle()
        yield slurm
    finally:
        slurm.run("scancel", "--full", "--user=root", check=False)
        if hosts:  # `unshare` ignores SIGTERM; SIGKILL ends what runs in its namespace, too
            for daemon in slurm.daemons.values():
                daemon.kill()
        _end([*slurm.daemons.values()])
        for process in slurm.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


PRETENDED = """\
GresTypes=gpu
SlurmdTimeout=0
NodeName=h[1-8] NodeHostname={host} NodeAddr=127.0.0.1 Port=[29001-29008] CPUs=192 RealMemory=2000000 \
Gres=gpu:h100:8 Feature=h100 State=IDLE
NodeName=l[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[29017-29020] CPUs=64 RealMemory=1000000 \
Gres=gpu:l40s:4 Feature=l40s State=IDLE
NodeName=c1 NodeHostname={host} NodeAddr=127.0.0.1 Port=29025 CPUs=32 RealMemory=64000 State=IDLE
PartitionName=gpu Nodes=h[1-8],l[1-4] Default=YES MaxTime=INFINITE State=UP
PartitionName=cpu Nodes=c1 MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def pretended() -> Iterator[Slurm]:
    """A slurmctld that believes in GPU nodes, without slurmd: for ``sbatch --test-only``. Nothing can run.

    Some seconds after its start it notices that no node answers (``idle``); `refreshed` starts it again.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    slurm = Slurm(folder)
    try:
        _configure(slurm, pretend=True)
        _start_munged(slurm)
        refreshed(slurm)
        yield slurm
    finally:
        _end([*slurm.daemons.values()])
        shutil.rmtree(folder, ignore_errors=True)


def refreshed(slurm: Slurm) -> None:
    """Start the slurmctld of `pretended`, again if it runs and has noticed that its nodes do not answer."""
    if idle(slurm):
        return
    if "slurmctld" in slurm.daemons:
        _end([slurm.daemons.pop("slurmctld")])
    shutil.rmtree(slurm.folder / "state")
    (slurm.folder / "state").mkdir()
    slurm.start_controller()
    slurm.until("idle nodes", lambda: "idle" in slurm.outcome("sinfo", "-h", "-o", "%t").split())


def idle(slurm: Slurm) -> bool:
    return "slurmctld" in slurm.daemons and set(slurm.outcome("sinfo", "-h", "-o", "%t").split()) == {"idle"}


def _start_munged(slurm: Slurm) -> None:
    folder = slurm.folder
    slurm.start(
        "munged",
        "munged",
        "--foreground",
        "--force",
        "--num-threads=2",
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munge.seed",
    )
    slurm.until("munged", (folder / "munge.socket").exists)


def _configure(slurm: Slurm, *, pretend: bool = False) -> None:
    folder, ports = slurm.folder, free_ports(1 + NODES)
    host, address = socket.gethostname(), "127.0.0.1"
    nodes = f"NodeName=n[1-{NODES}] NodeHostname={host} NodeAddr={address} Port=[{ports[1]}-{ports[-1]}]"
    nodes += " CPUs=4 State=UNKNOWN"
    if slurm.login:
        host, address = slurm.login.name, slurm.login.address
        made = [node for node in slurm.nodes.values() if node]
        nodes = "\n".join(f"NodeName={n.name} NodeAddr={n.address} Port={ports[1]} CPUs=4 State=UNKNOWN" for n in made)
    text = CONFIGURATION.format(
        host=host, address=address, ports=ports, folder=folder, nodes=nodes, names=",".join(slurm.nodes)
    )
    if pretend:
        kept = [line for line in text.splitlines() if not line.startswith(("NodeName=", "PartitionName="))]
        text = "\n".join(kept).replace("=CR_Core", "=CR_Core_Memory") + "\n"
        text += PRETENDED.format(host=socket.gethostname())
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def free_ports(count: int) -> list[int]:
    """One port, and ``count - 1`` more that follow each other; none that a connection is given."""
    for first in range(21000 + os.getpid() * 64 % 8000, 32000, count):  # far from those of the other lane
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return list(range(first, first + count))
    raise AssertionError("no free ports")


def _end(daemons: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(daemons):
        process.send_signal(signal.SIGTERM)
    for process in reversed(daemons):
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
