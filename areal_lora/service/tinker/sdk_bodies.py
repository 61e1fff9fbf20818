"""JSON bodies of the SDK's requests, as far as something here reads them. Fields that are not named are ignored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Bounded: messages and SQLite hold integers of 64 bits."""


class CreateSession(msgspec.Struct, frozen=True, kw_only=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
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
    model_seq_id: Count
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: dict[str, Any] | None = None


class OfModel(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(msgspec.Struct, frozen=True, kw_only=True):
    """``optimizer_params`` are those of an optimizer other than AdamW."""

    model_id: str
    seq_id: Count
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    seq_id: Count
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSamplerBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``path`` or ``sampling_session_seq_id``."""

    model_id: str
    seq_id: Count
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"
    ttl_seconds: float | None = None
    user_metadata: dict[str, Any] | None = None


class SaveExternal(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str
    seq_id: Count
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
    model_seq_id: Count | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSampler(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class Retrieve(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class Path(msgspec.Struct, frozen=True, kw_only=True):
    tinker_path: str


class Ttl(msgspec.Struct, frozen=True, kw_only=True):
    ttl_seconds: float | None = None
