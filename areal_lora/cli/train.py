"""``areal-lora train``, ``resume`` and ``plan``: start a run, or print what a start would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_lora.cli.status import Files, OptionalFiles, Overrides, Run, find_run, with_overrides
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from areal_lora.config.models import Config


def train(
    config: Files,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved plan and start nothing")] = False,
    details: Annotated[bool, typer.Option("--details", help="with --dry-run: also processes, ports and files")] = False,
    explain_resume: Annotated[
        bool, typer.Option("--explain-resume", help="print what a start would restore; start nothing")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="take adapters while the run works, over HTTP and from its inbox")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="move a previous run aside and start a new one")] = False,
) -> None:
    """Train here, or submit a Slurm job. The same command resumes the run in its folder."""
    from rich.console import Console

    from areal_lora.config.load import load_config
    from areal_lora.launcher import dry_run as preview
    from areal_lora.launcher import run

    parts: list[Path | dict[str, Any]] = [{"service": {"api": {}}}] if serve else []
    chosen = load_config([*parts, *config], overrides or [])
    if dry_run:
        print_dry_run(chosen, fresh=fresh, details=details)
    elif explain_resume:
        prepared = run.prepare(chosen, Console(stderr=True, highlight=False), fresh=fresh, starts=False)
        for line in preview.explain_resume(prepared.config):
            print(line)
    else:
        raise typer.Exit(run.run(chosen, fresh=fresh))


def plan(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [a.b=c]...", help="run folder or its name; overrides")
    ] = None,
    config: OptionalFiles = None,
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


def resume(run: Run, overrides: Overrides = None) -> None:
    """Start a run again from the newest checkpoints: here, or as a Slurm job.

    The checks are those of a start; a run that still works is not touched.
    """
    from areal_lora.launcher.run import run as start

    raise typer.Exit(start(with_overrides(find_run(run), overrides or [])))
