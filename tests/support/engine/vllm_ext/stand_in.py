"""A rollout server without vLLM: ``python -m tests.support.engine.vllm_ext.stand_in --run-folder DIR --index N``.

For tests of launcher, trainer and controller. The stand-in starts in a few seconds, uses the run folder, publishes
its ports and ends like the real server, receives versions over real groups (``MemoryServer``) and has the same
fault points. Answers are a pure function of prompt, seed and version; about a third of them solve the word problem
of the prompt. Log-probabilities of answers and of the probe are invented: a run with the stand-in needs a large
``weight_sync.probe_tolerance`` and ``behaviour_cap``.

``AREAL_LORA_STAND_IN_TOKEN_S`` is the time per token, 0 by default. ``interpreter`` writes an executable for
``rollout.python``, so that a launcher starts the stand-in in place of the real server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.run import own_place
from areal_lora.config.sizing.slots import adapter_capacity, adapter_slots, has_tenants, kept_versions
from areal_lora.engine.vllm_ext.server.guards import guarded
from areal_lora.engine.vllm_ext.server.leaving import Door, Stop, leave_in_order
from areal_lora.engine.vllm_ext.server.main import ROLE, bound_sockets, server_tls
from areal_lora.engine.vllm_ext.server.openai_api import AnswerBody, CompletionBody, CompletionChoice, Usage, error_body
from areal_lora.errors import ArealLoraError, UnknownVersionError
from areal_lora.families.registry import path_of
from areal_lora.network.http_server import CLOSE_S, HttpServer, prompts_of
from areal_lora.network.tls import Plane
from areal_lora.processes import stacks
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import die_with_parent
from areal_lora.processes.watched import reached, watched_task
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint, read_secret
from areal_lora.run_folder.status import EVENT_LOOP, Heart, set_status
from areal_lora.types import AdapterRef, TokenColumns
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.messages import served_shapes
from areal_lora.weight_sync.server.slot_table import ResidentVersion
from tests.support.paths import ROOT
from tests.support.weight_sync.memory_server import MemoryServer

log = get_logger("tests.support.engine.vllm_ext.stand_in")  # __name__ is __main__ here

TOKEN_S = "AREAL_LORA_STAND_IN_TOKEN_S"
_STORY = re.compile(r"(\d+) (bags of )?(?:\w+, (buys|finds|gets|sells|loses|uses) )?(\d+) .*?and (\w+) (\d+)\.")
_PLUS = ("buys", "finds", "gets")

_encode = msgspec.json.Encoder().encode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.support.engine.vllm_ext.stand_in", description=__doc__)
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--grace-s", type=float, default=0.0)
    args = parser.parse_args(argv)
    setup_logging(ROLE, args.index)
    stacks.install(args.run_folder.stack_dump(f"{ROLE}-{args.index}"))
    try:
        die_with_parent(signal.SIGTERM)
        config = read_config(args.run_folder)
        return asyncio.run(serve(config, args.run_folder, args.index, args.grace_s))
    except ArealLoraError as e:
        log.error("%s", e)
        return e.exit_code


async def serve(config: Config, run_folder: RunFolder, index: int, grace_s: float = 0.0) -> int:
    """Serve until a stop is requested; return the exit code."""
    stop, loop = Stop(grace_s), asyncio.get_running_loop()
    stop.on_signals()
    modules, secret = base_modules(Path(config.model.folder)), read_secret(run_folder)
    with ExitStack() as stack:
        host = own_place(config.cluster, run_folder).address
        data, admin = stack.enter_context(bound_sockets(host))
        server = stack.enter_context(
            MemoryServer(
                run=config.run.name,
                secret=secret,
                base_digest=base_digest(config.model.folder),
                shapes=lambda spec: served_shapes(modules, spec),
                modules=modules,
                n_slots=adapter_slots(config),
                keep=kept_versions(config),
                adapters=adapter_capacity(config),
                layouts=adapter_capacity(config),
                score=score,
                declared={a.name: a.spec(config.model.path) for a in config.adapters},
                leaving=stop.leaving.is_set,
                on_dismiss=partial(loop.call_soon_threadsafe, stop.dismissed.set),
                listener=admin,
            )
        )
        tls = server_tls(host, run_folder, secret, closed=has_tenants(config))
        door = Door(guarded(StandInDataPlane(config, server).app(), host, secret, closed=has_tenants(config)))
        http = HttpServer(door, data, tls.get(Plane.DATA))
        serving = watched_task("http-plane", http.serve)
        ports = {"data": data.getsockname()[1], "admin": server.endpoint.admin_port}
        publish_endpoint(run_folder, ROLE, index, ports, host, tls)
        set_status(run_folder, ROLE, index, "serving")
        heart = Heart(run_folder, ROLE, index, {EVENT_LOOP: config.run.stall_s})
        ticks = watched_task("event-loop-ticks", heart.tick)
        leave = partial(leave_in_order, stop, door, busy=lambda: server.busy, publish_s=config.weight_sync.timeout_s)
        leaving = watched_task("leave", partial(leave, run_folder=run_folder, index=index))
        await stop.event.wait()
        http.should_exit = True
        await asyncio.wait({serving}, timeout=CLOSE_S + 1)
        ticks.cancel()
        leaving.cancel()
        heart.stop()
    set_status(run_folder, ROLE, index, "stopped")
    return 0


class StandInDataPlane:
    """Answer ``POST /v1/completions`` with the bodies of the real server."""

    def __init__(self, config: Config, server: MemoryServer) -> None:
        self._server, self._changes = server, config.rollout.in_flight_policy != "finish"
        self._tokenizer = Tokenizer.from_file(str(Path(config.model.folder) / "tokenizer.json"))
        self._token_s = float(os.environ.get(TOKEN_S, "0"))

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", self.completions, methods=["POST"])])

    async def completions(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=CompletionBody)
            changes = self._changes and not body.pin_version
            with self._server.lease(body.model, pinned=body.pin_version, or_newer=changes) as resident:
                return await self._complete(body, resident, changes)
        except UnknownVersionError as e:
            return Response(error_body(404, str(e)), status_code=404, media_type="application/json")
        except msgspec.MsgspecError as e:
            return Response(error_body(400, str(e)), status_code=400, media_type="application/json")

    async def _complete(self, body: CompletionBody, resident: ResidentVersion, changes: bool) -> Response:
        prompts = [p if isinstance(p, list) else self._tokenizer.encode(p).ids for p in prompts_of(body.prompt)]
        if not all(prompts) or not prompts:
            raise msgspec.ValidationError("the prompt is empty")
        jobs = [(p, None if body.seed is None else body.seed + k) for p in prompts for k in range(body.n)]
        choices = await asyncio.gather(*(self._choice(body, resident, changes, i, *job) for i, job in enumerate(jobs)))
        n_out = sum(len(c.versions or c.columns or ()) for c in choices)
        n_in = sum(map(len, prompts))
        given = [v for c in choices for v in (c.columns.each_version.tolist() if c.columns else c.versions or ())]
        ref = resident.ref
        newest = max([ref.version, *given])
        answer = AnswerBody(
            id="cmpl-0",
            object="text_completion",
            created=int(time.time()),
            choices=choices,
            model=str(AdapterRef(name=ref.name, version=newest)),
            usage=Usage(prompt_tokens=n_in, completion_tokens=n_out, total_tokens=n_in + n_out),
        )
        return Response(_encode(answer), media_type="application/json")

    async def _choice(
        self, body: CompletionBody, on: ResidentVersion, changes: bool, index: int, prompt: list[int], seed: int | None
    ) -> CompletionChoice:
        """With ``changes`` a token is of the newest version, and none comes after the loss of the one before."""
        reached("server.generating")
        ref = on.ref
        rng = dice(prompt, None if body.temperature == 0 else seed, ref.version)
        text = solution(self._tokenizer.decode(prompt), rng)
        limit = 16 if body.max_tokens is None else body.max_tokens
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids[:limit]
        versions = list[int]()
        while len(versions) < len(token_ids):
            with self._server.lease(str(on.ref), or_newer=changes, incarnation=on.incarnation) as on:
                while len(versions) < len(token_ids):
                    await asyncio.sleep(self._token_s)
                    if changes and not self._server.is_newest(on):
                        break
                    versions.append(on.ref.version)
        row, n = prompt + token_ids, len(prompt)
        logprobs = {
            "token_logprobs": [
                made_up(f"{ref.name}@v{version}", row[: n + t + 1]) for t, version in enumerate(versions)
            ]
        }
        finish_reason = "length" if len(token_ids) == limit else "stop"
        if body.return_columns:
            columns = TokenColumns.of(token_ids, logprobs["token_logprobs"], versions)
            return CompletionChoice(
                index=index, finish_reason=finish_reason, text=self._tokenizer.decode(token_ids), columns=columns
            )
        return CompletionChoice(
            index=index,
            finish_reason=finish_reason,
            versions=versions,
            text=self._tokenizer.decode(token_ids),
            token_ids=token_ids if body.return_token_ids else None,
            logprobs=logprobs if body.logprobs is not None else None,
        )


def base_modules(folder: Path) -> dict[str, tuple[int, int]]:
    """Read (inputs, outputs) of every module that can have LoRA from the headers of safetensors files."""
    modules = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            module = name.removesuffix(".weight")
            if module != name and path_of(module) is not None and len(tensor["shape"]) == 2:
                outputs, inputs = tensor["shape"]
                modules[module] = inputs, outputs
    return modules


def dice(prompt: list[int], seed: int | None, version: int) -> Random:
    return Random(hashlib.blake2b(repr((prompt, seed, version)).encode()).digest())


def solution(story: str, rng: Random) -> str:
    """Answer a word problem, correctly in about one case of three; any other text gets some number."""
    found = _STORY.search(story)
    if found is None:
        return f" #### {rng.randint(1, 99)}"
    a, bags, first, b, second, c = found.groups()
    middle = int(a) * int(b) if bags else int(a) + int(b) * (1 if first in _PLUS else -1)
    result = middle + int(c) * (1 if second in _PLUS else -1)
    return f" #### {result + rng.choice((0, 0, 1, -1, 2, 10))}"


def score(model: str | None, rows: list[list[int]]) -> list[list[float]]:
    """Invent log-probabilities: finite, deterministic, different per version, equal to those of the answers."""
    return [[0.0, *(made_up(model, row[: t + 1]) for t in range(1, len(row)))] for row in rows]


def made_up(model: str | None, token_ids: list[int]) -> float:
    """Invent the log-probability of the last of ``token_ids`` after the others, under version ``model``."""
    return -0.5 - Random(f"{model} {token_ids}").random()


def interpreter(path: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Write an executable for ``rollout.python`` that starts the stand-in with ``environment`` added."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items())
    command = f"cd {shlex.quote(str(ROOT))} && exec env {settings} {shlex.quote(sys.executable)} -m {__name__}"
    path.write_text(f'#!/bin/sh\nshift 2  # -m and the real server\n{command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
