"""The environment of ``versus.py``'s neighbour: a virtual environment in a cache folder, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRL = "1.16.0"
PACKAGES = (f"trl=={TRL}", "peft", "datasets", "accelerate", "transformers")
READS_OURS = ("pydantic", "pyyaml", "msgspec", "rich")  # what the task, its reward and the configuration import
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_lora"


def make_environment(cache: Path) -> Path:
    """Return the interpreter of an environment with TRL and without vLLM, made in ``cache`` if it is not there.

    Its versions are those of this environment (``requirements/cpu.txt``); torch comes from the configured index or
    from PyTorch's, as in ``requirements/install.sh``.
    """
    folder = cache / f"trl-{TRL}-torch-{version('torch')}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    print(f"installing TRL {TRL} into {folder}, a minute or more", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    torch = ["--no-deps", f"torch=={version('torch')}"]
    if subprocess.run([*pip, *torch], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*pip, *torch, "--index-url", TORCH_INDEX], check=True)
    pins = ["--constraint", str(ROOT / "requirements" / "cpu.txt")]
    subprocess.run([*pip, *pins, *PACKAGES, *READS_OURS], check=True)
    ready.touch()
    return python
