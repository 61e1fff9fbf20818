"""A run whose roles are small programs: ``python -m tests.support.cli.held_run ROOT NAME SECONDS_TO_STOP``.

They have ten seconds more than they need to stop.

The launcher's own lock, supervision and console; the roles have the command lines of the real ones.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher import run
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.start import RunStart
from tests.support.paths import EXAMPLES

ROLE = """
import signal, sys, time
def stop(*_):
    time.sleep({stop_s})
    print("stopped in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


def all_up(run: Path) -> bool:
    """Every role of the run obeys SIGTERM."""
    logs = list((run / "logs").glob("*-?.log"))
    return len(logs) == 4 and all("up" in log.read_text() for log in logs)


def main() -> int:
    root, name, stop_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [f"run.root={root}", f"run.name={name}"],
    )
    plan = make_plan(config, Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")))
    code = ROLE.format(stop_s=stop_s)
    specs = tuple(replace(s, argv=(sys.executable, "-c", code, *s.argv[1:])) for s in plan.processes)
    with RunStart(config) as begun:
        begun.prepare()
        run.STOP_GRACE_S = stop_s + 10.0
        return run.run_local(config, replace(plan, processes=specs), Console()).code


if __name__ == "__main__":
    sys.exit(main())
