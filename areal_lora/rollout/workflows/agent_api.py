"""Bodies of the agents' endpoint: the subset of OpenAI's API whose answers can be trained on.

What would change the policy that is sampled (another temperature, penalties, a forced format) is refused
instead of being ignored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import TextTokenizer
from areal_lora.errors import RolloutError
from areal_lora.types import Generation

MAX_N = 128


class Refused(RolloutError):
    """A request that is answered with ``status`` and an OpenAI error body."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions`` has a ``prompt``, ``POST /v1/chat/completions`` has ``messages``."""

    model: str
    prompt: str | list[int] | None = None
    messages: list[ChatTurn] | None = None
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None

    def check(self, adapter: str, sampling: SamplingConfig) -> None:
        """Raises Refused."""
        if self.model != adapter:
            raise Refused(404, f"there is no model {self.model!r} for this key, only {adapter!r}")
        for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
            asked = getattr(self, name)
            if asked is not None and asked != value:
                raise Refused(400, f"{name} {asked:g} is not the run's {value:g}; leave it out")
        if self.stream:
            raise Refused(400, "answers are not streamed; leave stream out")
        if not 1 <= self.n <= MAX_N or (self.longest is not None and self.longest < 1):
            raise Refused(400, f"n is 1 to {MAX_N}, max_tokens at least 1")

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def render(self, tokenizer: TextTokenizer) -> str:
        """The chat as the text that the model continues."""
        if not tokenizer.chat_template:
            raise Refused(400, "this model's tokenizer has no chat template; use /v1/completions")
        messages = [{"role": m.role, "content": m.content} for m in self.messages or []]
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text


_decode = msgspec.json.Decoder(Request).decode


def parse(body: bytes, *, chat: bool) -> Request:
    """Raises Refused for anything but a request of that route."""
    try:
        request = _decode(body)
    except msgspec.DecodeError as error:
        raise Refused(400, str(error)) from None
    if (request.messages is not None) != chat or (request.prompt is None) != chat:
        raise Refused(400, "give messages" if chat else "give prompt")
    return request


def reply_body(
    request: Request, model: str, number: int, prompt_ids: Sequence[int], answers: Sequence[Generation]
) -> dict[str, Any]:
    chat = request.messages is not None
    choices = [
        {"index": i, "finish_reason": answer.finish_reason, "logprobs": None}
        | ({"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text})
        for i, answer in enumerate(answers)
    ]
    n_prompt, n_out = len(prompt_ids), sum(len(answer.token_ids) for answer in answers)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "created": int(time.time()),
        "model": model,
        "object": "chat.completion" if chat else "text_completion",
        "choices": choices,
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_out, "total_tokens": n_prompt + n_out},
    }


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    return {"error": {"message": message, "type": kind.get(status, "server_error"), "code": status}}
