"""Trainers that are killed and started again beside a real server that goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import aiohttp
import pytest

from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef
from tests.support.engine.vllm_ext.serving import PROMPT, RunningServer
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Trainer:
    """``with`` kills it."""

    def __init__(self, server: RunningServer) -> None:
        python = starter_of(ROLES["trainer.python"]).interpreter(server.folder / "trainer.python")
        command = [python, "-m", "tests.support.engine.vllm_ext.trainer_process", server.folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert self._line() == "ready"

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(120)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, version: int, seed: int, fault: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version} {seed} {fault}\n")
        self.process.stdin.flush()

    def publish(self, version: int, seed: int, fault: str = "") -> tuple[str, int, float]:
        """(ref, attempts, seconds)."""
        self.tell(version, seed, fault)
        ref, attempts, seconds = self._line().split()
        return ref, int(attempts), float(seconds)


async def endless(server: RunningServer, model: str, stop: asyncio.Event) -> list[tuple[list[int], list[int]]]:
    """(tokens, versions) of one greedy answer after the other."""
    answers = []
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            status, answer = await server.post(
                session,
                model=model,
                prompt=PROMPT,
                max_tokens=150,
                temperature=0.0,
                ignore_eos=True,
                return_token_ids=True,
            )
            assert status == 200, answer
            answers.append((answer["choices"][0]["token_ids"], answer["choices"][0]["versions"]))
    return answers


@pytest.mark.parametrize("fault", ["1", "60", "after", "idle", "lost"])
def test_a_new_trainer_takes_the_place_of_one_that_was_killed(server: RunningServer, fault: str) -> None:
    """Killed with the first, with half of the tensors sent, after the version was live, or while nothing went on.

    The next trainer publishes the version that it resumes from: the one before, unless it was live. Where that one is
    ``lost`` all the same, the trainer makes another one of its name.
    """
    server.source.close()
    held = server.newest.version + 1 if server.newest else 0
    server.newest = AdapterRef(name="math", version=held + 2)

    async def run() -> tuple[list[tuple[list[int], list[int]]], list[tuple[str, int, float]]]:
        with Trainer(server) as first:
            await asyncio.to_thread(first.publish, held, 1)
            stop = asyncio.Event()
            stream = asyncio.create_task(endless(server, f"math@v{held}", stop))
            second = asyncio.create_task(asyncio.to_thread(Trainer, server))
            if fault in ("idle", "lost"):
                await asyncio.to_thread(first.publish, held + 1, 2)
                first.process.send_signal(signal.SIGKILL)
            elif fault == "after":
                await asyncio.to_thread(first.publish, held + 1, 2, fault)
            else:
                first.tell(held + 1, 2, fault)
            assert await asyncio.to_thread(first.process.wait, 120) == -signal.SIGKILL
            with await second as successor:
                came = held + 1 if fault in ("idle", "after") else held
                reports = [await asyncio.to_thread(successor.publish, came, 2 if came > held else 1)]
                reports += [await asyncio.to_thread(successor.publish, v, 3) for v in range(came + 1, held + 3)]
            stop.set()
            return await stream, reports

    try:
        answers, reports = asyncio.run(run())
    finally:  # other tests publish to this server afterwards
        server.source.session = int(RunFolder(server.folder).trainer_session.read_text())
    assert len({tuple(ids) for ids, _ in answers}) == 1, "the running requests have noticed nothing"
    assert {v for _, versions in answers for v in versions} == {held}
    assert [attempts for _, attempts, _ in reports] == [1] * len(reports)
    assert max(seconds for _, _, seconds in reports) < server.config.weight_sync.attempt_s
    print(f"\n{fault}: {reports}")
    wanted = server.logprobs(server.adapter(3), PROMPT)
    got = server.score(AdapterRef(name="math", version=held + 2))
    assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 1e-4
