"""One rollout server of the weight-sync benchmark: the product's engine and admin plane, dummy base weights.

Reads one JSON command per line on stdin, answers with one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import dataclasses
import json
import os
import sys
from typing import Any

import msgspec
import uvloop
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from areal_lora.config.recorded import read_config
from areal_lora.engine.vllm_ext.server import assemble as assembling
from areal_lora.engine.vllm_ext.server.leaving import Stop
from areal_lora.engine.vllm_ext.server.main import HttpServer, bound_sockets, server_tls, set_environment
from areal_lora.network.tls import Plane
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret

STREAM_TOKENS = 400


class Streams:
    """Endless requests on the newest version; counts what was aborted."""

    def __init__(self, parts: Any, length: int) -> None:
        self._parts, self._length = parts, length
        self._tasks: list[asyncio.Task[None]] = []
        self.finished: dict[str, int] = {}

    def start(self, n: int, model: str) -> None:
        self._tasks = [asyncio.create_task(self._run(i, n, model)) for i in range(n)]

    async def stop(self) -> dict[str, int]:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.finished

    async def _run(self, i: int, n: int, model: str) -> None:
        prompt = [5 + (7 * i + j) % 90 for j in range(32)]
        # The first requests end one after the other: from then on contexts of all lengths run side by side.
        length = max(1, self._length * (i + 1) // n)
        while True:
            params = SamplingParams(
                max_tokens=length,
                temperature=1.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            length = self._length
            with self._parts.adapters.lease(model) as lease:
                async for output in self._parts.generator.stream(prompt, params, lease):
                    if output.finished:
                        reason = str(output.outputs[0].finish_reason)
                        self.finished[reason] = self.finished.get(reason, 0) + 1


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_folder", type=RunFolder.of)
    parser.add_argument("index", type=int)
    args = parser.parse_args()
    config = read_config(args.run_folder)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr
    set_environment(config)
    product_args = assembling.engine_args
    assembling.engine_args = lambda c: dataclasses.replace(
        product_args(c), load_format="dummy", worker_extension_cls="sync_worker.BenchExtension"
    )
    stop = Stop()
    with bound_sockets(config.cluster.bind) as sockets:
        secret = read_secret(args.run_folder)
        parts = await assembling.assemble(config, args.run_folder, args.index, secret, stop)
        tls = server_tls(config.cluster.bind, args.run_folder, secret)
        http = HttpServer(parts.admin_app, sockets[1], tls[Plane.ADMIN])
        serving = asyncio.create_task(http.serve())
        answers.write(json.dumps({"admin_port": sockets[1].getsockname()[1], "pid": os.getpid()}) + "\n")
        await commands(parts, answers)
        http.should_exit = True
        await asyncio.wait([serving], timeout=3)
        parts.close(2.0)


async def commands(parts: Any, answers: Any) -> None:
    """Until stdin closes."""
    loop = asyncio.get_running_loop()
    streams = Streams(parts, STREAM_TOKENS)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        name, arguments = command["do"], command.get("args", [])
        answer: Any = None
        if name == "stream":
            streams = Streams(parts, STREAM_TOKENS)
            streams.start(*arguments)
        elif name == "quiet":
            answer = await streams.stop()
        elif name == "bench_join":
            await parts.engine.collective_rpc(name, args=(base64.b64decode(arguments[0]), *arguments[1:]))
        else:
            answer = (await parts.engine.collective_rpc(name, args=tuple(arguments)))[0]
        answers.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    uvloop.run(main())
    sys.stdout.flush()
    os._exit(0)
