"""Run a plan on this machine: start, show, wait, restart what failed, stop."""

from __future__ import annotations

from rich.console import Console

from areal_lora.config.adapter_run import ends_of
from areal_lora.config.models import Config
from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.ended import RunEnd
from areal_lora.launcher.plan import JobPlan
from areal_lora.launcher.supervise import STOP_GRACE_S, Interrupts, Supervisor
from areal_lora.launcher.watch import Watch, end_event, print_failure
from areal_lora.obs.console import LiveConsole
from areal_lora.run_folder.events import EndEvent, now_utc, record_end


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
        again = "The same command resumes the run."
        console.print(f"Stopped. The run folder is {plan.run_folder}. {again}", markup=False, soft_wrap=True)
        record_end(plan.run_folder, EndEvent(at=now_utc(), code=ExitCode.INTERRUPTED, who="it", how="was interrupted"))
        return RunEnd(code=ExitCode.INTERRUPTED, why="it was interrupted")
    if failure is None:
        return RunEnd(code=ExitCode.DONE)
    code = ExitCode(failure.code) if failure.code in NON_RETRYABLE else ExitCode.COMPONENT_FAILED
    record_end(plan.run_folder, end_event(failure, code))
    return RunEnd(code=code, why=f"{failure.spec.name} {failure.cause}; its log is {failure.log}")
