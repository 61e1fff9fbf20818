"""Write the prompts of chats: what the chat template adds to a conversation, and its tokens.

A template takes 35 us a message, and the conversation is written again at each of its turns: with a hundred turns that
is nine tenths of a turn's CPU time. Conversations of ``LONG`` turns and more are therefore written in other processes,
started as ``python -I -m areal_lora.rollout.agent_api.prompt_writers FOLDER`` with the folder of the tokenizer, on
machines that have the cores. A frame is a 4-byte big-endian length and a msgpack message; a `PromptJob` is answered by
a `PromptText` or a `PromptRefusal`. The process ends at the end of its input.
"""

import asyncio
import contextlib
import os
import sys
import time
from array import array
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import msgspec

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter, load_tokenizer
from areal_lora.errors import ConfigError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse
from areal_lora.rollout.agent_api.replies import Turn, text_digest
from areal_lora.tasks.scorer_child import pack_frame, read_frame, write_frame

LONG = 16  # turns: shorter conversations take less than a millisecond
CORES_EACH = 8  # the others are the servers', the trainer's and the environments'
MOST_PROCESSES = 4  # of 0.4 GiB each: more write faster than one event loop sends requests
PAUSE_S = 60.0  # between two starts
_ANSWER = "areal answer"

log = get_logger(__name__)


class PromptStart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The first ``n`` turns of a prompt, which an earlier prompt and its answer are. ``sampled`` has the answer's
    tokens.

    ``written`` is length and digest of what the template wrote before the answer; None where it only wrote the new
    turns (`chat_append`).
    """

    n: int
    sampled: list[int]
    written: tuple[int, bytes] | None


class PromptJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``how`` is a `PromptFormat` in JSON. With ``check_tools`` a template that does not write tools is refused."""

    how: str
    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]] = []
    check_tools: bool = False
    start: PromptStart | None = None


class PromptText(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """``token_ids`` [T] int32 follow those of the start if the prompt ``continues`` it, else they are the prompt.

    ``written``: as in `PromptStart`.
    """

    token_ids: bytes
    continues: bool
    written: tuple[int, bytes] | None


class PromptRefusal(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Fields of an `AgentRequestError`."""

    status: int
    message: str
    param: str | None


def write_appended(formatter: Formatter, job: PromptJob) -> PromptText | None:
    """With `chat_append` the new turns after those of the start, which takes no time for earlier ones.

    None for other prompts, and for turns that the template refuses after any answer.
    """
    if job.start is not None and not job.check_tools and formatter.how.kind == "chat_append":
        new = [turn.for_template() for turn in job.turns[job.start.n :]]
        with contextlib.suppress(ConfigError):
            if after := formatter.after_answer(new, last=True):
                return _continued(formatter, job.start, after, None)
    return None


def write_whole(formatter: Formatter, job: PromptJob) -> PromptText:
    """Raises AgentRequestError for turns or tools that the template does not write."""
    text = _text(formatter, job.turns, job.tools, last=True)
    if job.check_tools and text == _text(formatter, job.turns, [], last=True):
        raise refuse("tools", "the model's chat template does not write tools, so the model would not know of them")
    written = len(text), text_digest(text)
    if job.start is not None and (after := _after(formatter, job, job.start, text)) is not None:
        return _continued(formatter, job.start, after, written)
    ids = formatter.tokenizer.encode(text, add_special_tokens=False)  # a template writes special tokens itself
    return PromptText(token_ids=array("i", ids).tobytes(), continues=False, written=written)


def _continued(formatter: Formatter, start: PromptStart, after: str, written: tuple[int, bytes] | None) -> PromptText:
    ids = formatter.without_end(formatter.tokenizer.encode(after, add_special_tokens=False), start.sampled)
    return PromptText(token_ids=array("i", ids).tobytes(), continues=True, written=written)


def _after(formatter: Formatter, job: PromptJob, start: PromptStart, text: str) -> str | None:
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
    for ids in (start.sampled, start.sampled[:-1]):  # with the end of sequence and without
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


class _WriterLost(Exception):
    """The process has ended before its answer."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """One process, and the prompts that it has not written yet, in order."""

    process: Process
    waiting: deque[asyncio.Future[bytes]] = field(default_factory=deque)

    async def write(self, job: PromptJob) -> bytes:
        """Raises _WriterLost."""
        assert self.process.stdin is not None
        written: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting.append(written)
        self.process.stdin.write(pack_frame(job))
        return await written

    async def read(self) -> bytes:
        """The next frame. Raises IncompleteReadError at the end of the process."""
        assert self.process.stdout is not None
        size = int.from_bytes(await self.process.stdout.readexactly(4), "big")
        return await self.process.stdout.readexactly(size)


class PromptWriters:
    """``most`` processes for long conversations, used with ``async with``; ``folder`` has the tokenizer.

    The first long conversation starts them. What they cannot write yet, or no longer, is written in this process.
    """

    def __init__(self, folder: str = "", most: int = 0) -> None:
        self._folder, self._most = folder, most
        self._ready, self._tasks, self._next_start_s = list[_Writer](), list[asyncio.Task[None]](), 0.0

    @classmethod
    def of_this_machine(cls, folder: str) -> Self:
        return cls(folder, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // CORES_EACH))

    async def write(self, formatter: Formatter, job: PromptJob) -> PromptText:
        """Raises AgentRequestError."""
        if (appended := write_appended(formatter, job)) is not None:
            return appended
        if len(job.turns) >= LONG:
            self._start()
            if self._ready:
                with contextlib.suppress(_WriterLost):
                    least = min(self._ready, key=lambda writer: len(writer.waiting))
                    found: PromptText | PromptRefusal = _decoded(await least.write(job))
                    if isinstance(found, PromptRefusal):
                        raise AgentRequestError(found.status, found.message, found.param)
                    return found
        return write_whole(formatter, job)

    def _start(self) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        if len(self._tasks) < self._most and time.monotonic() >= self._next_start_s:
            self._next_start_s = time.monotonic() + PAUSE_S
            more = range(self._most - len(self._tasks))
            self._tasks += [watched_task("prompt-writer", self._serve) for _ in more]

    async def _serve(self) -> None:
        """Start a process, and pass on what it writes until it ends."""
        argv = (sys.executable, "-I", "-m", "areal_lora.rollout.agent_api.prompt_writers", self._folder)
        try:
            process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, start_new_session=True)
        except OSError as error:
            log.warning("no process for prompts can be started, they are written in this one: %s", error)
            return
        writer = _Writer(process)
        try:
            await writer.read()  # empty: its tokenizer is there
            self._ready.append(writer)
            while True:
                body = await writer.read()
                if not (written := writer.waiting.popleft()).done():
                    written.set_result(body)
        except (asyncio.IncompleteReadError, OSError):
            log.warning("a process for prompts has ended; prompts are written in this one until the next is started")
        finally:
            if writer in self._ready:
                self._ready.remove(writer)
            for written in writer.waiting:
                if not written.done():
                    written.set_exception(_WriterLost())
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


_decoded = msgspec.msgpack.Decoder(PromptText | PromptRefusal).decode


def main(folder: str) -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no frame
    tokenizer = load_tokenizer(folder)
    formatter = cache(lambda how: Formatter(tokenizer=tokenizer, how=PromptFormat.model_validate_json(how)))
    write_frame(replies, None)
    while (body := read_frame(requests)) is not None:
        job = msgspec.msgpack.decode(body, type=PromptJob)
        try:
            write_frame(replies, write_whole(formatter(job.how), job))
        except AgentRequestError as error:
            write_frame(replies, PromptRefusal(status=error.status, message=str(error), param=error.param))


if __name__ == "__main__":
    main(sys.argv[1])
