"""The trackers by name, and a process that sends a run to one of them: ``run.trackers`` starts it beside the run.

It reads the run folder only. The end of the run, or SIGTERM, has it send the rest and end.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.run import TrackerName
from areal_lora.errors import ArealLoraError, ConfigError, ExitCode
from areal_lora.obs.tracking import sdks, tracker
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import die_with_parent
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status

ROLE, PROJECT = "tracker", "areal_lora"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """A tracker's package on the index, the variable with its project or address, and what makes a run of it there."""

    package: str
    variable: str
    default: str | None
    make: Callable[[tracker.TrackedRun, str, str | None], tracker.Tracker]

    @property
    def place(self) -> str | None:
        return os.environ.get(self.variable, self.default)


CLIENTS: dict[str, Client] = {
    "wandb": Client("wandb", "WANDB_PROJECT", PROJECT, sdks.WandbTracker),
    "mlflow": Client("mlflow-skinny", "MLFLOW_TRACKING_URI", None, sdks.MlflowTracker),
    "trackio": Client("trackio", "TRACKIO_PROJECT", PROJECT, sdks.TrackioTracker),
    "swanlab": Client("swanlab", "SWANLAB_PROJECT", PROJECT, sdks.SwanlabTracker),
}
"""By the name in ``run.trackers``, which is that of the module and of the extra, too."""


def clients_of(trackers: Iterable[TrackerName]) -> list[str]:
    """Those that need a process, each once: the trainer writes TensorBoard's files."""
    return [name for name in dict.fromkeys(trackers) if name in CLIENTS]


def check_clients(trackers: Iterable[TrackerName]) -> None:
    """Raise EnvironmentError_ for a package that is missing here, ConfigError for an address; imports no package."""
    for name in clients_of(trackers):
        tracker.require(name, CLIENTS[name].package, name)
        if CLIENTS[name].place is None:
            variable = CLIENTS[name].variable
            raise ConfigError("run.trackers", f"{name} has no address", f"set the variable {variable}")


def send(
    folder: RunFolder,
    config: Config,
    name: str,
    place: str,
    ended: Callable[[], str | None],
    announce: Callable[[str], None],
    *,
    within: str | None = None,
    shown: str | None = None,
    wait: bool = True,
    every_s: float = 0.0,
) -> str | None:
    """Send a run to the tracker ``name`` (`follow`); ``announce`` where it can be looked at.

    ``place`` is a project or address, ``within`` an entity or experiment, ``shown`` another name of the run.
    """
    with tracker.only_one(folder, name):
        client = CLIENTS[name].make(tracker.tracked_run(folder, shown, tracker.public_config(config)), place, within)
        announce(client.where)
        behind = config.checkpoint.every_steps - 1 + config.checkpoint.max_behind
        only = config.only_adapter
        return tracker.follow(folder, client, ended, behind=behind, only=only, wait=wait, every_s=every_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Sends a run to a tracker; started by the launcher.")
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--tracker", choices=CLIENTS, required=True)
    options = parser.parse_args(argv)
    folder, name, stopped = options.run_folder, options.tracker, []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    die_with_parent(signal.SIGTERM)
    setup_logging(ROLE, options.index)

    def ended() -> str | None:
        """The trainer writes the summary of a run that is done after all else."""
        return "done" if folder.summary.is_file() else "stopped" if stopped else None

    def announce(where: str) -> None:
        log.info("the run is sent to %s", where)
        set_status(folder, ROLE, options.index, f"sending to {where}")

    try:
        state = send(folder, read_config(folder), name, CLIENTS[name].place or "", ended, announce)
    except ArealLoraError as error:
        log.error("%s", error)
        return error.exit_code
    log.info("the run is %s, and sent", state)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
