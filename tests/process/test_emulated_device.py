"""The code for GPUs on a CUDA device that is emulated: what fails on a GPU is then CUDA's part, or NCCL's.

The nightly run has all layouts of the trainer on it, with the versions that requirements/gpu-trainer.txt pins
(`test_gpu_versions.py`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from areal_lora.config.sections.run import Recompute
from tests.support.gpu.emulated.environment import emulating
from tests.support.gpu.engines import alone, differences, judge
from tests.support.launcher.command import configs
from tests.support.paths import ROOT, TINY_MODEL
from tests.support.sizes import NIGHTLY, sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEVICE = """
import json, torch
from torch import nn
from tests.support.gpu.emulated.cuda import counts
found = {}
torch.manual_seed(1)
layers = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
here, there = layers(), layers().cuda()
there.load_state_dict(here.state_dict())
x = torch.randn(5, 8)
for model, rows in ((here, x), (there, x.cuda())):
    model(rows)[:, 1::2].square().sum().backward()
pairs = zip(here.parameters(), there.parameters())
found["gradients"] = all(b.grad.is_cuda and torch.allclose(a.grad, b.grad.cpu(), atol=1e-5) for a, b in pairs)
try:
    x.cuda() + x
    found["mixed"] = ""
except RuntimeError as error:
    found["mixed"] = str(error)
found["scalar"] = (x.cuda() + torch.tensor(1.0)).is_cuda
far, near = x.cuda(), torch.zeros(5, 8)
near.copy_(far, non_blocking=True)
found["early"] = torch.equal(near, x)
far.zero_()
torch.cuda.synchronize()
found["late"] = torch.equal(near, x)
before = counts()
y = far.mul(2).index_select(0, torch.tensor([1, 0]).cuda())
found["launches"] = sum(n for name, n in (counts() - before).items() if name.startswith("aten::"))
before = counts()
y.sum().item(), y.nonzero(), y[y > 0], y.cpu(), y.tolist()
found["waits"] = dict((name, n) for name, n in (counts() - before).items() if name.startswith("waits"))
held = torch.cuda.memory_allocated()
block = torch.empty(1000, device="cuda")
found["held"] = torch.cuda.memory_allocated() - held
del block
found["freed"] = torch.cuda.memory_allocated() - held
print(json.dumps(found))
"""


def test_the_device_computes_as_a_cpu_does_and_refuses_what_a_gpu_refuses(tmp_path: Path) -> None:
    environment = emulating(tmp_path / "site", transformer_engine=False)
    done = subprocess.run([sys.executable, "-c", DEVICE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    waits = found.pop("waits")
    assert found.pop("mixed").startswith("Expected all tensors to be on the same device")
    assert found == {
        "gradients": True, "scalar": True, "early": False, "late": True, "launches": 2, "held": 4000, "freed": 0,
    }  # fmt: skip
    assert waits == {"waits: item": 1, "waits: copy to the host": 2, "waits: aten::nonzero": 2}


@pytest.mark.parametrize(
    ("engine", "recompute"),
    sample(
        [(engine, how) for engine in ("megatron", "fsdp") for how in get_args(Recompute)], 2, lambda case: [case[0]]
    ),
)
def test_the_trainer_for_gpus_is_right_and_the_host_waits_for_nothing_in_its_passes(
    tmp_path: Path, engine: str, recompute: Recompute
) -> None:
    """In bfloat16, with flash attention, grouped products and Transformer Engine."""
    environment = emulating(tmp_path / "site", transformer_engine=engine == "megatron")
    found = alone(tmp_path, engine, "bfloat16", recompute, "cuda", environment=environment)
    exact = alone(tmp_path, engine, "float32", "none", "cpu", environment=os.environ)
    print(differences(found, exact))
    judge(differences(found, exact))


SERVER = """
import areal_lora.config.recorded as recorded
read = recorded.read_config


def on_cpus(*args, **known):
    config = read(*args, **known)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cpu"})})


recorded.read_config = on_cpus
"""


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes: only with AREAL_LORA_NIGHTLY=1")
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_run_learns_with_its_trainer_on_the_device(tmp_path: Path, engine: str) -> None:
    """Its server is vLLM on the CPU, which takes this machine for one without a GPU."""
    environments = {"trainer": emulating(tmp_path / "site"), "rollout": {"PYTHONPATH": f"{tmp_path / 'server'}:{ROOT}"}}
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "sitecustomize.py").write_text(SERVER)
    for role, environment in environments.items():
        own = {name: environment[name] for name in ("PYTHONPATH", "EMULATED") if name in environment}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
        program = tmp_path / role
        program.write_text("\n".join(["#!/bin/sh", *lines, f'exec {shlex.quote(sys.executable)} "$@"', ""]))
        program.chmod(0o755)
    overrides = [
        f"run.root={tmp_path}",
        "run.steps=4",
        f"model.path={TINY_MODEL}",
        "adapters.0.task.kind=word_problems",
        "adapters.0.optimizer.lr=1e-3",
        "adapters.0.sampling.max_new_tokens=32",
        "rollout.max_model_len=256",
        "rollout.kv_cache_gib=0.5",
        "cluster.device_memory_gib=null",
        f"trainer.engine={engine}",
        *(f"{role}.python={tmp_path / role}" for role in environments),
    ]
    command = [sys.executable, "-m", "areal_lora.launch", *configs("one_gpu"), *overrides]
    own = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    records = [json.loads(line) for line in (tmp_path / "gsm8k-grpo-one-gpu/metrics.jsonl").read_text().splitlines()]
    accuracies = [record["accuracy"] for record in records if record["kind"] == "eval"]
    assert accuracies[-1] > accuracies[0] + 0.1
