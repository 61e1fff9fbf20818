"""One life of a queue with a client inside: ``python -m tests.support.service.queue_life FOLDER STEPS``.

The client makes so many steps of two passes, each posted in another order than it is numbered. What was acknowledged
and answered is in ``client.json``; the next life repeats all requests that have no answer there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import OperationFailure, StepResult
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.queue.placement import ObservedAdapter, RunObserver
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_store import Store, put_tenant
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.queue.requests import CreateModel, Pending
from areal_lora.types import AdapterPhase
from tests.support.service.queue import LORA, QUOTA, STEP, WAIT_S, accept, tokens


class Kept(msgspec.Struct):
    """``acknowledged`` are request ids by seq, ``answers`` how they were answered."""

    session: str = ""
    acknowledged: dict[int, str] = {}
    answers: dict[int, str] = {}


class Client:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "client.json"
        self.kept = msgspec.json.decode(self.path.read_bytes(), type=Kept) if self.path.exists() else Kept()

    def keep(self) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self.kept))
        temporary.replace(self.path)

    async def live(self, queue: RequestQueue, steps: int) -> None:
        kept = self.kept
        if not kept.session:
            kept.session = await queue.open_session("acme")
            self.keep()
        await self._answer(queue, 0, await queue.create_model("acme", kept.session, 0, "p", CreateModel(lora=LORA)))
        for step in range(steps):
            actions = {3 * step + 2: tokens(2, 3), 3 * step + 3: STEP, 3 * step + 1: tokens(1, 2)}
            for seq, action in actions.items():
                request = await queue.submit("acme", f"{kept.session}:train:0", seq, f"print {seq}", action)
                assert kept.acknowledged.get(seq, request) == request
                kept.acknowledged[seq] = request
                self.keep()
            for seq in actions:
                await self._answer(queue, seq, kept.acknowledged[seq])

    async def _answer(self, queue: RequestQueue, seq: int, request: str) -> None:
        answer = await queue.outcome("acme", request, WAIT_S)
        assert not isinstance(answer, Pending), answer
        text = type(answer).__name__
        if isinstance(answer, StepResult):
            text = f"step {answer.step} of {answer.grad_norm:g}"
        if isinstance(answer, OperationFailure):
            text = f"failed: {answer.reason}"
        assert self.kept.answers.get(seq, text) == text, "an answer has changed"
        self.kept.answers[seq] = text
        self.keep()


class AllActive(RunObserver):
    """Of a run whose every adapter takes steps."""

    def of(self, key: str) -> ObservedAdapter:
        return ObservedAdapter(phase=AdapterPhase.ACTIVE)


async def main(folder: Path, steps: int) -> None:
    store = Store(RunFolder(folder).service_tables, "run")
    store.change(lambda tx: put_tenant(tx, "acme", QUOTA), 0.0)
    writer = Writer(store, RunFolder(folder), dict)
    observed = AllActive(RunFolder(folder), capacity=4)
    async with RequestQueue(writer, RunFolder(folder), accept, observed) as queue:
        try:
            await Client(folder).live(queue, steps)
        except RequestError as refused:
            print(f"refused: {refused}", flush=True)
            os._exit(3)
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
