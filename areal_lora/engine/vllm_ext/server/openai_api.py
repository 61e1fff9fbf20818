"""Define request and answer bodies of the data plane: a subset of OpenAI's API, and extensions.

Extensions: ``return_token_ids`` and, in every choice, ``token_ids`` and ``versions`` (the adapter
version of each token, -1 for the base). ``logprobs.token_logprobs[t]`` belongs to ``token_ids[t]``; with
``return_token_ids`` and ``logprobs`` above 0, ``logprobs.top_ids[t]`` are log-probabilities by token id. ``echo`` puts
the prompt in front of all of them; its first token has the score 0 and no others. With ``max_tokens`` 0 there is the
prompt alone, which may be as long as the context.
``return_columns``: a choice has `TokenColumns` (each array in base64) in place of ``token_ids``, ``versions`` and
``logprobs.token_logprobs``; needs ``logprobs``, without ``echo``. With ``behaviour.router_replay`` they have
routes, and the first choice of a prompt ``prompt_routes``, from token ``routes_from`` on, unless it is a stream or
its version is pinned.
``return_kept``, with ``top_k`` from 1 to `MOST_KEPT`: columns have the ids that were kept for each token, and
log-probabilities normalised over them. All others are before truncation; of tokens left out there are none.
``structured_outputs``: the text is JSON of a schema. Log-probabilities are those under
the grammar. The whole answer comes from one version, under any in-flight policy.
``stop_token_ids`` end an answer like its end token, which is the last of its tokens.
``pin_version``: the whole answer comes from the version that ``model`` names, under any in-flight policy,
and the version stays for ``adapters.PINNED_S`` after it, for the next request of an evaluation.
``background``: the engine orders the request as if it had arrived ``generate.BACKGROUND_S`` later.
Unknown fields are refused: ignoring a setting silently would change the policy.
"""

from typing import Annotated, Any

import msgspec

from areal_lora.network.http_server import Prompt, StructuredOutputs
from areal_lora.types import MOST_STOPS, STOP_CHARACTERS, TokenColumns

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Bounded: the engine gets messages that hold integers of 64 bits."""
StopText = Annotated[str, msgspec.Meta(max_length=STOP_CHARACTERS)]
Few = msgspec.Meta(max_length=MOST_STOPS)


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    n: Int = 1
    max_tokens: Int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int = 0
    min_p: float = 0.0
    min_tokens: Int = 0
    seed: Int | None = None
    stop: StopText | Annotated[list[StopText], Few] | None = None
    stop_token_ids: Annotated[list[Int], Few] = []
    stream: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    user: str | None = None
    pin_version: bool = False
    background: bool = False


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``. ``prompt`` is a text, texts, token ids, or lists of token ids."""

    prompt: Prompt
    logprobs: Int | None = None
    echo: bool = False
    return_columns: bool = False
    return_kept: bool = False
    routes_from: Int = 0
    structured_outputs: StructuredOutputs | None = None

    @property
    def wants_logprobs(self) -> int | None:
        return self.logprobs


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``; needs a tokenizer with a chat template."""

    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: Int = 0
    max_completion_tokens: Int | None = None

    @property
    def wants_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer, or one part of it in a stream."""

    index: int
    finish_reason: str | None
    text: str | None = None
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    versions: list[int] | None = None
    columns: TokenColumns | None = None
    prompt_routes: bytes | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer body. ``model`` is the version of the newest token."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def error_body(status: int, message: str) -> bytes:
    kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})
