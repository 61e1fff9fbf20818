"""What a process sets up at its start: its end with its parent, open files, the garbage collector, its devices.

The plan numbers the devices of a node from 0. What Slurm or the user's environment gives may be 4,5,6,7 or UUIDs, so a
number of the plan is a position in the inherited list.
"""

import ctypes
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress

from areal_lora.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals) -> None:
    """Have the kernel send ``sig`` to this process when its parent ends in any way. A fork does not inherit this."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)


MOST_FILES = 1 << 20
"""Programs that close every possible file before they start another one would take minutes with a container's 2^30."""


def raise_open_files() -> None:
    """Permit this process and its children as many open files as the hard limit does, up to ``MOST_FILES``.

    Each request in flight is a connection, and the soft limit is usually 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # some sandboxes forbid any change
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in the block, which imports large libraries. For the main function of a process.

    Imports make a million objects that stay, and the collector would look through all of them again and again: up to a
    fifth of the CPU time. What exists at the end is never collected (``gc.freeze``).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


FULL_EVERY_S = 300.0
"""A full collection beside 2,000 conversations takes a second: less than 1 % of the time."""
_NEVER = 1 << 30


@contextmanager
def rare_full_collections(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """In the block the function alone collects garbage among old objects, once in ``FULL_EVERY_S``.

    For an event loop with many objects that live for minutes: Python would go through all of them whenever their number
    has grown by a quarter. Young garbage is collected as before.
    """
    before, last = gc.get_threshold(), clock()

    def collect() -> None:
        nonlocal last
        if clock() - last >= FULL_EVERY_S:
            gc.collect()
            last = clock()

    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield collect
    finally:
        gc.set_threshold(*before)


DEVICES_VARIABLE = "AREAL_LORA_DEVICES"
"""Numbers of the process's devices on its node, set by the launcher."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable that a device's runtime reads when it is initialised."""


def take_devices(device: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make only the plan's devices visible to this process, before it uses them. Raises ConfigError for too few."""
    chosen = environment.get(DEVICES_VARIABLE)
    if chosen is None or device not in VISIBLE:
        return
    variable, numbers = VISIBLE[device], [int(number) for number in chosen.split(",")]
    inherited = environment.get(variable)
    if inherited is not None:
        given = [name.strip() for name in inherited.split(",") if name.strip()]
        if max(numbers) >= len(given):
            raise ConfigError(
                variable,
                f"the plan uses device number {max(numbers)} (counted from 0) of this node, and {inherited!r} "
                f"gives {len(given)}",
                "give as many devices as cluster.devices_per_node, or lower that",
            )
        chosen = ",".join(given[number] for number in numbers)
    environment[variable] = chosen
    del environment[DEVICES_VARIABLE]
