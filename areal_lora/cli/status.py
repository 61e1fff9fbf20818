"""``areal-lora status RUN``: what a run does now, or how it ended."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.live import Live
from rich.text import Text

from areal_lora.cli.find_run import Run, aligned, open_run
from areal_lora.cli.look import AdapterStatus, ProcessStatus, Status, look
from areal_lora.obs.console import duration, histogram, number, percent
from areal_lora.obs.report.page import detail_lines
from areal_lora.obs.run_view import counted
from areal_lora.rollout.ledger.ledger import GroupState
from areal_lora.rollout.ledger.reconcile import group_counts
from areal_lora.run_folder.paths import RunFolder

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
                print("", *aligned(group_rows(folder)), sep="\n", flush=True)
            if details and not as_json and screen is None and folder.summary.is_file():
                print("", *detail_lines(folder), sep="\n", flush=True)
            if not watch or not going(seen):
                return
            time.sleep(EVERY_S)


def going(seen: Status) -> bool:
    return seen.state in ("running", "waiting", "ending", "unknown")


def render(seen: Status) -> str:
    """The status as a few rows, a table of several adapters and one of processes, in plain text."""
    table = [("process", "node", "pid", "state", "doing")]
    for one in seen.processes:
        pid = "-" if one.pid is None else str(one.pid)
        table.append((one.name, one.node or "-", pid, process_state(one), one.doing or "-"))
    text = [f"{name:<{NAME_WIDTH}}  {value}" for name, value in lines(seen)]
    text += ["", *aligned(adapter_rows(seen.adapters))] if seen.adapters else []
    return "\n".join([*text, "", *aligned(table)])


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


def group_rows(folder: RunFolder) -> Sequence[Sequence[str]]:
    """A head and a row per adapter of the ledger."""
    rows = [("groups of", *(state.name.lower() for state in GroupState), "dropped for")]
    for adapter, (states, dropped) in group_counts(folder).items():
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items())) or "-"
        rows.append((adapter, *(str(states[state]) for state in GroupState), why))
    return rows


def lines(seen: Status) -> list[tuple[str, str]]:
    """The rows above the table: name and text of each."""
    by = f" (launcher {seen.launcher_pid} on {seen.launcher_host})" if seen.launcher_pid else ""
    rows = [("run", f"{seen.run} in {seen.folder}"), ("state", seen.state + by + (f": {seen.why}" if seen.why else ""))]
    if seen.job is not None:
        state = f"{seen.job.state or 'unknown to Slurm'}{f' ({seen.job.reason})' if seen.job.reason else ''}"
        rows.append(("job", f"{seen.job.id} {state}" + (f" on {seen.job.nodes}" if seen.job.nodes else "")))
    pace = f"   {seen.step_s:.2f} s a step" if seen.step_s is not None else ""
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


def process_state(one: ProcessStatus) -> str:
    """``alive``, ``ended``, or for a process of another machine the age of its heartbeat."""
    if one.alive is None:
        return "no heartbeat yet" if one.beat_s is None else f"heartbeat {one.beat_s:.0f} s ago"
    return "alive" if one.alive else "ended" if one.doing else "not started"
