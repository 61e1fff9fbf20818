"""Multi-turn rollouts, and the conversations of agents as they are kept in the run folder for inspection.

The model and an environment take turns, and the episode is one packed trajectory::

    prompt + first text | answer 1 | reply 1 | answer 2 | reply 2 | ... | answer k
         not trained       trained              trained                    trained
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from areal_lora.data.prompts import Prompt
from areal_lora.errors import RecordError
from areal_lora.rollout.agent_api.session import RequestRecord, Session
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.user_code import call
from areal_lora.rollout.workflow import Episode, PackedTurns, WorkflowContext, all_samples, derived_seed, given_score
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, Cause, Generation, Sample, TrajectoryGroup

_encode = msgspec.json.Encoder().encode


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
    session: Session, uid: str, sample: int, reward: float | None, detail: str = ""
) -> ConversationRecord:
    return ConversationRecord(
        time=time.time(),
        adapter=session.ref.name,
        uid=uid,
        sample=sample,
        evaluation=session.context.evaluating,
        reward=reward,
        detail=detail,
        requests=session.records,
        tokens=[
            TrajectoryRecord(token_ids=c.ids.tolist(), versions=c.each_version.tolist())
            for c in (conversation.columns for conversation in session.conversations)
        ],
    )


@dataclass(slots=True)
class ConversationFile:
    """Appends to a run's file, one JSON object per run of an agent. The oldest are dropped.

    When the file has half of ``max_bytes``, it takes the place of the file before, and a new one starts.
    """

    folder: RunFolder
    max_bytes: int = 64 << 20

    def write(self, conversation: ConversationRecord) -> None:
        line = _encode(conversation) + b"\n"
        if len(line) > self.max_bytes // 2:
            return
        path = self.folder.conversations
        if path.exists() and path.stat().st_size + len(line) > self.max_bytes // 2:
            path.rename(self.folder.conversations_before)
        with path.open("ab") as file:
            file.write(line)


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

    With ``task.format.kind: chat`` it is a message of ``role``, and the chat template writes what is around it.

    ``reward`` is what this turn earned; an episode's reward is the sum of its turns'. An episode in which no turn
    has a reward gets the configured reward of the model's last answer.
    """

    text: str = ""
    done: bool = False
    reward: float | None = None
    role: str = "user"


class Environment(Protocol):
    """The other side of one episode; a new one for each trajectory. Both methods may be ``async``."""

    def reset(self, sample: Sample) -> str | Awaitable[str | None] | None:
        """Start; the text returned, if any, is put after the prompt."""
        ...

    def step(self, text: str) -> Reply | Awaitable[Reply]:
        """Reply to the model's answer: without special tokens, and without the text of `stop` that ended it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlayedTurns:
    packed: PackedTurns
    last: Generation
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnWorkflow:
    """``n_samples`` episodes at once, each with an environment of its own from ``environment(**arguments)``.

    An answer takes at most `sampling.max_new_tokens`, an episode `sampling.timeout_s`. It ends when the
    environment is done, after ``max_turns`` answers, with an answer that is cut off by its length (the environment
    still judges it), or when a reply leaves no room for another answer.
    """

    context: WorkflowContext
    environment: Callable[..., Environment]
    arguments: Mapping[str, Any]
    max_turns: int

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n, group = self.context.sampling.n_samples, self.context.conversation()
        played = await all_samples(
            self._within_deadline(group.conversation(), prompt, ref, derived_seed(seed, i)) for i in range(n)
        )
        scores = await self.context.scores([(self.context.item(prompt.sample, p.last), p.reward) for p in played])
        trajectories = tuple(
            p.packed.trajectory(f"{prompt.uid}:{i}", i, ref.name, score)
            for i, (p, score) in enumerate(zip(played, scores, strict=True))
        )
        sampled = [p.packed.token_ids[len(prompt.token_ids) :] for p in played]
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories),
            # The special tokens of a chat mark the speaker.
            texts=tuple(
                self.context.tokenizer.decode(ids, skip_special_tokens=prompt.sample.messages is None)
                for ids in sampled
            ),
        )

    async def _within_deadline(
        self, context: WorkflowContext, prompt: Prompt, ref: AdapterRef, seed: int
    ) -> _PlayedTurns:
        timeout_s = context.sampling.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._play(context, prompt, ref, seed)
        except TimeoutError:
            raise GenerationFault(FaultKind.TIMEOUT, f"the episode took longer than {timeout_s:g} s") from None

    async def _play(self, context: WorkflowContext, prompt: Prompt, ref: AdapterRef, seed: int) -> _PlayedTurns:
        longest = context.max_model_len
        code = partial(call, FaultKind.ENVIRONMENT, ref.name)
        environment = await code(self.environment, **self.arguments)
        reset, step = await code(_now, attrgetter("reset", "step"), environment)
        first = _checked("reset", await code(reset, prompt.sample), str, type(None))
        packed, rewards = PackedTurns(), list[float]()
        # Not every text that an environment makes can be tokenized: half a surrogate pair cannot.
        packed.given(prompt.token_ids + (await code(_now, context.encode, first) if first else []))
        if len(packed) >= longest:
            raise GenerationFault(FaultKind.REJECTED, "the environment's first text leaves no room for an answer")
        for turn in range(self.max_turns):
            # The episode's deadline cuts a request off; its own is no shorter, so that no server is blamed for it.
            (answer,) = await context.answer(
                ref, packed.token_ids, seed=derived_seed(seed, turn), timeout_s=2 * context.sampling.timeout_s
            )
            packed.sampled(answer)
            reply = _checked("step", await code(step, answer.text), Reply)
            if reply.reward is not None:
                rewards.append(given_score(_checked("step's reward", reply.reward, float, int)).reward)
            if reply.done or answer.finish_reason == "length":
                break
            text = _checked("step's text", reply.text, str)
            added = await code(_now, context.formatter.reply, text, reply.role, answer.token_ids)
            if turn + 1 == self.max_turns:
                packed.finish_reason = "max_turns"
            elif len(packed) + len(added) >= longest:
                packed.finish_reason = "length"
                break
            else:
                packed.given(added)
        return _PlayedTurns(packed=packed, last=answer, reward=sum(rewards) if rewards else None)


async def _now(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in the event loop: `call` gives what is no coroutine function a thread."""
    return function(*arguments)


def _checked(what: str, value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise GenerationFault(FaultKind.ENVIRONMENT, f"{what} is {type(value).__name__}, not {names}", Cause.CODE)
    return value
