"""Embedded runs of models of different shapes, and the memory that their processes used."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_lora.launcher.plan import MODULES, SERVER
from tests.support.launcher.command import plain_run
from tests.support.paths import EXAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of random weights, and the overrides of its run."""

    layers: int
    hidden: int
    experts: int
    expert_ffn: int
    vocab: int
    overrides: tuple[str, ...] = ()


# Token budgets that the batches fill: two or three equal micro-batches, with a few percent to spare.
SHAPES = {
    "many experts": Shape(
        layers=8,
        hidden=512,
        experts=32,
        expert_ffn=256,
        vocab=128,
        overrides=("trainer.max_tokens_per_microbatch=4650",),
    ),
    "wide vocabulary": Shape(
        layers=2,
        hidden=256,
        experts=8,
        expert_ffn=256,
        vocab=8192,
        overrides=("trainer.max_tokens_per_microbatch=3500", "rollout.kv_cache_gib=0.5"),
    ),
    "wide experts": Shape(
        layers=8,
        hidden=384,
        experts=8,
        expert_ffn=384,
        vocab=128,
        overrides=("trainer.max_tokens_per_microbatch=4850",),
    ),
}
SHORT = ("run.steps=2", "eval.every_steps=0", "adapters.0.task.n_eval=8", "rollout.gpu_memory_utilization=0.3")


def make_model(shape: Shape, folder: Path) -> Path:
    """The tiny model's tokenizer with other weights."""
    shutil.copytree(EXAMPLES / "tiny_model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig.from_pretrained(EXAMPLES / "tiny_model")
    config.num_hidden_layers, config.hidden_size, config.vocab_size = shape.layers, shape.hidden, shape.vocab
    config.num_experts = config.num_local_experts = shape.experts
    config.moe_intermediate_size = shape.expert_ffn
    config.num_attention_heads, config.num_key_value_heads = shape.hidden // 32, shape.hidden // 64
    config.mlp_only_layers = []
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


@dataclass(slots=True)
class Peaks:
    """Largest resident set of each process, by role; ``total`` is the largest sum at one time."""

    by_pid: dict[int, tuple[str, int]] = field(default_factory=dict)
    total: int = 0

    def role(self, role: str) -> list[int]:
        return [nbytes for name, nbytes in self.by_pid.values() if name == role]


def measured(shape: Shape, folder: Path, *overrides: str, timeout_s: float = 550.0) -> Peaks:
    """Run a few steps and return the peaks of resident memory. Asserts that the run ends well."""
    model = make_model(shape, folder / "model")
    command = plain_run(f"run.root={folder}", f"model.path={model}", *SHORT, *shape.overrides, *overrides)
    peaks, deadline = Peaks(), time.monotonic() + timeout_s
    with (folder / "console.txt").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as launcher:
        root = psutil.Process(launcher.pid)
        while launcher.poll() is None:
            if time.monotonic() > deadline:
                launcher.terminate()
            _look(root, peaks)
            time.sleep(0.1)
    assert launcher.returncode == 0, (folder / "console.txt").read_text()[-3000:]
    return peaks


def _look(root: psutil.Process, peaks: Peaks) -> None:
    total = 0
    for process, role in _roles(root):
        try:
            now = process.memory_info().rss
            high = int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        except (psutil.Error, OSError, IndexError):
            continue
        total += now
        peaks.by_pid[process.pid] = (role, max(high, peaks.by_pid.get(process.pid, ("", 0))[1]))
    peaks.total = max(peaks.total, total)


def _roles(root: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """Processes of the run with their role; children of a server have ``server worker``."""
    try:
        children = root.children()
    except psutil.Error:
        return
    for child in children:
        try:
            words = " ".join(child.cmdline())
            role = next((role for role, module in MODULES.items() if module in words), "other")
            yield child, role
            for inner in child.children(recursive=True):
                yield inner, f"{role} worker" if role == SERVER else f"{role} child"
        except psutil.Error:
            continue
