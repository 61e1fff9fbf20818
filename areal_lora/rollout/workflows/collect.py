"""From prompts, answers and what came between them to trajectories in the alignment of contract C10.

This is the only place of the rollout plane that lays tokens out: entry t of every array describes
token t, and the loss mask is on exactly where the model itself sampled::

    token_ids         p0  p1 | a0  a1  a2 | r0  r1 | b0  b1
    loss_mask          0   0    1   1   1    0   0    1   1
    rollout_logprobs   0   0  -.2 -.7 -.1    0   0  -.3 -.4
    versions          -1  -1    4   4   4   -1  -1    5   5

Tokens are never made from text again once they exist: what the model sampled is what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_lora.tasks.scorer import Score
from areal_lora.types import AdapterRef, Generation, Trajectory


@dataclass(slots=True)
class PackedTurns:
    """One growing sequence: the prompt, then in turn the model's answers and the replies."""

    token_ids: list[int] = field(default_factory=list)  # [T], as all below
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def given(self, token_ids: Sequence[int]) -> None:
        """Append what the model did not sample: the prompt, or a reply."""
        n = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [0] * n
        self.rollout_logprobs += [0.0] * n
        self.versions += [-1] * n

    def sampled(self, answer: Generation) -> None:
        """Append what the model answered to all of the tokens so far."""
        self.token_ids += answer.token_ids
        self.loss_mask += [1] * len(answer.token_ids)
        self.rollout_logprobs += answer.logprobs
        self.versions += answer.versions
        self.finish_reason = answer.finish_reason

    def is_prefix_of(self, prompt_ids: Sequence[int]) -> bool:
        return self.token_ids == prompt_ids[: len(self.token_ids)]

    def trajectory(self, uid: str, sample: int, adapter: str, score: Score) -> Trajectory:
        """At least one answer must be there; its oldest token's version is the trajectory's."""
        return Trajectory(
            uid=uid,
            sample=sample,
            adapter=AdapterRef(name=adapter, version=min(v for v in self.versions if v >= 0)),
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            rollout_logprobs=self.rollout_logprobs,
            versions=self.versions,
            reward=score.reward,
            outcome=score.outcome,
            finish_reason=self.finish_reason,
            detail=score.detail,
            components=dict(score.components),
            correct=score.correct,
            cause=score.cause,
        )


def join(conversations: list[PackedTurns], prompt_ids: Sequence[int], answer: Generation) -> PackedTurns:
    """Record one completion, and return the conversation it now is the end of.

    It continues the longest of ``conversations`` whose tokens its prompt begins with, else it begins one of its own.
    """
    fitting = [c for c in conversations if c.is_prefix_of(prompt_ids)]
    conversation = max(fitting, key=lambda c: len(c.token_ids), default=None)
    if conversation is None:
        conversation = PackedTurns()
        conversations.append(conversation)
    conversation.given(prompt_ids[len(conversation.token_ids) :])
    conversation.sampled(answer)
    return conversation
