"""Bodies of the API's answers. Every answer but a tar and an inference stream is one of these."""

from __future__ import annotations

from typing import Any

import msgspec

from areal_lora.service.observed import ObservedAdapter
from areal_lora.service.queue.queue_rows import AdapterRow, Quota


class AdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter. ``wanted`` is the desired phase, ``phase`` that of the run: null until it has seen the adapter.

    ``step`` counts the steps made, ``reward`` and ``lag`` are those of the newest one; ``version`` is the newest one
    that servers answer with, ``checkpoint`` the newest one that can be downloaded.
    """

    name: str
    incarnation: int
    wanted: str
    phase: str | None
    reason: str
    step: int
    reward: float | None
    lag: float | None
    version: int | None
    checkpoint: int | None
    created_s: float
    settings: dict[str, Any]


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    adapters: list[AdapterBody]


class AcceptedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that is durable. The run carries it out as soon as it can; GET shows when."""

    name: str
    incarnation: int
    verb: str
    wanted: str


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """Records as `obs.metrics.records` describes them. ``next`` is the ``after`` of the next request."""

    records: list[dict[str, Any]]
    next: int


class Logs(msgspec.Struct, frozen=True, kw_only=True):
    states: list[dict[str, Any]]


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    owned_by: str = "areal_lora"


class Models(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelBody]
    object: str = "list"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    quota: Quota
    keys: list[str]


class Tenants(msgspec.Struct, frozen=True, kw_only=True):
    tenants: list[Tenant]


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """``key`` is shown this once; only its hash is kept."""

    tenant: str
    label: str
    key: str


class KeyRemoval(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    label: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    run: str


class TenantRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/tenants``: a new tenant, or another quota of one. Keys left out are those of the run."""

    tenant: str
    quota: dict[str, int | float] = {}


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/tenants/TENANT/keys``. A label that exists gets a new key; the former one ends."""

    label: str = "default"


def shown(row: AdapterRow, seen: ObservedAdapter) -> AdapterBody:
    step = seen.step
    return AdapterBody(
        name=row.name,
        incarnation=row.incarnation,
        wanted=row.wanted.value,
        phase=None if seen.phase is None else seen.phase.value,
        reason=seen.reason,
        step=0 if step is None else step.step + step.taken,
        reward=None if step is None else step.reward_mean,
        lag=None if step is None else step.mean_lag,
        version=seen.version,
        checkpoint=seen.checkpoint,
        created_s=row.created_s,
        settings=row.settings,
    )
