"""``areal-lora resume RUN [a.b=c ...]``: start a run again from its recorded configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from areal_lora.cli.runs import RUN_HELP, find_run, run_names, with_overrides


def resume(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="override one key, such as run.steps=200")
    ] = None,
) -> None:
    """Start a run again from the newest checkpoints: here, or as a Slurm job.

    The checks are those of a start; a run that still works is not touched.
    """
    from areal_lora.launcher.run import run as start

    raise typer.Exit(start(with_overrides(find_run(run), overrides or [])))
