"""``areal-lora track RUN``: send a run to Weights & Biases or MLflow, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.recorded_runs import RUN_HELP, find_run, recorded_config, run_names
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from areal_lora.config.models import Config
    from areal_lora.obs.tracking.tracker import Tracker
    from areal_lora.run_folder.paths import RunFolder

LOCAL_S, SLURM_S = 5.0, 30.0
"""Seconds between two looks at whether the run has ended; those at a job query Slurm."""
EXPERIMENT = "areal_lora"


def track(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="project of Weights & Biases")] = None,
    entity: Annotated[str | None, typer.Option(metavar="E", help="user or team of the project")] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="address of an MLflow server or store")] = None,
    experiment: Annotated[str, typer.Option(metavar="NAME", help="experiment of MLflow")] = EXPERIMENT,
    name: Annotated[str | None, typer.Option(metavar="N", help="name that is shown; the run's own if unset")] = None,
    follow: Annotated[bool, typer.Option(help="send what is new until the run ends, or what is there once")] = True,
) -> None:
    """Send the curves of a run, its configuration and its end.

    Repeat the command after any interruption: it continues where it stopped. The run does not depend on it. Keys are
    those of the SDKs: WANDB_API_KEY, MLFLOW_TRACKING_TOKEN and others.
    """
    if (wandb is None) == (mlflow is None):
        raise ConfigError("track", "it needs one tracker", "give --wandb PROJECT or --mlflow URI")
    folder = find_run(run)
    config = recorded_config(folder)

    from areal_lora.obs.tracking.follower import follow as send
    from areal_lora.obs.tracking.follower import only_one

    with only_one(folder, "wandb" if wandb is not None else "mlflow"):
        tracker = _tracker(folder, config, wandb, entity, mlflow, experiment, name)
        print(f"{folder} is sent to {tracker.where}", flush=True)
        state = send(folder, tracker, _now_and_then(folder, config), wait=follow)
    print(f"the run is {state}; everything is sent" if state else "what was recorded is sent; the run continues")


def _tracker(
    folder: RunFolder,
    config: Config,
    wandb: str | None,
    entity: str | None,
    mlflow: str | None,
    experiment: str,
    name: str | None,
) -> Tracker:
    from areal_lora.obs.tracking.public_config import public_config
    from areal_lora.obs.tracking.tracker import tracked_run

    run = tracked_run(folder, name, public_config(config))
    if wandb is not None:
        from areal_lora.obs.tracking.to_wandb import WandbTracker

        return WandbTracker(run, wandb, entity)
    from areal_lora.obs.tracking.to_mlflow import MlflowTracker

    return MlflowTracker(run, mlflow or "", experiment)


def _now_and_then(folder: RunFolder, config: Config) -> Callable[[], str | None]:
    """How the run has ended, looked at now and again after a while; None in between."""
    from areal_lora.cli.look import ended

    every_s = SLURM_S if config.cluster.kind == "slurm" else LOCAL_S
    due = 0.0

    def look() -> str | None:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return None
        due = now + every_s
        return ended(folder, config)

    return look
