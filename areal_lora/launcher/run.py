"""One run from its configuration: check and plan it, take its run folder, run it here or submit it to Slurm."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from areal_lora.checkpoint.recover import check_present
from areal_lora.config.facts import gather_facts
from areal_lora.config.models import Config
from areal_lora.config.recorded import ends_of, more_steps
from areal_lora.config.rules.findings import Finding, Severity
from areal_lora.config.rules.guardrails import check_start, resolve_targets
from areal_lora.errors import NON_RETRYABLE, ConfigErrors, ExitCode
from areal_lora.launcher.hub import HubDownload, download, resolve
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.restarts import RunEnd
from areal_lora.launcher.slurm.script import submit
from areal_lora.launcher.start import RunStart, check_packages, previous_run, prompt_findings, with_absolute_root
from areal_lora.launcher.supervise import STOP_GRACE_S, Interrupts, Supervisor
from areal_lora.launcher.sweep import Sweep, launched, print_result
from areal_lora.launcher.watch import Watch, end_event, print_failure
from areal_lora.obs.console import LiveConsole, print_line
from areal_lora.obs.report.closing import print_closing, print_report
from areal_lora.obs.tracking.main import check_clients
from areal_lora.run_folder.events import EndEvent, now_utc, record_end
from areal_lora.tasks.check import reward_problems, task_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A checked configuration with its model found and its targets resolved. ``download``: files to fetch first."""

    config: Config
    plan: JobPlan
    download: HubDownload | None


def run(config: Config, *, fresh: bool = False, sweep: Sweep | None = None) -> int:
    """Run ``config`` on this machine, or submit it to Slurm; resume the run in its folder unless ``fresh``.

    With a ``sweep`` its adapters are the trials, which are checked as listed ones and join the run.
    Blocks until a local run ends. Call it in the main thread: Ctrl-C stops the run. Returns an ``ExitCode``: DONE,
    INTERRUPTED, or how the run failed. Raises ArealLoraError for a run that cannot start, ConfigErrors for a
    configuration that the guardrails refuse.
    """
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    prepared = prepare(config, err, fresh=fresh)
    chosen = prepared.config if sweep is None else launched(prepared.config, sweep)
    return start(chosen, prepared.plan, out, fresh, prepared.download, sweep=sweep).code


def prepare(config: Config, err: Console, *, fresh: bool = False, starts: bool = True) -> PreparedRun:
    """Find the model, check and plan; warnings go to ``err``. Offline unless ``starts``. Raises ConfigErrors."""
    here = starts and config.cluster.kind == "local"
    previous = None if fresh else previous_run(with_absolute_root(config).run_folder)
    config, needed = resolve(config, previous.config.model if previous else None, online=starts)
    facts = gather_facts(config, runs_here=here)
    if here:
        check_packages(config)
    if starts:
        check_clients(config.run.trackers)
    findings = check_start(config, facts)
    if errors := [finding.error() for finding in findings if finding.severity is Severity.ERROR]:
        raise ConfigErrors(errors)
    _warn(findings, err)
    for check in (task_problems, reward_problems):
        if problems := list(check(config, online=starts)):
            raise ConfigErrors(problems)
    _warn(prompt_findings(config, online=starts), err)
    config = resolve_targets(config, facts)
    return PreparedRun(config=config, plan=make_plan(config, facts), download=needed)


def _warn(findings: Iterable[Finding], err: Console) -> None:
    for finding in findings:
        print_line(err, f"{finding.severity}: {finding.error()}")


def start(
    config: Config,
    plan: JobPlan,
    out: Console,
    fresh: bool = False,
    needed: HubDownload | None = None,
    code: Mapping[str, str] | None = None,
    sweep: Sweep | None = None,
) -> RunEnd:
    """Take the run folder with ``code``, download what of the model is ``needed``, run here or submit to Slurm.

    ``sweep`` is that of the run, if it has one.
    """
    with RunStart(config, fresh, code, sweep) as run_start:
        if run_start.moved is not None:
            print_line(out, f"A previous run was in {plan.run_folder}; it is now {run_start.moved.name}.")
        if run_start.previous is not None and run_start.previous.finished(config):
            steps = run_start.previous.steps
            more = f"more steps, such as {' '.join(more_steps(run_start.previous.config, steps))}"
            done = f"This run is done: {run_start.previous.steps_done} steps."
            print_line(out, f"{done} Continue with {more}, or start over with --fresh.")
            print_closing(plan.run_folder, out)
            return RunEnd(code=ExitCode.DONE)
        print_line(out, f"Run folder: {plan.run_folder}")
        if run_start.previous is not None:
            check_present(plan.run_folder, config)
            newest = [f"{name}@v{max(found)}" for name, found in run_start.previous.versions.items() if found]
            if newest:
                print_line(out, f"The run in it is resumed; its newest checkpoints: {', '.join(newest)}.")
            else:
                print_line(out, "A run in it ended before its first checkpoint: it restarts at step 0.")
        if config.model.commit is not None:
            print_line(out, f"Base model: {config.model.path} at {config.model.commit}, in {config.model.snapshot}")
        if needed is not None:
            download(needed, partial(print_line, out))
        if config.cluster.kind == "slurm":
            job = submit(config, plan, run_start.prepare)
            print_line(out, f"Submitted Slurm job {job}; logs in {plan.run_folder.logs}")
            return RunEnd(code=ExitCode.DONE)
        run_start.prepare()
        end = run_local(config, plan, out)
    if plan.run_folder.summary.is_file():  # also where an adapter has failed
        print_closing(plan.run_folder, out)
        print_result(plan.run_folder, out)
    return end


def run_local(config: Config, plan: JobPlan, console: Console) -> RunEnd:
    """Its code is DONE when trainer rank 0 ended well, INTERRUPTED, or how the run failed.

    Failed processes are restarted, see ``Restarts``. Whatever the outcome, no process, port or shared memory of the
    run remains.
    """
    view = LiveConsole(plan.run_folder, ends_of(config), console)
    with Interrupts() as interrupts, Supervisor(plan.run_folder.logs, STOP_GRACE_S) as supervisor:
        supervisor.start(plan.processes)
        view.start()
        try:
            failure = Watch(config, plan, supervisor, view).until_end(lambda: interrupts.count > 0)
        finally:
            view.stop()
        if interrupts.count:
            console.print("Interrupted: stopping (once more to kill at once).", markup=False)
        elif failure is not None:
            # Printed before the stop, which takes seconds and adds errors of the other processes.
            print_failure(failure, console)
        supervisor.stop(interrupted=interrupts)
    if interrupts.count:
        print_line(console, f"Stopped. The run folder is {plan.run_folder}. The same command resumes the run.")
        event = EndEvent(at=now_utc(), code=ExitCode.INTERRUPTED, process="it", how="was interrupted")
        end = RunEnd(code=ExitCode.INTERRUPTED, why="it was interrupted")
    elif failure is None:
        return RunEnd(code=ExitCode.DONE)
    else:
        code = ExitCode(failure.code) if failure.code in NON_RETRYABLE else ExitCode.COMPONENT_FAILED
        event = end_event(failure, code)
        end = RunEnd(code=code, why=f"{failure.spec.name} {failure.cause}; its log is {failure.log}")
    record_end(plan.run_folder, event)
    if not plan.run_folder.summary.is_file():
        print_report(plan.run_folder, console)
    return end
