"""``areal-lora report RUN``: write report.html from what is recorded so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_lora.cli.runs import RUN_HELP, find_run, recorded_config, run_names


def report(run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)]) -> None:
    """Write report.html now, also while the run works."""
    from areal_lora.obs.report.page import write_report

    folder = find_run(run)
    recorded_config(folder)
    path: Path = write_report(folder)
    print(path)
