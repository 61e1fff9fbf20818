"""What a request of any route asks for, and what it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse
from areal_lora.rollout.agent_api.turns import Turn
from areal_lora.types import Generation

T = TypeVar("T", bound=msgspec.Struct)
MAX_N = 128
MAX_TOP_LOGPROBS = 20  # OpenAI's limit, and vLLM's


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """``turns`` of a chat, or else a ``prompt``. ``tools`` are those that the prompt names, in the chat format."""

    model: str
    turns: tuple[Turn, ...] | None = None
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    parallel_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None  # None: no log-probabilities

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise refuse("n", f"n is 1 to {MAX_N}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise refuse("max_tokens", "at least 1")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise refuse("top_logprobs", f"0 to {MAX_TOP_LOGPROBS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """One answer: what was sampled, and the message that the agent gets."""

    sampled: Generation
    turn: Turn

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.turn.calls else self.sampled.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """``number`` counts the session's requests."""

    number: int
    request: SamplingRequest
    prompt_ids: list[int]
    replies: list[SampledReply]

    @property
    def n_out(self) -> int:
        return sum(len(reply.sampled.token_ids) for reply in self.replies)

    def usage(self) -> dict[str, int]:
        n = len(self.prompt_ids)
        return {"prompt_tokens": n, "completion_tokens": self.n_out, "total_tokens": n + self.n_out}


def converted(body: dict[str, Any], kind: type[T]) -> T:
    """The fields that ``kind`` has. Raises AgentRequestError for values of other types."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise AgentRequestError(400, str(error)) from None


def stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def sse(events: Sequence[dict[str, Any]], *, named: bool = False) -> bytes:
    """Server-sent events; ``named`` ones begin with their type and have no end mark of their own."""
    lines = []
    for event in events:
        name = b"event: " + event["type"].encode() + b"\n" if named else b""
        lines.append(name + b"data: " + msgspec.json.encode(event) + b"\n\n")
    return b"".join(lines) + (b"" if named else b"data: [DONE]\n\n")
