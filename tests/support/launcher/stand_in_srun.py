"""What srun 22.05 does with its tasks, on this machine; takes the options that the job script uses.

``--nodelist`` overrides the host file. The first task that ends badly kills the others, and so does a signal to srun;
its own code is the highest. Each task is a process group, written to ``$CALLS.groups`` for the stand-in of scancel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    command = sys.argv[sys.argv.index("bash") :]
    words = [word.partition("=") for word in sys.argv[1 : sys.argv.index("bash")]]
    options = {name: value for name, _, value in words}
    tasks = int(options["--ntasks"])
    if "--nodelist" in options:
        hosts = options["--nodelist"].split(",")
        if len(hosts) != tasks:
            return refuse(f"You asked for {tasks} tasks but hostlist specified {len(hosts)} nodes")
    else:
        hosts = Path(os.environ["SLURM_HOSTFILE"]).read_text().split()
        if len(hosts) < tasks:
            return refuse("Too few NodeNames in Slurm Hostfile")
    if len(set(hosts)) != int(options["--nodes"]):
        return refuse("Unable to create step: Requested node configuration is not available")
    running = [start(command, options["--output"], i, hosts[i]) for i in range(tasks)]
    signal.signal(signal.SIGTERM, lambda *_: kill(running))
    worst = 0
    while running:
        for task in [task for task in running if task.poll() is not None]:
            running.remove(task)
            code = task.returncode if task.returncode >= 0 else 128 - task.returncode
            worst = max(worst, code)
            if code:
                kill(running)
        time.sleep(0.02)
    return worst


def start(command: list[str], output: str, number: int, host: str) -> subprocess.Popen[bytes]:
    env = os.environ | {"SLURM_PROCID": str(number), "NODE": host, "BATCH": str(os.getppid())}
    with open(output.replace("%t", str(number)), "ab") as log:
        task = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    with open(f"{os.environ['CALLS']}.groups", "a") as groups:
        groups.write(f"{task.pid}\n")
    return task


def kill(running: list[subprocess.Popen[bytes]]) -> None:
    for task in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)


def refuse(why: str) -> int:
    print(f"srun: error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
