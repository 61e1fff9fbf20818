"""Gather the facts of the machine or of the allocation, with a line of progress for each probe, and check them."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from areal_lora.config.facts import gather_facts
from areal_lora.config.models import Config
from areal_lora.doctor import probes
from areal_lora.doctor.canary import fly
from areal_lora.doctor.checks import LOGS_BYTES, DoctorFinding, check_all
from areal_lora.errors import ConfigError
from areal_lora.families.sites import adapter_size
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.slurm.job_query import hosts as expanded

NODE_S, BANDWIDTH_S = 60.0, 90.0
STATES_OF_A_CHECKPOINT = 3  # weights and two moments
Report = Callable[[str], None]


def examine(config: Config, report: Report, *, quick: bool = False, keep: bool = False) -> list[DoctorFinding]:
    """Probe this machine, or every node of the allocation that this runs in; returns all findings.

    ``quick``: without bandwidth and canary. Nothing remains in the run root, except the canary's logs with ``keep``.
    """
    step = partial(_step, report)
    with step("the run root"):
        folder = probes.probe_folder(config.run.root)
    with _workplace(config.run.root, folder, keep, report) as place:
        if place is not None:
            (place / probes.CONFIG).write_text(config.model_dump_json(), encoding="utf-8")
        # Of the Slurm allocation that this process runs in; none outside of one.
        hosts = expanded(os.environ.get("SLURM_JOB_NODELIST", "")) if shutil.which("srun") else []
        with step(f"{len(hosts)} nodes of the allocation" if hosts else "this machine"):
            nodes = _nodes(config, folder, place, hosts)
        speeds: list[probes.BandwidthFacts] = []
        backends = ("gloo", "nccl") if config.cluster.device == "cuda" else ("gloo",)
        for backend in backends if place is not None and not quick else ():
            with step(f"{backend} bandwidth"):
                speeds.append(_bandwidth(config, place, hosts, backend))
        flown = probes.CanaryFacts(skipped="--quick" if quick else "the run root cannot be written")
        if not quick and place is not None and not any(role.problem for node in nodes for role in node.roles):
            with step("the adapter canary"):
                flown = fly(config, place)
        elif not quick and place is not None:
            flown = probes.CanaryFacts(skipped="an interpreter cannot be used")
    facts = probes.DoctorFacts(
        nodes=nodes,
        missing_nodes=[host for host in hosts if host not in {node.host for node in nodes}],
        bandwidth=speeds,
        canary=flown,
    )
    return list(check_all(config, facts, needed_bytes(config)))


def needed_bytes(config: Config) -> int:
    """Disk space of the checkpoints that are kept, one in progress, the exported adapter, logs and records."""
    try:
        shape = make_plan(config, gather_facts(config, runs_here=False)).shape
    except ConfigError:  # its model is not here
        return LOGS_BYTES
    keep = config.checkpoint.keep_last + 2  # the best and one in progress
    files = sum(4 * adapter_size(shape, adapter.spec("")).file_parameters for adapter in config.adapters)
    return LOGS_BYTES + files * (STATES_OF_A_CHECKPOINT * keep + 1)


@contextlib.contextmanager
def _step(report: Report, what: str) -> Iterator[None]:
    """Progress lines with the seconds of a step."""
    started = time.monotonic()
    report(f"looking at {what} ...")
    yield
    report(f"  {time.monotonic() - started:.1f} s")


@contextlib.contextmanager
def _workplace(root: Path, folder: probes.FolderFacts, keep: bool, report: Report) -> Iterator[Path | None]:
    """A folder of its own on the file system of the run root; None where it cannot be written."""
    if folder.write:
        yield None
        return
    above = next(path for path in (root, *root.parents) if path.is_dir())
    place = above / f".doctor-{os.getpid()}"
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        if keep:
            report(f"kept {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def _nodes(config: Config, folder: probes.FolderFacts, place: Path | None, hosts: list[str]) -> list[probes.NodeFacts]:
    if not hosts or place is None:
        return [probes.probe_node(config, folder, place)]
    command = ["srun", "--overlap", f"--nodes={len(hosts)}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    module = [sys.executable, "-m", probes.__name__, "--folder", str(place)]
    with contextlib.suppress(probes.NoAnswer):  # a node whose file is missing is a finding
        probes.answer_of([*command, *module], NODE_S, OMP_NUM_THREADS="1")
    return [msgspec.json.decode(path.read_bytes(), type=probes.NodeFacts) for path in sorted(place.glob("node-*.json"))]


def _bandwidth(config: Config, place: Path | None, hosts: list[str], backend: str) -> probes.BandwidthFacts:
    """A broadcast between one process of each node, or between two of this machine."""
    assert place is not None
    world = max(2, len(hosts))
    python = probes.interpreters(config)["trainer"]
    module = [python, "-m", probes.__name__, "--folder", str(place), "--backend", backend, "--world", str(world)]
    commands = [[*module, "--rank", str(rank)] for rank in range(world)]
    if len(hosts) > 1:
        srun = ["srun", "--overlap", f"--nodes={world}", f"--ntasks={world}", "--ntasks-per-node=1"]
        commands = [[*srun, "--cpus-per-task=1", *module]]
    problem = "no answer"
    try:
        with ThreadPoolExecutor(world) as pool:
            list(pool.map(lambda command: probes.answer_of(command, BANDWIDTH_S, OMP_NUM_THREADS="1"), commands))
    except probes.NoAnswer as error:
        problem = str(error)
    try:
        return msgspec.json.decode((place / f"bandwidth-{backend}.json").read_bytes(), type=probes.BandwidthFacts)
    except FileNotFoundError:
        return probes.BandwidthFacts(backend=backend, hosts=hosts or ["this machine"], problem=problem)
