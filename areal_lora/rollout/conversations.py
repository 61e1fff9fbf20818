"""Multi-turn rollouts, and the conversations of agents as they are kept in the run folder for inspection.

The model and an environment take turns, and the episode is one packed trajectory::

    prompt + first text | answer 1 | reply 1 | answer 2 | reply 2 | ... | answer k
         not trained       trained              trained                    trained
"""

import asyncio
import contextlib
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from areal_lora.data.prompts import Prompt
from areal_lora.errors import RecordError
from areal_lora.processes.log import get_logger
from areal_lora.rollout.agent_api.ended_sessions import EndedSession
from areal_lora.rollout.agent_api.session import RequestRecord
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, PackedTurns, WorkerLost, WorkflowContext, all_samples, derived_seed
from areal_lora.run_folder.events import JsonlSink
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, Cause, Generation, Sample, TrajectoryGroup

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_one_writer = threading.Lock()  # of the file: adapters and evaluations have a `ConversationFile` each
log = get_logger(__name__)


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory; entry t of each list is of token t. ``versions`` is -1 where the model did not sample."""

    token_ids: list[int]
    versions: list[int]


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run of an agent. ``reward`` is None where it failed, which ``detail`` explains."""

    time: float
    adapter: str
    uid: str
    sample: int
    evaluation: bool
    reward: float | None
    detail: str
    requests: list[RequestRecord]
    tokens: list[TrajectoryRecord]


def conversation_of(
    session: EndedSession, adapter: str, uid: str, sample: int, evaluation: bool, reward: float | None, detail: str = ""
) -> ConversationRecord:
    return ConversationRecord(
        time=time.time(),
        adapter=adapter,
        uid=uid,
        sample=sample,
        evaluation=evaluation,
        reward=reward,
        detail=detail,
        requests=msgspec.json.decode(session.requests, type=list[RequestRecord]),
        tokens=[
            TrajectoryRecord(token_ids=c.ids.tolist(), versions=c.each_version.tolist())
            for c in (conversation.columns for conversation in session.conversations)
        ],
    )


@dataclass(slots=True)
class ConversationFile:
    """Appends to a run's file, one JSON object per run of an agent. The oldest are dropped.

    When the file has half of ``max_bytes``, it takes the place of the file before, and a new one starts. Any thread.
    """

    folder: RunFolder
    max_bytes: int = 64 << 20

    def write(self, conversation: ConversationRecord) -> None:
        """Raises RecordError where the disk does not take it."""
        line = _encode(conversation)
        if len(line) >= self.max_bytes // 2:
            return
        path = self.folder.conversations
        with _one_writer:
            if path.exists() and path.stat().st_size + len(line) >= self.max_bytes // 2:
                path.rename(self.folder.conversations_before)
            with contextlib.closing(JsonlSink(path)) as sink:
                sink.write(line)


def read_conversations(folder: RunFolder) -> Iterator[ConversationRecord]:
    """From the oldest that is kept; without a last line that is being written. Raises RecordError."""
    decode = msgspec.json.Decoder(ConversationRecord).decode
    for each in (folder.conversations_before, folder.conversations):
        if not each.exists():
            continue
        with each.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    yield decode(line)
                except msgspec.DecodeError as error:
                    raise RecordError(f"{each}, line {number}: {error} (fix: remove the line)") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The environment's reply to an answer. A plain ``text`` goes into the sequence as it is, with its own separators.

    With ``task.format.kind: chat`` it is a message of ``role``, and the chat template writes what is around it; of the
    role ``assistant`` it continues the model's own turn as it is, such as a tool's result behind a text of `stop`.

    ``reward`` is what this turn earned; an episode's reward is the sum of its turns'. An episode in which no turn
    has a reward gets the configured reward of the model's last answer. ``metrics`` are averaged over episodes as
    ``reward/<name>``; of a name an episode has the last value.
    """

    text: str = ""
    done: bool = False
    reward: float | None = None
    role: str = "user"
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The other side of one episode; a new one for each trajectory. Both methods may be ``async``."""

    def reset(self, sample: Sample) -> str | Awaitable[str | None] | None:
        """Start; the text returned, if any, is put after the prompt. ``sample`` has the fields of a `Sample`."""

    def step(self, text: str) -> Reply | Awaitable[Reply]:
        """Reply to the model's answer: without special tokens, and without the text of `stop` that ended it."""


class SampleTimeout(GenerationFault):
    """The time of a sample is over. Only this sample is repeated, once."""

    def __init__(self, detail: str) -> None:
        super().__init__(FaultKind.TIMEOUT, detail)


SAMPLE_TRIES = 3
"""Workers that one sample may lose before its group is sampled again: the sample may be what ends them."""


async def repeated(tried: Callable[[int], Awaitable[T]], seed: int, uid: str) -> T:
    """Run sample ``uid`` again that has lost its worker, or failed; the other samples of its group continue.

    It is a new session, since what the lost one sampled is not trained on. Where the answers may be at fault, as for a
    time-out, it has another seed than ``seed``. A second fault is its group's, as is the first of code that would fail
    again, or of a version that no server holds.
    """
    failed = False
    for _ in range(SAMPLE_TRIES - 1):
        try:
            return await tried(seed)
        except GenerationFault as fault:
            if not isinstance(fault, WorkerLost):
                if failed or not fault.retryable or fault.cause is Cause.CODE or fault.kind is FaultKind.RETIRED:
                    raise
                failed, seed = True, derived_seed(seed, "again") if fault.resample else seed
            log.warning("sample %s is repeated: %s", uid, fault)
    return await tried(seed)


Answer: TypeAlias = Callable[[Any], Coroutine[Any, Any, Any]]
"""Returns what the code in a worker is to get for what it sent; both are JSON."""
Played: TypeAlias = Callable[[Mapping[str, Any], Answer], Awaitable[object]]
"""Runs a sample with these fields in a worker, and answers its calls. Raises GenerationFault, WorkerLost."""


@dataclass(slots=True, kw_only=True)
class PlayedEpisode:
    """One episode as far as it has come. `answer` is called with the environment's first text, then its replies.

    ``turns`` are the messages after the prompt, up to the last answer; ``rewards`` see `Trajectory.turn_rewards`.
    """

    context: WorkflowContext
    ref: AdapterRef
    seed: int
    max_turns: int
    packed: PackedTurns
    rewards: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    n_turns: int = 0
    last: Generation | None = None

    async def answer(self, body: Any) -> str | None:
        """The model's next answer, None if the episode has ended. Raises GenerationFault.

        It ends when the environment is done, after ``max_turns`` answers, with an answer that is cut off by its length
        (the environment still judges it), or when a reply leaves no room for another answer.
        """
        context, reply, longest = self.context, msgspec.convert(body, Reply, strict=False), self.context.max_model_len
        if self.last is None:
            added = context.encode(reply.text) if reply.text else []
            if len(self.packed) + len(added) >= longest:
                raise GenerationFault(FaultKind.REJECTED, "the environment's first text leaves no room for an answer")
        else:
            if reply.reward is not None:
                self.rewards.append((len(self.packed) - 1, reply.reward))
            self.metrics |= reply.metrics
            if reply.done or self.last.finish_reason == "length":
                return None
            added = context.formatter.reply(reply.text, reply.role, self.last.token_ids)
            if self.n_turns == self.max_turns:
                self.packed.finish_reason = "max_turns"
                return None
            if len(self.packed) + len(added) >= longest:
                self.packed.finish_reason = "length"
                return None
        # The episode's deadline cuts a request off; its own is no shorter, so that no server is blamed for it.
        (self.last,) = await context.answer(
            self.ref,
            self.packed.ids() + array("i", added),
            seed=derived_seed(self.seed, self.n_turns),
            timeout_s=2 * context.sampling.timeout_s,
            routes_from=self.packed.n_routed,
        )
        self.packed.given(added)
        self.packed.sampled(self.last)
        if reply.text or self.turns:  # a first text is optional
            self.turns.append({"role": reply.role, "content": reply.text})
        start = "" if reply.role == "assistant" else context.formatter.how.prefill
        self.turns.append({"role": "assistant", "content": start + self.last.text})
        self.n_turns += 1
        return self.last.text


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnWorkflow:
    """``n_samples`` episodes at once, each with an environment of its own, which ``played`` runs in a worker.

    An answer takes at most `sampling.max_new_tokens`, an episode `sampling.timeout_s`. With ``cut`` an episode whose
    time is over ends with its last answer.
    """

    context: WorkflowContext
    played: Played
    max_turns: int
    cut: bool = False

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n, group = self.context.sampling.n_samples, self.context.conversation()
        made = await all_samples(
            repeated(
                partial(self._episode, group.conversation(), prompt, ref), derived_seed(seed, i), f"{prompt.uid}:{i}"
            )
            for i in range(n)
        )
        items = [
            (
                self.context.item(prompt.sample, answer, each.turns),
                sum(reward for _, reward in each.rewards) if each.rewards else None,
            )
            for each, answer in made
        ]
        scores = await self.context.scores(items)
        trajectories = tuple(
            replace(
                each.packed.trajectory(f"{prompt.uid}:{i}", i, ref.name, score),
                turn_rewards=tuple(each.rewards),
                components={**score.components, **each.metrics},
            )
            for i, ((each, _), score) in enumerate(zip(made, scores, strict=True))
        )
        # The special tokens of a chat mark the speaker.
        decode = partial(self.context.tokenizer.decode, skip_special_tokens=prompt.sample.messages is None)
        texts = tuple(decode(each.packed.token_ids[len(prompt.token_ids) :]) for each, _ in made)
        return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories), texts=texts)

    async def _episode(
        self, context: WorkflowContext, prompt: Prompt, ref: AdapterRef, seed: int
    ) -> tuple[PlayedEpisode, Generation]:
        packed, timeout_s = PackedTurns(), context.sampling.timeout_s
        packed.given(prompt.token_ids)
        episode = PlayedEpisode(context=context, ref=ref, seed=seed, max_turns=self.max_turns, packed=packed)
        try:
            async with asyncio.timeout(timeout_s):
                await self.played({"sample": msgspec.to_builtins(prompt.sample)}, episode.answer)
        except TimeoutError:
            if not self.cut or episode.last is None:
                raise SampleTimeout(f"the episode took longer than {timeout_s:g} s") from None
            packed.finish_reason = FaultKind.TIMEOUT
        assert episode.last is not None
        return episode, episode.last
