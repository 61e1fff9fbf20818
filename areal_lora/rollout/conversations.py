"""The conversations of agents, kept in the run folder for inspection: one JSON object per run of an agent.

When the file has half of the bound, it takes the place of the file before, and a new one begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_lora.errors import RecordError
from areal_lora.rollout.agent_api.session import ChatExchange, Session
from areal_lora.rollout.agent_api.turns import Turn
from areal_lora.run_folder.paths import RunFolder

_encode = msgspec.json.Encoder().encode


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory; entry t of each list is of token t. ``versions`` is -1 where the model did not sample."""

    token_ids: list[int]
    versions: list[int]


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``conversation``, ``begin`` and ``end`` are the place of its sampled tokens."""

    turn: Turn
    finish_reason: str
    conversation: int
    begin: int
    end: int


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request. ``turns`` lacks the first ``known`` ones, which earlier requests and answers have; ``prompt`` is that
    of a plain completion.
    """

    known: int
    turns: list[Turn]
    tools: list[dict[str, Any]]
    answers: list[AnswerRecord]
    prompt: str | list[int] | None = None


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
        requests=[_asked(exchange) for exchange in session.exchanges],
        tokens=[TrajectoryRecord(token_ids=c.token_ids, versions=c.versions) for c in session.conversations],
    )


def _asked(exchange: ChatExchange) -> RequestRecord:
    request = exchange.answered.request
    answers = [
        AnswerRecord(turn=reply.turn, finish_reason=reply.finish_reason, conversation=at, begin=begin, end=end)
        for reply, (at, begin, end) in zip(exchange.answered.replies, exchange.spans, strict=True)
    ]
    return RequestRecord(
        known=exchange.known,
        turns=list((request.turns or ())[exchange.known :]),
        tools=[] if exchange.known else request.tools,  # the same as before, else it would not continue
        answers=answers,
        prompt=request.prompt if request.turns is None else None,
    )


@dataclass(slots=True)
class ConversationFile:
    """Appends to a run's file within ``max_bytes``, together with the file before; nothing with 0."""

    folder: RunFolder
    max_bytes: int

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
