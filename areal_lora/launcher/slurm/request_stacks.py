"""Request the stacks of all processes of the session on this node; prints how many will write them.

``python -m areal_lora.launcher.slurm.request_stacks``, as a step on every node. A signal to a step would reach every
process in it, and end those that have no handler.
"""

import os
import sys

import psutil

from areal_lora.processes import stacks
from areal_lora.run_folder.paths import SESSION_VARIABLE


def main() -> int:
    session, requested = os.environ[SESSION_VARIABLE], 0
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(SESSION_VARIABLE) == session and process.pid != os.getpid()
            # The tasks' shells take USR1 for a wish to requeue.
            shell = process.name() in ("bash", "srun", "slurm_script")
        except psutil.Error:
            continue
        requested += mine and not shell and stacks.request(process.pid)
    print(requested, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
