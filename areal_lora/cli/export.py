"""``areal-lora export RUN OUT``: a version of a run as a PEFT folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_lora.cli.runs import ADAPTER_HELP, RUN_HELP, VERSION_HELP, find_run, recorded_config, run_names
from areal_lora.errors import ConfigError


def export(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to make; it must not exist")],
    version: Annotated[str, typer.Option(metavar="N", help=VERSION_HELP)] = "newest",
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)] = None,
) -> None:
    """Write a version as a PEFT folder that stock peft, transformers and vLLM load; also while the run works."""
    from areal_lora.checkpoint.versions import pick_version

    folder = find_run(run)
    chosen = pick_version(folder, recorded_config(folder), version, adapter)
    if out.exists():
        raise ConfigError(str(out), "it exists", "name a folder that does not")
    chosen.export(out)
    print(f"{chosen.ref} in {out.absolute()}")
