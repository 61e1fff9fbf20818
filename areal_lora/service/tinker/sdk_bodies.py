"""JSON bodies of the SDK's requests, as far as something here reads them. Fields that are not named are ignored."""

import math
from itertools import chain
from typing import Annotated, Any, assert_never

import msgspec
import numpy as np
from starlette.responses import Response

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import OperationFailure, PassResult, StepResult
from areal_lora.service.http import Answered, JsonObject, decoded
from areal_lora.service.queue import requests
from areal_lora.service.tinker import passes
from areal_lora.types import MOST_STOPS, STOP_CHARACTERS

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Bounded: messages and SQLite hold integers of 64 bits."""
ModelNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
SamplerNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class CreateSession(msgspec.Struct, frozen=True, kw_only=True):
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class OfSession(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    rank: Count
    seed: Count | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "adamw"


class CreateModelBody(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    model_seq_id: ModelNumber
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: dict[str, Any] | None = None


class OfModel(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    learning_rate: NonNegative = 1e-4
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: NonNegative = 1e-12
    weight_decay: NonNegative = 0.0
    grad_clip_norm: NonNegative = 0.0


class AdamStep(msgspec.Struct, frozen=True, kw_only=True):
    """What an OptimStepBody for AdamW holds. Judged in its turn, so that a refusal keeps the order of operations."""

    adam_params: AdamParams


class OfSequence(OfModel, frozen=True, kw_only=True):
    """An operation of a model, in its place in their order."""

    seq_id: Count


class OptimStepBody(OfSequence, frozen=True, kw_only=True):
    """``optimizer_params`` are those of an optimizer other than AdamW."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(OfSequence, frozen=True, kw_only=True):
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSamplerBody(OfSequence, frozen=True, kw_only=True):
    """Either ``path`` or ``sampling_session_seq_id``."""

    path: str | None = None
    sampling_session_seq_id: SamplerNumber | None = None
    kind: str = "snapshot"
    ttl_seconds: float | None = None
    user_metadata: dict[str, Any] | None = None


class SaveExternal(OfSequence, frozen=True, kw_only=True):
    path: str = ""
    ttl_seconds: float | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Into an existing model (``model_id``, ``seq_id``), or into a new one (``session_id``, ``model_seq_id``)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Count | None = None
    session_id: str | None = None
    model_seq_id: ModelNumber | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSampler(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    sampling_session_seq_id: SamplerNumber
    base_model: str | None = None
    model_path: str | None = None


class Retrieve(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class Path(msgspec.Struct, frozen=True, kw_only=True):
    tinker_path: str


class Ttl(msgspec.Struct, frozen=True, kw_only=True):
    ttl_seconds: float | None = None


PROTOBUF = "application/x-protobuf"


def retrieved(answer: requests.Answer | requests.Pending, request: str) -> Answered:
    """A passing state and a failure are answers as well: an HTTP error would mean that retrieving has failed."""
    match answer:
        case PassResult():
            return Response(passes.scored_body(answer), media_type=PROTOBUF)
        case StepResult(step=step, grad_norm=grad_norm, skipped=skipped):
            figures = {"step": float(step), "grad_norm": grad_norm, "skipped": float(skipped)}
            return {"metrics": {name: value for name, value in figures.items() if math.isfinite(value)}}
        case requests.ActionResult(model=model, path=path, sampler=sampler, unloaded=unloaded):
            named = {"model_id": model, "path": path, "sampling_session_id": sampler}
            named["type"] = "unload_model" if unloaded else None
            return {key: value for key, value in named.items() if value is not None}
        case OperationFailure(reason=reason, by_client=by_client):
            return {"error": reason, "category": "user" if by_client else "server"}
        case requests.Pending(reason=reason, capacity=capacity):
            state = "paused_capacity" if capacity else "active"
            return {"type": "try_again", "request_id": request, "queue_state": state, "queue_state_reason": reason}
        case _:
            assert_never(answer)


Top = Annotated[int, msgspec.Meta(ge=0, le=20)]  # that of our servers
SEEDS = 1 << 62  # the engine counts samples of one request on from the seed, in 64 bits
EMPTY_TOP = -99999.0
EMPTY = frozenset({b"null", b"false", b"0", b"0.0", b'""', b"[]", b"{}"})  # a field that is not used
MAX_FIELDS = 64  # of one sample, those that are not used included
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
StopText = Annotated[str, msgspec.Meta(max_length=STOP_CHARACTERS)]
Stops = Annotated[list[StopText | int], msgspec.Meta(max_length=MOST_STOPS)]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "encoded_text"
    tokens: list[Token] = []


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    chunks: list[Chunk]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``stop`` None: the end token; [] nothing, not even the end token; else texts or token ids beside it."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: StopText | Stops | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /api/v1/asample``.

    ``record_stability_info`` changes nothing: ``stable_reinforce`` needs no more than log-probabilities, which every
    sample has.
    """

    sampling_session_id: str
    seq_id: int
    prompt: PromptBody
    sampling_params: Settings
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = "sample"

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    @property
    def n_echoed(self) -> int:
        """Tokens of the prompt at the start of the server's answer, so that they have scores."""
        return self.n_prompt if self.prompt_logprobs or self.topk_prompt_logprobs else 0

    @property
    def n_prompt(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.prompt.chunks)


def read_sample(body: bytes) -> SampleRequest:
    """Raises RequestError; a field that nothing here serves is refused by its name, unless it is empty."""
    given = decoded(body, dict[str, msgspec.Raw])  # what is not read makes no objects, which would block the service
    if len(given) > MAX_FIELDS:
        raise RequestError("sample", f"it has {len(given)} fields", f"send {MAX_FIELDS} at most")
    unknown = sorted(
        key for key in given.keys() - set(SampleRequest.__struct_fields__) if bytes(given[key]) not in EMPTY
    )
    if unknown:
        raise RequestError(unknown[0], "samples have no such field here", "leave it out")
    if bytes(given.get("prompt", b"")).count(b"{") > passes.MAX_CHUNKS:  # before each is an object
        raise RequestError("prompt", f"it has more than {passes.MAX_CHUNKS} chunks", "send fewer, longer ones")
    try:
        request = msgspec.json.decode(body, type=SampleRequest)
    except (msgspec.ValidationError, UnicodeError) as error:
        reason, _, key = str(error)[:200].partition(" - at `$.")
        raise RequestError(key.rstrip("`") or "sample", reason, "correct the request") from None
    decoded(msgspec.structs.asdict(request) | {"prompt": None}, JsonObject)  # tokens are within their bounds
    if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
        raise RequestError("prompt", "images and sounds are not supported", "send text as tokens")
    if not request.n_prompt:
        raise RequestError("prompt", "it has no tokens", "send one or more")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < request.n_prompt):
        reason = "it is not from 1 to the length of the prompt - 1, or prompt_logprobs is not set"
        raise RequestError("prompt_logprobs_last_n", reason, "correct it")
    return request


def completion(request: SampleRequest, model: str, context: int, *, pinned: bool) -> dict[str, Any]:
    """The body for a server's ``/v1/completions``. ``pinned``: from the version that ``model`` names, whole.

    Raises RequestError for a prompt longer than ``context``.
    """
    if request.n_prompt > context:
        reason = f"it has {request.n_prompt} tokens; a sequence has {context} at most"
        raise RequestError("prompt", reason, "shorten it")
    settings, prompt = request.sampling_params, request.token_ids
    n_new = max(1, context - len(prompt)) if settings.max_tokens is None else settings.max_tokens
    if request.n_echoed == context and n_new == 1:
        n_new = 0  # the SDK's compute_logprobs: of the prompt alone
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop or []
    return {
        "model": model,
        "prompt": prompt,
        "n": request.num_samples,
        "max_tokens": n_new,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": max(0, settings.top_k),
        "seed": None if settings.seed is None else settings.seed % SEEDS,
        "stop": [each for each in stop if isinstance(each, str)],
        "stop_token_ids": [each for each in stop if isinstance(each, int)],
        "ignore_eos": settings.stop == [],
        "logprobs": max(request.topk_sample_logprobs, request.topk_prompt_logprobs),
        "echo": request.n_echoed > 0,
        "return_token_ids": True,
        "pin_version": pinned,
    }


class _Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    token_logprobs: list[float]
    top_ids: list[dict[int, float]] = []


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: str | None
    token_ids: list[int] = []
    logprobs: _Logprobs


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    choices: list[_Choice]


def sampled_body(request: SampleRequest, payload: bytes) -> bytes:
    """The SDK's message from a server's answer."""
    answer = msgspec.json.decode(payload, type=_Answer)
    n_prompt = request.n_echoed
    message = passes.SampleResponse(prompt_cache_hit_tokens=0)
    for choice in sorted(answer.choices, key=lambda each: each.index):
        reasons = {"stop": passes.STOP, "length": passes.LENGTH}
        if choice.finish_reason not in reasons:
            raise RequestError("sample", "a server ended the sample early", "sample again", status=503)
        sequence = message.sequences.add(stop_reason=reasons[choice.finish_reason])
        sequence.tokens = np.array(choice.token_ids[n_prompt:], "<i4").tobytes()
        sequence.logprobs = np.array(choice.logprobs.token_logprobs[n_prompt:], "<f4").tobytes()
        if request.topk_sample_logprobs:
            _fill_top(sequence.topk, choice.logprobs.top_ids[n_prompt:], request.topk_sample_logprobs)
    prompt, last = answer.choices[0].logprobs, request.prompt_logprobs_last_n
    unscored = 1 if last is None else n_prompt - last
    if request.prompt_logprobs:
        scores = np.array(prompt.token_logprobs[:n_prompt], "<f4")
        scores[:unscored] = np.nan
        message.prompt_logprobs = scores.tobytes()
    if request.topk_prompt_logprobs:
        rows = [{} if i < unscored else row for i, row in enumerate(prompt.top_ids[:n_prompt])]
        _fill_top(message.topk_prompt, rows, request.topk_prompt_logprobs)
    encoded: bytes = message.SerializeToString()
    return encoded


def _fill_top(message: Any, rows: list[dict[int, float]], k: int) -> None:
    """The ``k`` most likely tokens of each position, the most likely one first; empty places are marked."""
    counts = np.fromiter(map(len, rows), np.intp, len(rows))
    row = np.repeat(np.arange(len(rows)), counts)
    place = row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(rows), max(k, counts.max(initial=0))
    ids, values = np.zeros(shape, "<i4"), np.full(shape, EMPTY_TOP, "<f4")
    ids[place] = np.fromiter(chain.from_iterable(rows), "<i4", len(row))
    values[place] = np.fromiter(chain.from_iterable(map(dict.values, rows)), "<f4", len(row))
    first = np.argsort(-values, axis=1, kind="stable")[:, :k]
    ids, values = np.take_along_axis(ids, first, 1), np.take_along_axis(values, first, 1)
    message.token_ids, message.logprobs, message.k, message.length = ids.tobytes(), values.tobytes(), k, len(rows)
