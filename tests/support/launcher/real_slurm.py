"""A real Slurm on this machine: munged, slurmctld and four slurmd that stand for four nodes.

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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NODES = 4
START_S, STOP_S, REVOKED_S = 30.0, 10.0, 2.5
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIGURATION = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,default_queue_depth=10
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{last}] CPUs=4 State=UNKNOWN
PartitionName=low Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_not() -> str:
    """Why a real Slurm cannot run here; empty where it can. Installs the packages where that is possible."""
    if os.geteuid() != 0:
        return "a real Slurm needs root here"
    if missing_programs() and shutil.which("apt-get"):
        for command in (("apt-get", "update"), ("apt-get", "install", "-y", "slurm-wlm", "munge")):
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(command, env=environment, capture_output=True, check=False, timeout=240)
    missing = missing_programs()
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else ""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=search_path()) is None]


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Slurm:
    """Commands of the cluster; ``environment`` is what a program needs to talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": search_path(),
        }

    def run(self, *command: str, check: bool = True, timeout_s: float = 30.0) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """``RUNNING``, ``COMPLETED``, ... as slurmctld has it."""
        return self.job(job)["JobState"]

    def job(self, job: str) -> dict[str, str]:
        fields = (word.partition("=") for word in self.run("scontrol", "-o", "show", "job", job).split())
        return {key: value for key, _, value in fields}

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{self.logs()}"
            time.sleep(0.1)

    def until_over(self, job: str, timeout_s: float = 30.0) -> dict[str, str]:
        """Wait until ``job`` neither waits nor runs any more."""
        going = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
        self.until(f"the end of job {job}", lambda: self.state(job) not in going, timeout_s)
        return self.job(job)

    def until_requeued(self, job: str, timeout_s: float = 30.0) -> None:
        """Wait until ``job`` was requeued, and let it begin: Slurm would wait for two minutes more."""
        self.until(f"job {job} to be requeued", lambda: self.job(job)["Restarts"] == "1", timeout_s)
        self.until(f"job {job} to be over", lambda: self.state(job) != "COMPLETING")
        # slurmd refuses what was signed in the second in which it was told of the end, or before.
        time.sleep(REVOKED_S)

        def begun() -> bool:
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            return self.state(job) != "PENDING"

        self.until(f"job {job} to begin again", begun)

    def logs(self) -> str:
        tails = [
            f"--- {path.name}\n" + path.read_text(errors="replace")[-1500:] for path in self.folder.glob("slurm*.log")
        ]
        return "\n".join(tails)


@contextlib.contextmanager
def started() -> Iterator[Slurm]:
    """Start the daemons; end them and whatever jobs have left when the context ends."""
    # A socket's path has to be short, so not pytest's folder.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    slurm, daemons = Slurm(folder), list[subprocess.Popen[bytes]]()

    def daemon(*command: str) -> None:
        log = (folder / f"{len(daemons)}-{Path(command[0]).name}.log").open("wb")
        daemons.append(subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log, start_new_session=True))

    try:
        _configure(folder)
        daemon(
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
        daemon("slurmctld", "-D")
        for node in range(1, NODES + 1):
            daemon("slurmd", "-D", "-N", f"n{node}")
        idle = " ".join(["idle"] * NODES)
        slurm.until(
            "four idle nodes",
            lambda: slurm.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t", check=False).replace("\n", " ") == idle,
            START_S,
        )
        yield slurm
    finally:
        subprocess.run(["scancel", "--full", "--user=root"], env=slurm.environment, capture_output=True, check=False)
        _end(daemons)
        _end_steps(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    ports = _free_ports(1 + NODES)
    text = CONFIGURATION.format(host=socket.gethostname(), ports=ports, last=ports[-1], folder=folder, nodes=NODES)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def _free_ports(count: int) -> list[int]:
    """One port, and ``count - 1`` more that follow each other."""
    for first in range(21000 + os.getpid() % 8000, 32000, count):
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


def _end_steps(folder: Path) -> None:
    """A slurmstepd outlives its slurmd; each has the cluster's folder in its environment."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                os.kill(int(path.name), signal.SIGKILL)
