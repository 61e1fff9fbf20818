"""``areal-lora schema``: JSON schema of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schema(
    out: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="write it there instead of printing it")] = None,
) -> None:
    """Print the JSON schema of configuration files. An editor uses it with this first line of a file:

    # yaml-language-server: $schema=FILE
    """
    from areal_lora.config.schema import json_schema

    if out is None:
        print(json_schema(), end="")
    else:
        out.write_text(json_schema(), encoding="utf-8")
        print(out)
