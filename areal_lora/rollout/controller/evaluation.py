"""Evaluate one version of an adapter on all its sets, in the background of training rollouts.

A set of single greedy answers goes out in requests of ``CHUNK`` prompts. Any other set runs a workflow per problem, as
training does, with a client that asks for this version only. Sets follow each other; the result has all of them, so
that an evaluation that is cut off is repeated whole, and no set is lost or counted twice.

The places that evaluations may take on the servers: one pool for all adapters.

Half of what the servers take belongs to training rollouts, and seven eighths while the trainer waits for a batch. The
evaluations in progress divide the rest equally; one alone has all of it. Each may always have one request in progress,
however large: an evaluation that waited for the others would lose its version meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from areal_lora.data.prompts import Prompt
from areal_lora.errors import ArealLoraError
from areal_lora.processes.startup import get_logger
from areal_lora.rollout.channel.channel_messages import EvalResult, EvalSetResult
from areal_lora.rollout.completion_client import CompletionClient, FaultKind, GenerationFault, GreedyAnswer
from areal_lora.rollout.controller.base_evals import BaseEvals, ScoredAnswer, failed, given_answers, judged, result_of
from areal_lora.rollout.controller.eval_sets import EvalSet
from areal_lora.rollout.workflow import Scorer, Workflow
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef

GIVES_WAY = 4
"""The part of their places that evaluations keep while the trainer waits: one in so many. Not none: a trainer that is
faster than its servers waits at every step."""


class EvalPlaces:
    """``sequences`` that evaluations may have at once; see `resize`."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._trainer_waits = False
        self._shares: list[Share] = []

    @property
    def each(self) -> int:
        """Sequences of each evaluation in progress."""
        sequences = self._sequences // GIVES_WAY if self._trainer_waits else self._sequences
        return sequences // max(1, len(self._shares))

    def trainer_waits(self, waits: bool) -> None:
        """Whether the trainer waits for a batch of rollouts. Requests in progress are not cut off."""
        self._trainer_waits = waits
        self._admit()

    def resize(self, sequences: int) -> None:
        """The servers have changed. Requests in progress are not cut off."""
        self._sequences = sequences
        self._admit()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """The part of one evaluation, while it is in progress."""
        share = Share(self)
        self._shares.append(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            self._admit()

    def _admit(self) -> None:
        for share in self._shares:
            share.admit()


class Share:
    """Requests of one evaluation, admitted in the order in which they were made."""

    def __init__(self, places: EvalPlaces) -> None:
        self._places = places
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, sequences: int) -> AsyncIterator[None]:
        """Wait for the places of one request."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, turn))
        self.admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # else it has taken none: it was cut off while it waited
                self._taken -= sequences
            self.admit()

    def admit(self) -> None:
        """Begin what has a place now."""
        while self._waiting:
            sequences, turn = self._waiting[0]
            if not turn.cancelled():
                if self._taken and self._taken + sequences > self._places.each:
                    return
                self._taken += sequences
                turn.set_result(None)
            self._waiting.popleft()


T = TypeVar("T")

CHUNK = 32  # prompts of one request
SCORED_AT_ONCE = 8  # answers; rollouts wait for the same scorers, and have their turn in between
MAX_TRIES = 5
BACK_OFF_S = 0.2
USER_TRIES = 2
USER_FAULTS = (
    FaultKind.AGENT,
    FaultKind.ENVIRONMENT,
    FaultKind.WORKFLOW,
    FaultKind.TIMEOUT,
    FaultKind.REJECTED,
    FaultKind.SCORER,
)
"""What a workflow does wrong with one problem: its answers stay unscored, after ``USER_TRIES``."""

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Asks and scores for one adapter; its requests take ``places``, which the evaluations of all adapters share.

    ``workflows`` are by the name of a set; those of single greedy answers need none. ``seed`` is the run's: a problem
    is asked with the same seed at every version. ``base_keys`` are by the name of a set those of version 0, where it
    equals the base; ``base`` has the results.
    """

    client: CompletionClient
    scorer: Scorer
    reward_kind: str
    sets: Sequence[EvalSet]
    workflows: dict[str, Workflow]
    places: EvalPlaces
    seed: int = 0
    base_keys: Mapping[str, str] = field(default_factory=dict)
    base: BaseEvals = field(default_factory=BaseEvals)

    async def run(self, ref: AdapterRef, tag: str) -> EvalResult:
        """Never raises for faults of servers, scorers or workflows: ``error`` of a set's result states the reason."""
        start = time.monotonic()
        sets = [await self._once_if_base(chosen, ref) for chosen in self.sets]
        return EvalResult(
            adapter=ref.name, version=ref.version, tag=tag, sets=tuple(sets), wall_s=time.monotonic() - start
        )

    async def _once_if_base(self, chosen: EvalSet, ref: AdapterRef) -> EvalSetResult:
        """The result on one set; of a version 0 that equals the base, the one that all such versions have."""
        key = self.base_keys.get(chosen.name) if ref.version == 0 else None
        if key is None:
            return await self._set(chosen, ref)
        found = await self.base.once(key, ref, partial(self._set, chosen, ref))
        return msgspec.structs.replace(found, name=chosen.name)

    async def _set(self, chosen: EvalSet, ref: AdapterRef) -> EvalSetResult:
        start = time.monotonic()
        try:
            if chosen.single_greedy:
                answers = await self._in_chunks(chosen, ref)
            else:
                answers = await self._one_by_one(chosen, ref)
        except ExceptionGroup as group:  # fault boundary: a user's workflow or reward; other adapters train on
            error = _first(group)
            if isinstance(error, ArealLoraError):
                return failed(chosen, str(error), time.monotonic() - start)
            log.error("evaluation of %s on %s", ref, chosen.name, exc_info=error)
            return failed(chosen, f"{type(error).__name__}: {error}", time.monotonic() - start)
        # In a thread: the bootstrap of a large set takes a second.
        return await asyncio.to_thread(
            result_of, chosen, ref, answers, self.reward_kind, wall_s=time.monotonic() - start
        )

    # ------------------------------------------------------------ single greedy answers

    async def _in_chunks(self, chosen: EvalSet, ref: AdapterRef) -> list[list[ScoredAnswer]]:
        starts = range(0, len(chosen.held_out.samples), CHUNK)
        with self.places.share() as share:
            chunks = await _all(self._chunk(chosen, ref, slice(at, at + CHUNK), share) for at in starts)
        return [[given] for chunk in chunks for given in chunk]

    async def _chunk(self, chosen: EvalSet, ref: AdapterRef, part: slice, share: Share) -> list[ScoredAnswer]:
        sampling, prefill = chosen.sampling, chosen.formatter.prefill
        prompts = chosen.held_out.token_ids[part]

        async def measure() -> list[GreedyAnswer]:
            async with share.take(len(prompts)):
                return await self.client.greedy(
                    ref,
                    prompts,
                    max_tokens=sampling.max_new_tokens,
                    timeout_s=sampling.timeout_s,
                    stop=sampling.stop or None,
                )

        answers = await _patiently(measure)
        items = [
            ScoreItem.of(s, a.text, n_tokens=a.n_tokens, finish_reason=a.finish_reason, prefill=prefill)
            for s, a in zip(chosen.held_out.samples[part], answers, strict=True)
        ]
        scores: list[Score] = []
        for at in range(0, len(items), SCORED_AT_ONCE):
            scores += await self.scorer.score(items[at : at + SCORED_AT_ONCE])
        return [
            ScoredAnswer(
                text=a.text,
                score=judged(score, chosen.config.correct_threshold),
                n_tokens=a.n_tokens,
                finish_reason=a.finish_reason,
            )
            for a, score in zip(answers, scores, strict=True)
        ]

    # ------------------------------------------------------------ workflows

    async def _one_by_one(self, chosen: EvalSet, ref: AdapterRef) -> list[list[ScoredAnswer]]:
        held_out = zip(chosen.held_out.samples, chosen.held_out.token_ids, strict=True)
        prompts = [
            Prompt(uid=s.uid, position=i, sample=s, text=chosen.formatter.text(s), token_ids=ids)
            for i, (s, ids) in enumerate(held_out)
        ]
        with self.places.share() as share:
            return await _all(self._problem(chosen, ref, prompt, share) for prompt in prompts)

    async def _problem(self, chosen: EvalSet, ref: AdapterRef, prompt: Prompt, share: Share) -> list[ScoredAnswer]:
        workflow = self.workflows[chosen.name]
        seed = problem_seed(self.seed, chosen.name, prompt.uid)

        async def measure() -> list[ScoredAnswer]:
            async with share.take(chosen.config.n_samples):
                return given_answers(chosen, prompt, ref, await workflow.run(prompt, ref, seed))

        try:
            return await _patiently(measure)
        except GenerationFault as fault:
            if fault.kind not in USER_FAULTS:
                raise
            unscored = Score(reward=float("nan"), outcome=fault.outcome, detail=str(fault))
            return [ScoredAnswer(text="", score=unscored)] * chosen.config.n_samples


def problem_seed(run_seed: int, name: str, uid: str) -> int:
    """31-bit seed of the answers to one problem of a set."""
    return int.from_bytes(blake2b(f"{run_seed}:{name}:{uid}".encode(), digest_size=4).digest(), "little") >> 1


async def _patiently(measure: Callable[[], Awaitable[T]]) -> T:
    """Repeat what may succeed later; raises the last GenerationFault."""
    failures = user_failures = 0
    while True:
        try:
            return await measure()
        except GenerationFault as fault:
            # A dead server is restarted; a retired version is not restored.
            failures += fault.kind is not FaultKind.CONNECTION
            user_failures += fault.kind in USER_FAULTS and fault.kind is not FaultKind.TIMEOUT
            final = fault.kind is FaultKind.RETIRED or not fault.retryable
            if failures == MAX_TRIES or user_failures == USER_TRIES or final:
                raise
            await asyncio.sleep(BACK_OFF_S * 2**failures)


async def _all(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run) for run in runs]
    return [task.result() for task in running]


def _first(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
