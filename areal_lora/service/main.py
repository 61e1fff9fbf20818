"""The service of a run: ``python -m areal_lora.service.main --run-folder DIR``.

    HTTP, inbox --> check --> decide, commit --> desired.json --> trainer rank 0
                                                                       |
    answers  <------------------- metrics.jsonl <----------------------'

    SDK clients --> queue --> commit --> operations --> trainer rank 0 --> outcomes --> commit --> answers

It can be killed at any moment: what was acknowledged is in its file, and a start writes the desired state again.
"""

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
from contextlib import AsyncExitStack, suppress
from functools import partial

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.errors import ArealLoraError, ExitCode, Unavailable
from areal_lora.network.http_server import CLOSE_S, HttpServer, listening
from areal_lora.processes import stacks
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import die_with_parent
from areal_lora.processes.watched import watched_task
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint
from areal_lora.run_folder.status import EVENT_LOOP, Heart, set_status
from areal_lora.service.acceptance import EVERY_S, Acceptance, FolderInbox, admit_operator, api_of
from areal_lora.service.api import Api
from areal_lora.service.gateway import Gateway, Meter
from areal_lora.service.observed import RunObserver
from areal_lora.service.queue.placement import Surroundings
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import LOCAL, Quota
from areal_lora.service.queue.queue_store import Store
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.tinker.routes import Sdk

ROLE = "service"
PRUNE_S = 600.0
HOST = "127.0.0.1"

log = get_logger("areal_lora.service.main")  # __name__ is __main__ here


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.service.main", description=__doc__)
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    run_folder: RunFolder = parser.parse_args(argv).run_folder
    setup_logging(ROLE, 0)
    stacks.install(run_folder.stack_dump(f"{ROLE}-0"))
    die_with_parent(signal.SIGTERM)
    try:
        asyncio.run(serve(read_config(run_folder), run_folder))
    except ArealLoraError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    set_status(run_folder, ROLE, 0, "stopped")
    return ExitCode.DONE


async def serve(config: Config, run_folder: RunFolder) -> None:
    """Serve until SIGTERM or SIGINT."""
    api_config = api_of(config)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sock = listening(HOST, api_config.port, "service.api.port")
    async with AsyncExitStack() as stack:
        shutil.rmtree(run_folder.service_exports, ignore_errors=True)  # of downloads of an earlier process
        observed = RunObserver(run_folder)
        while observed.look():
            pass
        store = Store(run_folder.service_tables, config.run.name)
        admit_operator(store, run_folder.service_key, Quota())
        writer = Writer(store, run_folder, observed.phases)
        stack.callback(writer.close)
        acceptance = Acceptance(config, writer)
        around = Surroundings.of(config, observed)
        queue = await stack.enter_async_context(RequestQueue(writer, run_folder, acceptance.of_client, around))
        gateway, meter = await stack.enter_async_context(Gateway(run_folder)), Meter()
        api = Api(
            config=config,
            run_folder=run_folder,
            writer=writer,
            observed=observed,
            acceptance=acceptance,
            gateway=gateway,
            meter=meter,
            sdk=await stack.enter_async_context(Sdk(config, run_folder, queue, gateway, meter)),
        )
        http = HttpServer(api.app(), sock, None)
        plane = watched_task("http-plane", http.serve)
        port = sock.getsockname()[1]
        publish_endpoint(run_folder, ROLE, 0, {"api": port}, host=HOST)
        set_status(run_folder, ROLE, 0, f"serving on http://{HOST}:{port}")
        log.info("serving on http://%s:%d", HOST, port)
        heart = Heart(run_folder, ROLE, 0, {EVENT_LOOP: config.run.stall_s})
        take_in = partial(acceptance.take_in, tenant=LOCAL, quota=None)
        inbox = FolderInbox(run_folder.inbox, lambda section, request: take_in(section, request=request))
        tasks = [
            watched_task("event-loop-ticks", heart.tick),
            watched_task("metrics-tail", partial(_follow, observed, writer)),
            watched_task("pruning", partial(_prune, observed, writer, around.configured)),
            watched_task("inbox", inbox.watch),
        ]
        await stop.wait()
        http.should_exit = True
        await asyncio.wait([plane], timeout=CLOSE_S + 1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        heart.stop()


async def _follow(observed: RunObserver, writer: Writer) -> None:
    """Read the run's records as they come, and note which operations it has carried out."""
    while True:
        more = observed.look()
        await writer.settle()
        await asyncio.sleep(0 if more else EVERY_S)


async def _prune(observed: RunObserver, writer: Writer, configured: frozenset[str]) -> None:
    while True:
        with suppress(Unavailable):  # the next round repeats it
            await writer.administer(Store.prune)
        observed.forget(but=configured | {row.key for row in writer.tables.adapters.values()})
        await asyncio.sleep(PRUNE_S)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
