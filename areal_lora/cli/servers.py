"""``areal-lora add-servers RUN`` and ``remove-servers RUN``: rollout servers that come and go while a run works."""

from __future__ import annotations

from typing import Annotated

import typer

from areal_lora.cli.recorded_runs import RUN_HELP, find_run, run_names


def add_servers(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    servers: Annotated[int, typer.Option(help="servers to add; on Slurm, of each node")] = 1,
    nodes: Annotated[int, typer.Option(help="Slurm jobs of one node each")] = 1,
    time: Annotated[str, typer.Option(help="time limit of the Slurm jobs, instead of the run's")] = "",
    partition: Annotated[str, typer.Option(help="partition of the Slurm jobs, instead of the run's")] = "",
    grace_s: Annotated[float, typer.Option(help="seconds for requests in progress when a server leaves")] = 20.0,
    here: Annotated[bool, typer.Option("--here", help="on this machine, also for a run on Slurm")] = False,
) -> None:
    """Add rollout servers to a run in progress, as Slurm jobs of one node each, or on this machine.

    On this machine the command stays until the run ends; Ctrl-C lets the servers leave in order.
    """
    from rich.console import Console

    from areal_lora.launcher import add_servers as action

    code = action.add_servers(
        find_run(run),
        servers=servers,
        nodes=nodes,
        time_limit=time,
        partition=partition,
        grace_s=grace_s,
        here=here,
        console=Console(highlight=False),
    )
    raise typer.Exit(code)


def remove_servers(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    job: Annotated[str, typer.Option(help="only those of this Slurm job, or of this process")] = "",
) -> None:
    """Have added servers leave: they take no more requests, end those in progress, and the run continues."""
    from rich.console import Console

    from areal_lora.launcher.add_servers import remove_servers as action

    action(find_run(run), job=job, console=Console(highlight=False))
