"""Runs processes given as JSON through the real ``run_local``; the tests start it as a process of its own.

Each is the code of an interpreter, or the words of a command; a fourth value is the node. With other nodes than this
one the launcher is that of node 0, and ``AGENT`` in the environment makes the process the agent of that node.

``python -m tests.support.launcher.drive RUN_FOLDER GRACE_S '[["trainer", 0, "print(1)"], ...]' [a.b=c ...]``
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.recorded import write_config
from areal_lora.families.registry import known_config
from areal_lora.launcher import restarts, run, watch
from areal_lora.launcher.nodes import agent, supervisor
from areal_lora.launcher.plan import ProcessSpec, make_plan
from areal_lora.obs.console import run_console
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder
from areal_lora.run_folder.status import begin_session
from tests.support.paths import EXAMPLES

AGENT = "AGENT"
"""The variable with the node of an agent."""
LATER = "LATER"
"""The variable with ``SECONDS:STEP:PATH`` of `Ahead`."""


class Ahead:
    """The launcher's clock: once ``path`` exists, each of its pauses counts ``step_s`` more, in all ``whole_s``."""

    def __init__(self, path: Path, whole_s: float, step_s: float) -> None:
        self._path, self._whole_s, self._step_s, self._ahead_s = path, whole_s, step_s, 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._ahead_s < self._whole_s and self._path.exists():
            self._ahead_s += self._step_s


def main() -> int:
    folder, processes = Path(sys.argv[1]), json.loads(sys.argv[3])
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [f"run.root={folder.parent}", f"run.name={folder.name}", *sys.argv[4:]],
    )
    if node := int(os.environ.get(AGENT, "0")):
        agent.SILENT_S = float(os.environ.get("SILENT_S", agent.SILENT_S))
        return agent.run_agent(config, RunFolder(folder), node, fresh=False, note=print)
    if config.cluster.kind == "nodes":
        os.environ[SESSION_VARIABLE] = str(os.getpid())
        begin_session(RunFolder(folder))
    plan = make_plan(config, Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")))
    specs = tuple(
        ProcessSpec(
            role=role,
            index=index,
            argv=tuple(code) if isinstance(code, list) else (sys.executable, "-u", "-c", code),
            env={},
            node=node[0] if node else 0,
        )
        for role, index, code, *node in processes
    )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_config(RunFolder(folder), config)
    dummy = replace(plan, run_folder=RunFolder(folder), processes=specs)
    run.STOP_GRACE_S, restarts.BACK_OFF_S = float(sys.argv[2]), 0.1
    restarts.HEALTHY_S = float(os.environ.get("HEALTHY_S", restarts.HEALTHY_S))
    restarts.WRITE_S = float(os.environ.get("WRITE_S", restarts.WRITE_S))
    supervisor.JOIN_S = float(os.environ.get("JOIN_S", supervisor.JOIN_S))
    watch.HEARTBEAT_TIMEOUT_S = float(os.environ.get("HEARTBEAT_TIMEOUT_S", watch.HEARTBEAT_TIMEOUT_S))
    if LATER in os.environ:
        whole_s, step_s, path = os.environ[LATER].split(":", 2)
        watch.time = Ahead(Path(path), float(whole_s), float(step_s))  # type: ignore[assignment]
    return run.run_local(config, dummy, run_console()).code


if __name__ == "__main__":
    sys.exit(main())
