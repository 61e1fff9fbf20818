"""``areal-lora train``: start a run from configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from areal_lora.cli.plan import print_dry_run


def train(
    config: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="YAML file or the name of a shipped example; several are merged in order"),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c]...", help="override one key, such as run.seed=2")
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
    from rich.console import Console

    from areal_lora.config.load import load_config
    from areal_lora.launcher import explain, run

    parts: list[Path | dict[str, Any]] = [{"service": {"api": {}}}] if serve else []
    chosen = load_config([*parts, *config], overrides or [])
    if dry_run:
        print_dry_run(chosen, fresh=fresh, details=details)
    elif explain_resume:
        prepared = run.prepare(chosen, Console(stderr=True, highlight=False), fresh=fresh, starts=False)
        for line in explain.explain_resume(prepared.config):
            print(line)
    else:
        raise typer.Exit(run.run(chosen, fresh=fresh))
