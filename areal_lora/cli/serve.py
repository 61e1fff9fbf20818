"""``areal-lora serve RUN``: a version of a run behind an OpenAI-compatible server on loopback."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from areal_lora.cli.runs import ADAPTER_HELP, RUN_HELP, VERSION_HELP, find_run, recorded_config, run_names


def serve(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    version: Annotated[str, typer.Option(metavar="N", help=VERSION_HELP)] = "newest",
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: a free one")] = 8000,
) -> None:
    """Serve a version with vLLM's own OpenAI server until Ctrl-C; only this machine can reach it.

    The version is exported to a temporary folder; neither the run nor its folder changes.
    """
    from areal_lora.cli.serving import served
    from areal_lora.config.adapter_run import adapter_named

    folder = find_run(run)
    config = recorded_config(folder)
    chosen = adapter_named(config, adapter)
    print(f"Starting vLLM with {version} of {folder}", flush=True)
    with served(folder, config, chosen, version, port) as server:
        body = json.dumps({"model": server.model, "prompt": "Q: 2 + 2?\nA:", "max_tokens": 32})
        print(f"{server.model} answers at {server.url} (Ctrl-C ends it). Ask it:", flush=True)
        print(f"  curl {server.url}/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        server.wait()
