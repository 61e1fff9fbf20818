"""Decide about operations: tables and what the run has in, the adapter's next row out, or `RequestError`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal_lora.run_folder.desired import DesiredPhase
from areal_lora.service.queue.queue_rows import NAME, AdapterRow, OpenOperation, Tables, Verb
from areal_lora.service.refused import RequestError, unknown_adapter
from areal_lora.types import AdapterPhase

WANTED = {Verb.PAUSE: DesiredPhase.PAUSED, Verb.RESUME: DesiredPhase.ACTIVE, Verb.DELETE: DesiredPhase.DELETED}
OVER = (AdapterPhase.DONE, AdapterPhase.FAILED)
CARRIED_OUT = {
    DesiredPhase.ACTIVE: (AdapterPhase.ACTIVE, AdapterPhase.DRAINING, *OVER),
    DesiredPhase.PAUSED: (AdapterPhase.PAUSED, *OVER),
}

Phases = Mapping[str, AdapterPhase]
"""The phase of each adapter of the run by its key there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """A valid adapter that a tenant requests."""

    name: str
    rank: int
    weight: float
    settings: dict[str, Any]


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        reason = f"{name[:64]!r} is no name"
        raise RequestError(422, "name", reason, "use up to 47 of a-z, 0-9, _ and -, the first a letter or a digit")


def create(tables: Tables, tenant: str, request: AdapterRequest, *, now_s: float) -> AdapterRow:
    """The row of a new adapter. Where the servers have no place for it, the run lets it wait for one."""
    check_name(request.name)
    quota, mine = tables.quotas[tenant], tables.of(tenant)
    if (tenant, request.name) in tables.adapters:
        raise RequestError(
            422, "name", f"there is an adapter {request.name!r}", "choose another name, or delete it first"
        )
    if request.rank > quota.rank:
        raise RequestError(
            422, "rank", f"{request.rank} is above the quota of {quota.rank}", f"use at most {quota.rank}"
        )
    if request.weight > quota.weight:
        reason = f"{request.weight:g} is above the quota of {quota.weight:g}"
        raise RequestError(422, "weight", reason, f"use at most {quota.weight:g}")
    if len(mine) >= quota.adapters:
        raise RequestError(429, "name", f"the quota is {quota.adapters} adapters", "delete one first")
    _check_queue(tables, tenant)
    return AdapterRow(
        tenant=tenant,
        name=request.name,
        incarnation=tables.next_incarnation(tenant, request.name),
        wanted=DesiredPhase.ACTIVE,
        settings=request.settings,
        created_s=now_s,
    )


def change(tables: Tables, phases: Phases, tenant: str, name: str, verb: Verb) -> AdapterRow:
    """The row of an adapter that is to pause, to resume or to leave."""
    row = tables.adapters.get((tenant, name))
    if row is None:
        raise unknown_adapter(name)
    if verb is not Verb.DELETE:
        _check_queue(tables, tenant)  # what takes work away is always taken
        if (phase := phases.get(row.key)) in OVER:
            raise RequestError(422, "name", f"{name!r} is {phase}: it takes no further steps", "create another adapter")
    return replace(row, wanted=WANTED[verb])


def _check_queue(tables: Tables, tenant: str) -> None:
    limit = tables.quotas[tenant].operations
    if sum(each.tenant == tenant for each in tables.open) >= limit:
        reason = f"{limit} operations wait for the run, and that is the quota"
        raise RequestError(429, "operations", reason, "wait until the run has carried some out")


def carried_out(tables: Tables, phases: Phases) -> list[OpenOperation]:
    """Operations that the run has carried out: its adapter is what the newest of them wants."""
    return [each for each in tables.open if _is_carried_out(tables, phases, each)]


def _is_carried_out(tables: Tables, phases: Phases, operation: OpenOperation) -> bool:
    row = tables.adapters.get((operation.tenant, operation.name))
    if row is None or row.incarnation != operation.incarnation:  # deleted: nothing of it is wanted any more
        return True
    return phases.get(row.key) in CARRIED_OUT[row.wanted]
