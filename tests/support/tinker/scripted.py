"""A run for SDK programs: the service's real process, a trainer that answers by rules, a server that samples by rules.

Samples of a prompt: each token is the one before it plus 1, modulo 64; log-probability ``-token / 64``, that of the
next token is 1 lower.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
from aiohttp import web

from areal_lora.config.recorded import write_config
from areal_lora.engine.vllm_ext.server.openai_api import CompletionBody, error_body
from areal_lora.network.http_server import DEFAULT_MAX_TOKENS, prompts_of
from areal_lora.operations.protocol import Operation, OperationFailure
from areal_lora.run_folder.paths import DesiredPhase, RunFolder, read_desired
from areal_lora.run_folder.rendezvous import create_secret, forget_endpoint, publish_endpoint, read_endpoint
from tests.support.clocks import wait_until
from tests.support.forks.starter import starter_of
from tests.support.launcher.real_slurm import free_ports
from tests.support.operations.scripted_trainer import ScriptedTrainer
from tests.support.service.running import service_config
from tests.support.tinker.sdk import environment, sdk_program

SERVICE = "areal_lora.service.main"
WAIT_S, PROGRAM_S = 150.0, 280.0
PROGRAMS = Path(__file__).parent


class ScriptedRun:
    """``with ScriptedRun(root)``; adapters of the desired state join the trainer as they come."""

    def __init__(
        self,
        root: Path,
        fault: Callable[[Operation], OperationFailure | None] = lambda _: None,
        limits: Mapping[str, float] = MappingProxyType({}),
        **api: Any,
    ) -> None:
        """``limits`` are those of each tenant of `tenant`."""
        config = service_config(root, port=free_ports(1)[0], **api)  # the same one after a restart
        self.folder = config.run_folder
        self.folder.path.mkdir(parents=True)
        create_secret(self.folder)
        write_config(self.folder, config)
        self._fault, self._limits = fault, limits
        self.asked: list[dict[str, Any]] = []
        """Bodies of samples that the server got."""
        self.answers = threading.Event()
        """While it is not set, samples wait at the server."""
        self.answers.set()
        self._stop = threading.Event()

    def __enter__(self) -> ScriptedRun:
        self.trainer = ScriptedTrainer(self.folder, self._fault)
        self._threads = [threading.Thread(target=self._follow), threading.Thread(target=self._serve)]
        for thread in self._threads:
            thread.start()
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self.process.terminate()
        self.process.wait(WAIT_S)
        for thread in self._threads:
            thread.join(WAIT_S)
        self.trainer.close()

    # ------------------------------------------------------------ service

    def start(self) -> None:
        forget_endpoint(self.folder, "service", 0)
        with (self.folder.path / "log").open("ab") as log:
            words = ["--run-folder", str(self.folder)]
            self.process = starter_of(SERVICE).start(SERVICE, words, os.environ, log)
        wait_until(self._is_up, WAIT_S, "the service")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log()
        return read_endpoint(self.folder, "service", 0) is not None

    def log(self) -> str:
        return (self.folder.path / "log").read_text()[-6000:]

    @property
    def url(self) -> str:
        endpoint = read_endpoint(self.folder, "service", 0)
        assert endpoint is not None
        return f"http://{endpoint.host}:{endpoint.ports['api']}"

    def tenant(self, name: str, **quota: float) -> str:
        """A new tenant's key."""
        return new_tenant(self.folder, self.url, name, **{**self._limits, **quota})

    # ------------------------------------------------------------ programs

    def begin(self, version: str, program: str, key: str, *words: str) -> subprocess.Popen[str]:
        """Start a program of this folder with the SDK in ``version``."""
        more = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            sdk_program(PROGRAMS / program, *words),
            env=environment(version) | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The JSON object in the program's last line."""
        out, err = process.communicate(timeout=PROGRAM_S)
        assert process.returncode == 0, f"{out}\n{err[-6000:]}\n{self.log()}"
        said: dict[str, Any] = json.loads(out.splitlines()[-1])
        return said

    # ------------------------------------------------------------ trainer and server

    def _follow(self) -> None:
        there: set[str] = set()
        while not self._stop.wait(0.05):
            wanted = {a.key for a in read_desired(self.folder).adapters if a.phase is not DesiredPhase.DELETED}
            for key in sorted(wanted - there):
                self.trainer.join(key)
                self._record(key, "active")
            for key in sorted(there - wanted):
                self.trainer.leave(key)
                self._record(key, "deleted")
            there = wanted

    def _record(self, key: str, state: str) -> None:
        with self.folder.metrics.open("a") as file:
            file.write(json.dumps({"kind": "state", "adapter": key, "state": state, "version": 0, "reason": ""}) + "\n")

    def _serve(self) -> None:
        asyncio.run(self._serving())

    async def _serving(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        publish_endpoint(self.folder, "server", 0, {"data": port, "admin": port}, host="127.0.0.1")
        while not self._stop.is_set():
            await asyncio.sleep(0.05)
        await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        try:
            body = msgspec.convert(self.asked[-1], CompletionBody)
            prompts = [list(each.encode()) if isinstance(each, str) else each for each in prompts_of(body.prompt)]
        except msgspec.ValidationError as error:
            return web.Response(body=error_body(400, str(error)), status=400, content_type="application/json")
        while not self.answers.is_set():
            await asyncio.sleep(0.02)
        choices = [_choice(body, prompt or [0]) for prompt in prompts for _ in range(body.n)]
        answer = {"model": body.model, "choices": [choice | {"index": k} for k, choice in enumerate(choices)]}
        return web.json_response(answer)


def _choice(body: CompletionBody, prompt: list[int]) -> dict[str, Any]:
    before = prompt if body.echo else []
    n_new = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    tokens = [(prompt[-1] + 1 + i) % 64 for i in range(n_new)]
    scores = [0.0, *(-t / 64 for t in before[1:])] if before else []
    choice: dict[str, Any] = {
        "finish_reason": "length",
        "token_ids": [*before, *tokens],
        "logprobs": {"token_logprobs": [*scores, *(-t / 64 for t in tokens)]},
    }
    if body.logprobs:
        rows = [{str(t): -t / 64, str(t + 1): -t / 64 - 1} for t in [*before, *tokens]]
        choice["logprobs"]["top_ids"] = [{}, *rows[1:]] if before else rows
    return choice


def new_tenant(folder: RunFolder, url: str, name: str, **quota: float) -> str:
    """Its key."""
    operator = folder.service_key.read_text().strip()
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {operator}"}, timeout=WAIT_S) as http:
        http.post("/v1/tenants", json={"tenant": name, "quota": quota}).raise_for_status()
        made = http.post(f"/v1/tenants/{name}/keys").raise_for_status()
    return str(made.json()["key"])
