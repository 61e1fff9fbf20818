"""Request the stacks of all processes of the session on this node.

``python -m areal_lora.launcher.slurm.request_stacks``, as a step on every node. A signal to a step would reach every
process in it, and end those that have no handler.
"""

import contextlib
import os

import psutil

from areal_lora.processes import stacks
from areal_lora.run_folder.paths import SESSION_VARIABLE


def main() -> None:
    session = os.environ[SESSION_VARIABLE]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get(SESSION_VARIABLE) == session and process.pid != os.getpid()
            # The tasks' shells take USR1 for a wish to requeue.
            if mine and process.name() not in ("bash", "srun", "slurm_script"):
                stacks.request(process.pid)


if __name__ == "__main__":
    main()
