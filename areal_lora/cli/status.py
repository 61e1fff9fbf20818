"""``areal-lora status RUN``: what a run does now, or how it ended, from its folder, this machine's processes and Slurm.

``look`` gathers, ``Status`` is the result. Nothing is written: the run may be of another user, killed, or read-only.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Annotated

import msgspec
import typer
from rich.live import Live
from rich.text import Text

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.cli.find_run import Run, aligned, local_processes, open_run
from areal_lora.config.models import Config
from areal_lora.config.recorded import ends_of, with_joined
from areal_lora.config.sizing.slots import seats_of
from areal_lora.launcher.slurm.job_query import look as look_up, lost_nodes, placement, submitted_job
from areal_lora.launcher.slurm.states import Phase, explain
from areal_lora.launcher.start import Owner, holder, is_free
from areal_lora.network.addresses import look as interfaces
from areal_lora.obs.console import duration, histogram, number, percent, training_speed
from areal_lora.obs.metrics.reader import newest_records, state_records
from areal_lora.obs.metrics.records import lag_counts, mean_lag
from areal_lora.obs.report.closing import detail_lines
from areal_lora.obs.run_view import AdapterView, RunView, counted
from areal_lora.processes.log import printable
from areal_lora.rollout.ledger.ledger import GroupState
from areal_lora.rollout.ledger.reconcile import group_counts
from areal_lora.run_folder.events import EndEvent, StartEvent, count_restarts, last_end, read_events
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint
from areal_lora.run_folder.status import read_statuses
from areal_lora.types import AdapterPhase

ENDED = ("done", "stopped")
QUIET_S = 60.0
"""A process of another machine whose heartbeat is older counts as silent."""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``alive`` is None where this machine cannot see it; ``beat_s``: seconds since its heartbeat."""

    name: str
    node: str
    pid: int | None
    alive: bool | None
    beat_s: float | None
    doing: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job of the run: ``state`` and ``reason`` as Slurm has them, ``text`` what that means."""

    id: str
    state: str
    reason: str
    phase: str
    nodes: str
    restarts: int
    text: str


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter of several; None: not known yet. ``reason`` is that of its ``state``, empty where it is plain.

    ``steps`` is None where a client drives it. ``share`` is its part of the trained tokens of the newest steps, ``lag``
    their mean staleness in versions.
    ``checkpoint`` is the newest version on the disk.
    """

    name: str
    state: AdapterPhase
    reason: str
    steps_done: int
    steps: int | None
    reward: float | None
    accuracy: float | None
    accuracy_version: int | None
    lag: float | None
    share: float
    checkpoint: int | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Figures as in ``metrics.jsonl``; None: not known yet. ``state`` is one of
    running, waiting, ending, done, stopped and unknown.

    ``steps`` is None where clients drive all adapters: there is no end.
    With several adapters ``steps_done`` and ``steps`` are sums, ``reward`` and ``accuracy`` are None, and ``adapters``
    has a row for each; it is empty for a run with one.
    ``groups_equal`` and ``training`` (speed, memory) are the newest step's; ``faults`` are of rollouts that failed.
    ``failure`` is why the last start ended before the last step, where that is known.
    """

    run: str
    folder: str
    kind: str
    state: str
    why: str
    launcher_pid: int | None
    launcher_host: str | None
    steps_done: int
    steps: int | None
    eta_s: float | None
    step_s: float | None
    training: dict[str, float | None]
    reward: float | None
    accuracy: float | None
    accuracy_version: int | None
    staleness: dict[int, int]
    staleness_mean: float | None
    checkpoints: dict[str, int]
    checkpoint_age_s: float | None
    restarts: dict[str, int]
    requeues: int
    starts: int
    job: JobStatus | None
    processes: list[ProcessStatus]
    adapters: list[AdapterStatus] = []
    groups_equal: float | None = None
    faults: list[str] = []
    failure: EndEvent | None = None


def look(folder: RunFolder, config: Config) -> Status:
    """The status of the run in ``folder`` now, with the adapters that joined it."""
    config = with_joined(config, folder)
    slurm = config.cluster.kind == "slurm"
    job = _job(folder) if slurm else None
    held, here = holder(folder), local_processes(folder)
    processes = list(_processes(folder, config, here, job))
    view = _view(folder, config)
    state, why = _state(folder, job, held, here)
    if state == "done" and (
        failed := [name for name, one in view.adapters.items() if one.state is AdapterPhase.FAILED]
    ):
        cause = f": {end}" if (end := last_end(folder)) is not None else ""
        again = f"areal-lora resume {quote(str(folder))} tries again"
        state, why = "stopped", f"{', '.join(failed)} failed{cause} (fix: {again})"
    last = view.steps[-1] if view.steps else None
    accuracy, accuracy_version = _measured(view.only)
    events = read_events(folder)
    newest = {a.name: max(versions_in(folder.adapter_checkpoints(a.name)), default=None) for a in config.adapters}
    ages = [_age_s(folder.adapter_checkpoints(name) / f"v{v:06d}") for name, v in newest.items() if v is not None]
    return Status(
        run=config.run.name,
        folder=str(folder),
        kind=config.cluster.kind,
        state=state,
        why=why,
        launcher_pid=held.pid if held else None,
        launcher_host=held.host if held else None,
        steps_done=view.steps_done,
        steps=view.total,
        eta_s=view.remaining_s() if state == "running" else None,
        step_s=last.step_s if last else None,
        training={t: x for t, x in last.metrics.items() if t.startswith(("speed/", "memory/"))} if last else {},
        reward=last.reward_mean if last and view.only else None,
        accuracy=accuracy,
        accuracy_version=accuracy_version,
        staleness=lag_counts(view.steps),
        staleness_mean=mean_lag(lag_counts(view.steps)),
        checkpoints={name: version for name, version in newest.items() if version is not None},
        checkpoint_age_s=min((age for age in ages if age is not None), default=None),
        restarts=count_restarts(folder),
        requeues=job.restarts if job else 0,
        starts=sum(isinstance(event, StartEvent) for event in events),
        job=job,
        processes=processes,
        adapters=[] if view.only else list(_adapters(view, newest)),
        failure=last_end(folder) if state == "stopped" else None,
        groups_equal=last.metrics.get("train/groups_equal") if last and view.only else None,
        faults=[
            view.prefix(name) + one.steps[-1].faults_text
            for name, one in view.adapters.items()
            if one.steps and one.steps[-1].faults
        ],
    )


def ended(folder: RunFolder, config: Config) -> str | None:
    """``done`` or ``stopped``; None for a run that works, waits, ends, or of which that is not known."""
    job = _job(folder) if config.cluster.kind == "slurm" else None
    state, _ = _state(folder, job, holder(folder), local_processes(folder))
    return state if state in ("done", "stopped") else None


def _adapters(view: RunView, checkpoints: Mapping[str, int | None]) -> Iterator[AdapterStatus]:
    shares = view.shares()
    for name, newest in checkpoints.items():
        one = view.adapters[name]
        accuracy, version = _measured(one)
        yield AdapterStatus(
            name=name,
            state=one.state,
            reason=one.reason,
            steps_done=one.steps_done,
            steps=one.total,
            reward=one.steps[-1].reward_mean if one.steps else None,
            accuracy=accuracy,
            accuracy_version=version,
            lag=one.mean_lag,
            share=shares[name],
            checkpoint=newest,
        )


def _job(folder: RunFolder) -> JobStatus | None:
    """The job that was submitted for the folder; None before."""
    if (number := submitted_job(folder)) is None:
        return None
    record = look_up(number)
    text = explain(record)
    return JobStatus(
        id=number,
        state=record.state,
        reason=record.reason if record.reason not in ("None", "(null)") else "",
        phase=str(text.phase),
        nodes=record.nodes,
        restarts=record.restarts,
        text=re.sub(r"\bRUN\b", lambda _: quote(str(folder)), str(text)),
    )


def _state(folder: RunFolder, job: JobStatus | None, held: Owner | None, here: Mapping[str, int]) -> tuple[str, str]:
    """A state of a run, and the reason where it is not plain."""
    done = folder.summary.is_file()
    if job is not None:
        if job.phase == Phase.UNKNOWN and _beats(folder):
            return "unknown", job.text
        words = {Phase.RUNNING: "running", Phase.WAITING: "waiting", Phase.ENDING: "ending"}
        state = words.get(Phase(job.phase), "done" if done else "stopped")
        return state, "" if state in ("running", "done") and job.state in ("RUNNING", "COMPLETED") else job.text
    if held is not None:
        return (
            ("running", "") if held.here else ("running", f"according to a mark of process {held.pid} on {held.host}")
        )
    if here:
        return "ending", "its launcher has ended; the processes below end within 10 seconds"
    if done:
        return "done", ""
    if _beats(folder) and not is_free(folder):
        return "unknown", "no process of it is on this machine, but there are fresh heartbeats: it works on another one"
    why = last_end(folder) or "it ended before its last step and recorded no cause: killed, or the disk was full"
    return "stopped", f"{why} (then: areal-lora resume {quote(str(folder))} continues)"


def _beats(folder: RunFolder) -> bool:
    ages = [_age_s(path) for path in folder.heartbeats.glob("*-*")] if folder.heartbeats.is_dir() else []
    return any(age is not None and age < QUIET_S for age in ages)


def _processes(
    folder: RunFolder, config: Config, here: Mapping[str, int], job: JobStatus | None
) -> Iterator[ProcessStatus]:
    doing = read_statuses(folder)
    servers = [f"server-{i}" for i in range(config.rollout.servers)]
    planned = [*(f"trainer-{i}" for i in range(config.trainer.world_size)), "controller-0", *servers]
    names = dict.fromkeys([*planned, *doing, *here])
    nodes = placement(folder) if job else {}
    # Ranks above 0 publish no address.
    seats = seats_of(config).trainer if config.cluster.kind == "nodes" else ()
    ranks = {f"trainer-{rank}": f"node {seat.node}" for rank, seat in enumerate(seats)}
    lost = lost_nodes(set(nodes.values())) if job and job.phase == Phase.RUNNING else set()
    over = job is not None and job.phase in (Phase.OVER, Phase.WAITING)
    own = {str(address) for one in interfaces() for address in one.addresses}
    for name in names:
        (role, _, index), endpoint = name.rpartition("-"), None
        with contextlib.suppress(OSError, ValueError):
            endpoint = read_endpoint(folder, role, int(index))
        node = nodes.get(name)
        elsewhere = endpoint is not None and not endpoint.host.startswith("127.") and endpoint.host not in own
        # Another machine's cannot be seen from here.
        unseen = not over and node not in lost and (config.cluster.kind != "local" or elsewhere)
        node_name = os.uname().nodename if name in here or endpoint else ""
        host = endpoint.host if endpoint and elsewhere and name not in here else node_name
        yield ProcessStatus(
            name=name,
            node=f"{node} (lost)" if node in lost else node or host or ranks.get(name, ""),
            pid=here.get(name, endpoint.pid if endpoint else None),
            alive=name in here or (None if unseen else False),
            beat_s=_age_s(folder.heartbeat(name)),
            doing=doing.get(name, ""),
        )


def _view(folder: RunFolder, config: Config) -> RunView:
    """The newest records; of several adapters also their states, as one that ended early may not be among those."""
    view = RunView(ends_of(config))
    for record in state_records(folder) if len(config.adapters) != 1 else ():
        view.add(record)
    for newest in newest_records(folder):
        view.add(newest)
    return view


def _measured(adapter: AdapterView | None) -> tuple[float | None, int | None]:
    """Accuracy and version of the last evaluation, if it has an accuracy."""
    last = adapter.last_eval if adapter else None
    return (None, None) if last is None or last.accuracy is None else (last.accuracy, last.version)


def _age_s(path: os.PathLike[str]) -> float | None:
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:
        return None


EVERY_S = 2.0
NAME_WIDTH = 10


def status(
    run: Run,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every 2 seconds until the run ends")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, or one a line with --watch")] = False,
    groups: Annotated[bool, typer.Option("--groups", help="also prompt groups by state, and drops by reason")] = False,
    details: Annotated[bool, typer.Option("--details", help="of a finished run also commands and all figures")] = False,
) -> None:
    """Show roles, step, reward, staleness, remaining time, checkpoints and the Slurm job of a run."""
    folder, config = open_run(run)
    screen = Live(auto_refresh=False) if watch and not as_json and sys.stdout.isatty() else None
    with screen or contextlib.nullcontext():
        while True:
            seen = look(folder, config)
            if screen is not None:
                screen.update(Text(render(seen)), refresh=True)
            else:
                print(msgspec.json.encode(seen).decode() if as_json else render(seen), flush=True)
            if groups and not as_json and screen is None:
                print("", *aligned(group_rows(folder, seen.state)), sep="\n", flush=True)
            if details and not as_json and screen is None and folder.summary.is_file():
                print("", *detail_lines(folder), sep="\n", flush=True)
            if not watch or seen.state in ENDED:
                return
            time.sleep(EVERY_S)


def render(seen: Status) -> str:
    """The status as a few rows, a table of several adapters and one of processes, in plain text."""
    table = [("process", "node", "pid", "state", "doing")]
    for one in seen.processes:
        pid = "-" if one.pid is None else str(one.pid)
        state = "alive" if one.alive else "ended" if one.doing else "not started"
        if one.alive is None:  # of another machine
            state = "no heartbeat yet" if one.beat_s is None else f"heartbeat {one.beat_s:.0f} s ago"
        table.append((one.name, one.node or "-", pid, state, one.doing or "-"))
    text = [f"{name:<{NAME_WIDTH}}  {value}" for name, value in lines(seen)]
    text += ["", *aligned(adapter_rows(seen.adapters))] if seen.adapters else []
    return printable("\n".join([*text, "", *aligned(table)]))


def adapter_rows(adapters: Sequence[AdapterStatus]) -> Sequence[Sequence[str]]:
    """A head and a row per adapter; ``share`` is of the trained tokens of the newest steps."""
    rows = [("adapter", "state", "step", "reward", "accuracy", "lag", "share", "checkpoint", "why")]
    for one in adapters:
        accuracy = number(one.accuracy) + ("" if one.accuracy_version is None else f" (v{one.accuracy_version})")
        figures = (number(one.reward), accuracy, number(one.lag, 2), percent(one.share))
        checkpoint = "-" if one.checkpoint is None else f"v{one.checkpoint}"
        rows.append(
            (one.name, str(one.state), counted(one.steps_done, one.steps), *figures, checkpoint, one.reason or "-")
        )
    return rows


def group_rows(folder: RunFolder, state: str) -> Sequence[Sequence[str]]:
    """A head and a row per adapter of the ledger; ``state`` is that of the run."""
    rows = [("groups of", *(state.name.lower() for state in GroupState), "dropped for")]
    for adapter, found in sorted(group_counts(folder, ended=state in ENDED).items()):
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(found.dropped.items())) or "-"
        rows.append((adapter, *(str(found.states.get(each, 0)) for each in GroupState), why))
    return rows


def lines(seen: Status) -> list[tuple[str, str]]:
    """The rows above the table: name and text of each."""
    by = f" (launcher {seen.launcher_pid} on {seen.launcher_host})" if seen.launcher_pid else ""
    rows = [("run", f"{seen.run} in {seen.folder}"), ("state", seen.state + by + (f": {seen.why}" if seen.why else ""))]
    if seen.job is not None:
        state = f"{seen.job.state or 'unknown to Slurm'}{f' ({seen.job.reason})' if seen.job.reason else ''}"
        rows.append(("job", f"{seen.job.id} {state}" + (f" on {seen.job.nodes}" if seen.job.nodes else "")))
    pace = "" if seen.step_s is None else "   ".join([f"   {seen.step_s:.2f} s a step", *training_speed(seen.training)])
    eta = f"   ETA {duration(seen.eta_s)}" if seen.eta_s is not None else ""
    rows.append(("step", f"{counted(seen.steps_done, seen.steps)}{pace}{eta}"))
    if seen.reward is not None or seen.accuracy is not None:
        accuracy = (
            f"   accuracy {number(seen.accuracy)} (v{seen.accuracy_version})" if seen.accuracy is not None else ""
        )
        equal = f"   {percent(seen.groups_equal)} of groups equal" if seen.groups_equal is not None else ""
        rows.append(("reward", number(seen.reward) + accuracy + equal))
    rows += [("faults", text) for text in seen.faults]
    if seen.staleness:
        rows.append(("staleness", f"{histogram(seen.staleness)}   mean {number(seen.staleness_mean, 2)}"))
    if seen.checkpoints:
        age = f", {duration(seen.checkpoint_age_s)} ago" if seen.checkpoint_age_s is not None else ""
        rows.append(("checkpoint", ", ".join(f"{name}@v{v}" for name, v in seen.checkpoints.items()) + age))
    counts = [f"{process} {n}" for process, n in seen.restarts.items()]
    counts += [f"requeued {seen.requeues}"] if seen.requeues else []
    counts += [f"started {seen.starts}"] if seen.starts > 1 else []
    return [*rows, ("restarts", ", ".join(counts) or "none")]
