"""Workflows turn a prompt into a group of scored trajectories.

A workflow raises GenerationFault where it has no answers at all; answers that could not be
scored come back with their typed outcome and without a reward of their own. It never retries:
the controller retries groups whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal_lora.config.models import SamplingConfig
from areal_lora.rollout.client import CompletionClient
from areal_lora.rollout.prompts import Prompt
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef, Generation, Outcome, Trajectory, TrajectoryGroup


class Scorer(Protocol):
    """What workflows need of a scorer pool: one score per item, in order."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a workflow returns: the group, and the text of each trajectory's answer for reports."""

    group: TrajectoryGroup
    texts: tuple[str, ...]


class Workflow(Protocol):
    """One way to roll out a prompt, single turn or many."""

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Roll out ``prompt`` with ``ref``; raises GenerationFault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnWorkflow:
    """Asks once for ``n_samples`` answers and scores them in one batch."""

    client: CompletionClient
    scorer: Scorer
    sampling: SamplingConfig

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        sampling = self.sampling
        generations = await self.client.sample(
            ref, prompt.token_ids, n=sampling.n_samples, max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature, top_p=sampling.top_p, seed=seed, deadline_s=sampling.deadline_s,
        )
        items = [ScoreItem(completion=generation.text, gold=prompt.sample.answer) for generation in generations]
        # Shielded: cutting a scoring short costs its child process, letting it end costs a millisecond.
        scores = await asyncio.shield(self.scorer.score(items))
        trajectories = tuple(
            single_turn(prompt, index, ref.name, generation, score)
            for index, (generation, score) in enumerate(zip(generations, scores, strict=True))
        )
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories),
            texts=tuple(generation.text for generation in generations),
        )


def single_turn(prompt: Prompt, sample: int, adapter: str, answer: Generation, score: Score) -> Trajectory:
    """Prompt [P] and answer [A] as one trajectory [P + A] in the alignment of contract C10."""
    off = len(prompt.token_ids)
    return Trajectory(
        uid=f"{prompt.uid}:{sample}",
        sample=sample,
        adapter=AdapterRef(name=adapter, version=min(answer.versions)),
        token_ids=prompt.token_ids + answer.token_ids,
        loss_mask=[0] * off + [1] * len(answer.token_ids),
        rollout_logprobs=[0.0] * off + answer.logprobs,
        versions=[-1] * off + answer.versions,
        reward=score.reward,
        outcome=score.outcome,
        finish_reason=answer.finish_reason,
        detail=score.detail,
    )


def first_fault(group: TrajectoryGroup) -> Trajectory | None:
    """The first trajectory that may not be trained on, or None."""
    return next((t for t in group.trajectories if t.outcome is not Outcome.OK), None)
