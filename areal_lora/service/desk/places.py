"""Which adapter leaves so that another one has its place. Pure.

A snapshot that is not the newest version of its model is served by an adapter of its own. It takes a place on the
servers and counts to the quota of its tenant, like any adapter. The one that was not used for longest leaves first.
Where none can leave, the session leaves whose client has been silent for longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OWN_IDLE_S = 10.0
OTHERS_IDLE_S = 60.0
"""A tenant's snapshot leaves for another tenant's adapter only after that long without use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An adapter that serves a saved state, and when it was asked for last."""

    model: str
    tenant: str
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """``taken`` of ``capacity`` places on the servers, and ``mine`` of the tenant's ``quota``, have an adapter."""

    taken: int
    capacity: int
    mine: int
    quota: int


def evicted(places: Places, snapshots: Sequence[Snapshot], tenant: str, now_s: float) -> str | None:
    """The model that leaves so that ``tenant`` may have one more adapter; None if there is room, or none can leave."""
    own = [each for each in snapshots if each.tenant == tenant and now_s - each.used_s >= OWN_IDLE_S]
    others = [each for each in snapshots if each.tenant != tenant and now_s - each.used_s >= OTHERS_IDLE_S]
    if places.mine >= places.quota:
        return _oldest(own)
    if places.taken >= places.capacity:
        return _oldest(own) or _oldest(others)
    return None


def abandoned(places: Places, sessions: Sequence[tuple[str, str]], tenant: str) -> str | None:
    """The session that ends so that ``tenant`` may have one more adapter.

    ``sessions`` are those with adapters whose clients are silent, with their tenants, the longest silent first.
    """
    if fits(places):
        return None
    return next((name for name, owner in sessions if owner == tenant or places.mine < places.quota), None)


def fits(places: Places) -> bool:
    return places.mine < places.quota and places.taken < places.capacity


def _oldest(snapshots: Sequence[Snapshot]) -> str | None:
    return min(snapshots, key=lambda each: (each.used_s, each.model)).model if snapshots else None
