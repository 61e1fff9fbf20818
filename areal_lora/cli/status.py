"""``areal-lora status RUN``: what a run does now, or how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_lora.cli.look import AdapterStatus, ProcessStatus, Status
    from areal_lora.config.models import Config
    from areal_lora.run_folder.paths import RunFolder

RUNS = "runs"
RUN_HELP = "run folder, or the name of a run below runs/ of this folder or one above it"
VERSION_HELP = "a number, newest or best"
ADAPTER_HELP = "which adapter, if the run has several"
SHOWN = 8

Run = Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=lambda incomplete: run_names(incomplete))]
Version = Annotated[str, typer.Option(metavar="N", help=VERSION_HELP)]
Adapter = Annotated[str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)]
_FILE = typer.Option(metavar="FILE", help="YAML file or the name of a shipped example; several are merged in order")
Files = Annotated[list[Path], _FILE]
OptionalFiles = Annotated[list[Path] | None, _FILE]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="override one key, such as run.seed=2")
]


def find_run(text: str) -> RunFolder:
    """The run folder at path ``text``, or of the run of that name below ``runs/`` of this folder or of one above it.

    Raises ConfigError for anything that is not the folder of a started run.
    """
    candidates = [Path(text).expanduser(), *(place / text for place in _places())]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise ConfigError(text, "there is no such run", _which())
    folder = RunFolder(found.absolute())
    if not found.is_dir():
        raise ConfigError(str(folder), "it is a file, not a run folder", _which())
    if folder.config.is_file():
        return RunFolder.current(found.resolve())
    what = "it is empty: no run started in it" if not any(found.iterdir()) else "it is not a run folder: no config.json"
    raise ConfigError(str(folder), what, _which())


def recorded_config(folder: RunFolder) -> Config:
    """``config.recorded.read_config_here``, imported when it is needed."""
    from areal_lora.config.recorded import read_config_here

    return read_config_here(folder)


def with_overrides(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """``recorded_config`` with ``a.b=c`` applied and checked like those of a start."""
    from areal_lora.config.load import load_config
    from areal_lora.config.recorded import moved_here

    config = recorded_config(folder)
    if not overrides:
        return config
    fixed = [text for text in overrides if text.partition("=")[0] in ("run.name", "run.root")]
    if fixed:
        fix = "leave it out; a copy of the folder is a run of its own"
        raise ConfigError(fixed[0], "the run folder decides name and root of its run", fix)
    return moved_here(load_config([folder.config], overrides), folder)


def _places() -> Iterator[Path]:
    here = Path.cwd()
    yield from (folder / RUNS for folder in (here, *here.parents))


def run_names(incomplete: str = "") -> list[str]:
    """Runs that a shell can complete ``incomplete`` to, newest first."""
    return [name for _, names in _runs() for name in names if name.startswith(incomplete)]


def _runs() -> Iterator[tuple[Path, list[str]]]:
    """Each ``runs/`` with the names of its runs, newest first."""
    for place in _places():
        if place.is_dir():
            runs = [path for path in place.iterdir() if (path / RunFolder(path).config.name).is_file()]
            yield place, [path.name for path in sorted(runs, key=lambda path: -path.stat().st_mtime)]


def _which() -> str:
    for place, names in _runs():
        if names:
            more = ", ..." if len(names) > SHOWN else ""
            return f"name a run folder, or one of the runs in {place}: {', '.join(names[:SHOWN])}{more}"
    return "name the run folder, such as runs/NAME"


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
    import msgspec

    from areal_lora.cli.look import look

    folder = find_run(run)
    config = recorded_config(folder)
    if watch and not as_json and sys.stdout.isatty():
        _watch_live(lambda: look(folder, config))
        return
    while True:
        seen = look(folder, config)
        print(msgspec.json.encode(seen).decode() if as_json else render(seen), flush=True)
        if groups and not as_json:
            print("", *aligned(group_rows(folder)), sep="\n", flush=True)
        if details and not as_json and folder.summary.is_file():
            from areal_lora.obs.report.page import detail_lines

            print("", *detail_lines(folder), sep="\n", flush=True)
        if not watch or not going(seen):
            return
        time.sleep(EVERY_S)


def going(seen: Status) -> bool:
    return seen.state in ("running", "waiting", "ending", "unknown")


def _watch_live(take: Callable[[], Status]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            seen = take()
            live.update(Text(render(seen)), refresh=True)
            if not going(seen):
                return
            time.sleep(EVERY_S)


def render(seen: Status) -> str:
    """The status as a few rows, a table of several adapters and one of processes, in plain text."""
    table = [("process", "node", "pid", "state", "doing")]
    for one in seen.processes:
        pid = "-" if one.pid is None else str(one.pid)
        table.append((one.name, one.node or "-", pid, process_state(one), one.doing or "-"))
    text = [f"{name:<{NAME_WIDTH}}  {value}" for name, value in lines(seen)]
    text += ["", *aligned(adapter_rows(seen.adapters))] if seen.adapters else []
    return "\n".join([*text, "", *aligned(table)])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]


def adapter_rows(adapters: Sequence[AdapterStatus]) -> Sequence[Sequence[str]]:
    """A head and a row per adapter; ``share`` is of the trained tokens of the newest steps."""
    from areal_lora.obs.console import number, percent
    from areal_lora.obs.run_view import counted

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
    from areal_lora.rollout.ledger.file import GroupState
    from areal_lora.rollout.ledger.peek import group_counts

    rows = [("groups of", *(state.name.lower() for state in GroupState), "dropped for")]
    for one in group_counts(folder):
        why = ", ".join(f"{reason} {n}" for reason, n in one.dropped.items()) or "-"
        rows.append((one.adapter, *(str(one.states[state]) for state in GroupState), why))
    return rows


def lines(seen: Status) -> list[tuple[str, str]]:
    """The rows above the table: name and text of each."""
    from areal_lora.obs.console import duration, histogram, number, percent
    from areal_lora.obs.run_view import counted

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
