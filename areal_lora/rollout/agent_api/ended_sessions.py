"""What the controller has of the sessions of agents, wherever they are: their keys, and what comes of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.completion_client import FaultKind
from areal_lora.rollout.workflow import scored_trajectory
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.types import Cause, Sample, TokenColumns, Trajectory


class EndedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """``turns`` are its messages as JSON, for reports."""

    columns: TokenColumns
    finish_reason: str
    turns: str


class EndedSession(msgspec.Struct, frozen=True, kw_only=True):
    """What the run gets of a session. ``requests`` are its records as JSON, ``messages`` those up to the last answer.

    ``text``, ``n_tokens`` and ``finish_reason`` are of that answer. ``ends`` are the places of the last tokens of the
    requests' answers: conversation and index.

    ``fault`` has the fields of the `GenerationFault` of a request. It is ``full`` as a `Session`.
    """

    conversations: list[EndedConversation]
    requests: bytes
    messages: list[dict[str, Any]]
    ends: list[tuple[int, int]]
    text: str
    n_tokens: int
    finish_reason: str
    full: bool
    n_untrained: int
    fault: tuple[FaultKind, str, Cause] | None

    @property
    def trained(self) -> list[tuple[int, EndedConversation]]:
        """The conversations that have tokens of the policy, with their numbers."""
        return [(i, each) for i, each in enumerate(self.conversations) if each.columns.n_sampled]

    def item(self, sample: Sample) -> ScoreItem:
        """What the configured reward gets: the last completion, with its conversation as the agent has sent it."""
        item = ScoreItem.of(sample, self.text, n_tokens=self.n_tokens, finish_reason=self.finish_reason)
        return msgspec.structs.replace(item, messages=self.messages)

    def trajectories(
        self,
        prompt: Prompt,
        sample: int,
        adapter: str,
        score: Score,
        finish_reason: str,
        turn_rewards: Sequence[tuple[int, float]],
    ) -> list[Trajectory]:
        """All with the sample's one score. ``finish_reason`` and ``turn_rewards`` are of the `AgentResult`.

        A conversation has the rewards of its own turns, and at its first token the sum of those before: its answers did
        not earn them. What later conversations earn stays with its last answer.
        """
        places = [(*self.ends[request], reward) for request, reward in turn_rewards]
        made = list[Trajectory]()
        for i, each in self.trained:
            how = finish_reason or each.finish_reason
            trajectory = scored_trajectory(f"{prompt.uid}:{sample}.{i}", sample, adapter, score, each.columns, how)
            own = [(0 if c < i else at, reward) for c, at, reward in places if c <= i]
            made.append(replace(trajectory, turn_rewards=tuple(own)))
        return made


@dataclass(slots=True, kw_only=True)
class OpenSession:
    """A session that an agent may call with its ``key`` at ``port``; ``fault`` is done when a request has failed.

    ``ended`` is there after its block, unless that raises.
    """

    port: int
    key: str
    fault: asyncio.Future[None]
    ended: EndedSession = field(init=False)
