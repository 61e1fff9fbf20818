"""From the messages of a request to the tokens of its prompt; what was sampled is never tokenized again.

Where messages start with those of an earlier request and its answer, the prompt starts with the earlier prompt's tokens
and the sampled ones. Only what the chat template writes after them is new::

    earlier tokens, sampled ones | end of the assistant's turn | tool's message | start of the next turn

An answer counts as given back if its content and calls are those that the agent got. What the template would write for
it may differ (spaces in the arguments of a call): the sampled tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lora.data.formatting import Formatter
from areal_lora.errors import ConfigError
from areal_lora.rollout.agent_api.chat import SampledReply, SamplingRequest
from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse
from areal_lora.rollout.agent_api.turns import Turn

_ANSWER = "areal answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTurns:
    """The turns up to an answer and with it, and all their tokens; ``spelt`` is the answer's text as it was sampled,
    with the end of sequence and without.
    """

    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]]
    token_ids: list[int]
    spelt: tuple[str, str]

    def starts(self, request: SamplingRequest) -> bool:
        assert request.turns is not None
        given = request.turns[: len(self.turns)]
        return (
            self.tools == request.tools
            and len(given) == len(self.turns)
            and all(mine.same(theirs) for mine, theirs in zip(self.turns, given, strict=True))
        )


@dataclass(slots=True)
class Prompts:
    """The prompts of one session."""

    formatter: Formatter
    _known: list[KnownTurns] = field(default_factory=list)
    _texts: dict[str, list[int]] = field(default_factory=dict)  # of plain prompts and their answers

    def token_ids(self, request: SamplingRequest) -> list[int]:
        """Tokens [P] of the request's prompt. Raises AgentRequestError."""
        if request.turns is not None:
            return self._of_turns(request, request.turns)
        if isinstance(request.prompt, list):
            return request.prompt
        known = max((t for t in self._texts if request.prompt.startswith(t)), key=len, default="")
        rest = self.formatter.tokenizer.encode(request.prompt[len(known) :], add_special_tokens=not known)
        return self._texts.get(known, []) + rest

    def continued(self, request: SamplingRequest) -> int:
        """How many of the request's turns are those of an earlier request and its answer."""
        known = self._longest(request)
        return len(known.turns) if known is not None else 0

    def answered(self, request: SamplingRequest, prompt_ids: list[int], reply: SampledReply) -> None:
        """Keep the tokens of an answer for requests that continue it."""
        sampled, decode = reply.sampled.token_ids, self.formatter.tokenizer.decode
        ids, raw = prompt_ids + sampled, decode(sampled, skip_special_tokens=False)
        if request.turns is not None:
            spelt = raw, decode(sampled[:-1], skip_special_tokens=False)
            self._known.append(
                KnownTurns(turns=(*request.turns, reply.turn), tools=request.tools, token_ids=ids, spelt=spelt)
            )
        elif isinstance(request.prompt, str):
            self._texts[request.prompt + raw] = ids

    def _longest(self, request: SamplingRequest) -> KnownTurns | None:
        fitting = (known for known in self._known if request.turns is not None and known.starts(request))
        return max(fitting, key=lambda known: len(known.turns), default=None)

    def _of_turns(self, request: SamplingRequest, turns: tuple[Turn, ...]) -> list[int]:
        if not self.formatter.tokenizer.chat_template:
            raise AgentRequestError(400, "this model's tokenizer has no chat template; use /v1/completions")
        text = self._text(turns, request.tools, last=True)
        if request.tools and text == self._text(turns, [], last=True):
            raise refuse("tools", "the model's chat template does not write tools, so the model would not know of them")
        known = self._longest(request)
        if known is not None and (after := self._after(known, text)) is not None:
            rest = self.formatter.tokenizer.encode(after, add_special_tokens=False)
            return known.token_ids + self.formatter.without_end(rest, known.token_ids)
        # A template writes special tokens itself.
        return self.formatter.tokenizer.encode(text, add_special_tokens=False)

    def _after(self, known: KnownTurns, text: str) -> str | None:
        """What follows the answer in ``text``; None if the template writes the turns before it otherwise by now.

        It starts with what the template writes to end the answer's turn: after the answer as it was sampled, if the
        template writes that, else after any answer.
        """
        head = self._text(known.turns, known.tools, last=False)
        before = self._text(known.turns[:-1], known.tools, last=True)
        if not text.startswith(head) or not head.startswith(before):
            return None
        for spelt in known.spelt:
            if head.startswith(before + spelt):
                return text[len(before + spelt) :]
        marked = (*known.turns[:-1], Turn(role="assistant", content=_ANSWER))
        _, found, end = self._text(marked, known.tools, last=False).rpartition(_ANSWER)
        return end + text[len(head) :] if found and head.endswith(end) else None

    def _text(self, turns: Sequence[Turn], tools: list[dict[str, Any]], *, last: bool) -> str:
        try:
            return self.formatter.chat([turn.for_template() for turn in turns], tools=tools, last=last)
        except ConfigError as error:
            raise AgentRequestError(400, error.reason, "messages") from None
