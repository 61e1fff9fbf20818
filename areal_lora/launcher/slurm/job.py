"""Supervise a run from inside its Slurm job: ``python -m areal_lora.launcher.slurm.job --run-folder RUN``.

The batch script starts this and forwards its signals as words on standard input. Processes that fail are restarted in
the allocation. The job is requeued only for a signal of Slurm and for a lost node that it cannot do without.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from rich.console import Console

from areal_lora.checkpoint.checkpoint_store import newest_in
from areal_lora.config.facts import gather_facts
from areal_lora.config.models import Config
from areal_lora.config.recorded import ends_of, read_config
from areal_lora.errors import DISK_ERRORS, ArealLoraError, ConfigError, EnvironmentError_, ExitCode
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm.job_query import Allocation, allocation, look, run, submitted_job
from areal_lora.launcher.slurm.job_steps import POLL_S, SlurmSteps
from areal_lora.launcher.slurm.states import RUNNING, JobOutcome, Words, is_active, outcome
from areal_lora.launcher.sweep import print_result
from areal_lora.launcher.watch import Watch, end_event, own_failure_recorded, print_failure
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.obs.console import LiveConsole, run_console
from areal_lora.obs.report.closing import print_closing, print_report
from areal_lora.run_folder.events import RequeueEvent, note_event, now_utc
from areal_lora.run_folder.paths import SESSION_VARIABLE, RunFolder, write_file
from areal_lora.run_folder.status import begin_session


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """From one start of the batch script, with the ``newest`` checkpoints by adapter, to the next.

    ``without``: requeues up to this one without a new checkpoint. ``reason``: why the job itself requeued.
    """

    job: str
    restarts: int
    newest: dict[str, int]
    without: int = 0
    reason: str = ""

    def next_without(self, newest: Mapping[str, int]) -> int:
        """What the next lifetime counts, with these checkpoints at the end of this one."""
        progress = any(version > self.newest.get(name, -1) for name, version in newest.items())
        return 0 if progress else self.without + 1


def next_lifetime(last: Lifetime | None, job: str, restarts: int, newest: Mapping[str, int]) -> Lifetime:
    """The lifetime that starts now. A job that was submitted again counts from the start."""
    without = last.next_without(newest) if last and last.job == job and restarts > last.restarts else 0
    return Lifetime(job=job, restarts=restarts, newest=dict(newest), without=without)


def too_many(without: int, most: int) -> str:
    """Why there is no further requeue; empty if there may be one."""
    if without <= most:
        return ""
    times = f"{without} times" if without > 1 else "once"
    return (
        f"the job would be requeued {times} in a row without a new checkpoint "
        f"(run.max_restarts is {most}; fix: see the reasons above, or raise the time limit)"
    )


def read_lifetime(run_folder: RunFolder) -> Lifetime | None:
    """The last one; None where there is none, or none that can be read."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(run_folder.job_requeues.read_bytes(), type=Lifetime)
    return None


def write_lifetime(run_folder: RunFolder, lifetime: Lifetime) -> None:
    write_file(run_folder.job_requeues, msgspec.json.encode(lifetime) + b"\n")


SETTLE_S = 1.0
"""After scancel, tasks may end before the word about it arrives."""
TRIES = 3
"""Questions about the job, two seconds apart, where Slurm does not answer."""
BY_SLURM = "by Slurm: a preemption, a lost node, the time limit before the start was complete, or scontrol"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Supervises a run inside its Slurm job; started by job.sbatch.")
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    names = (os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0"))
    os.environ[SESSION_VARIABLE] = "-".join(names)
    run_folder: RunFolder = parser.parse_args(argv).run_folder
    console = run_console(terminal=False)
    try:
        config = read_config(run_folder)
        plan = make_plan(config, gather_facts(config, runs_here=False))
        job = allocation(os.environ, plan.pools)
        return SlurmJob(config, plan, job, console).run()
    except ArealLoraError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return error.exit_code


class SlurmJob:
    """One lifetime of the job: from a start of the batch script to its end."""

    def __init__(self, config: Config, plan: JobPlan, job: Allocation, console: Console) -> None:
        self._config, self._plan, self._job, self._console = config, plan, job, console
        self._folder = plan.run_folder

    def run(self) -> int:
        """Returns the exit code of the batch script. Raises ConfigError where another job works in the run folder."""
        other = submitted_job(self._folder)
        if other is not None and other != self._job.job and is_active(look(other)):
            reason = f"Slurm job {other} works in {self._folder}"
            raise ConfigError("run.name", reason, f"wait for it, or scancel {other}")
        self._folder.job_id.write_text(f"{self._job.job}\n", encoding="ascii")
        lifetime = self._begin()
        words = Words(sys.stdin.fileno(), self._folder)
        if why := too_many(lifetime.without, self._config.run.max_restarts):
            self._say(f"The job ends as failed: {why}")
            return ExitCode.COMPONENT_FAILED
        result: JobOutcome | None = None
        try:
            with own_failure_recorded(self._folder), SlurmSteps(self._config, self._plan, self._job) as steps:
                result = self._watch(steps, words)
                if words.first:
                    self._say(f"{words.first} arrived: the steps are stopped")
                steps.stop()
        except OSError as error:  # most failures of a file system pass
            if error.errno in DISK_ERRORS:
                raise
            result = result or JobOutcome(code=ExitCode.TEMPORARY, requeue=f"the supervisor failed: {error}")
        if result.requeue:
            result = self._requeue(lifetime, result)
        elif result.failure is not None:
            note_event(self._folder, end_event(result.failure, result.code))
        if result.text:
            self._say(result.text)
        if self._folder.summary.exists():  # also where an adapter has failed
            print_closing(self._folder, self._console)
            print_result(self._folder, self._console)
        else:
            print_report(self._folder, self._console)
        return result.code

    def _begin(self) -> Lifetime:
        """Start the session; count and record the requeue that led to it."""
        last = read_lifetime(self._folder)
        lifetime = next_lifetime(last, self._job.job, self._job.restarts, newest_in(self._folder.checkpoints))
        write_lifetime(self._folder, lifetime)
        os.environ[NODES_VARIABLE] = " ".join(self._job.hosts)
        begin_session(self._folder)
        self._folder.logs.mkdir(exist_ok=True)
        if self._job.restarts and last is not None and not last.reason:
            event = RequeueEvent(at=now_utc(), job=self._job.job, why=BY_SLURM, without=lifetime.without)
            note_event(self._folder, event)
        self._say(f"Slurm job {self._job.job}, start {self._job.restarts + 1}, on {' '.join(self._job.hosts)}")
        return lifetime

    def _watch(self, steps: SlurmSteps, words: Words) -> JobOutcome:
        view = LiveConsole(self._folder, ends_of(self._config), self._console)
        view.start()
        try:
            steps.start(self._plan.processes)
            failure = Watch(self._config, self._plan, steps, view, POLL_S).until_end(words.any)
        finally:
            view.stop()
        if failure is not None:
            time.sleep(SETTLE_S)
            words.any()
        word = words.first
        if failure is not None and not word:
            # Printed before the stop, which takes seconds and adds errors of the other processes.
            print_failure(failure, self._console)
        return outcome(failure, word, look(self._job.job, TRIES).state if failure is not None or word else "")

    def _requeue(self, lifetime: Lifetime, result: JobOutcome) -> JobOutcome:
        """Requeue the job, or state why it ends instead."""
        newest: dict[str, int] = {}
        with contextlib.suppress(OSError):
            newest = newest_in(self._folder.checkpoints)
        without = lifetime.next_without(newest)
        if why := too_many(without, self._config.run.max_restarts):
            return JobOutcome(code=ExitCode.COMPONENT_FAILED, text=f"{result.requeue}; the job ends as failed: {why}")
        state = look(self._job.job, TRIES).state
        if state != RUNNING:
            # scancel, while the steps stopped.
            return outcome(None, result.requeue, state)
        count = f" ({without} of {self._config.run.max_restarts} without a new checkpoint)" if without else ""
        self._say(f"The job is requeued: {result.requeue}{count}")
        event = RequeueEvent(at=now_utc(), job=self._job.job, why=result.requeue, without=without)
        note_event(self._folder, event)
        with contextlib.suppress(OSError):  # then the next start counts this requeue as one by Slurm
            write_lifetime(self._folder, msgspec.structs.replace(lifetime, reason=result.requeue))
        try:
            run("scontrol", "requeue", self._job.job)
        except EnvironmentError_ as error:
            return JobOutcome(code=ExitCode.COMPONENT_FAILED, text=f"the job is not requeued: {error}")
        return JobOutcome(code=result.code)

    def _say(self, text: str) -> None:
        when = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self._console.print(f"{when}: {text}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
