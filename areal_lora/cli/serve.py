"""``areal-lora serve`` and ``chat``: a version behind an OpenAI-compatible server on loopback, or in the terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from areal_lora.cli.status import Adapter, Run, Version, find_run, recorded_config


def serve(
    run: Run,
    version: Version = "newest",
    adapter: Adapter = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: a free one")] = 8000,
) -> None:
    """Serve a version with vLLM's own OpenAI server until Ctrl-C; only this machine can reach it.

    The version is exported to a temporary folder; neither the run nor its folder changes.
    """
    from areal_lora.cli.serving import served
    from areal_lora.config.recorded import adapter_named

    folder = find_run(run)
    config = recorded_config(folder)
    chosen = adapter_named(config, adapter)
    print(f"Starting vLLM with {version} of {folder}", flush=True)
    with served(folder, config, chosen, version, port) as server:
        body = json.dumps({"model": server.model, "prompt": "Q: 2 + 2?\nA:", "max_tokens": 32})
        print(f"{server.model} answers at {server.url} (Ctrl-C ends it). Try it:", flush=True)
        print(f"  curl {server.url}/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        server.wait()


def chat(
    run: Run,
    version: Version = "newest",
    adapter: Adapter = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="send this, print the answer and end")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer; the run's if not given")] = None,
) -> None:
    """Talk to a version in the terminal. What you type is written in the format of the run's task.

    A chat task keeps the conversation; /new starts another one. Ctrl-D ends.
    """
    from areal_lora.cli.serving import Conversation, served
    from areal_lora.config.recorded import adapter_named
    from areal_lora.data.formatting import Formatter, load_tokenizer

    folder = find_run(run)
    config = recorded_config(folder)
    chosen = adapter_named(config, adapter)
    formatter = Formatter(tokenizer=load_tokenizer(config.model.folder), how=chosen.task.format)
    print(f"starting vLLM with {version} of {folder}", file=sys.stderr, flush=True)
    with served(folder, config, chosen, version, 0) as server:
        talk = Conversation(chosen, formatter, server, temperature, max_tokens or chosen.sampling.max_new_tokens)
        if prompt is not None:
            print(talk.answer(prompt))
            return
        print(f"{server.model} listens; /new starts again, Ctrl-D ends", file=sys.stderr)
        while (text := _typed()) is not None:
            if text == "/new":
                talk.turns.clear()
            elif text:
                print(talk.answer(text), flush=True)


def _typed() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
