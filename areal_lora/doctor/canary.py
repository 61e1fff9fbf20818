"""The canary: one small adapter from a real trainer to a real server of the configured interpreters.

The model is the shipped tiny one; devices, data types and interpreters are those of the configuration. If the server
answers like the base, or unlike the trainer, the environment would train on answers of another policy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from areal_lora.config.models import Config
from areal_lora.config.recorded import write_config
from areal_lora.config.sections.run import ClusterConfig
from areal_lora.doctor.probes import CanaryFacts, interpreters
from areal_lora.launcher.restarts import last_lines
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder
from areal_lora.run_folder.rendezvous import create_secret

TINY_MODEL = Path(__file__).resolve().parents[2] / "examples" / "math" / "tiny_model"
MOST_S, STOP_S, POLL_S = 240.0, 4.0, 0.1
RANK, NAME = 4, "canary"
DEVICE_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def canary_config(
    device: str, trainer: str | None, rollout: str | None, root: Path, *, share_devices: bool = False
) -> Config:
    """A run of one trainer rank and one server with the tiny model, in the interpreters of both roles."""
    on_cpu = device == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    values: dict[str, Any] = {
        "run": {"name": NAME, "steps": 1, "root": str(root)},
        "model": {"path": str(TINY_MODEL), "dtype": dtype},
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
        "trainer": {"world_size": 1, "python": trainer},
        "rollout": {
            "python": rollout,
            "max_lora_rank": 8,
            "max_model_len": 128,
            "max_num_seqs": 16,
            "kv_cache_gib": 0.1,
            "enforce_eager": True,
        },
        "weight_sync": {"timeout_s": 20.0},
        "cluster": {"device": device, "devices_per_node": 2, "share_devices": share_devices, "bind": "127.0.0.1"},
    }
    return Config.model_validate(values)


def plain_config() -> Config:
    """A configuration of this interpreter, the CPUs of this machine and ``runs/`` of the working folder."""
    return canary_config("cpu", None, None, Path.cwd() / "runs")


def fly(config: Config, root: Path) -> CanaryFacts:
    """Run the canary in ``root``, a folder of its own on the file system of the run root."""
    if not TINY_MODEL.is_dir():
        return CanaryFacts(skipped=f"{TINY_MODEL} is not there; it belongs to a checkout of the repository")
    folder = RunFolder(root / NAME, "")
    folder.logs.mkdir(parents=True)
    cluster = config.cluster
    small = canary_config(
        cluster.device, config.trainer.python, config.rollout.python, root, share_devices=cluster.share_devices
    )
    write_config(folder, small)
    create_secret(folder)
    started = time.monotonic()
    python = interpreters(config)
    flight = _Flight(folder, small.cluster)
    try:
        server = flight.start("server", python["rollout"], "areal_lora.engine.vllm_ext.server.main", "--index", "0")
        trainer = flight.start("trainer", python["trainer"], "areal_lora.doctor.canary_trainer")
        ready_s = 0.0
        while (code := trainer.poll()) is None:
            late = time.monotonic() - started > MOST_S
            if not ready_s and folder.endpoint("server-0").exists():
                ready_s = time.monotonic() - started
            if server.poll() is not None or (late and not ready_s):
                return CanaryFacts(side="rollout server", problem=flight.last_error("server", server.poll()))
            if late:
                return CanaryFacts(side="trainer", problem=flight.last_error("trainer", None))
            time.sleep(POLL_S)
        total_s = time.monotonic() - started
        if code:
            return CanaryFacts(side="trainer", problem=flight.last_error("trainer", code), total_s=total_s)
        found = msgspec.json.decode(flight.output("trainer").splitlines()[-1])
        return CanaryFacts(ready_s=ready_s, total_s=total_s, **found)
    except OSError as error:
        return CanaryFacts(side="launcher", problem=f"{error.filename}: {error.strerror}")
    finally:
        flight.end()


class _Flight:
    """The two processes of a canary; all that they started ends with them."""

    def __init__(self, folder: RunFolder, cluster: ClusterConfig) -> None:
        self._folder, self._cluster = folder, cluster
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, python: str, module: str, *more: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        environment[SESSION_VARIABLE] = ""  # of a job in which the doctor may run
        if role == "trainer":
            environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        if variable := DEVICE_VARIABLES.get(self._cluster.device):
            devices = environment.get(variable, "0,1").split(",")
            first = role == "trainer" or self._cluster.share_devices
            environment[variable] = devices[0] if first else devices[-1]
        command = [python, "-m", module, "--run-folder", str(self._folder), *more]
        with self._folder.log(role).open("wb") as log, self._output(role).open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment, start_new_session=True
            )
        self._running.append(process)
        return process

    def _output(self, role: str) -> Path:
        return self._folder.path / f"{role}.out"

    def output(self, role: str) -> str:
        return self._output(role).read_text(encoding="utf-8", errors="replace")

    def last_error(self, role: str, code: int | None) -> str:
        """The last error in the log of a role, or its last line."""
        lines = [line.strip() for line in last_lines(self._folder.log(role), 200) if line.strip()]
        errors = [line for line in lines if " ERROR " in line or "Error: " in line]
        how = "it gave no answer in time" if code is None else f"it ended with code {code}"
        return f"{how}; {(errors or lines or ['no output'])[-1][:600]}"

    def end(self) -> None:
        """SIGTERM to both, then SIGKILL to them and their children."""
        children: list[psutil.Process] = []
        for process in self._running:
            with contextlib.suppress(psutil.Error):
                children += psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.05, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
