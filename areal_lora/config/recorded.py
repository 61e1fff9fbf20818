"""The resolved configuration of a run, as its run folder records it."""

from __future__ import annotations

import hashlib
import json

from pydantic import ValidationError

from areal_lora.config.joined import with_joined
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder


def write_config(run_folder: RunFolder, config: Config) -> None:
    """Record ``config``; readers see the previous file or the new one."""
    write_file(run_folder.config, config.model_dump_json(indent=2))


def read_config(run_folder: RunFolder) -> Config:
    """Inverse of :func:`write_config`. Raises ConfigError for a missing file and for one of another version."""
    try:
        return Config.model_validate_json(_content(run_folder))
    except ValidationError as error:
        raise ConfigError(
            str(run_folder.config),
            f"this version cannot read it ({error.error_count()} keys differ), so the run cannot be resumed",
            "set another run.name, or start over with --fresh",
        ) from None


def read_config_here(run_folder: RunFolder) -> Config:
    """The configuration of the run, at the place where its folder is now, with the adapters that have joined.

    Raises ConfigError for a file that is half-written or of another version of areal_lora.
    """
    try:
        json.loads(_content(run_folder))
    except ValueError as error:
        reason = f"it is not JSON ({error}): it was cut short or edited"
        raise ConfigError(str(run_folder.config), reason, "restore the file, or start over with --fresh") from None
    return moved_here(with_joined(read_config(run_folder), run_folder), run_folder)


def moved_here(config: Config, run_folder: RunFolder) -> Config:
    """``config`` with the root and name that ``run_folder`` has now."""
    run = config.run.model_copy(update={"root": run_folder.path.parent, "name": run_folder.path.name})
    return config.model_copy(update={"run": run})


def config_digest(run_folder: RunFolder) -> str:
    """sha256 of the recorded file, in hex. Raises ConfigError for a missing file."""
    return hashlib.sha256(_content(run_folder)).hexdigest()


def _content(run_folder: RunFolder) -> bytes:
    try:
        return run_folder.config.read_bytes()
    except FileNotFoundError:
        reason = "the run folder has no resolved configuration"
        raise ConfigError(str(run_folder.config), reason, "name the folder of a started run") from None
