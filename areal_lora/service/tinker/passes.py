"""Bodies of forward and backward passes: a request becomes a `Pass`, and its outcome the body of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from areal_lora.operations.protocol import Datum, Loss, LossSettings, Pass, PassResult
from areal_lora.service.refused import RequestError
from areal_lora.service.tinker import protos
from areal_lora.service.tinker.tensors import finite, row, token_ids, whole

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK = "sequence_ratio_mask"
_SETTINGS: dict[Loss, dict[str, str]] = {
    Loss.CROSS_ENTROPY: {},
    Loss.IMPORTANCE_SAMPLING: {},
    Loss.PPO: {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    Loss.CISPO: {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    Loss.DRO: {"beta": "beta"},
    Loss.GSPO: {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    Loss.STABLE_REINFORCE: {"kl_coeff": "beta"},
}
"""Settings of each loss in the SDK's words and in ours."""
_OPTIONAL = {Loss.CROSS_ENTROPY: {WEIGHTS}, Loss.GSPO: {RATIO_MASK}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """``wanted`` is the pass, or why there is none: the place in the order of the model's operations is taken."""

    model: str
    seq: int
    wanted: Pass | RequestError


def read_pass(body: bytes) -> PassRequest:
    """Raises RequestError for a body that names neither model nor place."""
    message = protos.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        reason = "it is no protobuf message of a forward or backward pass"
        raise RequestError(422, "body", reason, "use an SDK version that the service page names") from None
    model = _text(message.model_id, "model_id")
    wanted: Pass | RequestError
    try:
        wanted = _pass(message)
    except RequestError as refused:
        wanted = refused
    return PassRequest(model=model, seq=message.seq_id, wanted=wanted)


def scored_body(scored: PassResult) -> bytes:
    """The answer: log-probabilities of the targets of each datum, and the loss as a sum."""
    message = protos.ForwardBackwardOutput(loss_fn_output_type=b"TargetLogprobs")
    record = message.loss_fn_outputs.add(type_tag=b"TargetLogprobs", num_datums=len(scored.logprobs))
    offsets = np.cumsum([0, *map(len, scored.logprobs)], dtype="<i8")
    output = record.fields.add(key=LOGPROBS.encode())
    output.value.data = b"".join(scored.logprobs)
    output.value.offsets = offsets.tobytes()
    output.value.dtype = protos.FLOAT32
    message.metrics.add(key=b"loss:sum", value=scored.loss)
    encoded: bytes = message.SerializeToString()
    return encoded


def _pass(message: Any) -> Pass:
    name = _text(message.loss_fn, "loss_fn")
    if name not in list(Loss):
        reason = f"the loss {name[:64]!r} is not known here"
        raise RequestError(422, "loss_fn", reason, f"use one of {', '.join(Loss)}, or a custom loss at the client")
    if not message.data:
        raise RequestError(422, "data", "there are no data", "send at least one datum")
    loss = Loss(name)
    return Pass(
        data=tuple(_datum(datum, f"data[{i}]", loss) for i, datum in enumerate(message.data)),
        loss=loss,
        settings=_settings(message, loss),
        backward=not message.forward_only,
    )


def _datum(message: Any, path: str, loss: Loss) -> Datum:
    parts = []
    for i, chunk in enumerate(message.model_input):
        where = f"{path}.model_input[{i}]"
        if not chunk.HasField("encoded_text"):
            raise RequestError(422, where, "images and sounds are not supported", "send text as tokens")
        parts.append(token_ids(chunk.encoded_text.tokens, where))
    inputs = np.concatenate(parts) if parts else np.zeros(0, "<i4")
    n = len(inputs)
    if not n:
        raise RequestError(422, f"{path}.model_input", "it has no tokens", "send at least one token")
    given = {_text(each.key, path): each.value for each in message.loss_fn_inputs}
    needed = {TARGETS} if loss is Loss.CROSS_ENTROPY else {TARGETS, LOGPROBS, ADVANTAGES}
    taken = needed | _OPTIONAL.get(loss, set())
    for key in sorted(needed - given.keys()):
        raise RequestError(422, f"{path}.loss_fn_inputs", f"{loss} needs {key}", f"send {key}")
    for key in sorted(given.keys() - taken):
        fix = f"leave it out; {loss} takes {', '.join(sorted(taken))}"
        raise RequestError(422, f"{path}.loss_fn_inputs.{key[:64]}", f"{loss} has no such input", fix)

    def numbers(key: str) -> npt.NDArray[np.float32]:
        where = f"{path}.loss_fn_inputs.{key}"
        return finite(row(given[key], where, n), where)

    where = f"{path}.loss_fn_inputs.{TARGETS}"
    targets = whole(row(given[TARGETS], where, n), where)
    read = {key: numbers(key) for key in given.keys() - {TARGETS}}
    weights = _weights(loss, read, n)
    if ADVANTAGES in read and (wrong := np.flatnonzero((weights == 0) & (read[ADVANTAGES] != 0))).size:
        reason = f"number {wrong[0]} is not 0, and {RATIO_MASK} is 0 there"
        raise RequestError(422, f"{path}.loss_fn_inputs.{ADVANTAGES}", reason, "send 0, or mark the target in the mask")
    if (wrong := np.flatnonzero((targets[:-1] != inputs[1:]) & (weights[:-1] != 0))).size:
        reason = f"target {wrong[0]} counts, and is not the input token that follows it"
        raise RequestError(422, where, reason, "send inputs tokens[:-1] and targets tokens[1:] of one sequence")
    return Datum(
        tokens=np.append(inputs, targets[-1:]).astype("<i4").tobytes(),
        weights=weights.tobytes(),
        logprobs=read[LOGPROBS].tobytes() if LOGPROBS in read else b"",
        advantages=read[ADVANTAGES].tobytes() if ADVANTAGES in read else b"",
    )


def _weights(loss: Loss, read: Mapping[str, npt.NDArray[np.float32]], n: int) -> npt.NDArray[np.float32]:
    """0 where a target changes nothing, so that its token may be anything, such as the 0 of ``[0] * k + sampled``."""
    match loss:
        case Loss.CROSS_ENTROPY:
            return read.get(WEIGHTS, np.ones(n, "<f4"))
        case Loss.DRO:  # also a target without an advantage is kept near the sampler
            return np.ones(n, "<f4")
        case _:
            return np.not_equal(read.get(RATIO_MASK, read[ADVANTAGES]), 0.0).astype(np.float32)


def _settings(message: Any, loss: Loss) -> LossSettings:
    """Old SDKs send numbers alone, new ones both; the new ones count."""
    found: dict[str, float] = {_text(each.key, "loss_fn_config"): each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        key = _text(each.key, "loss_fn_config")
        if not each.value.HasField("number"):
            raise RequestError(422, f"loss_fn_config.{key[:64]}", "it is no number", "send a number")
        found[key] = each.value.number
    known = _SETTINGS[loss]
    for key, value in found.items():
        if key not in known:
            fix = f"use {', '.join(known)}" if known else "leave it out"
            raise RequestError(422, f"loss_fn_config.{key[:64]}", f"{loss} has no such setting", fix)
        if not np.isfinite(value) or value < 0:
            raise RequestError(422, f"loss_fn_config.{key}", "it is no finite number from 0", "correct it")
    return LossSettings(**{known[key]: value for key, value in found.items()})


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError(422, path, "it is no UTF-8", "send UTF-8") from None
