"""Find a run, its folder and its processes on this machine; options that several verbs have. Writes nothing."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import psutil
import typer

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import moved_here, read_config, read_config_here
from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder

RUNS = "runs"
RUN_HELP = "run folder, or the name of a run below runs/ of this folder or one above it"
VERSION_HELP = "a number, newest or best"
ADAPTER_HELP = "which adapter, if the run has several"
SHOWN = 8
"""Names of runs in an error."""

Run = Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=lambda incomplete: run_names(incomplete))]
Version = Annotated[str, typer.Option(metavar="N", help=VERSION_HELP)]
AnyVersion = Annotated[str, typer.Option(metavar="N", help=f"{VERSION_HELP}; base: no adapter")]
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
    here = Path.cwd()
    candidates = [Path(os.path.expanduser(text)), *(folder / RUNS / text for folder in (here, *here.parents))]
    found = next((path for path in candidates if os.path.exists(path)), None)
    if found is None:
        raise ConfigError(text, "there is no such run", _which())
    folder = RunFolder(found.absolute())
    if not found.is_dir():
        raise ConfigError(str(folder), "it is a file, not a run folder", _which())
    if folder.config.is_file():
        return RunFolder.current(found.resolve())
    what = "it is empty: no run started in it" if not any(found.iterdir()) else "it is not a run folder: no config.json"
    raise ConfigError(str(folder), what, _which())


def open_run(text: str) -> tuple[RunFolder, Config]:
    """The folder as of `find_run`, and the configuration of the run at the place where it is now."""
    folder = find_run(text)
    return folder, read_config_here(folder)


def with_overrides(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """The configuration of the run with ``a.b=c`` applied and checked like those of a start.

    Without adapters that have joined: these join again.
    """
    if not overrides:
        return moved_here(read_config(folder), folder)
    fixed = [text for text in overrides if text.partition("=")[0] in ("run.name", "run.root")]
    if fixed:
        fix = "leave it out; a copy of the folder is a run of its own"
        raise ConfigError(fixed[0], "the run folder decides name and root of its run", fix)
    return moved_here(load_config([read_config(folder).model_dump(mode="json")], overrides), folder)


def run_names(incomplete: str = "") -> list[str]:
    """Runs that a shell can complete ``incomplete`` to, newest first."""
    return [name for _, names in _runs() for name in names if name.startswith(incomplete)]


def _runs() -> Iterator[tuple[Path, list[str]]]:
    """Each ``runs/`` with the names of its runs, newest first."""
    here = Path.cwd()
    for place in (folder / RUNS for folder in (here, *here.parents)):
        if place.is_dir():
            runs = [path for path in place.iterdir() if (path / RunFolder(path).config.name).is_file()]
            yield place, [path.name for path in sorted(runs, key=lambda path: -path.stat().st_mtime)]


def _which() -> str:
    for place, names in _runs():
        if names:
            more = ", ..." if len(names) > SHOWN else ""
            return f"name a run folder, or one of the runs in {place}: {', '.join(names[:SHOWN])}{more}"
    return "name the run folder, such as runs/NAME"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]


def local_processes(folder: RunFolder) -> dict[str, int]:
    """``{"trainer-0": process id, ...}`` of the run's processes on this machine, found by their command lines."""
    from areal_lora.launcher.plan import MODULES  # takes longer than what most verbs need of this module

    roles, found = {module: role for role, module in MODULES.items()}, {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "--run-folder" not in command or process.status() == psutil.STATUS_ZOMBIE:
                continue
            options = dict(pairwise(command))
            role = roles.get(options.get("-m", ""))
            if role is not None and os.path.realpath(options["--run-folder"]) == os.path.realpath(folder):
                index = options.get("--index") or (process.environ().get("RANK", "0") if role == "trainer" else "0")
                found[f"{role}-{index}"] = process.pid
    return found
