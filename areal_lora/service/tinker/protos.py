"""The protobuf bodies of the SDK's wire, as fields and numbers.

Declared in proto2, whose singular fields show whether they were sent. On the wire that equals the SDK's proto3
files: an enum is an int32, a map is a repeated entry of key and value, and texts are bytes until they are decoded.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

STOP, LENGTH = 0, 1
"""Reasons why a sequence ended."""
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Types of a tensor's elements."""

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
    "bytes": Field.TYPE_BYTES,
    "int32": Field.TYPE_INT32,
    "uint32": Field.TYPE_UINT32,
    "int64": Field.TYPE_INT64,
    "double": Field.TYPE_DOUBLE,
    "bool": Field.TYPE_BOOL,
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="areal_lora/tinker.proto", package=_PACKAGE, syntax="proto2")
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
