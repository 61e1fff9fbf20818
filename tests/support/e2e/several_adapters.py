"""Runs of the example with three adapters, small and repeatable, and what they have trained as digests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from areal_lora.checkpoint.checkpoint_store import version_folder, versions_in
from areal_lora.checkpoint.state import MANIFEST_FILE, decode_manifest
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import forked_python
from tests.support.e2e.metrics import records
from tests.support.launcher.command import forked_roles
from tests.support.paths import EXAMPLES, ROOT

STEPS = {"attention": 5, "experts": 2, "shared": 5}
SEED = 2
"""With it two prompts a step are enough: some answers are right in each step, and not all, so that weights change."""
SHORT = (
    "rollout.max_staleness=0",
    "checkpoint.keep_last=1000",
    "eval.every_steps=0",
    "run.max_restarts=0",
    "weight_sync.timeout_s=120",  # a server that is stalled for 20 s is not lost
)
REPEATABLE = ("rollout.deterministic=true", *SHORT)
"""A server computes one sequence at a time."""


def entries(*names: str, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of the example, small, with ``changes`` by name."""
    example = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())
    chosen = []
    for entry in example["adapters"]:
        if entry["name"] not in names:
            continue
        entry["task"] = {"kind": "word_problems", "n_eval": 4}
        entry["sampling"] |= {"prompts_per_step": 2, "n_samples": 4, "max_new_tokens": 16}
        entry.pop("max_staleness", None)
        entry |= {"steps": STEPS[entry["name"]]} | changes.get(entry["name"], {})
        chosen.append(entry)
    return chosen


@dataclass(frozen=True)
class Ended:
    """A run that has ended. ``states`` are bytes of weights and moments by adapter and version, as digests."""

    code: int
    output: str
    folder: RunFolder
    states: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in records(self.folder.path) if record["kind"] == "step"]


def run(
    root: Path,
    name: str,
    adapters: list[dict[str, Any]],
    *swept: str,
    model: Path = EXAMPLES / "tiny_model",
    cwd: Path = ROOT,
    overrides: Sequence[str] = REPEATABLE,
) -> Ended:
    """A run of ``adapters``; a sweep of the only one where overrides and options of a sweep are given."""
    base = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())
    base["model"]["path"] = str(model)
    base |= {"adapters": adapters, "run": {"name": name, "root": str(root), "steps": 10, "seed": SEED}}
    (root / f"{name}.yaml").write_text(json.dumps(base))
    verb = ["areal_lora", "sweep"] if swept else ["areal_lora.launch"]
    command = [forked_python(), "-m", *verb, "--config", str(root / f"{name}.yaml"), *overrides, *swept]
    command += forked_roles(root)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    folder = RunFolder(root / name)
    states = states_of(folder, [path.name for path in folder.checkpoints.iterdir()])
    return Ended(done.returncode, done.stdout + done.stderr, folder, states)


def states_of(folder: RunFolder, names: list[str]) -> dict[str, dict[int, list[str]]]:
    states = {}
    for name in names:
        versions = folder.adapter_checkpoints(name)
        manifests = {
            v: decode_manifest((version_folder(versions, v) / MANIFEST_FILE).read_bytes())
            for v in versions_in(versions)
        }
        states[name] = {v: [entry.blake2b for entry in m.files] for v, m in manifests.items()}
    return states
