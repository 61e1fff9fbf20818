"""The tokens of the prompts of one run of an agent.

What was sampled is never tokenized again. Where messages start with those of an earlier request and its answer, the
prompt starts with the earlier prompt's tokens and the sampled ones. Only what the chat template writes after them is
new::

    earlier tokens, sampled ones | end of the assistant's turn | tool's message | start of the next turn

An answer counts as given back if its calls and content are those that the agent got, or those without its thoughts.
What the template would write for it may differ (spaces in the arguments of a call): the sampled tokens stay. A template
that writes earlier turns differently once others follow (without their thoughts) starts a new sequence, unless
``task.format.kind`` is ``chat_append``: then what it writes for the new turns follows the earlier tokens. A template
takes 35 us a message, and writes the whole conversation at each of its turns where it does not append.
"""

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from areal_lora.data.prompts import Formatter
from areal_lora.errors import ConfigError
from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse, warn_once
from areal_lora.rollout.agent_api.replies import SampledReply, SamplingRequest, Turn, digest, text_digest
from areal_lora.rollout.workflow import PackedTurns
from areal_lora.types import THOUGHT_END


class KnownTurns(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """``n`` turns up to an answer and with it: those of ``before``, then ``added``. Memory is for these only.

    Their tokens are the first ``end`` ones of ``conversation``, the last ``n_sampled`` of them the answer. ``written``
    is length and digest of what the template wrote before the answer; None where it only wrote the new turns
    (`chat_append`). No cycle can hold one, nor a turn: the garbage collector, which stops the event loop, need not
    visit them.
    """

    before: "KnownTurns | None"
    added: tuple[Turn, ...]
    n: int
    conversation: PackedTurns
    end: int
    n_sampled: int
    written: tuple[int, bytes] | None

    def turns(self) -> list[Turn]:
        known: KnownTurns | None = self
        groups = list[tuple[Turn, ...]]()
        while known is not None:
            groups.append(known.added)
            known = known.before
        return [turn for group in reversed(groups) for turn in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompt:
    """The tokens [P] of a request's prompt. Its turns start with those of ``known``, and have ``digest``."""

    token_ids: Sequence[int]
    known: KnownTurns | None = None
    digest: bytes = b""
    written: tuple[int, bytes] | None = None

    @property
    def n_known(self) -> int:
        return self.known.n if self.known else 0


@dataclass(slots=True)
class Prompts:
    """The prompts of one session. Conversations are found by digests of their turns, of the tools first."""

    formatter: Formatter
    _known: dict[bytes, tuple[KnownTurns, ...]] = field(default_factory=dict)  # that differ in thoughts, or in tokens
    _texts: dict[str, tuple[PackedTurns, int]] = field(default_factory=dict)  # of plain prompts and their answers
    _tools: set[bytes] = field(default_factory=set)  # that the template writes

    def of(self, request: SamplingRequest) -> WrittenPrompt:
        """Raises AgentRequestError."""
        if request.turns is not None:
            return self._of_turns(request, request.turns)
        if isinstance(request.prompt, list):
            return WrittenPrompt(token_ids=request.prompt)
        known = max((t for t in self._texts if request.prompt.startswith(t)), key=len, default="")
        conversation, end = self._texts.get(known, (PackedTurns(), 0))
        rest = self.formatter.tokenizer.encode(request.prompt[len(known) :], add_special_tokens=not known)
        return WrittenPrompt(token_ids=conversation.ids(end) + array("i", rest))

    def answered(
        self, request: SamplingRequest, prompt: WrittenPrompt, reply: SampledReply, conversation: PackedTurns
    ) -> KnownTurns | None:
        """Keep an answer, the end of ``conversation``, for requests that continue it.

        ``request`` has the turns after the prompt's known ones.
        """
        sampled, end = reply.sampled.token_ids, len(conversation)
        if request.turns is None:
            if isinstance(request.prompt, str):
                text = self.formatter.tokenizer.decode(sampled, skip_special_tokens=False)
                self._texts[request.prompt + text] = conversation, end
            return None
        known = KnownTurns(
            before=prompt.known,
            added=(*request.turns, reply.turn),
            n=prompt.n_known + len(request.turns) + 1,
            conversation=conversation,
            end=end,
            n_sampled=len(sampled),
            written=prompt.written,
        )
        key = reply.turn.digest(prompt.digest)
        self._known[key] = (*self._known.get(key, ()), known)
        return known

    def _of_turns(self, request: SamplingRequest, turns: tuple[Turn, ...]) -> WrittenPrompt:
        if not self.formatter.tokenizer.chat_template:
            raise AgentRequestError(400, "this model's tokenizer has no chat template; use /v1/completions")
        digests = [digest(b"", request.tools)]
        for turn in turns:
            digests.append(turn.digest(digests[-1]))
        found = (_best(self._known[d], turns) for d in reversed(digests) if d in self._known)
        known = next((each for each in found if each is not None), None)
        ids = known.conversation.ids(known.end) if known else array("i")
        job = PromptJob(
            turns=turns,
            tools=request.tools,
            check_tools=bool(request.tools) and digests[0] not in self._tools,
            start=known,
            sampled=ids[known.end - known.n_sampled :].tolist() if known else [],
        )
        text = write_prompt(self.formatter, job)
        if request.tools:
            self._tools.add(digests[0])
        if known is not None and not text.continues:
            ids = array("i")
            warn_once(
                "the chat template writes earlier turns differently, so that turns of a conversation are sequences"
                " of their own; task.format.kind=chat_append keeps them as they were sampled"
            )
        ids.extend(text.token_ids)
        return WrittenPrompt(token_ids=ids, known=known, digest=digests[-1], written=text.written)


def _best(found: Sequence[KnownTurns], turns: Sequence[Turn]) -> KnownTurns | None:
    """The newest one with the contents of ``turns``; of clients that drop thoughts the newest.

    None if each has an answer that was edited before the end of a thought, which digests leave out.
    """
    best = None
    for known in reversed(found):
        edited = [new.content for old, new in zip(known.turns(), turns, strict=False) if old.content != new.content]
        if not edited:
            return known
        if best is None and not any(THOUGHT_END in content for content in edited):
            best = known
    return best


_ANSWER = "areal answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """Turns that start with those of ``start``, of which the answer's tokens were ``sampled``.

    With ``check_tools`` a template that does not write tools is refused.
    """

    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]]
    check_tools: bool
    start: KnownTurns | None
    sampled: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """``token_ids`` [T] follow those of the start if the prompt ``continues`` it, else they are the prompt.

    ``written``: as in `KnownTurns`.
    """

    token_ids: "array[int]"
    continues: bool
    written: tuple[int, bytes] | None


def write_prompt(formatter: Formatter, job: PromptJob) -> PromptText:
    """Raises AgentRequestError for turns or tools that the template does not write."""
    return write_appended(formatter, job) or write_whole(formatter, job)


def write_appended(formatter: Formatter, job: PromptJob) -> PromptText | None:
    """With `chat_append` the new turns after those of the start, which takes no time for earlier ones.

    None for other prompts, and for turns that the template refuses after any answer.
    """
    if job.start is not None and not job.check_tools and formatter.how.kind == "chat_append":
        new = [turn.for_template() for turn in job.turns[job.start.n :]]
        with contextlib.suppress(ConfigError):
            if after := formatter.after_answer(new, last=True):
                return _continued(formatter, job.sampled, after, None)
    return None


def write_whole(formatter: Formatter, job: PromptJob) -> PromptText:
    text = _text(formatter, job.turns, job.tools, last=True)
    if job.check_tools and text == _text(formatter, job.turns, [], last=True):
        raise refuse("tools", "the model's chat template does not write tools, so the model would not know of them")
    written = len(text), text_digest(text)
    if job.start is not None and (after := _after(formatter, job, job.start, text)) is not None:
        return _continued(formatter, job.sampled, after, written)
    ids = formatter.tokenizer.encode(text, add_special_tokens=False)  # a template writes special tokens itself
    return PromptText(token_ids=array("i", ids), continues=False, written=written)


def _continued(formatter: Formatter, sampled: list[int], after: str, written: tuple[int, bytes] | None) -> PromptText:
    ids = formatter.without_end(formatter.tokenizer.encode(after, add_special_tokens=False), sampled)
    return PromptText(token_ids=array("i", ids), continues=True, written=written)


def _after(formatter: Formatter, job: PromptJob, start: KnownTurns, text: str) -> str | None:
    """What follows the answer of ``start`` in ``text``; None if the template writes the turns before it otherwise.

    It starts with what the template writes to end the answer's turn: after the answer as it was sampled, if the
    template writes that, else after any answer.
    """
    if start.written is None:
        before = _text(formatter, job.turns[: start.n - 1], job.tools, last=True)
        n, same = len(before), text.startswith(before)
    else:
        n, seen = start.written
        same = text_digest(text[:n]) == seen
    if not same:
        return None
    for ids in (job.sampled, job.sampled[:-1]):  # with the end of sequence and without
        spelt = formatter.tokenizer.decode(ids, skip_special_tokens=False)
        if text.startswith(spelt, n):
            return text[n + len(spelt) :]
    given = job.turns[: start.n]
    head = _text(formatter, given, job.tools, last=False)
    marked = (*given[:-1], Turn(role="assistant", content=_ANSWER))
    _, found, end = _text(formatter, marked, job.tools, last=False).rpartition(_ANSWER)
    return end + text[len(head) :] if found and text.startswith(head) and head.endswith(end) else None


def _text(formatter: Formatter, turns: Sequence[Turn], tools: list[dict[str, Any]], *, last: bool) -> str:
    try:
        return formatter.chat([turn.for_template() for turn in turns], tools=tools, last=last)
    except ConfigError as error:
        raise AgentRequestError(400, error.reason, "messages") from None
