"""``areal-lora train``: start a run from configuration files, as ``python -m areal_lora.launch`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="override one key, such as run.seed=2")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="YAML file or the name of a shipped example; several are merged in order"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved plan and start nothing")] = False,
    details: Annotated[bool, typer.Option("--details", help="with --dry-run: also processes, ports and files")] = False,
    explain_resume: Annotated[
        bool, typer.Option("--explain-resume", help="print what a start would restore; start nothing")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="take adapters while the run works, over HTTP and from its inbox")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="move a previous run aside and begin a new one")] = False,
) -> None:
    """Train here, or submit a Slurm job. The same command resumes the run in its folder."""
    from areal_lora.launch import main

    switches = {
        "--dry-run": dry_run,
        "--details": details,
        "--explain-resume": explain_resume,
        "--serve": serve,
        "--fresh": fresh,
    }
    words = [part for file in config or [] for part in ("--config", str(file))]
    words += [name for name, given in switches.items() if given]
    raise typer.Exit(main([*words, *(overrides or [])]))
