"""One run from its configuration: check and plan it, take its run folder, run it here or submit it to Slurm.

From ``model.path`` to a folder: a hub name becomes a commit and the folder of its snapshot. `resolve` decides, with the
hub's cache and, where the run is to start, with the hub; `download` then brings the files that are missing. The commit
is recorded in the run's config.json, and a run that is resumed keeps it.
"""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
from rich.console import Console

from areal_lora.checkpoint.recover import check_present
from areal_lora.config.facts import gather_facts
from areal_lora.config.models import Config, ModelConfig
from areal_lora.config.recorded import cached_snapshot, ends_of, missing_files, more_steps, wanted
from areal_lora.config.rules.findings import Finding, Severity, resolve_targets
from areal_lora.config.rules.guardrails import check_start
from areal_lora.errors import NON_RETRYABLE, ArealLoraError, ConfigError, ConfigErrors, EnvironmentError_, ExitCode
from areal_lora.families.registry import is_hub_name
from areal_lora.launcher.nodes.table import node_rank
from areal_lora.launcher.plan import ROLES, JobPlan, make_plan
from areal_lora.launcher.restarts import RunEnd
from areal_lora.launcher.slurm.script import submit
from areal_lora.launcher.start import RunStart, check_packages, previous_run, prompt_findings, with_absolute_root
from areal_lora.launcher.supervise import STOP_GRACE_S, Interrupts, Supervisor, handled
from areal_lora.launcher.sweep import Sweep, launched, print_result
from areal_lora.launcher.watch import Watch, end_event, own_failure_recorded, print_failure
from areal_lora.obs.console import LiveConsole, duration, human_bytes, print_line, run_console
from areal_lora.obs.report.closing import print_closing, print_report
from areal_lora.obs.tracking.main import check_clients
from areal_lora.run_folder.events import EndEvent, note_event, now_utc
from areal_lora.run_folder.paths import SESSION_VARIABLE
from areal_lora.tasks.check import reward_problems, task_problems

ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDownload:
    """Files of one commit of a hub model that are not in ``folder``, its snapshot in the cache, yet."""

    name: str
    folder: Path
    files: tuple[str, ...]
    nbytes: int


def resolve(config: Config, earlier: ModelConfig | None, *, online: bool) -> tuple[Config, HubDownload | None]:
    """``config`` with the model's folder known as far as it can be, and what has to be downloaded before a start.

    ``earlier`` is the model of the run that is resumed, if there is one. Offline (``--dry-run``) nothing is
    requested: a hub name without a snapshot in the cache stays without a folder. Raises ConfigError for what is neither
    a folder nor a hub model, and EnvironmentError_ where the hub would have to be contacted and cannot be.
    """
    model = config.model.model_copy(update={"commit": None, "snapshot": None})
    if Path(model.path).is_dir():
        if model.revision is not None:
            raise ConfigError("model.revision", f"{model.path} is a folder, which has no revisions", "leave it out")
        return config.model_copy(update={"model": model}), None
    if not is_hub_name(model.path):
        reason = f"there is no folder {model.path!r}, and it is not a hub name"
        raise ConfigError("model.path", reason, "give a Hugging Face model folder, or a hub name org/name")
    revision = model.revision
    if earlier is not None and earlier.commit and (earlier.path, earlier.revision) == (model.path, model.revision):
        revision = earlier.commit
    folder = _look_up(model, revision) if online else cached_snapshot(model.path, revision)
    if folder is None:
        return config.model_copy(update={"model": model}), None
    model = model.model_copy(update={"commit": folder.name, "snapshot": str(folder)})
    needed = _plan(model.path, folder) if online and missing_files(folder) else None
    return config.model_copy(update={"model": model}), needed


def _look_up(model: ModelConfig, revision: str | None) -> Path:
    """The snapshot folder of ``revision``; a complete one in the cache counts where the hub gives no access."""
    cached = cached_snapshot(model.path, revision)
    try:
        with _hub(model.path, revision, "config.json"), _quiet():
            if cached is None:  # a download of what is not cached retries for 20 s before it reports an error
                HfApi().model_info(model.path, revision=revision, timeout=ANSWER_S)
            return Path(hf_hub_download(model.path, "config.json", revision=revision)).absolute().parent
    except ArealLoraError:
        if cached is None or missing_files(cached):
            raise
        return cached


def _plan(name: str, folder: Path) -> HubDownload:
    with _hub(name, folder.name, ", ".join(missing_files(folder))):
        info = HfApi().model_info(name, revision=folder.name, files_metadata=True, timeout=ANSWER_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = tuple(file for file in wanted(sizes) if not (folder / file).is_file())
    if not any(file.endswith(".safetensors") for file in wanted(sizes)):
        reason = f"{name} has no model.safetensors and no shards of it"
        raise ConfigError("model.path", reason, "use one that is saved as safetensors")
    return HubDownload(name=name, folder=folder, files=files, nbytes=sum(sizes[file] for file in files))


def download(plan: HubDownload, report: Callable[[str], None]) -> None:
    """Bring the files of ``plan`` into the cache. What an earlier download left half-written is taken up again.

    Ctrl-C ends the process. Raises EnvironmentError_ if not all of them are available.
    """
    report(
        f"Downloading {plan.name} ({len(plan.files)} files, {human_bytes(plan.nbytes)}) from {constants.ENDPOINT} "
        f"into {plan.folder}"
    )
    started_s, quiet = time.monotonic(), nullcontext() if sys.stderr.isatty() else _quiet()
    ctrl_c = handled(signal.SIGINT, _end_at_once)
    with _hub(plan.name, plan.folder.name, ", ".join(plan.files)), ctrl_c, quiet:
        snapshot_download(plan.name, revision=plan.folder.name, allow_patterns=list(plan.files))
    if lacks := missing_files(plan.folder):
        raise EnvironmentError_(f"model.path: {plan.name} as downloaded lacks {', '.join(lacks)} ({plan.folder})")
    report(f"Downloaded {human_bytes(plan.nbytes)} in {duration(time.monotonic() - started_s)}.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's progress bars: in a log file they are thousands of lines."""
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _end_at_once(number: int, frame: object) -> None:
    """End the process: the threads that download cannot be interrupted, and exiting waits for them."""
    print("Interrupted; the same command downloads the rest.", flush=True)
    os._exit(ExitCode.INTERRUPTED)


@contextmanager
def _hub(name: str, revision: str | None, what: str) -> Iterator[None]:
    """Translate what huggingface_hub raises into one line with the fix."""
    own = Path(sys.executable).with_name("hf")  # as a shell finds it without an activated environment
    program = shlex.quote(str(own)) if own.is_file() else "hf"
    hub, access = constants.ENDPOINT, f"run `{program} auth login` or set HF_TOKEN"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error repeats what its warnings state
    try:
        yield
    except errors.GatedRepoError as error:
        reason = f"{name} is gated, and {hub} gives this machine no access"
        raise ConfigError("model.path", reason, f"accept its terms at {hub}/{name}, then {access}") from error
    except errors.RepositoryNotFoundError as error:
        reason = f"there is no folder {name!r}, and {hub} has no model of this name that this machine may read"
        raise ConfigError("model.path", reason, f"correct the name; if the model is private, {access}") from error
    except errors.RevisionNotFoundError as error:
        reason = f"{name} has no revision {revision!r} on {hub}"
        raise ConfigError("model.revision", reason, "give a branch, a tag or a commit of it") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name, revision, what, _line(error.__cause__ or error)) from error
    except errors.EntryNotFoundError as error:
        raise ConfigError("model.path", f"{name} has no {what} on {hub}", "use a model for transformers") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ConfigError("model.path", f"{hub} refuses access to {name}: {_line(error)}", access) from error
        raise _unreachable(name, revision, what, _line(error)) from error
    except ArealLoraError:
        raise
    except Exception as error:  # fault boundary: the hub's client raises its transport's many types, and OSError
        raise _unreachable(name, revision, what, _line(error)) from error


def _unreachable(name: str, revision: str | None, what: str, why: str) -> EnvironmentError_:
    at = f" at revision {revision}" if revision else ""
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return EnvironmentError_(
        f"model.path: there is no folder {name!r}, the cache {constants.HF_HUB_CACHE} lacks files of the hub model "
        f"{name}{at} ({what}), and {constants.ENDPOINT} did not give them{offline}: {why} "
        f"(fix: start where a hub is reachable, copy the cache of a machine that has it, or give a model folder)"
    )


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A checked configuration with its model found and its targets resolved. ``download``: files to fetch first."""

    config: Config
    plan: JobPlan
    download: HubDownload | None


def run(config: Config, *, fresh: bool = False, sweep: Sweep | None = None) -> int:
    """Run ``config`` here, or submit it to Slurm; resume the run in its folder unless ``fresh``. With other nodes this
    is the launcher on the first one, and the agent of each other.

    With a ``sweep`` its adapters are the trials, which are checked as listed ones and join the run.
    Blocks until a local run ends. Call it in the main thread: Ctrl-C stops the run. Returns an ``ExitCode``: DONE,
    INTERRUPTED, or how the run failed. Raises ArealLoraError for a run that cannot start, ConfigErrors if refused.
    """
    out, err = run_console(), Console(stderr=True, highlight=False)
    prepared = prepare(config, err, fresh=fresh)
    if node := node_rank(config.cluster):
        from areal_lora.launcher.nodes.agent import run_agent  # zmq, which no other launcher needs

        return run_agent(config, prepared.plan.run_folder, node, fresh=fresh, note=partial(print_line, out))
    chosen = prepared.config if sweep is None else launched(prepared.config, sweep)
    return start(chosen, prepared.plan, out, fresh, prepared.download, sweep=sweep).code


def prepare(config: Config, err: Console, *, fresh: bool = False, starts: bool = True) -> PreparedRun:
    """Find the model, check and plan; warnings go to ``err``. Offline unless ``starts``. Raises ConfigErrors."""
    here, node = starts and config.cluster.kind != "slurm", node_rank(config.cluster) if starts else 0
    if here and config.cluster.kind == "nodes":
        os.environ[SESSION_VARIABLE] = uuid4().hex[:16]  # of this start; an agent follows that of node 0
    # Node 0 may be writing the folder.
    previous = None if fresh or node else previous_run(with_absolute_root(config).run_folder)
    config, needed = resolve(config, previous.config.model if previous else None, online=starts)
    facts = gather_facts(config, runs_here=here)
    if here and config.cluster.kind == "local":
        check_packages(config)
    if starts and not node:
        check_clients(config.run.trackers)
    findings = check_start(config, facts)
    if errors := [finding.error() for finding in findings if finding.severity is Severity.ERROR]:
        raise ConfigErrors(errors)
    _warn(findings, err)
    for problems in (
        task_problems(config, online=starts, resumed=previous is not None),
        reward_problems(config, online=starts),
    ):
        if found := list(problems):
            raise ConfigErrors(found)
    _warn(prompt_findings(config, online=starts), err)
    config = resolve_targets(config, facts)
    plan = make_plan(config, facts)
    if here and config.cluster.kind == "nodes":
        check_packages(config, {ROLES[spec.role] for spec in plan.processes if spec.node == node})
    return PreparedRun(config=config, plan=plan, download=needed)


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

    Failed processes are restarted (`Restarts`). Whatever the outcome, no process, port or shared memory remains.
    """
    view = LiveConsole(plan.run_folder, ends_of(config), console)
    recorded = own_failure_recorded(plan.run_folder)
    with recorded, Interrupts() as interrupts, _supervisor(config, plan, view) as supervisor:
        supervisor.start(plan.processes)
        view.start()
        try:
            failure = Watch(config, plan, supervisor, view).until_end(lambda: interrupts.count > 0)
        finally:
            view.stop()
        supervisor.code = ExitCode.INTERRUPTED if interrupts.count else ExitCode.DONE
        if interrupts.count:
            console.print("Interrupted: stopping (once more to kill at once).", markup=False)
        elif failure is not None:
            # Printed before the stop, which takes seconds and adds errors of the other processes.
            print_failure(failure, console)
            supervisor.code = failure.code if failure.code in NON_RETRYABLE else ExitCode.COMPONENT_FAILED
        supervisor.stop(interrupted=interrupts)
    if interrupts.count:
        print_line(console, f"Stopped. The run folder is {plan.run_folder}. The same command resumes the run.")
        event = EndEvent(at=now_utc(), code=ExitCode.INTERRUPTED, process="it", how="was interrupted")
        end = RunEnd(code=ExitCode.INTERRUPTED, why="it was interrupted")
    elif failure is None:
        return RunEnd(code=ExitCode.DONE)
    else:
        code = ExitCode(supervisor.code)
        event = end_event(failure, code)
        end = RunEnd(code=code, why=f"{failure.spec.name} {failure.cause}; its log is {failure.log}")
    note_event(plan.run_folder, event)
    if not plan.run_folder.summary.is_file():
        print_report(plan.run_folder, console)
    return end


def _supervisor(config: Config, plan: JobPlan, view: LiveConsole) -> Supervisor:
    if config.cluster.kind != "nodes":
        return Supervisor(plan.run_folder.logs, STOP_GRACE_S)
    from areal_lora.launcher.nodes.supervisor import NodeSupervisor  # zmq

    return NodeSupervisor(config, plan, view.note)
