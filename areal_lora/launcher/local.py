"""Run a plan on this machine: start, show, wait, stop."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.config.rendezvous import read_endpoint
from areal_lora.launcher.plan import TRAINER, JobPlan
from areal_lora.launcher.restarts import Restarts
from areal_lora.launcher.supervise import Ended, Interrupts, Supervisor, last_lines
from areal_lora.obs.console import LiveConsole

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 70, 130
LOG_LINES = 30
POLL_S, TICK_S, MEMORY_NOTE_S = 0.1, 0.5, 5.0
EARLY_END_S = 30.0
"""A process may end in good order shortly before trainer rank 0 does; longer than this is a failure."""


def run_local(config: Config, plan: JobPlan, console: Console) -> int:
    """Returns an exit code: 0 when trainer rank 0 ended well, 70 when a component failed, 130 when interrupted.

    A rollout server that fails is started again, see ``Restarts``. Whatever the outcome, no process,
    port or shared memory of the run is left.
    """
    restarts = Restarts(
        plan.processes, config.rollout.max_restarts,
        lambda spec: read_endpoint(plan.run_folder, spec.role, spec.index) is not None,
    )
    view = LiveConsole(plan.run_folder, config.run.steps, console)
    with Interrupts() as interrupts, Supervisor(plan.run_folder / "logs", config.run.stop_grace_s) as supervisor:
        supervisor.start(plan.processes)
        view.start()
        try:
            failure = watch(supervisor, restarts, view, interrupts)
        finally:
            view.stop()
        if interrupts.count:
            console.print("Interrupted: stopping (once more to kill at once).", markup=False)
        elif failure is not None:
            # Said before the stop, which takes seconds and adds the other processes' complaints.
            print_failure(failure, console)
        supervisor.stop(interrupted=interrupts)
    if interrupts.count:
        console.print(f"Stopped. The run folder is {plan.run_folder}", markup=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return EXIT_OK if failure is None else EXIT_FAILED


def watch(supervisor: Supervisor, restarts: Restarts, view: LiveConsole, interrupts: Interrupts) -> Ended | None:
    """Wait for the end of trainer rank 0, the first failure that the run cannot go on with (returned) or a signal."""
    next_tick = next_note = 0.0
    early: list[tuple[float, Ended]] = []
    while not interrupts.count:
        now = time.monotonic()
        ended = []
        for e in supervisor.poll():
            if (done := restarts.take(e, now)) is not None:
                view.say(done)
            else:
                ended.append(e)
        for e in restarts.due(now):
            supervisor.start_again(e)
        failure = first_failure(ended)
        if failure is not None:
            return failure
        if any(e.spec.role == TRAINER and e.spec.index == 0 for e in ended):
            return None
        early += [(now, e) for e in ended if e.spec.role != TRAINER]
        if early and now - early[0][0] > EARLY_END_S:
            return early[0][1]
        if now >= next_note:
            supervisor.note_shared_memory()
            next_note = now + MEMORY_NOTE_S
        if now >= next_tick:
            view.tick()
            next_tick = now + TICK_S
        time.sleep(POLL_S)
    return None


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """The process to blame among those that ended together.

    One killed by a signal comes first: its peers then fail in the open, with lost connections.
    """
    failed = [e for e in ended if e.code != 0]
    return min(failed, key=lambda e: e.code >= 0, default=None)


def print_failure(failure: Ended, console: Console) -> None:
    lines = last_lines(failure.log, LOG_LINES)
    console.print(f"{failure.spec.name} {failure.how()}.", style="bold red", markup=False, soft_wrap=True)
    console.print(f"The last {len(lines)} lines of {failure.log}:", markup=False, soft_wrap=True)
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
