"""Environment workers of a run, as its controller starts them: ``python node_workers.py RUN``.

Plays one sample in each worker; when the file ``killed`` is there, two more. Prints what their environments send first.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from areal_lora.config.recorded import read_config
from areal_lora.rollout.environment_workers import EnvironmentWorkers, worker_launchers
from areal_lora.rollout.workflow import WorkerLost
from areal_lora.run_folder.paths import RunFolder
from tests.support.rollout.texts import FIELDS


async def main(folder: RunFolder) -> None:
    config = read_config(folder)

    async def answer(body: Any) -> None:
        print("environment:", body["text"], flush=True)

    async def play(workers: EnvironmentWorkers) -> None:
        try:
            await workers.run({"sample": {}}, answer)
        except WorkerLost as lost:
            print(lost, flush=True)
            await workers.run({"sample": {}}, answer)

    launchers = worker_launchers(config.cluster, os.environ)
    async with EnvironmentWorkers(config.adapters[0].workflow, FIELDS, launchers) as workers:
        for _ in range(2):
            await asyncio.gather(*(play(workers) for _ in range(2)))
            while not (folder.path / "killed").exists():
                await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main(RunFolder.current(Path(sys.argv[1]))))
