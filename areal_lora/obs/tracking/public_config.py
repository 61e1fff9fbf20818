"""The configuration without what may be secret, for readers outside the run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from areal_lora.config.models import Config

LEFT_OUT = "(left out)"
FREE_TEXT = ("setup", "extra", "srun_extra", "wrapper")
"""Keys of ``cluster.slurm`` with shell lines and options, in which a key may be exported."""
_SECRET_NAME = re.compile(r"(^|[_-])(key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
SHORTEST = 8
"""Characters of a variable's value that is taken for a secret."""


def public_config(config: Config) -> dict[str, Any]:
    """``config`` as JSON values. Left out are shell lines of Slurm, texts under names such as ``api_key``, credentials
    in addresses, and the values of environment variables with such names."""
    values: dict[str, Any] = config.model_dump(mode="json")
    slurm = values["cluster"]["slurm"]
    for part in (slurm, *slurm["components"]):
        given = flat({name: part[name] for name in FREE_TEXT if name in part})
        part |= {name.partition(".")[0]: LEFT_OUT for name in given}
    masked: dict[str, Any] = _masked(values)
    return masked


def public_json(config: Config) -> str:
    return json.dumps(public_config(config), indent=2, ensure_ascii=False)


def masked_text(text: str) -> str:
    """``text`` without credentials in addresses and values of environment variables with the name of a secret."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and _SECRET_NAME.search(name):
            text = text.replace(value, LEFT_OUT)
    return _CREDENTIALS.sub("", text)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"adapters.0.rank": 8, ...}`` of nested mappings and lists; empty ones have no entry."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _masked(value: Any) -> Any:
    match value:
        case str():
            return masked_text(value)
        case list():
            return [_masked(item) for item in value]
        case dict():
            return {
                masked_text(name): LEFT_OUT if _is_secret(name, item) else _masked(item) for name, item in value.items()
            }
    return value


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and _SECRET_NAME.search(name) is not None
