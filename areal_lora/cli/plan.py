"""``areal-lora plan``: what a start would do, for configuration files or for a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.runs import find_run, with_overrides
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from areal_lora.config.models import Config


def plan(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [a.b=c]...", help="run folder or its name; overrides")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="YAML file or the name of a shipped example; several are merged in order"),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="also all processes, ports and files")] = False,
) -> None:
    """Print the resolved plan of a start; starts and creates nothing (as `train --dry-run`)."""
    print_dry_run(chosen_config(config or [], words or []), details=details)


def print_dry_run(config: Config, *, fresh: bool = False, details: bool = False) -> None:
    """Print the resolved plan of ``config``; start and create nothing. Raises ConfigErrors for what cannot start."""
    from rich.console import Console

    from areal_lora.launcher.dry_run import print_plan
    from areal_lora.launcher.run import prepare

    prepared = prepare(config, Console(stderr=True, highlight=False), fresh=fresh, starts=False)
    print_plan(prepared.config, prepared.plan, Console(highlight=False), full=details)


def chosen_config(files: list[Path], words: list[str]) -> Config:
    """The configuration of ``--config`` files or of a run folder, with the overrides among ``words``."""
    from areal_lora.config.load import load_config

    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    runs = [word for word in words if word not in overrides]
    if files and runs and not Path(runs[0]).exists():
        raise ConfigError(runs[0], "is not an override", "write it as dotted.key=value")
    if len(runs) > 1 or bool(runs) == bool(files):
        given = " ".join([*(f"--config {file}" for file in files), *runs]) or "nothing"
        raise ConfigError("RUN or --config", f"{given} was given", "name one run, or configuration files")
    return with_overrides(find_run(runs[0]), overrides) if runs else load_config(files, overrides)
