"""Several rewards of one answer as one: their weighted sum, each computed in scorer processes of its own.

One reward is a list of one. The first reward of the list states what is correct. An answer that one of them could not
score is not scored: the first such outcome is the answer's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from areal_lora.config.sections.task import RewardConfig, labels
from areal_lora.tasks.score_item import ScoreItem
from areal_lora.tasks.scorer import Score, ScorerPool
from areal_lora.types import Outcome


class RewardSum:
    """Scores answers with all ``rewards``; use it with ``async with``, as a :class:`ScorerPool`."""

    def __init__(self, rewards: Sequence[RewardConfig], *, hidden: Path | None = None) -> None:
        self._labels = labels(list(rewards))
        self._kinds = [reward.kind for reward in rewards]
        self._weights = [reward.weight for reward in rewards]
        self._pools = [ScorerPool(reward, hidden=hidden) for reward in rewards]
        self._stack = AsyncExitStack()

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Return one score per item, in order. Raises what `ScorerPool.score` raises."""
        columns = await asyncio.gather(*(pool.score(items) for pool in self._pools))
        return [weighted(scores, self._labels, self._weights) for scores in zip(*columns, strict=True)]

    def take_costs(self) -> dict[str, float]:
        """What the rewards have spent since the last call: ``judge/calls``, ``judge/cached_share``."""
        found: dict[str, float] = {}
        for label, kind, pool in zip(self._labels, self._kinds, self._pools, strict=True):
            costs = pool.take_costs()
            if answers := costs.get("answers"):
                costs["cached_share"] = costs.pop("cached", 0.0) / answers
            found |= {f"{label or kind}/{name}": value for name, value in costs.items()}
        return found

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for pool in self._pools:
                await stack.enter_async_context(pool)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


def weighted(scores: Sequence[Score], names: Sequence[str], weights: Sequence[float]) -> Score:
    """The sum of one answer's ``scores``. The value of a named reward is a part, unweighted, and so are its parts."""
    for name, score in zip(names, scores, strict=True):
        if score.outcome is not Outcome.OK:
            detail = f"{name}: {score.detail}" if name else score.detail
            return Score(reward=math.nan, outcome=score.outcome, detail=detail, cause=score.cause)
    parts: dict[str, float] = {}
    for name, score in zip(names, scores, strict=True):
        parts |= _parts(name, score.reward, score.components)
    return Score(
        reward=sum(weight * score.reward for weight, score in zip(weights, scores, strict=True)),
        outcome=Outcome.OK,
        correct=scores[0].correct,
        components=parts,
    )


def _parts(name: str, value: float, components: Mapping[str, float]) -> dict[str, float]:
    if not name:
        return dict(components)
    return {name: value} | {f"{name}/{part}": number for part, number in components.items()}
