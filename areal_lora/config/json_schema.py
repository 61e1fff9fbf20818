"""JSON schema of the configuration, for editors: they complete keys, show their meaning and mark wrong ones.

No key is required and several alternatives may fit: a file may be an overlay, and what it lacks is in another one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_lora.config.models import Config

TARGET = Path("examples/schema.json")


def render() -> str:
    """The schema as a file of JSON."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_of_overlays(Config.model_json_schema())}
    return json.dumps(schema, indent=1) + "\n"


def _of_overlays(node: Any) -> Any:
    if isinstance(node, list):
        return [_of_overlays(item) for item in node]
    if not isinstance(node, dict):
        return node
    names = {"oneOf": "anyOf"}
    found = {names.get(key, key): _of_overlays(value) for key, value in node.items() if key != "discriminator"}
    if isinstance(found.get("required"), list):
        del found["required"]
    return found
