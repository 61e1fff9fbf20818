"""Multi-turn rollouts: the model and an environment take turns, and the episode is one packed trajectory.

prompt + first text | answer 1 | reply 1 | answer 2 | reply 2 | ... | answer k
     not trained       trained              trained                    trained
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, WorkflowContext, all_samples, derived_seed, given_score
from areal_lora.rollout.workflows.collect import PackedTurns
from areal_lora.rollout.workflows.user_code import call
from areal_lora.tasks.scorer import Score
from areal_lora.types import AdapterRef, Cause, Generation, Sample, TrajectoryGroup


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
        """Begin; the text returned, if any, is put after the prompt."""
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
    stop: Sequence[str] = ()

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n = self.context.sampling.n_samples
        played = await all_samples(self._within_deadline(prompt, ref, derived_seed(seed, i)) for i in range(n))
        scores = await self._scores(played, prompt.sample)
        trajectories = tuple(
            p.packed.trajectory(f"{prompt.uid}:{i}", i, ref.name, score)
            for i, (p, score) in enumerate(zip(played, scores, strict=True))
        )
        sampled = [p.packed.token_ids[len(prompt.token_ids) :] for p in played]
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories),
            # The special tokens of a chat mark who speaks.
            texts=tuple(
                self.context.tokenizer.decode(ids, skip_special_tokens=prompt.sample.messages is None)
                for ids in sampled
            ),
        )

    async def _scores(self, played: list[_PlayedTurns], sample: Sample) -> list[Score]:
        left = [self.context.item(sample, p.last) for p in played if p.reward is None]
        scored = iter(await self.context.score(left) if left else ())
        return [next(scored) if p.reward is None else given_score(p.reward) for p in played]

    async def _within_deadline(self, prompt: Prompt, ref: AdapterRef, seed: int) -> _PlayedTurns:
        timeout_s = self.context.sampling.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._play(prompt, ref, seed)
        except TimeoutError:
            raise GenerationFault(FaultKind.TIMEOUT, f"the episode took longer than {timeout_s:g} s") from None

    async def _play(self, prompt: Prompt, ref: AdapterRef, seed: int) -> _PlayedTurns:
        longest = self.context.max_model_len
        code = partial(call, FaultKind.ENVIRONMENT, ref.name)
        environment = await code(self.environment, **self.arguments)
        reset, step = await code(_methods, environment)
        first = _checked("reset", await code(reset, prompt.sample), str, type(None))
        packed, rewards = PackedTurns(), list[float]()
        packed.given(prompt.token_ids + (await self._tokens(ref, first) if first else []))
        if len(packed.token_ids) >= longest:
            raise GenerationFault(FaultKind.REJECTED, "the environment's first text leaves no room for an answer")
        for turn in range(self.max_turns):
            answer = await self._answer(packed, ref, derived_seed(seed, turn))
            reply = _checked("step", await code(step, answer.text), Reply)
            if reply.reward is not None:
                rewards.append(given_score(_checked("step's reward", reply.reward, float, int)).reward)
            if reply.done or answer.finish_reason == "length":
                break
            added = await self._reply(ref, _checked("step's text", reply.text, str), reply.role, answer.token_ids)
            if turn + 1 == self.max_turns:
                packed.finish_reason = "max_turns"
            elif len(packed.token_ids) + len(added) >= longest:
                packed.finish_reason = "length"
                break
            else:
                packed.given(added)
        return _PlayedTurns(packed=packed, last=answer, reward=sum(rewards) if rewards else None)

    async def _answer(self, packed: PackedTurns, ref: AdapterRef, seed: int) -> Generation:
        # The episode's deadline cuts a request off; its own is no shorter, so that no server is blamed for it.
        (answer,) = await self.context.answer(
            ref,
            packed.token_ids,
            seed=seed,
            timeout_s=2 * self.context.sampling.timeout_s,
            stop=list(self.stop) or None,
        )
        packed.sampled(answer)
        return answer

    async def _reply(self, ref: AdapterRef, text: str, role: str, answer_ids: list[int]) -> list[int]:
        async def encode() -> list[int]:
            return self.context.formatter.reply(text, role, answer_ids)

        ids: list[int] = await call(FaultKind.ENVIRONMENT, ref.name, encode)
        return ids

    async def _tokens(self, ref: AdapterRef, text: str) -> list[int]:
        """Not every text an environment makes can be tokenized: half a surrogate pair cannot."""

        async def encode() -> list[int]:
            return self.context.encode(text)

        ids: list[int] = await call(FaultKind.ENVIRONMENT, ref.name, encode)
        return ids


async def _methods(environment: Environment) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return environment.reset, environment.step


def _checked(what: str, value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise GenerationFault(FaultKind.ENVIRONMENT, f"{what} is {type(value).__name__}, not {names}", Cause.CODE)
    return value
