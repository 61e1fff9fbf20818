"""Bodies of forward and backward passes: a request becomes a `Pass`, and its outcome the body of the answer.

The protobuf bodies of the SDK's wire, as fields and numbers.

Declared in proto2, whose singular fields show whether they were sent. On the wire that equals the SDK's proto3
files: an enum is an int32, a map is a repeated entry of key and value, and texts are bytes until they are decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field, FileDescriptorProto
from google.protobuf.message import DecodeError

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import Datum, Loss, LossSettings, Pass, PassResult

STOP, LENGTH = 0, 1  # reasons why a sequence ended
FLOAT32, INT64, INT32 = 1, 2, 3  # types of a tensor's elements

_PACKAGE = "areal_lora.tinker"
_FIELDS: dict[str, tuple[str, ...]] = {
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "Tensor": ("1 bytes dense", "2 SparseCsr sparse_csr", "3 int32 dtype", "4 int64* shape"),
    "EncodedText": ("1 bytes tokens",),
    "Chunk": ("1 EncodedText encoded_text", "2 bytes image", "3 bytes dmel"),
    "Input": ("1 bytes key", "2 Tensor value"),
    "Datum": ("1 Chunk* model_input", "2 Input* loss_fn_inputs"),
    "Number": ("1 bytes key", "2 double value"),
    "Setting": ("1 double number", "2 bytes text"),
    "NamedSetting": ("1 bytes key", "2 Setting value"),
    "ForwardBackwardRequest": (
        "1 bytes model_id",
        "2 int32 seq_id",
        "3 Datum* data",
        "4 bytes loss_fn",
        "5 Number* loss_fn_config",
        "6 bool forward_only",
        "7 NamedSetting* loss_fn_config_v2",
    ),
    "BatchedTensor": ("1 bytes data", "2 bytes offsets", "3 int32 dtype", "4 int64* trailing_shape"),
    "Output": ("1 bytes key", "2 BatchedTensor value"),
    "ArrayRecord": ("1 bytes type_tag", "2 Output* fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": ("1 bytes loss_fn_output_type", "2 ArrayRecord* loss_fn_outputs", "3 Number* metrics"),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "SampledSequence": ("1 int32 stop_reason", "2 bytes tokens", "3 bytes logprobs", "4 TopkLogprobs topk"),
    "SampleResponse": (
        "1 SampledSequence* sequences",
        "2 bytes prompt_logprobs",
        "3 TopkLogprobs topk_prompt",
        "4 int32 prompt_cache_hit_tokens",
    ),
}
_SCALARS = {
    kind: Field.Type.Value(f"TYPE_{kind.upper()}") for kind in ["bytes", "int32", "uint32", "int64", "double", "bool"]
}


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="areal_lora/tinker.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for text in fields:
            number, kind, field_name = text.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = Field.LABEL_REPEATED if kind.endswith("*") else Field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()  # of its own: the SDK may be in the same process
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


_made = _classes()
ForwardBackwardRequest: Any = _made["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _made["ForwardBackwardOutput"]
SampleResponse: Any = _made["SampleResponse"]


MAX_DATA = 1024  # of one pass: clients send more as several
MAX_CHUNKS = 1 << 17  # of a pass or a sample; some clients send each token of a long answer as a chunk
MAX_INPUTS, MAX_SETTINGS = 8, 16
MAX_ELEMENTS = 1 << 24  # of one tensor when it is dense: a sparse one may claim any shape
_ELEMENTS = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}
Array = npt.NDArray[Any]


def row(tensor: Any, path: str, n: int) -> Array:
    """The ``n`` elements of a tensor of one dimension, or of one column. Raises RequestError."""
    shape = list(tensor.shape[:4])
    if shape not in ([], [n], [n, 1]):
        reason = f"its shape is {shape}, not [{n}]: there is one value for each input token"
        raise RequestError(path, reason, "send one value per token; several targets per token are not supported")
    found = _sparse(tensor.sparse_csr, tensor.dtype, path, n) if tensor.HasField("sparse_csr") else None
    values = _elements(tensor.dense, tensor.dtype, path) if found is None else found
    if len(values) != n:
        raise RequestError(path, f"it has {len(values)} values for {n} input tokens", "send one value per token")
    return values


def whole(values: Array, path: str) -> npt.NDArray[np.int32]:
    """``values`` as token ids."""
    if values.dtype.kind != "i":
        raise RequestError(path, "its elements are no whole numbers", "send token ids as int64")
    if ((values < 0) | (values > np.iinfo(np.int32).max)).any():
        raise RequestError(path, "an element is no token id", "send token ids of the base's tokenizer")
    return values.astype("<i4")


def finite(values: Array, path: str) -> npt.NDArray[np.float32]:
    numbers = values.astype("<f4")
    if not np.isfinite(numbers).all():
        raise RequestError(path, "an element is not finite", "send finite numbers")
    return numbers


def _elements(data: bytes, dtype: int, path: str) -> Array:
    if (kind := _ELEMENTS.get(dtype)) is None:
        raise RequestError(path, f"elements of type {dtype} are not known", "send float32 or int64")
    if len(data) % np.dtype(kind).itemsize:
        raise RequestError(path, "its bytes are no whole number of elements", "send what its type and shape require")
    return np.frombuffer(data, kind)


def _sparse(csr: Any, dtype: int, path: str, n: int) -> Array:
    """A column of ``n`` rows of which the rows named have a value, and the others 0."""
    values = _elements(csr.values, dtype, path)
    ends, columns = _elements(csr.crow_indices, INT64, path), _elements(csr.col_indices, INT64, path)
    counts = np.diff(ends)
    sound = len(ends) == n + 1 <= MAX_ELEMENTS and ends[0] == 0 and ends[-1] == len(values) == len(columns)
    if not sound or ((counts < 0) | (counts > 1)).any() or columns.any():
        raise RequestError(path, "it is no sparse tensor of this shape", "send what TensorData makes, or a dense one")
    dense = np.zeros(n, values.dtype)
    dense[counts == 1] = values
    return dense


TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK = "sequence_ratio_mask"
_CLIPS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
_SETTINGS: dict[Loss, dict[str, str]] = dict.fromkeys((Loss.PPO, Loss.CISPO, Loss.GSPO), _CLIPS)
_SETTINGS |= {Loss.DRO: {"beta": "beta"}, Loss.STABLE_REINFORCE: {"kl_coeff": "beta"}}
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
    message = ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        reason = "it is no protobuf message of a forward or backward pass"
        raise RequestError("body", reason, "use an SDK version that the service page names") from None
    model = _text(message.model_id, "model_id")
    wanted: Pass | RequestError
    try:
        wanted = _pass(message)
    except RequestError as refused:
        wanted = refused
    return PassRequest(model=model, seq=message.seq_id, wanted=wanted)


def scored_body(scored: PassResult) -> bytes:
    """The answer: log-probabilities of the targets of each datum, and the loss as a sum."""
    message = ForwardBackwardOutput(loss_fn_output_type=b"TargetLogprobs")
    record = message.loss_fn_outputs.add(type_tag=b"TargetLogprobs", num_datums=len(scored.logprobs))
    offsets = np.cumsum([0, *map(len, scored.logprobs)], dtype="<i8")
    output = record.fields.add(key=LOGPROBS.encode())
    output.value.data = b"".join(scored.logprobs)
    output.value.offsets = offsets.tobytes()
    output.value.dtype = FLOAT32
    message.metrics.add(key=b"loss:sum", value=scored.loss)
    encoded: bytes = message.SerializeToString()
    return encoded


def _pass(message: Any) -> Pass:
    name = _text(message.loss_fn, "loss_fn")
    if name not in list(Loss):
        reason = f"the loss {name[:64]!r} is not known here"
        raise RequestError("loss_fn", reason, f"use one of {', '.join(Loss)}, or a custom loss at the client")
    if not message.data:
        raise RequestError("data", "there are no data", "send at least one datum")
    if len(message.data) > MAX_DATA:
        raise RequestError("data", f"there are {len(message.data)}; one pass has {MAX_DATA} at most", "send several")
    _few(sum(len(datum.model_input) for datum in message.data), MAX_CHUNKS, "data.model_input")
    loss = Loss(name)
    return Pass(
        data=tuple(_datum(datum, f"data[{i}]", loss, message.forward_only) for i, datum in enumerate(message.data)),
        loss=loss,
        settings=_settings(message, loss),
        backward=not message.forward_only,
    )


def _few(count: int, most: int, path: str) -> None:
    """Raise RequestError for so many parts that a loop over them would block the service."""
    if count > most:
        raise RequestError(path, f"it has {count} parts; there are {most} at most", "send fewer")


def _datum(message: Any, path: str, loss: Loss, is_read: bool) -> Datum:
    """``is_read``: also the log-probability of a target that changes nothing is the answer, unless it is a 0 that fills
    up, as in ``[0] * k + sampled``.
    """
    _few(len(message.loss_fn_inputs), MAX_INPUTS, f"{path}.loss_fn_inputs")
    texts = [chunk.encoded_text.tokens for chunk in message.model_input if chunk.HasField("encoded_text")]
    if len(texts) < len(message.model_input):
        first = next(i for i, chunk in enumerate(message.model_input) if not chunk.HasField("encoded_text"))
        where = f"{path}.model_input[{first}]"
        raise RequestError(where, "images and sounds are not supported", "send text as tokens")
    where = f"{path}.model_input"
    _elements(next((text for text in texts if len(text) % 4), b""), INT32, where)  # the sum of lengths may hide it
    inputs = whole(_elements(b"".join(texts), INT32, where), where)
    n = len(inputs)
    if not n:
        raise RequestError(f"{path}.model_input", "it has no tokens", "send at least one token")
    given = {_text(each.key, path): each.value for each in message.loss_fn_inputs}
    needed = {TARGETS} if loss is Loss.CROSS_ENTROPY else {TARGETS, LOGPROBS, ADVANTAGES}
    taken = needed | _OPTIONAL.get(loss, set())
    for key in sorted(needed - given.keys()):
        raise RequestError(f"{path}.loss_fn_inputs", f"{loss} needs {key}", f"send {key}")
    for key in sorted(given.keys() - taken):
        fix = f"leave it out; {loss} takes {', '.join(sorted(taken))}"
        raise RequestError(f"{path}.loss_fn_inputs.{key[:64]}", f"{loss} has no such input", fix)

    def numbers(key: str) -> npt.NDArray[np.float32]:
        where = f"{path}.loss_fn_inputs.{key}"
        return finite(row(given[key], where, n), where)

    where = f"{path}.loss_fn_inputs.{TARGETS}"
    targets = whole(row(given[TARGETS], where, n), where)
    read = {key: numbers(key) for key in given.keys() - {TARGETS}}
    weights = _weights(loss, read, n)
    if ADVANTAGES in read and (wrong := np.flatnonzero((weights == 0) & (read[ADVANTAGES] != 0))).size:
        reason = f"number {wrong[0]} is not 0, and {RATIO_MASK} is 0 there"
        raise RequestError(f"{path}.loss_fn_inputs.{ADVANTAGES}", reason, "send 0, or mark the target in the mask")
    counts = (weights != 0) | (is_read & (targets != 0))
    if (wrong := np.flatnonzero((targets[:-1] != inputs[1:]) & counts[:-1])).size:
        reason = f"target {wrong[0]} counts, and is not the input token that follows it"
        raise RequestError(where, reason, "send inputs tokens[:-1] and targets tokens[1:] of one sequence")
    return Datum(
        tokens=np.append(inputs, targets[-1:]).astype("<i4").tobytes(),
        weights=weights.tobytes(),
        logprobs=read[LOGPROBS].tobytes() if LOGPROBS in read else b"",
        advantages=read[ADVANTAGES].tobytes() if ADVANTAGES in read else b"",
    )


def _weights(loss: Loss, read: Mapping[str, npt.NDArray[np.float32]], n: int) -> npt.NDArray[np.float32]:
    """0 where a target changes nothing, so that a backward pass may have any token there."""
    match loss:
        case Loss.CROSS_ENTROPY:
            return read.get(WEIGHTS, np.ones(n, "<f4"))
        case Loss.DRO:  # also a target without an advantage is kept near the sampler
            return np.ones(n, "<f4")
        case _:
            return np.not_equal(read.get(RATIO_MASK, read[ADVANTAGES]), 0.0).astype(np.float32)


def _settings(message: Any, loss: Loss) -> LossSettings:
    """Old SDKs send numbers alone, new ones both; the new ones count."""
    _few(max(len(message.loss_fn_config), len(message.loss_fn_config_v2)), MAX_SETTINGS, "loss_fn_config")
    found: dict[str, float] = {_text(each.key, "loss_fn_config"): each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        key = _text(each.key, "loss_fn_config")
        if not each.value.HasField("number"):
            raise RequestError(f"loss_fn_config.{key[:64]}", "it is no number", "send a number")
        found[key] = each.value.number
    known = _SETTINGS.get(loss, {})
    for key, value in found.items():
        if key not in known:
            fix = f"use {', '.join(known)}" if known else "leave it out"
            raise RequestError(f"loss_fn_config.{key[:64]}", f"{loss} has no such setting", fix)
        if not np.isfinite(value) or value < 0:
            raise RequestError(f"loss_fn_config.{key}", "it is no finite number from 0", "correct it")
    return LossSettings(**{known[key]: value for key, value in found.items()})


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError(path, "it is no UTF-8", "send UTF-8") from None
