"""Gather the facts of the machine or of the allocation, with a line of progress for each probe, and check them.

The canary (`fly`): one small adapter from a real trainer to a real server of the configured interpreters. The trainer's
side is ``python -m areal_lora.doctor.examine --run-folder DIR``: a real engine with a perturbed
adapter, the real publish path, and the truth check of every publish. It prints one JSON object with the differences;
errors go to standard error, as in a run.

The model is the shipped tiny one; devices, data types and interpreters are those of the configuration. If the server
answers like the base, or unlike the trainer, the environment would train on answers of another policy.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import examples
from areal_lora.config.models import Config
from areal_lora.config.recorded import probe_tolerance, read_config, write_config
from areal_lora.config.sections.run import ClusterConfig
from areal_lora.doctor import probes
from areal_lora.doctor.checks import LOGS_BYTES, DoctorFinding, check_all
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.families.sites import adapter_size
from areal_lora.launcher.plan import MODULES, ROLES, SERVER, TRAINER, ProcessSpec, make_plan
from areal_lora.launcher.restarts import last_lines
from areal_lora.launcher.slurm import job_query
from areal_lora.launcher.supervise import Supervisor
from areal_lora.processes.startup import DEVICES_VARIABLE, VISIBLE, collector_paused, take_devices
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.run_folder.status import run_role

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
        hosts = job_query.hosts(os.environ.get("SLURM_JOB_NODELIST", "")) if shutil.which("srun") else []
        with step(f"{len(hosts)} nodes of the allocation" if hosts else "this machine"):
            nodes = _nodes(config, folder, place, hosts)
        speeds: list[probes.BandwidthFacts] = []
        # NCCL refuses two members on one device.
        nccl = config.cluster.device == "cuda" and (len(hosts) > 1 or len(_visible(config.cluster)) > 1)
        backends = ("gloo", "nccl") if nccl and not config.cluster.share_devices else ("gloo",)
        for backend in backends if place is not None and not quick else ():
            with step(f"{backend} bandwidth"):
                speeds.append(_bandwidth(config, place, hosts, backend))
        flown = probes.CanaryFacts(skipped="--quick" if quick else "the run root cannot be written")
        if not quick and place is not None and not any(role.problem for node in nodes for role in node.roles):
            with step("the adapter canary"):
                flown = fly(config, place, _first(config, hosts))
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
    limit_s = NODE_S + probes.start_s(config, "trainer", "rollout")
    with contextlib.suppress(probes.NoAnswer):  # a node whose file is missing is a finding
        probes.answer_of([*command, *module], limit_s, OMP_NUM_THREADS="1")
    return [msgspec.json.decode(path.read_bytes(), type=probes.NodeFacts) for path in sorted(place.glob("node-*.json"))]


def _bandwidth(config: Config, place: Path | None, hosts: list[str], backend: str) -> probes.BandwidthFacts:
    """A broadcast between one process of each node, or between two of this machine."""
    assert place is not None
    world = max(2, len(hosts))
    python = probes.interpreters(config)["trainer"]
    module = [python, "-m", probes.__name__, "--folder", str(place), "--backend", backend, "--world", str(world)]
    if len(hosts) > 1:
        options = (f"--nodes={world}", f"--ntasks={world}", "--ntasks-per-node=1")
        ranks = [[*probes.slurm_of(config).step("trainer", *options, OMP_NUM_THREADS="1"), *module]]
    else:
        host, devices = _first(config, hosts), [{DEVICES_VARIABLE: str(i)} if backend == "nccl" else {} for i in (0, 1)]
        prefixes = [probes.prefix_of(config, "trainer", host, OMP_NUM_THREADS="1", **own) for own in devices]
        ranks = [[*prefix, *module, "--rank", str(i)] for i, prefix in enumerate(prefixes)]
    problem = "no answer"

    try:
        with ThreadPoolExecutor(world) as pool:
            limit_s = BANDWIDTH_S + probes.start_s(config, "trainer")
            list(pool.map(lambda command: probes.answer_of(command, limit_s), ranks))
    except probes.NoAnswer as error:
        problem = str(error)
    try:
        return msgspec.json.decode((place / f"bandwidth-{backend}.json").read_bytes(), type=probes.BandwidthFacts)
    except FileNotFoundError:
        return probes.BandwidthFacts(backend=backend, hosts=hosts or ["this machine"], problem=problem)


def _first(config: Config, hosts: list[str]) -> str:
    """The node for what needs one: of a Slurm job, the first of its allocation, whose submit host may lack devices."""
    return hosts[0] if hosts and config.cluster.kind == "slurm" else ""


TINY_MODEL = examples() / "math" / "tiny_model"
MOST_S, STOP_S, POLL_S = 240.0, 4.0, 0.1
RANK, NAME = 4, "canary"
B_SCALE = 0.05
SERVER_S = 120.0 + 2 * probes.IMAGE_S


def canary_config(root: Path, like: Config | None = None) -> Config:
    """One trainer rank and one server with the tiny model, with devices and interpreters ``like`` those of a run.

    Without one they are on CPUs and in this interpreter.
    """
    cluster: dict[str, Any] = {"devices_per_node": 2, "bind": "127.0.0.1", "device": "cpu"}
    if like is not None:
        cluster |= {"device": like.cluster.device, "share_devices": like.cluster.share_devices}
    values: dict[str, Any] = {
        "run": {"name": NAME, "steps": 1, "root": str(root)},
        "model": {"path": str(TINY_MODEL), "dtype": "float32" if cluster["device"] == "cpu" else "bfloat16"},
        "adapters": [
            {
                "name": NAME,
                "rank": RANK,
                "alpha": 2 * RANK,
                "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                "task": {"kind": "word_problems"},
                "algorithm": {"kind": "grpo"},
                "optimizer": {"lr": 1e-3},
                "sampling": {"prompts_per_step": 8, "n_samples": 8, "max_new_tokens": 20},
            }
        ],
        "trainer": {
            "world_size": 1,
            "engine": like.trainer.engine if like is not None else "megatron",
            "python": like and like.trainer.python,
        },
        "rollout": {
            "python": like and like.rollout.python,
            "max_lora_rank": 8,
            "max_model_len": 128,
            "max_num_seqs": 16,
            "kv_cache_gib": 0.1,
            "engine_args": {"enforce_eager": True},
        },
        "weight_sync": {"timeout_s": 20.0},
        "cluster": cluster,
    }
    return Config.model_validate(values)


def fly(config: Config, root: Path, host: str) -> probes.CanaryFacts:
    """Run the canary in ``root``, a folder of its own on the file system of the run root.

    ``host``: node of the allocation; empty: this machine.
    """
    if not TINY_MODEL.is_dir():
        return probes.CanaryFacts(skipped=f"{TINY_MODEL} is not there; it belongs to a checkout of the repository")
    folder = RunFolder(root / NAME, "")
    folder.logs.mkdir(parents=True)
    write_config(folder, canary_config(root, config))
    create_secret(folder)
    server = _process(folder, config, host, SERVER, MODULES[SERVER], "--index", "0")
    trainer = _process(folder, config, host, TRAINER, "areal_lora.doctor.examine")
    codes: dict[str, int] = {}
    started, ready_s = time.monotonic(), 0.0
    try:
        with Supervisor(folder.logs, STOP_S) as supervisor:
            supervisor.start([server, trainer])
            while not codes and time.monotonic() - started < MOST_S + probes.start_s(config, "trainer", "rollout"):
                if not ready_s and folder.endpoint(server.name).exists():
                    ready_s = time.monotonic() - started
                time.sleep(POLL_S)
                codes = {ended.spec.name: ended.code for ended in supervisor.poll()}
            total_s = time.monotonic() - started
            if host:
                _end_step(supervisor, server)
    except EnvironmentError_ as error:
        return probes.CanaryFacts(side="launcher", problem=str(error))
    if trainer.name in codes or (ready_s and server.name not in codes):
        if codes.get(trainer.name) != 0:
            problem = _last_error(folder.log(trainer.name), codes.get(trainer.name))
            return probes.CanaryFacts(side="trainer", problem=problem, total_s=total_s)
        result = next(line for line in reversed(last_lines(folder.log(trainer.name), 100)) if line.startswith("{"))
        return probes.CanaryFacts(ready_s=ready_s, total_s=total_s, **msgspec.json.decode(result))
    problem = _last_error(folder.log(server.name), codes.get(server.name))
    return probes.CanaryFacts(side="rollout server", problem=problem)


def _end_step(supervisor: Supervisor, spec: ProcessSpec) -> None:
    """Let a process of a step clean up: srun, when signalled, kills its tasks without a grace."""
    if step := job_query.step_ids([os.environ["SLURM_JOB_ID"]]).get(spec.name):
        with contextlib.suppress(EnvironmentError_):  # it has ended meanwhile
            job_query.run("scancel", "--signal=TERM", step)
        until = time.monotonic() + 2 * STOP_S
        while spec in supervisor.running() and time.monotonic() < until:
            time.sleep(POLL_S)
            supervisor.poll()


def _process(folder: RunFolder, config: Config, host: str, name: str, module: str, *more: str) -> ProcessSpec:
    cluster, role = config.cluster, ROLES[name]
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env[SESSION_VARIABLE] = ""  # of a job in which the doctor may run
    if name == TRAINER:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    if cluster.device in VISIBLE:
        other = 0 if name == TRAINER or cluster.share_devices else len(_visible(cluster)) - 1
        env[DEVICES_VARIABLE] = str(max(0, other))
    argv = (probes.interpreters(config)[role], "-m", module, "--run-folder", str(folder), *more)
    spec = ProcessSpec(name, 0, argv, {})
    return replace(spec, argv=(*probes.prefix_of(config, role, host, f"--job-name={spec.name}", **env), *argv))


def _visible(cluster: ClusterConfig) -> list[str]:
    """Devices that this process may use; where that is unset, the first two of ``cluster.devices_per_node``."""
    listed = os.environ.get(VISIBLE.get(cluster.device, ""), ",".join(("0", "1")[: cluster.devices_per_node]))
    return [device for device in listed.split(",") if device]


def _last_error(log: Path, code: int | None) -> str:
    lines = [line.strip() for line in last_lines(log, 200) if line.strip()]
    own = [line for line in lines if not line.startswith(probes.SRUNS)]
    errors = [line for line in own if " ERROR " in line or "Error: " in line]
    how = "it gave no answer in time" if code is None else f"it ended with code {code}"
    return f"{how}; {(errors or own or lines or ['no output'])[-1][:600]}"


def publish_perturbed(folder: RunFolder) -> dict[str, float | None]:
    """Publish an adapter whose every matrix is random; return how its log-probabilities compare."""
    import torch

    from areal_lora.data.prompts import load_tokenizer
    from areal_lora.distributed.store import Exchange
    from areal_lora.run_folder.rendezvous import read_secret, wait_endpoint
    from areal_lora.trainer.adapter import build_adapter, probe_rows
    from areal_lora.trainer.build import build_engine, build_publisher
    from areal_lora.trainer.main import join_world
    from areal_lora.trainer.versions.publishing import AdapterPublishing
    from areal_lora.weight_sync.trainer.decisions import PublishReport
    from areal_lora.weight_sync.trainer.leader import Leader
    from areal_lora.weight_sync.trainer.membership import RendezvousWatch

    config = read_config(folder)
    take_devices(config.cluster.device)
    torch.set_num_threads(config.cluster.threads)
    join_world(config, folder, 0, 1)
    engine = build_engine(config)
    chosen = config.adapters[0]
    adapter = build_adapter(config, chosen, probe_rows(config, chosen, load_tokenizer(config.model.folder)))
    engine.add_adapter(adapter.spec, chosen.optimizer, adapter.run.seed)
    generator = torch.Generator().manual_seed(1)
    tensors = dict(engine.export_adapter(adapter.name))
    for name, tensor in tensors.items():
        if name.endswith("lora_B.weight"):
            tensors[name] = B_SCALE * torch.randn(tensor.shape, generator=generator)
    engine.load_adapter(adapter.name, tensors)
    scores = [engine.logprobs(adapter.probe, adapter=name) for name in (None, adapter.name)]
    wait_endpoint(folder, "server", 0, SERVER_S)
    watch = RendezvousWatch(folder, config.rollout.tp)
    leader = Leader(
        run=config.run.name,
        secret=read_secret(folder),
        servers=watch.present(),
        config=config.weight_sync,
        tolerance=probe_tolerance(config),
    )
    publisher = build_publisher(config, folder, engine, Exchange(timeout_s=SERVER_S), leader)
    reports: list[PublishReport] = []
    publishing = AdapterPublishing(
        engine, publisher, config.rollout.adapter_mode, lambda report, _: reports.append(report)
    )
    publishing.publish(adapter, 0)
    publishing.join(adapter.name)
    publishing.close()
    (report,) = reports
    return {
        "mean_abs": report.probe_mean_abs,
        "max_abs": report.probe_max_abs,
        "changed_by": float((scores[0] - scores[1]).abs().max()),
    }


if __name__ == "__main__":
    with collector_paused():
        code = run_role(TRAINER, lambda folder: print(json.dumps(publish_perturbed(folder)), flush=True))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
