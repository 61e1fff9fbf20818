"""Custom workflows that tests run in a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, SingleTurnWorkflow, WorkflowContext
from areal_lora.types import AdapterRef, TokenColumns, TrajectoryGroup


def no_workflow(context: Any) -> None: ...


class Changed:
    """Single turn, with one thing changed."""

    value: Any = None

    def __init__(self, context: WorkflowContext, *, change: str = "") -> None:
        self.inner, self.change = SingleTurnWorkflow(context=context), change

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        if self.change == "raise":
            raise ValueError("broken")
        if self.change == "fault":
            raise GenerationFault(FaultKind.CONNECTION, "gone")
        episode = await self.inner.run(prompt, ref, seed)
        first, *others = episode.group.trajectories
        if self.change == "uid":
            return replace(episode, group=replace(episode.group, uid="0:other"))
        if self.change == "empty":
            return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=()), texts=())
        if self.change == "texts":
            return replace(episode, texts=())
        if self.change == "text":
            return "an answer"  # type: ignore[return-value]
        changed: dict[str, Any] = {
            "": {},
            "reward": {"reward": self.value},
            "no columns": {"columns": None},
            "nothing sampled": {"columns": TokenColumns.unsampled(first.token_ids)},
            "adapter": {"adapter": AdapterRef(name="other", version=1)},
            "first sampled": {"columns": TokenColumns.of([1, 2], [-0.1, -0.2], [1, 1])},
            "long": {"columns": TokenColumns.of([5] * 65, [0.0] * 64 + [-1.0], [-1] * 64 + [1])},
        }[self.change]
        group = replace(episode.group, trajectories=(replace(first, **changed), *others))
        return replace(episode, group=group)


class Killed:
    """Single turn, whose first process ends itself after its first samples."""

    def __init__(self, context: WorkflowContext, *, marks: str) -> None:
        self.inner, self.marks = SingleTurnWorkflow(context=context), Path(marks)

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        episode = await self.inner.run(prompt, ref, seed)
        if not any(self.marks.iterdir()):
            (self.marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return episode


class Hangs:
    """Single turn. The first ``times`` runs never end; a thread that ``blocks`` cannot be cancelled either."""

    def __init__(self, context: WorkflowContext, *, marks: str, times: int, blocks: bool = False) -> None:
        self.inner, self.marks = SingleTurnWorkflow(context=context), Path(marks)
        self.times, self.blocks = times, blocks

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n = len(list(self.marks.iterdir()))
        (self.marks / f"{n}-{seed}-{os.getpid()}").touch()
        if n < self.times:
            if self.blocks:
                time.sleep(3600.0)
            await asyncio.sleep(3600.0)
        return await self.inner.run(prompt, ref, seed)


class TwoTurns:
    """Two requests of one conversation, whose answers the group's only trajectory does not show."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context, self.inner = context, SingleTurnWorkflow(context=context)

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        group = self.context.conversation()
        mine, other = group.conversation(), group.conversation()
        for context in (mine, other, mine):
            await context.answer(ref, prompt.token_ids, seed=seed, timeout_s=60.0)
        return await self.inner.run(prompt, ref, seed)


class Abandons:
    """Abandons a request, waits until ``closed`` exists, and then runs a single turn."""

    def __init__(self, context: WorkflowContext, *, closed: str) -> None:
        self.context, self.inner, self.closed = context, SingleTurnWorkflow(context=context), Path(closed)

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        request = asyncio.create_task(self.context.answer(ref, prompt.token_ids, n=7, seed=seed, timeout_s=600.0))
        await asyncio.sleep(0.5)
        request.cancel()
        while not self.closed.exists():
            await asyncio.sleep(0.01)
        return await self.inner.run(prompt, ref, seed)


class Shown:
    """Single turn, whose trajectories have a detail that shows the context."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context, self.inner = context, SingleTurnWorkflow(context=context)

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        episode, context = await self.inner.run(prompt, ref, seed), self.context
        detail = f"{context.evaluating} {context.sampling.temperature} {context.max_model_len}"
        shown = tuple(replace(t, detail=detail) for t in episode.group.trajectories)
        return replace(episode, group=replace(episode.group, trajectories=shown))
