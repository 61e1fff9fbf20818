"""Runs processes given as JSON through the real ``run_local``; the tests start it as a process of its own.

Each is the code of an interpreter, or the words of a command.

``python -m tests.support.launcher.drive RUN_FOLDER GRACE_S '[["trainer", 0, "print(1)"], ...]' [a.b=c ...]``
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.recorded import write_config
from areal_lora.families.registry import known_config
from areal_lora.launcher import restarts, run, watch
from areal_lora.launcher.plan import ProcessSpec, make_plan
from areal_lora.obs.console import run_console
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import EXAMPLES


def main() -> int:
    folder, processes = Path(sys.argv[1]), json.loads(sys.argv[3])
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [f"run.root={folder.parent}", f"run.name={folder.name}", *sys.argv[4:]],
    )
    plan = make_plan(config, Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")))
    specs = tuple(
        ProcessSpec(
            role=role,
            index=index,
            argv=tuple(code) if isinstance(code, list) else (sys.executable, "-u", "-c", code),
            env={},
        )
        for role, index, code in processes
    )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_config(RunFolder(folder), config)
    dummy = replace(plan, run_folder=RunFolder(folder), processes=specs)
    run.STOP_GRACE_S, restarts.BACK_OFF_S = float(sys.argv[2]), 0.1
    restarts.HEALTHY_S = float(os.environ.get("HEALTHY_S", restarts.HEALTHY_S))
    watch.HEARTBEAT_TIMEOUT_S = float(os.environ.get("HEARTBEAT_TIMEOUT_S", watch.HEARTBEAT_TIMEOUT_S))
    if later := os.environ.get("AN_HOUR_LATER"):
        ahead = lambda: time.monotonic() + 3600.0 * Path(later).exists()  # noqa: E731
        watch.time = SimpleNamespace(monotonic=ahead, sleep=time.sleep)  # type: ignore[assignment]
    return run.run_local(config, dummy, run_console()).code


if __name__ == "__main__":
    sys.exit(main())
