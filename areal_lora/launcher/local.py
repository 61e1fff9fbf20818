"""Run a plan on this machine: start, show, wait, restart what failed, stop."""

from __future__ import annotations

import time
from collections import defaultdict

from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, JobPlan, ProcessSpec
from areal_lora.launcher.pulse import Pulse
from areal_lora.launcher.restarts import Restarts, Verdict, to_blame, unit_of
from areal_lora.launcher.stalls import waits, write_stall
from areal_lora.launcher.supervise import Ended, Interrupts, Supervisor, kill_sessions, last_lines
from areal_lora.obs.console import LiveConsole
from areal_lora.run_folder.events import RestartEvent, StallEvent, now_utc, write_event
from areal_lora.run_folder.heartbeat import forget_beats, last_beats
from areal_lora.run_folder.rendezvous import forget_endpoint

LOG_LINES = 30
POLL_S, TICK_S = 0.1, 0.5
PEER_GRACE_S = 1.5
"""Time that the other trainer ranks get to log what they saw after one rank ended; then they are killed."""
EARLY_END_S = 30.0
"""A process may end well so long before trainer rank 0 does; longer is a failure."""


def run_local(config: Config, plan: JobPlan, console: Console) -> int:
    """Returns an ``ExitCode``: DONE when trainer rank 0 ended well, INTERRUPTED, or how the run failed.

    Failed processes are restarted, see ``Restarts``. Whatever the outcome, no process, port or shared memory of the
    run remains.
    """
    view = LiveConsole(plan.run_folder, config.run.steps, console)
    with Interrupts() as interrupts, Supervisor(plan.run_folder.logs, config.run.stop_grace_s) as supervisor:
        supervisor.start(plan.processes)
        view.start()
        try:
            failure = _Watch(config, plan, supervisor, view).until_end(interrupts)
        finally:
            view.stop()
        if interrupts.count:
            console.print("Interrupted: stopping (once more to kill at once).", markup=False)
        elif failure is not None:
            # Printed before the stop, which takes seconds and adds errors of the other processes.
            print_failure(failure, console)
        supervisor.stop(interrupted=interrupts)
    if interrupts.count:
        again = "The same command resumes the run."
        console.print(f"Stopped. The run folder is {plan.run_folder}. {again}", markup=False, soft_wrap=True)
        return ExitCode.INTERRUPTED
    if failure is None:
        return ExitCode.DONE
    return failure.code if failure.code in NON_RETRYABLE else ExitCode.COMPONENT_FAILED


class _Watch:
    """Sees to the processes until trainer rank 0 ends well, one fails for good, or a signal comes."""

    def __init__(self, config: Config, plan: JobPlan, supervisor: Supervisor, view: LiveConsole) -> None:
        self._folder, self._supervisor, self._view = plan.run_folder, supervisor, view
        trainer, servers = config.run.max_restarts, config.rollout.max_restarts
        beats_s = config.run.heartbeat_timeout_s
        self._restarts = Restarts(plan.processes, {TRAINER: trainer, CONTROLLER: trainer, SERVER: servers})
        self._pulse = Pulse({TRAINER: config.run.stall_s, CONTROLLER: beats_s, SERVER: beats_s})
        self._early: list[tuple[float, Ended]] = []
        self._next_tick = 0.0

    def until_end(self, interrupts: Interrupts) -> Ended | None:
        """The failure that ends the run, or None."""
        while not interrupts.count:
            ended, now = self._supervisor.poll(), time.monotonic()
            if any(e.spec.role == TRAINER and e.spec.index == 0 and e.code == ExitCode.DONE for e in ended):
                return None
            # The other ranks and the controller may end well shortly before rank 0 does.
            early = [e for e in ended if e.code == ExitCode.DONE and e.spec.role != SERVER]
            self._early += [(now, e) for e in early]
            ended = [e for e in ended if e not in early]
            self._pulse.look(last_beats(self._folder), now)
            failure = self._settle(ended + self._early_too_long(now), now) or self._end_stalled(now)
            if failure is not None:
                return failure
            for specs in self._restarts.due(time.monotonic()):
                self._start_again(specs)
            self._show(now)
            time.sleep(POLL_S)
        return None

    def _settle(self, ended: list[Ended], now: float) -> Ended | None:
        """Decide about each unit of which something ended. Returns the failure that ends the run."""
        units: dict[str, list[Ended]] = defaultdict(list)
        for e in ended:
            units[unit_of(e.spec)].append(e)
        for members in units.values():
            kill_sessions({e.pid for e in members})
            members += self._supervisor.end(self._restarts.members(members[0].spec), PEER_GRACE_S, "was ended")
            blamed = to_blame([e for e in members if not e.why]) or members[0]
            verdict = self._decide(blamed, now)
            if verdict.ends_run:
                return blamed
        return None

    def _early_too_long(self, now: float) -> list[Ended]:
        """Return processes that exited with 0 over ``EARLY_END_S`` ago, when trainer rank 0 should have ended too."""
        late = [e for at, e in self._early if now - at > EARLY_END_S]
        self._early = [(at, e) for at, e in self._early if now - at <= EARLY_END_S]
        return late

    def _end_stalled(self, now: float) -> Ended | None:
        """Record and end processes without a heartbeat for too long. Returns the failure that ends the run."""
        silent = self._pulse.silent(now)
        for spec in [spec for spec in self._supervisor.running() if spec.name in silent]:
            how = f"sent no heartbeat for {silent[spec.name]:.0f} s"
            path = write_stall(self._folder, self._supervisor.pids(), f"{spec.name} {how}")
            self._view.say(f"{spec.name} {how}; the stacks of all processes are in {path}; {waits(self._folder)}")
            write_event(self._folder, StallEvent(at=now_utc(), who=spec.name, stacks=str(path)))
            members = self._supervisor.end(self._restarts.members(spec), why=how)
            verdict = self._decide(next(e for e in members if e.spec == spec), now)
            if verdict.ends_run:
                return verdict.ended
        return None

    def _decide(self, ended: Ended, now: float) -> Verdict:
        beating = f"{TRAINER}-0" if ended.spec.role == TRAINER else ended.spec.name
        verdict = self._restarts.take(ended, now, self._pulse.worked_s(beating))
        self._pulse.forget(beating)
        for spec in self._restarts.members(ended.spec):
            # At once: the next look would take the last beat of this session for the first of the next.
            forget_beats(self._folder, spec.role, spec.index)
        self._early = [(at, e) for at, e in self._early if unit_of(e.spec) != unit_of(ended.spec)]
        if not verdict.ends_run:
            self._view.say(str(verdict))
        if verdict.wait_s is not None:
            write_event(self._folder, RestartEvent(at=now_utc(), who=unit_of(ended.spec), how=ended.how()))
        return verdict

    def _start_again(self, specs: tuple[ProcessSpec, ...]) -> None:
        for spec in specs:
            if spec.role != SERVER:
                # Others wait for the new ports. The trainer needs those of a server to check whether it is alive.
                forget_endpoint(self._folder, spec.role, spec.index)
        self._supervisor.start(specs)

    def _show(self, now: float) -> None:
        self._supervisor.note_shared_memory()
        if now >= self._next_tick:
            self._view.tick()
            self._next_tick = now + TICK_S


def print_failure(failure: Ended, console: Console) -> None:
    lines = last_lines(failure.log, LOG_LINES)
    console.print(f"{failure.spec.name} {failure.how()}.", style="bold red", markup=False, soft_wrap=True)
    console.print(f"The last {len(lines)} lines of {failure.log}:", markup=False, soft_wrap=True)
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
