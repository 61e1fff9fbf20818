"""Run one trainer rank: ``RANK=0 WORLD_SIZE=2 python -m areal_lora.trainer.main --run-folder DIR``.

Rank 0 serves the rendezvous store of the ranks on a port that the system chooses, and publishes the port
as ``trainer-0`` in the run folder.
"""

import argparse
import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.run import own_place
from areal_lora.distributed.store import CurveStore, StoreServer
from areal_lora.errors import ArealLoraError, exit_code_of
from areal_lora.network.addresses import set_variables
from areal_lora.platforms.device import collective_of
from areal_lora.processes import stacks
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import collector_paused, raise_open_files, take_devices
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint, read_secret, wait_endpoint
from areal_lora.run_folder.status import set_status

ROLE = "trainer"
STARTUP_TIMEOUT_S = 600.0

log = get_logger("areal_lora.trainer.main")  # __name__ is __main__ here


def join_world(config: Config, run_folder: RunFolder, rank: int, world_size: int) -> None:
    """Initialise torch.distributed over a store that requires the run secret."""
    place = own_place(config.cluster, run_folder)
    if warning := set_variables(place):
        log.warning(warning)
    host = place.address
    secret = read_secret(run_folder)
    if rank == 0:
        port = StoreServer(host, secret).port
        publish_endpoint(run_folder, ROLE, 0, {"store": port}, host=host)
    else:
        endpoint = wait_endpoint(run_folder, ROLE, 0, STARTUP_TIMEOUT_S)
        host, port = endpoint.host, endpoint.ports["store"]
    store = CurveStore(host, port, secret, STARTUP_TIMEOUT_S)
    dist.init_process_group(
        collective_of(config.cluster.device),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=STARTUP_TIMEOUT_S),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One trainer rank; started by areal_lora.launch.")
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    run_folder: RunFolder = parser.parse_args(argv).run_folder
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise_open_files()
    setup_logging(ROLE, rank)
    stacks.install(run_folder.stack_dump(f"{ROLE}-{rank}"))
    config = read_config(run_folder)
    torch.set_num_threads(config.cluster.threads)
    set_status(run_folder, ROLE, rank, "importing the engine")
    # The heavy imports follow the check of the arguments.
    try:
        take_devices(config.cluster.device)
        with collector_paused():
            from areal_lora.trainer.build import build_trainer
            from areal_lora.trainer.loop import train

            join_world(config, run_folder, rank, world_size)
            trainer = build_trainer(config, run_folder, rank)
        if rank:
            set_status(run_folder, ROLE, rank, "in step with trainer-0")
        train(trainer)
        trainer.close()
    except ArealLoraError as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=True)
        return error.exit_code
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception as error:  # fault boundary: threads inside collectives would turn the exit code into an abort
        log.exception("%s: %s", type(error).__name__, error)
        code = exit_code_of(error)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
