"""Greedy accuracy on held-out problems, in the background of training rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.config.models import SamplingConfig
from areal_lora.rollout.client import CompletionClient, FaultKind, GenerationFault
from areal_lora.rollout.messages import EvalResult, RolloutSample
from areal_lora.rollout.workflow import Scorer
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef, Outcome, Sample

CHUNK = 32  # prompts of one request
MAX_TRIES = 5
BACK_OFF_S = 0.2
UNSERVED_S = 300.0  # how long a server may be gone
N_SAMPLES = 4  # examples in a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """``samples`` and ``token_ids`` [N][P] speak of the same problems; at most ``max_chunks`` requests at once."""

    client: CompletionClient
    scorer: Scorer
    sampling: SamplingConfig
    samples: Sequence[Sample]
    token_ids: Sequence[list[int]]
    max_chunks: int

    async def run(self, ref: AdapterRef, tag: str) -> EvalResult:
        """Never raises for rollout faults: a result that could not be measured says so in ``error``."""
        start = time.monotonic()
        slots = asyncio.Semaphore(self.max_chunks)
        chunks = [self.token_ids[start : start + CHUNK] for start in range(0, len(self.token_ids), CHUNK)]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._chunk(ref, chunk, slots)) for chunk in chunks]
        except ExceptionGroup as group:
            faults, others = group.split(GenerationFault)
            if others is not None or faults is None:
                raise
            return self._failed(ref, tag, str(faults.exceptions[0]), start)
        texts = [text for task in running for text in task.result()]
        scores = await self.scorer.score(
            [ScoreItem(completion=text, gold=s.answer) for text, s in zip(texts, self.samples, strict=True)]
        )
        scored = [score for score in scores if score.outcome is Outcome.OK]
        if not scored:
            return self._failed(ref, tag, f"no answer could be scored: {scores[0].detail}", start)
        return EvalResult(
            adapter=ref.name,
            version=ref.version,
            tag=tag,
            accuracy=sum(score.reward >= 1.0 for score in scored) / len(scored),
            n=len(scored),
            wall_s=time.monotonic() - start,
            samples=self._examples(ref, texts, scores),
        )

    async def _chunk(self, ref: AdapterRef, prompts: Sequence[list[int]], slots: asyncio.Semaphore) -> list[str]:
        sampling = self.sampling
        unserved_until_s = time.monotonic() + UNSERVED_S
        failed = 0
        while True:
            try:
                async with slots:
                    return await self.client.greedy(
                        ref, prompts, max_tokens=sampling.max_new_tokens, deadline_s=sampling.deadline_s
                    )
            except GenerationFault as fault:
                # A server that is gone is started again; a retired version does not come back.
                failed += fault.kind is not FaultKind.CONNECTION or time.monotonic() > unserved_until_s
                if failed == MAX_TRIES or fault.kind is FaultKind.RETIRED or not fault.retryable:
                    raise
                await asyncio.sleep(BACK_OFF_S * 2**failed)

    def _examples(self, ref: AdapterRef, texts: Sequence[str], scores: Sequence[Score]) -> tuple[RolloutSample, ...]:
        return tuple(
            RolloutSample(
                uid=sample.uid, prompt=sample.prompt, completion=text, answer=sample.answer, reward=score.reward,
                version=ref.version,
            )
            for sample, text, score in list(zip(self.samples, texts, scores, strict=True))[:N_SAMPLES]
        )

    def _failed(self, ref: AdapterRef, tag: str, error: str, start: float) -> EvalResult:
        return EvalResult(
            adapter=ref.name, version=ref.version, tag=tag, accuracy=0.0, n=0, wall_s=time.monotonic() - start,
            error=error,
        )
