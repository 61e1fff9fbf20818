"""A rollout server: ``python -m areal_lora.engine.vllm_ext.server.main --run-folder DIR --index N``.

One process with vLLM's engine (a child process) behind two HTTP apps on ports of their own::

    agents, controller --> data plane  (openai_api)  --> Generator ------> AsyncLLM ==> EngineCore
    trainer            --> admin plane (TLS, key)    --> ServedAdapters -->   RPC   ==> worker extension
                                                              `------ commands (zmq) ------^

The server binds its ports first, so a port in use is an early error, and publishes them when it can serve
requests. SIGTERM, SIGINT or the end of the parent end the server and its children with code 0: at once, or in order
within ``--grace-s`` (``leaving``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import psutil
import uvloop

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.run import own_place
from areal_lora.config.sizing.slots import has_tenants
from areal_lora.engine.vllm_ext.plugin import SERVER_PID
from areal_lora.engine.vllm_ext.server.guards import write_client_files
from areal_lora.engine.vllm_ext.server.leaving import Door, Stop, leave_in_order
from areal_lora.errors import ArealLoraError, ConfigError, ProcessFailed, PublishError
from areal_lora.network.addresses import on_loopback, set_variables
from areal_lora.network.http_server import CLOSE_S, HttpServer
from areal_lora.network.tls import Plane, server_context
from areal_lora.obs.machine import MachineWatch
from areal_lora.processes import stacks
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import collector_paused, die_with_parent, raise_open_files, take_devices
from areal_lora.processes.watched import watched_task
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint, read_secret
from areal_lora.run_folder.status import EVENT_LOOP, EVERY_S, LOADING, Heart, renewed_status, set_status

if TYPE_CHECKING:
    from areal_lora.engine.vllm_ext.server.adapters import ServedAdapters
    from areal_lora.engine.vllm_ext.server.assemble import Parts

log = get_logger("areal_lora.engine.vllm_ext.server.main")  # __name__ is __main__ here

ROLE = "server"
WATCH_S = 0.5
ENGINE_EVERY_S = 10.0  # between two RPCs to the engine, which it answers between model steps
WORKERS_S = 5.0
"""Longest silence of a worker's command thread, which answers a ping at once whatever the model does. Beyond it, or
with an engine process that was stopped (SIGSTOP), the server's heart does not beat."""
ENGINE, WORKERS = "engine", "workers"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.engine.vllm_ext.server.main", description=__doc__)
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--grace-s", type=float, default=0.0, help="leave the run in order within so many seconds")
    args = parser.parse_args(argv)
    raise_open_files()
    setup_logging(ROLE, args.index)
    stacks.install(args.run_folder.stack_dump(f"{ROLE}-{args.index}"))
    try:
        die_with_parent(signal.SIGTERM)
        config = read_config(args.run_folder)
        take_devices(config.cluster.device)
        place = own_place(config.cluster, args.run_folder)
        with bound_sockets(place.address) as sockets:
            set_environment(config)
            if warning := set_variables(place, one_node=True):
                log.warning(warning)
            return uvloop.run(serve(config, args.run_folder, args.index, sockets, args.grace_s))
    except ArealLoraError as e:
        log.error("%s", e)
        return e.exit_code


@contextlib.contextmanager
def bound_sockets(host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open listening sockets for the data plane and the admin plane. Raises ConfigError for a wrong ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            data, admin = (
                stack.enter_context(socket.create_server((host, 0), family=family, backlog=1024)) for _ in range(2)
            )
        except OSError as e:
            raise ConfigError("cluster.bind", f"cannot bind {host}: {e.strerror}", "use another address") from e
        yield data, admin


def server_tls(host: str, run_folder: RunFolder, secret: str, *, closed: bool = False) -> dict[str, ssl.SSLContext]:
    """Make TLS contexts: for the admin plane, and for the data plane unless ``host`` is on loopback.

    With ``closed`` the data plane has a key there, too.
    """
    planes = [Plane.ADMIN] if on_loopback(host) and not closed else [Plane.ADMIN, Plane.DATA]
    if Plane.DATA in planes:
        write_client_files(run_folder, secret)
    return {plane: server_context(secret, plane, host) for plane in planes}


def set_environment(config: Config) -> None:
    """Set the variables that vLLM reads once, at import."""
    env = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # by the one token of `assemble.SAMPLED`, which has no position
        "TOKENIZERS_PARALLELISM": "false",
        SERVER_PID: str(os.getpid()),
        "HF_HUB_OFFLINE": "1",  # the launcher has put the model into a folder
    }
    if config.cluster.device != "cuda":  # `compat.cpu_scheduler`; on NPUs vLLM has a second one of another kind
        env["VLLM_USE_V2_MODEL_RUNNER"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    if config.cluster.device == "cpu":
        threads = config.cluster.threads
        # vLLM compiles two small sampling functions; that needs a C++ compiler and fails in a path with a space.
        env["TORCHDYNAMO_DISABLE"] = "1"
        env["OMP_NUM_THREADS"] = str(threads)
        cores = sorted(os.sched_getaffinity(0))
        spans = [[cores[(w * threads + t) % len(cores)] for t in range(threads)] for w in range(config.rollout.tp)]
        # Several workers need disjoint cores by name; a single one is placed by the system.
        bind = "|".join(",".join(map(str, span)) for span in spans) if config.rollout.tp > 1 else "nobind"
        env["VLLM_CPU_OMP_THREADS_BIND"] = bind
    os.environ.update(env)


async def serve(
    config: Config,
    run_folder: RunFolder,
    index: int,
    sockets: tuple[socket.socket, socket.socket],
    grace_s: float = 0.0,
) -> int:
    """Serve until a stop is requested; return the exit code. Raises ProcessFailed if the engine ends unasked."""
    set_status(run_folder, ROLE, index, "importing vLLM")
    with collector_paused():
        from areal_lora.engine.vllm_ext.server.assemble import assemble  # vLLM reads the environment on import

    stop = Stop(grace_s)
    secret = read_secret(run_folder)
    for sock in sockets:
        os.register_at_fork(after_in_child=sock.close)  # the engine's processes must not hold the server's ports
    with renewed_status(run_folder, ROLE, index, LOADING):
        parts = await assemble(config, run_folder, index, secret, stop)
    # Not before: loading the model blocks the event loop, and nothing needs saving until then.
    stop.on_signals()
    try:
        host = own_place(config.cluster, run_folder).address
        tls = server_tls(host, run_folder, secret, closed=has_tenants(config))
        http = [
            HttpServer(door := Door(parts.data_app), sockets[0], tls.get(Plane.DATA)),
            HttpServer(parts.admin_app, sockets[1], tls[Plane.ADMIN]),
        ]
        planes = [watched_task("http-plane", server.serve) for server in http]
        ports = {"data": sockets[0].getsockname()[1], "admin": sockets[1].getsockname()[1]}
        publish_endpoint(run_folder, ROLE, index, ports, host, tls)
        set_status(run_folder, ROLE, index, "serving")
        log.info("serving %s on %s (%d adapter slots)", config.model.path, ports, parts.n_slots)
        stall_s = config.run.stall_s  # a model step may take long; a ping may not
        heart = Heart(run_folder, ROLE, index, {EVENT_LOOP: stall_s, ENGINE: stall_s, WORKERS: WORKERS_S})
        figures, device = parts.counters.figures, config.cluster.device
        machine = MachineWatch(run_folder, ROLE, index, device=device, figures=figures)
        processes = psutil.Process().children(True)
        signs = [
            watched_task("event-loop-ticks", heart.tick),
            watched_task("engine-ticks", partial(_engine_ticks, parts, heart, min(ENGINE_EVERY_S, stall_s / 4))),
            watched_task("worker-pings", partial(_worker_pings, parts.adapters, heart, processes)),
        ]
        leave = partial(
            leave_in_order,
            stop,
            door,
            busy=parts.adapters.turn.locked,
            publish_s=config.weight_sync.form_s + config.weight_sync.timeout_s,
            run_folder=run_folder,
            index=index,
        )
        signs.append(watched_task("leave", leave))
        while not stop.event.is_set() and not parts.engine.errored:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.event.wait(), WATCH_S)
        died = parts.engine.errored
        for server in http:
            server.should_exit = True
        await asyncio.wait(planes, timeout=CLOSE_S + 1)
        for sign in signs:
            sign.cancel()
        heart.stop()
        machine.stop()
    finally:
        parts.close()
    if died:
        raise ProcessFailed("vLLM's engine ended by itself; its last lines are above")
    set_status(run_folder, ROLE, index, "stopped")
    return 0


async def _engine_ticks(parts: Parts, heart: Heart, every_s: float) -> None:
    """Report progress whenever the engine ends a step, and read its load."""
    from areal_lora.engine.vllm_ext.compat.engine import read_load  # as in ``serve``

    while not parts.engine.errored:
        try:
            await parts.engine.collective_rpc("al_alive")
            parts.counters.take(await read_load(parts.engine))
        except Exception:  # fault boundary: ``serve`` reports an engine that has ended
            if parts.engine.errored:
                return
            raise
        heart.progress(ENGINE)
        await asyncio.sleep(every_s)


async def _worker_pings(adapters: ServedAdapters, heart: Heart, engine: Sequence[psutil.Process]) -> None:
    """Report progress while all workers answer pings and no process of the engine is stopped."""
    while True:
        with contextlib.suppress(PublishError, psutil.NoSuchProcess):
            await adapters.ping()
            states = {process.status() for process in engine if process.is_running()}
            if states.isdisjoint({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}):  # SIGSTOP or a debugger
                heart.progress(WORKERS)
        await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # all is closed; the teardown of torch and vLLM would take seconds
