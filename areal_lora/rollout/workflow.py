"""Workflows turn a prompt into a group of scored trajectories.

A workflow raises GenerationFault where it has no answers at all; answers that could not be scored are returned with
their typed outcome and without a reward of their own. The controller retries groups whole; a workflow repeats only a
sample that has lost its worker or its time (`conversations.repeated`).

`PackedTurns` is the only place of the rollout plane that lays tokens out (contract C10): entry t of every array
describes token t, and the loss mask is on exactly where the model itself sampled::

    token_ids         p0  p1 | a0  a1  a2 | r0  r1 | b0  b1
    loss_mask          0   0    1   1   1    0   0    1   1
    rollout_logprobs   0   0  -.2 -.7 -.1    0   0  -.3 -.4
    versions          -1  -1    4   4   4   -1  -1    5   5

Tokens are never made from text again once they exist: what the model sampled is what is trained on.
"""

import asyncio
import itertools
import math
from array import array
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol, Self, TypeVar

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import Formatter, Prompt, TextTokenizer
from areal_lora.errors import ConfigError
from areal_lora.network.http_server import ParsedText, StructuredOutputs, ToolCallsBody
from areal_lora.rollout.completion_client import Arrived, CompletionRequest, FaultKind, GenerationFault
from areal_lora.tasks.reward_calls import Score, ScoreItem, cause_of
from areal_lora.tasks.rewards import grade
from areal_lora.tasks.stored_samples import given_answer
from areal_lora.tokens import first_routes
from areal_lora.types import AdapterRef, Generation, Outcome, Sample, TokenColumns, Trajectory, TrajectoryGroup

T = TypeVar("T")


@dataclass(slots=True)
class PackedTurns:
    """One growing sequence: the prompt, then in turn the model's answers and the replies.

    ``parts`` are columns of what the model answered, and of the rest the token ids [T] int32 alone. ``routes`` are
    those of the first tokens, ``route_bytes`` each. The first ``n_routed`` have one: a server need not return it again.
    """

    parts: list[TokenColumns | bytes] = field(default_factory=list)
    finish_reason: str = ""
    routes: bytearray = field(default_factory=bytearray)  # [tokens, L, K]
    route_bytes: int = 0
    n_routed: int = 0

    def __len__(self) -> int:
        return sum(map(len, self._ids())) // 4

    def _ids(self) -> list[bytes]:
        return [part if isinstance(part, bytes) else part.token_ids for part in self.parts]

    @property
    def columns(self) -> TokenColumns:
        joined = TokenColumns.joined(
            [TokenColumns.unsampled(array("i", part)) if isinstance(part, bytes) else part for part in self.parts]
        )
        return joined.routed(bytes(self.routes).ljust(self.route_bytes * len(self), b"\xff"))

    @property
    def any_sampled(self) -> bool:
        return any(not isinstance(part, bytes) and part.n_sampled for part in self.parts)

    def ids(self, end: int | None = None) -> "array[int]":
        """The first ``end`` tokens."""
        return array("i", b"".join(self._ids())[: None if end is None else 4 * end])

    @property
    def token_ids(self) -> list[int]:
        return self.ids().tolist()

    def starts(self, token_ids: bytes) -> bool:
        """Whether ``token_ids`` [T] int32 start with all of these."""
        parts = self._ids()
        starts = itertools.accumulate(map(len, parts), initial=0)
        return all(token_ids.startswith(part, at) for part, at in zip(parts, starts, strict=False))

    def given(self, token_ids: Sequence[int]) -> None:
        """Append what the model did not sample: the prompt, or a reply."""
        self.parts.append(array("i", token_ids).tobytes())

    def sampled(self, answer: Generation) -> None:
        """Append what the model answered to all of the tokens so far. A token keeps the first route that it got."""
        start = answer.routes_from
        if answer.prompt_routes and start <= self.n_routed:
            size = self.route_bytes = len(answer.prompt_routes) // (len(self) - start)
            given = answer.prompt_routes + (answer.columns.routes or b"\xff" * (size * len(answer.columns)))
            self.routes[size * start :], n = first_routes(bytes(self.routes[size * start :]), given, size)
            self.n_routed = start + n
        self.parts.append(answer.columns.routed(b""))
        self.finish_reason = answer.finish_reason

    def trajectory(self, uid: str, sample: int, adapter: str, score: Score) -> Trajectory:
        return scored_trajectory(uid, sample, adapter, score, self.columns, self.finish_reason)


def scored_trajectory(
    uid: str, sample: int, adapter: str, score: Score, columns: TokenColumns, finish_reason: str
) -> Trajectory:
    """At least one answer must be there; its oldest token's version is the trajectory's."""
    return Trajectory(
        uid=uid,
        sample=sample,
        adapter=AdapterRef(name=adapter, version=columns.span[0]),
        columns=columns,
        reward=score.reward,
        outcome=score.outcome,
        finish_reason=finish_reason,
        detail=score.detail,
        components=dict(score.components),
        correct=score.correct,
        cause=score.cause,
    )


def continued_by(conversations: Iterable[PackedTurns], prompt_ids: Sequence[int]) -> PackedTurns | None:
    """The longest of ``conversations`` whose tokens a prompt starts with."""
    given = TokenColumns.unsampled(prompt_ids).token_ids
    return max((c for c in conversations if c.starts(given)), key=len, default=None)


def join(conversations: list[PackedTurns], prompt_ids: Sequence[int], answer: Generation) -> PackedTurns:
    """Record one completion, and return the conversation it now is the end of (`continued_by`), perhaps a new one."""
    conversation = continued_by(conversations, prompt_ids)
    if conversation is None:
        conversation = PackedTurns()
        conversations.append(conversation)
    if conversation.n_routed < (n := answer.routes_from):  # the one that it continued has another answer by now
        first = array("i", prompt_ids[:n])
        other = next((c for c in conversations if c.n_routed >= n and c.ids(n) == first), conversation)
        size = conversation.route_bytes = other.route_bytes
        conversation.routes, conversation.n_routed = other.routes[: size * n], min(n, other.n_routed)
    conversation.given(prompt_ids[len(conversation) :])
    conversation.sampled(answer)
    return conversation


class WorkerLost(GenerationFault):
    """The process that a sample runs in, or its session, has ended. Only this sample is repeated."""

    def __init__(self, detail: str) -> None:
        super().__init__(FaultKind.ENVIRONMENT, detail)


class RolloutClient(Protocol):
    """The part of a `CompletionClient` that workflows use."""

    @property
    def pins(self) -> bool: ...

    def conversation(self) -> Self: ...

    def newest(self, ref: AdapterRef) -> AdapterRef: ...

    async def sample(
        self, ref: AdapterRef, request: CompletionRequest, *, timeout_s: float, arrived: Arrived | None = None
    ) -> list[Generation]: ...

    async def score(
        self, ref: AdapterRef, prompt_ids: list[int], answer_ids: list[int], *, temperature: float, timeout_s: float
    ) -> Generation: ...

    async def tool_calls(self, ref: AdapterRef, request: ToolCallsBody, *, timeout_s: float) -> list[ParsedText]: ...


class Scorer(Protocol):
    """The part of a scorer pool that workflows use: one score per item, in order."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """Context of a workflow. ``client`` samples, ``scorer`` returns the configured reward: without ``has_reward`` 0.

    ``sampling`` is the adapter's; log-probabilities are trained on at its temperature, so every sampled token has
    to be sampled with it. In an evaluation it is the set's, ``client`` requests one version only, and nothing is
    trained on (``evaluating``). ``formatter`` writes prompts and replies as tokens. No sequence may be longer than
    ``max_model_len`` tokens. Without ``streams`` answers come whole: those of a stream have no routes.
    """

    client: RolloutClient
    scorer: Scorer
    sampling: SamplingConfig
    formatter: Formatter
    max_model_len: int
    streams: bool = True
    has_reward: bool = True

    @property
    def evaluating(self) -> bool:
        return self.client.pins

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.formatter.tokenizer

    def conversation(self) -> "WorkflowContext":
        """A context for requests that continue each other: they stay on one server, which caches their tokens.

        That of a group of conversations with one prompt has contexts for them in the same way.
        """
        return replace(self, client=self.client.conversation())

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of text that continues others: without start or end of sequence."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def answer(
        self,
        ref: AdapterRef,
        token_ids: Sequence[int],
        *,
        seed: int,
        timeout_s: float,
        max_tokens: int | None = None,
        n: int = 1,
        stop: list[str] | None = None,
        top_logprobs: int = 0,
        schema: dict[str, Any] | None = None,
        arrived: Arrived | None = None,
        routes_from: int = 0,
    ) -> list[Generation]:
        """``n`` answers to ``token_ids`` by the newest version of ``ref``'s adapter; raises GenerationFault.

        They are as long as ``max_tokens``, `sampling.max_new_tokens` and the model's length allow, which must be one
        token at least.
        """
        room = self.max_model_len - len(token_ids)
        longest = min(room, self.sampling.max_new_tokens, room if max_tokens is None else max_tokens)
        request = CompletionRequest(
            prompt=token_ids,
            n=n,
            max_tokens=longest,
            seed=seed,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            stop=[*self.sampling.stop, *(stop or ())] or None,
            stop_token_ids=self.formatter.ends or None,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            return_kept=self.sampling.truncates and not self.evaluating,
            min_tokens=self.sampling.min_tokens,
            logprobs=top_logprobs,
            structured_outputs=None if schema is None else StructuredOutputs(json=schema),
            routes_from=routes_from,
        )
        return await self.client.sample(self.client.newest(ref), request, timeout_s=timeout_s, arrived=arrived)

    def item(self, sample: Sample, answer: Generation, turns: Sequence[dict[str, Any]] = ()) -> ScoreItem:
        """What the reward gets of one answer to ``sample``; ``turns``: as `ScoreItem.of`."""
        return ScoreItem.of(
            sample,
            answer.text,
            n_tokens=len(answer.columns),
            finish_reason=answer.finish_reason,
            prefill=self.formatter.how.prefill,
            turns=turns,
        )

    async def scores(self, given: Sequence[tuple[ScoreItem, float | Score | None]]) -> list[Score]:
        """Of items with the rewards that user code gave; without one (None) the configured reward scores."""
        left = [item for item, reward in given if reward is None]
        scored = iter(await self.score(left) if left else ())
        return [next(scored) if reward is None else given_score(reward) for _, reward in given]

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        # Shielded: cutting a scoring short costs its child process, letting it end costs a millisecond.
        return await asyncio.shield(self.scorer.score(items))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Result of a workflow: the group, and for reports of each trajectory the answer's text, and the turns as JSON."""

    group: TrajectoryGroup
    texts: tuple[str, ...]
    turns: tuple[str, ...] = ()


class Workflow(Protocol):
    """One way to roll out a prompt, single turn or many."""

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Roll out ``prompt`` with ``ref``; raises GenerationFault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnWorkflow:
    """Requests ``n_samples`` answers at once and scores them in one batch.

    A request has no deadline of its own: a long answer of a healthy server takes as long as it takes. A server that is
    lost or hangs is excluded by the trainer, which ends its requests; the feed's lease ends what is lost otherwise.
    """

    context: WorkflowContext

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n = self.context.sampling.n_samples
        answers = await self.context.answer(ref, prompt.token_ids, n=n, seed=seed, timeout_s=math.inf)
        scores = await self.context.score([self.context.item(prompt.sample, answer) for answer in answers])
        trajectories = tuple(
            single_turn(prompt, index, ref.name, answer, score)
            for index, (answer, score) in enumerate(zip(answers, scores, strict=True))
        )
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories), texts=tuple(a.text for a in answers)
        )


def single_turn(prompt: Prompt, sample: int, adapter: str, answer: Generation, score: Score) -> Trajectory:
    """Prompt [P] and answer [A] as one trajectory [P + A]."""
    packed = PackedTurns()
    packed.given(prompt.token_ids)
    packed.sampled(answer)
    return packed.trajectory(f"{prompt.uid}:{sample}", sample, adapter, score)


def given_score(reward: object) -> Score:
    """A reward that user code gave: a `Score`, or what a reward function may return; else an error, as of a scorer."""
    if isinstance(reward, Score):
        return reward
    try:
        return grade(reward)
    except (TypeError, ValueError, OverflowError) as error:
        return Score.fault(Outcome.ERROR, str(error), cause_of(error, alone=False))


def derived_seed(seed: int, *parts: str | int) -> int:
    """31-bit seed of one part of what ``seed`` is the seed of: equal for equal parts, in every run."""
    text = ":".join(map(str, (seed, *parts)))
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


async def all_samples(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run a group's samples at once; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run) for run in runs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


def first_fault(group: TrajectoryGroup) -> Trajectory | None:
    """The first trajectory that may not be trained on, or None."""
    return next((t for t in group.trajectories if t.outcome is not Outcome.OK), None)


def greedy(sampling: SamplingConfig) -> SamplingConfig:
    """One answer of the likeliest tokens; length, stop texts and time limit as in training."""
    changes = {"n_samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return sampling.model_copy(update=changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWorkflow:
    """The data set's own answer to a prompt, once, scored by servers and reward; ``column``: as `given_answer`.

    The group has what a sampled one has, log-probabilities and versions of every trained token: only the objective of
    its tokens differs (`algorithms.losses`). A conversation is one sequence; the reward gets its last answer.
    """

    context: WorkflowContext
    column: str | None

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Raises GenerationFault, also for an answer that is too long or that the chat template refuses."""
        context, messages = self.context, given_answer(prompt.sample, self.column)
        try:
            parts = context.formatter.given(messages)
        except ConfigError as error:  # one row must not end a run
            raise GenerationFault(FaultKind.REJECTED, f"the given answer: {error}") from None
        given_ids = list(itertools.chain.from_iterable(parts))
        n_tokens = len(prompt.token_ids) + len(given_ids)
        if n_tokens >= context.max_model_len:
            limit = f"rollout.max_model_len = {context.max_model_len}"
            raise GenerationFault(FaultKind.REJECTED, f"prompt and given answer have {n_tokens} tokens, {limit}")
        scored = await context.client.score(
            context.client.newest(ref),
            prompt.token_ids,
            given_ids,
            temperature=context.sampling.temperature,
            timeout_s=context.sampling.timeout_s,
        )
        columns, packed, end = scored.columns, PackedTurns(), 0
        answer = replace(scored, text=messages[-1]["content"])
        packed.given(prompt.token_ids)
        for i, part in enumerate(parts):
            at = slice(end, end := end + len(part))
            if i % 2:
                packed.given(part)
            else:
                of_part = TokenColumns.of(part, columns.scores[at], columns.each_version[at].tolist())
                packed.sampled(answer := replace(answer, columns=of_part))
        (score,) = await context.score([context.item(prompt.sample, answer, messages if len(messages) > 1 else ())])
        trajectory = replace(packed.trajectory(f"{prompt.uid}:0", 0, ref.name, score), given=True)
        text = context.tokenizer.decode(given_ids, skip_special_tokens=False) if len(parts) > 1 else answer.text
        return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=(trajectory,)), texts=(text,))
