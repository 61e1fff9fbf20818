"""Run one function on N real processes that share a gloo world; results come back per rank."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import multiprocessing.forkserver
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.support.distributed import forkserver
from tests.support.forks.starter import starter_of

PRELOAD = "tests.support.distributed.preload"


class RanksFailed(AssertionError):
    """A rank raised or did not answer in time; the message holds every rank's traceback."""


def _child(
    pipe: Connection, target: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    from areal_lora.platforms.device import collective_of

    torch.set_num_threads(1)
    try:
        # A file store needs no port. The short timeout frees ranks whose peer has raised.
        dist.init_process_group(
            collective_of(os.environ.get("EMULATED", "cpu")),
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=150),
        )
        dist.barrier()  # a rank that is done sooner would close connections that others still make
        pipe.send((True, target(*args)))
        dist.destroy_process_group()
    except Exception:  # fault boundary: the parent must see what any rank raised  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))


def forking() -> ForkServerContext:
    """Make processes that are forks of one that has imported what trainers need, which takes longer than most tests.

    All tests share this one: Python has one such parent in a process. It is itself a fork of the starter of trainers,
    and its forks have its environment, that of the first use.
    """
    with _ONE_CALLER:
        return _forking()


_ONE_CALLER = threading.Lock()


@cache
def _forking() -> ForkServerContext:
    folder = Path(tempfile.mkdtemp(prefix="forkserver-"))
    address, alive = str(folder / "socket"), folder / "alive"
    os.mkfifo(alive)
    with (folder / "log").open("wb") as log:
        starter = starter_of(PRELOAD)
        fork = starter.start(forkserver.__name__, [address, str(alive)], os.environ | {"OMP_NUM_THREADS": "1"}, log)
    server = multiprocessing.forkserver._forkserver
    server._forkserver_alive_fd = os.open(alive, os.O_WRONLY)  # once the other end is open, which is after the socket
    server._forkserver_address = address
    server.ensure_running = lambda: fork.poll()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return mp.get_context("forkserver")


def run_ranks(
    target: Callable[..., Any], world: int, folder: Path, args: tuple[Any, ...], timeout_s: float = 280.0
) -> list[Any]:
    """``target(*args)`` on ``world`` processes; its return values in rank order (plain objects, numpy).

    Raises RanksFailed with all tracebacks. No process outlives the call.
    """
    context = forking()
    ranks = []
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(
            target=_child, args=(there, target, rank, world, str(folder / f"store-{world}"), args), daemon=True
        )
        process.start()
        there.close()
        ranks.append((process, here))
    deadline = time.monotonic() + timeout_s
    results: list[Any] = []
    problems: list[str] = []
    try:
        for rank, (_, pipe) in enumerate(ranks):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                problems.append(f"rank {rank}: no answer within {timeout_s} s")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "the process died"
            if ok:
                results.append(value)
            else:
                problems.append(f"rank {rank}: {value}")
    finally:
        for process, _ in ranks:
            process.join(timeout=5.0 if not problems else 0.1)
            if process.is_alive():
                process.kill()
    if problems:
        raise RanksFailed("\n".join(problems))
    return results
