"""What to do next so that a run has the adapters of its desired state. Pure: a plan, one change at a time.

    desired        has                 change
    any            not there           `Join` while servers have room, else `Note` as pending
    paused         pending, active     `Pause`
    active         paused              `Unpause`
    deleted, gone  there               `Leave`; `Note` as deleted if it never joined

Adapters leave before others join, so that a newcomer finds their place. A newcomer that fails, or an adapter that is
done, is not tried again in a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from areal_lora.run_folder.desired import Desired, DesiredAdapter, DesiredPhase
from areal_lora.types import AdapterPhase

SERVED = (AdapterPhase.PENDING, AdapterPhase.ACTIVE, AdapterPhase.DRAINING, AdapterPhase.PAUSED)
"""Phases in which an adapter has a place on the servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    adapter: DesiredAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpause:
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An adapter that is not there is in ``phase``; nothing but its state changes."""

    key: str
    phase: AdapterPhase
    reason: str = ""


Change: TypeAlias = Join | Leave | Pause | Unpause | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What a run has. ``here`` are adapters that have joined and not left, ``beside`` known states of other keys.

    ``configured`` adapters of the configuration have a place on the servers, which hold ``capacity``.
    """

    here: Mapping[str, AdapterPhase]
    beside: Mapping[str, AdapterPhase]
    configured: int = 0
    capacity: int = 1


def next_change(desired: Desired, roster: Roster) -> Change | None:
    """The first difference between what is desired and what is there; None if there is none."""
    wanted = {adapter.key: adapter for adapter in desired.adapters if adapter.phase is not DesiredPhase.DELETED}
    for key in roster.here:
        if key not in wanted:
            return Leave(key=key)
    for adapter in desired.adapters:
        if adapter.phase is DesiredPhase.DELETED and roster.beside.get(adapter.key) is not AdapterPhase.DELETED:
            return Note(key=adapter.key, phase=AdapterPhase.DELETED)
    for key, phase in roster.here.items():
        paused = wanted[key].phase is DesiredPhase.PAUSED
        if paused and phase in (AdapterPhase.PENDING, AdapterPhase.ACTIVE):
            return Pause(key=key)
        if not paused and phase is AdapterPhase.PAUSED:
            return Unpause(key=key)
    return _newcomer(wanted, roster)


def _newcomer(wanted: Mapping[str, DesiredAdapter], roster: Roster) -> Change | None:
    served = roster.configured + sum(phase in SERVED for phase in roster.here.values())
    for key, adapter in wanted.items():
        known = roster.beside.get(key)
        if key in roster.here or known in (AdapterPhase.FAILED, AdapterPhase.DONE):
            continue
        if served < roster.capacity:
            return Join(adapter=adapter)
        if known is None:
            full = f"waits for a place: servers hold rollout.max_adapters = {roster.capacity}"
            return Note(key=key, phase=AdapterPhase.PENDING, reason=full)
    return None
