"""The resolved configuration of a run, as its run folder records it."""

from __future__ import annotations

import hashlib

from pydantic import ValidationError

from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder


def write_config(run_folder: RunFolder, config: Config) -> None:
    """Record ``config``; readers see the previous file or the new one."""
    temporary = run_folder.config.with_name(f".{run_folder.config.name}.tmp")
    temporary.write_text(config.model_dump_json(indent=2), encoding="utf-8")
    temporary.replace(run_folder.config)


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


def config_digest(run_folder: RunFolder) -> str:
    """sha256 of the recorded file, in hex. Raises ConfigError for a missing file."""
    return hashlib.sha256(_content(run_folder)).hexdigest()


def _content(run_folder: RunFolder) -> bytes:
    try:
        return run_folder.config.read_bytes()
    except FileNotFoundError:
        reason = "the run folder has no resolved configuration"
        raise ConfigError(str(run_folder.config), reason, "name the folder of a started run") from None
