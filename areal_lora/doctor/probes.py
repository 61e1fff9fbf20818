"""Probes of one machine. Each returns what it finds; what goes wrong is a value, not an exception.

``python -m areal_lora.doctor.probes --folder DIR`` writes the facts of its node. With ``--backend`` it is one of
``--world`` processes that broadcast to each other, and rank 0 writes the bandwidth. Rank and world may come from srun
(SLURM_PROCID). The rendezvous is a file in the shared folder, so no port is needed but those that gloo or NCCL open.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from areal_lora.config.facts import SHARED_MEMORY, GpuFacts, probe_gpus
from areal_lora.config.models import Config
from areal_lora.config.sections.run import Role, SlurmConfig
from areal_lora.doctor import role_probe
from areal_lora.errors import ConfigError
from areal_lora.launcher.start import NO_FLOCK
from areal_lora.network.addresses import find_place, set_variables
from areal_lora.processes.startup import take_devices
from areal_lora.run_folder.paths import sync_folder, write_file


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
    ``open_files`` is the hard limit, to which each role raises its own.
    """

    host: str
    resolved: list[str] = []
    address: str = ""
    address_problem: str = ""
    loop_problem: str = ""
    open_files: int = 0
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
    """Differences of log-probabilities of a perturbed adapter. ``skipped``: why not tried. ``problem``: of ``side``."""

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


ANSWER_S, END_S = 30.0, 15.0
IMAGE_S = 600.0
"""For the start of a container, whose image may be fetched."""
SRUNS = ("srun: ", "slurmstepd")
"""Lines that hide the cause of a step's end."""
BLOCK_BYTES = 1 << 20
CONFIG = "examined.json"
NBYTES, TIMES, MEET_S = 32 << 20, 4, 60.0


class NoAnswer(Exception):
    """A command that could not be started, failed or took too long."""


def answer_of(command: list[str], timeout_s: float = ANSWER_S, **variables: str) -> str:
    """Run ``command`` to its end and return what it printed. Raises NoAnswer with the reason."""
    environment = os.environ | variables
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        with subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            finally:
                _end(process)
    except OSError as error:
        raise NoAnswer(f"it cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"it gave no answer within {timeout_s:g} s") from None
    if process.returncode:
        lines = errors.strip().splitlines()
        last = ([line for line in lines if not line.startswith(SRUNS)] or lines or [""])[-1]
        raise NoAnswer(f"it ended with code {process.returncode}: {last}")
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """End a command that is still running: the step of an srun that is killed continues."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()


def probe_role(role: str, python: str, prefix: Sequence[str] = (), start_s: float = 0.0) -> RoleFacts:
    """Read the versions of an interpreter, with the folder and the PYTHONPATH that the processes of a run get.

    ``prefix``: words before the interpreter. The text of the script is an argument: a container lacks its file.
    """
    printed, script = "", Path(role_probe.__file__).read_text(encoding="utf-8")
    try:
        printed = answer_of([*prefix, python, "-c", script], ANSWER_S + start_s, PYTHONDONTWRITEBYTECODE="1")
        printed = printed.strip().rpartition("\n")[2]  # a wrapper may have greeted
        return msgspec.convert({"role": role, "python": python, **msgspec.json.decode(printed)}, RoleFacts)
    except NoAnswer as error:
        problem = str(error)
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError):
        problem = f"it is not a Python: it printed {printed[:80]!r}"
    return RoleFacts(role=role, python=python, problem=problem)


def probe_folder(root: Path) -> FolderFacts:
    """Try in ``root`` (or the nearest folder above that exists) what runs do there. Leaves nothing behind."""
    place = next((path for path in (root, *root.parents) if path.is_dir()), Path("/"))
    path = place / f".doctor-{secrets.token_hex(4)}"
    facts = {"path": str(root)}
    try:
        free = shutil.disk_usage(place).free
        path.mkdir()
    except OSError as error:
        return FolderFacts(path=str(root), write=_text(error))
    try:
        started = time.monotonic()
        for name, attempt in (
            ("write", lambda at: (at / "a").write_bytes(bytes(BLOCK_BYTES))),
            ("fsync", _try_fsync),
            ("rename", _try_rename),
        ):
            try:
                attempt(path)
            except OSError as error:
                facts[name] = _text(error)
                break
        fsync_s = time.monotonic() - started
        return FolderFacts(**facts, flock=_try_flock(path), free_bytes=free, fsync_s=fsync_s)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _text(error: OSError) -> str:
    return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"


def _try_fsync(folder: Path) -> None:
    with (folder / "a").open("r+b") as file:
        os.fsync(file)
    sync_folder(folder)


def _try_rename(folder: Path) -> None:
    """Replace a file that a reader holds open: the reader keeps the old one, the name leads to the new one."""
    with (folder / "a").open("rb") as reader:
        write_file(folder / "a", b"new")
        if len(reader.read()) != BLOCK_BYTES or (folder / "a").read_bytes() != b"new":
            raise OSError(errno.EIO, "a renamed file is not replaced as a whole")


def _try_flock(folder: Path) -> str:
    """Why flock does not exclude a second holder; empty where it does."""
    try:
        with (folder / "lock").open("wb") as first, (folder / "lock").open("wb") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return ""
            return "it does not exclude a second holder"
    except OSError as error:
        return f"the file system has none: {_text(error)}" if error.errno in NO_FLOCK else _text(error)


def probe_node(config: Config, folder: FolderFacts, shared: Path | None = None, host: str = "") -> NodeFacts:
    """Everything about this node. ``shared`` is a folder on the run root for the comparison of clocks.

    ``host``: this node's name in the allocation that this is a step of.
    """
    resolved: list[str] = []
    with contextlib.suppress(OSError):
        resolved = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)})
    cluster, address, problem = config.cluster, "", ""
    try:
        address = find_place(bind=cluster.bind, interface=cluster.interface, nodes=cluster.nodes, peers=()).address
    except ConfigError as error:
        problem = str(error)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        host=node_name(),
        resolved=resolved,
        address=address,
        address_problem=problem,
        loop_problem=_loop(address),
        open_files=1 << 30 if files == resource.RLIM_INFINITY else files,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        clock_ahead_s=None if shared is None or folder.write else _clock_ahead_s(shared),
        gpus=probe_gpus() if config.cluster.device == "cuda" else [],
        folder=folder,
        roles=[_role(config, role, python, host) for role, python in interpreters(config).items()],
    )


def _role(config: Config, role: Role, python: str, host: str) -> RoleFacts:
    """One of an allocation is in a step of its own where options of srun start its container."""
    prefix = prefix_of(config, role, host * (role in slurm_of(config).srun_extra))
    return probe_role(role, python, prefix, start_s(config, role))


def start_s(config: Config, *roles: Role) -> float:
    """Seconds that containers of ``roles`` may take to start, one after the other."""
    slurm = slurm_of(config)
    return IMAGE_S * sum(role in slurm.srun_extra or role in slurm.wrapper for role in roles)


def slurm_of(config: Config) -> SlurmConfig:
    """How roles are started; without settings where the cluster is no Slurm."""
    return config.cluster.slurm if config.cluster.kind == "slurm" else SlurmConfig()


def prefix_of(config: Config, role: Role, host: str = "", *options: str, **env: str) -> list[str]:
    """Words before the interpreter of ``role``, as in a run: here, or as a step on ``host`` of the allocation.

    ``env`` is set by words behind those of srun, whose options may pass no environment.
    """
    slurm, devices = slurm_of(config), [] if config.cluster.device == "cpu" else ["--gpu-bind=none"]
    place = ["--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    return slurm.step(role, *place, *devices, *options, **env) if host else slurm.prefix(role, **env)


def node_name() -> str:
    """Slurm's name of this node, or the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def interpreters(config: Config) -> dict[Role, str]:
    """Interpreter of each role; that of the controller is the one which runs this."""
    return {"trainer": config.trainer.python or sys.executable, "rollout": config.rollout.python or sys.executable}


def _loop(address: str) -> str:
    """Why a process of this node cannot reach a port of ``address``, which another one of it has bound."""
    if not address:
        return ""
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            with socket.create_connection(server.getsockname()[:2], timeout=3.0):
                return ""
    except OSError as error:
        return error.strerror or str(error)


def _clock_ahead_s(folder: Path) -> float:
    """This clock minus that of the file system, which stamps a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="clock-") as file:
        return time.time() - os.stat(file.name).st_mtime


def bandwidth(config: Config, folder: Path, backend: str, rank: int, world: int) -> BandwidthFacts:
    """Broadcast from rank 0 on the configured network, several times; an error is a ``problem``."""
    import torch
    import torch.distributed as dist

    cluster, limit = config.cluster, timedelta(seconds=MEET_S + start_s(config, "trainer"))
    try:
        take_devices(cluster.device)
        set_variables(find_place(bind=cluster.bind, interface=cluster.interface, nodes=cluster.nodes, peers=()))
        store = dist.FileStore(str(folder / f"store-{backend}"), world)
        store.set_timeout(limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        data = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda" if backend == "nccl" else "cpu")
        dist.broadcast(data, 0)
        started = time.monotonic()
        for _ in range(TIMES):
            dist.broadcast(data, 0)
        dist.barrier()
        took_s = time.monotonic() - started
        store.set(f"host-{rank}", node_name())
        hosts = [store.get(f"host-{i}").decode() for i in range(world)]
        dist.destroy_process_group()
        return BandwidthFacts(backend=backend, hosts=hosts, gbit_s=8e-9 * NBYTES * TIMES / took_s)
    except (ConfigError, RuntimeError, OSError) as error:  # torch raises its errors of groups as RuntimeError
        last = str(error).strip().splitlines()
        return BandwidthFacts(backend=backend, hosts=[node_name()], problem=last[0] if last else "failed")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.doctor.probes", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("SLURM_PROCID", "0")))
    args = parser.parse_args(argv)
    folder: Path = args.folder
    config = Config.model_validate_json((folder / CONFIG).read_bytes())
    if args.backend is None:
        facts = probe_node(config, probe_folder(config.run.root), folder, node_name())
        write_file(folder / f"node-{node_name()}.json", msgspec.json.encode(facts))
    else:
        speed = bandwidth(config, folder, args.backend, args.rank, args.world)
        if args.rank == 0:
            (folder / f"bandwidth-{args.backend}.json").write_bytes(msgspec.json.encode(speed))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
