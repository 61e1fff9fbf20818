"""Find the run folder that a command means, and read what it recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder

if TYPE_CHECKING:
    from areal_lora.config.models import Config

RUNS = "runs"
RUN_HELP = "run folder, or the name of a run below runs/ of this folder or one above it"
VERSION_HELP = "a number, newest or best"
ADAPTER_HELP = "which adapter, if the run has several"
SHOWN = 8


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
