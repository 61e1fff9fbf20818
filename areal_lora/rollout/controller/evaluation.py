"""Greedy answers to held-out problems, scored by the configured reward, in the background of training rollouts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.config.models import SamplingConfig
from areal_lora.errors import ConfigError
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.messages import EvalResult, EvalSample
from areal_lora.rollout.client import CompletionClient, FaultKind, GenerationFault
from areal_lora.rollout.workflow import Scorer
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.tasks.tally import tally
from areal_lora.types import AdapterRef, Sample

CHUNK = 32  # prompts of one request
SCORED_AT_ONCE = 8  # answers; rollouts wait for the same scorers, and have their turn in between
MAX_TRIES = 5
BACK_OFF_S = 0.2
UNSERVED_S = 300.0  # how long a server may be gone
N_SAMPLES = 4  # examples in a result
N_NAMED = 5  # prompts left out that are named

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out problems: ``samples`` with their ``token_ids`` [N][P]; ``left_out`` are the uids of omitted ones."""

    samples: Sequence[Sample]
    token_ids: Sequence[list[int]]
    left_out: tuple[str, ...] = ()

    def note(self) -> str:
        """Return one line about the omitted problems; empty if there are none."""
        if not self.left_out:
            return ""
        named = ", ".join(self.left_out[:N_NAMED]) + (", ..." if len(self.left_out) > N_NAMED else "")
        total = len(self.left_out) + len(self.samples)
        return f"{len(self.left_out)} of {total} held-out prompts are too long and left out: {named}"


def fitting(samples: Sequence[Sample], token_ids: Sequence[list[int]], max_prompt_tokens: int) -> HeldOut:
    """The problems whose prompts leave room for an answer, as in training. Raises ConfigError if none does."""
    fit = [len(ids) <= max_prompt_tokens for ids in token_ids]
    if not any(fit):
        raise ConfigError(
            "rollout.max_model_len",
            f"all {len(samples)} held-out prompts are longer than the {max_prompt_tokens} tokens left beside an answer",
            "raise it, or lower sampling.max_new_tokens",
        )
    return HeldOut(
        samples=[sample for sample, fits in zip(samples, fit, strict=True) if fits],
        token_ids=[ids for ids, fits in zip(token_ids, fit, strict=True) if fits],
        left_out=tuple(sample.uid for sample, fits in zip(samples, fit, strict=True) if not fits),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """At most ``max_chunks`` requests at once."""

    client: CompletionClient
    scorer: Scorer
    sampling: SamplingConfig
    held_out: HeldOut
    max_chunks: int

    async def run(self, ref: AdapterRef, tag: str) -> EvalResult:
        """Never raises for rollout faults: ``error`` of the result states why it could not be measured."""
        start = time.monotonic()
        slots = asyncio.Semaphore(self.max_chunks)
        chunks = range(0, len(self.held_out.samples), CHUNK)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._chunk(ref, slice(at, at + CHUNK), slots)) for at in chunks]
        except ExceptionGroup as group:
            faults, others = group.split(GenerationFault)
            if others is not None or faults is None:
                raise
            return self._failed(ref, tag, str(faults.exceptions[0]), start)
        texts = [text for task in running for text, _ in task.result()]
        scores = [score for task in running for _, score in task.result()]
        figures = tally(scores)
        if figures.reward_mean is None:
            return self._failed(ref, tag, f"no answer could be scored: {scores[0].detail}", start)
        if 0 < figures.ungraded < figures.n - figures.unscored:
            log.warning(
                "evaluation of %s has no accuracy: the reward does not grade %d of %d answers (fix: return "
                "'correct' for every answer, or set reward.correct_threshold)",
                ref,
                figures.ungraded,
                figures.n - figures.unscored,
            )
        return EvalResult(
            adapter=ref.name,
            version=ref.version,
            tag=tag,
            accuracy=figures.accuracy,
            reward_mean=figures.reward_mean,
            n=figures.n,
            unscored=figures.unscored,
            left_out=len(self.held_out.left_out),
            left_out_first=self.held_out.left_out[:N_NAMED],
            wall_s=time.monotonic() - start,
            samples=self._examples(ref, texts, scores),
        )

    async def _chunk(self, ref: AdapterRef, part: slice, slots: asyncio.Semaphore) -> list[tuple[str, Score]]:
        texts = await self._answers(ref, self.held_out.token_ids[part], slots)
        samples = self.held_out.samples[part]
        items = [ScoreItem(completion=text, gold=s.answer) for text, s in zip(texts, samples, strict=True)]
        scores: list[Score] = []
        for at in range(0, len(items), SCORED_AT_ONCE):
            scores += await self.scorer.score(items[at : at + SCORED_AT_ONCE])
        return list(zip(texts, scores, strict=True))

    async def _answers(self, ref: AdapterRef, prompts: Sequence[list[int]], slots: asyncio.Semaphore) -> list[str]:
        sampling = self.sampling
        unserved_deadline = time.monotonic() + UNSERVED_S
        failed = 0
        while True:
            try:
                async with slots:
                    return await self.client.greedy(
                        ref, prompts, max_tokens=sampling.max_new_tokens, timeout_s=sampling.timeout_s
                    )
            except GenerationFault as fault:
                # A dead server is restarted; a retired version is not restored.
                failed += fault.kind is not FaultKind.CONNECTION or time.monotonic() > unserved_deadline
                if failed == MAX_TRIES or fault.kind is FaultKind.RETIRED or not fault.retryable:
                    raise
                await asyncio.sleep(BACK_OFF_S * 2**failed)

    def _examples(self, ref: AdapterRef, texts: Sequence[str], scores: Sequence[Score]) -> tuple[EvalSample, ...]:
        return tuple(
            EvalSample(
                uid=sample.uid,
                prompt=sample.prompt,
                completion=text,
                answer=sample.answer,
                reward=None if math.isnan(score.reward) else score.reward,
                correct=score.correct,
                version=ref.version,
            )
            for sample, text, score in list(zip(self.held_out.samples, texts, scores, strict=True))[:N_SAMPLES]
        )

    def _failed(self, ref: AdapterRef, tag: str, error: str, start: float) -> EvalResult:
        return EvalResult(
            adapter=ref.name,
            version=ref.version,
            tag=tag,
            accuracy=None,
            reward_mean=None,
            n=0,
            wall_s=time.monotonic() - start,
            error=error,
        )
