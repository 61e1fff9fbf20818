"""What to do next so that a run has the adapters of its desired state. Pure: a plan, one change at a time.

    desired        has                 change
    any            not there           `Join` while servers have room, else `Note` as pending
    paused         pending, active     `Pause`
    active         paused              `Resume`
    deleted, none  there               `Leave`; `Note` as deleted if it never joined

Adapters leave before others join, so that those find a free place. A joining adapter that fails, or an adapter that is
done, is not tried again in a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from areal_lora.run_folder.desired import DesiredAdapters, DesiredPhase
from areal_lora.trainer.work import AdapterChange, Join, Leave, Pause, Resume
from areal_lora.types import AdapterPhase

SERVED = (AdapterPhase.PENDING, AdapterPhase.ACTIVE, AdapterPhase.DRAINING, AdapterPhase.PAUSED)
"""Phases in which an adapter has a place on the servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An adapter that is not there is in ``phase``; nothing but its state changes."""

    adapter: str
    phase: AdapterPhase
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What a run has. ``here`` are adapters that have joined and not left, ``absent`` known states of other keys.

    ``configured`` adapters of the configuration have a place on the servers, which hold ``capacity``.
    """

    here: Mapping[str, AdapterPhase]
    absent: Mapping[str, AdapterPhase]
    configured: int = 0
    capacity: int = 1


def next_change(desired: DesiredAdapters, roster: Roster) -> AdapterChange | Note | None:
    """The first difference between what is desired and what is there; None if there is none."""
    wanted = {adapter.key: adapter for adapter in desired.adapters if adapter.phase is not DesiredPhase.DELETED}
    for key in roster.here:
        if key not in wanted:
            return Leave(adapter=key)
    for adapter in desired.adapters:
        if adapter.phase is DesiredPhase.DELETED and roster.absent.get(adapter.key) is not AdapterPhase.DELETED:
            return Note(adapter=adapter.key, phase=AdapterPhase.DELETED)
    for key, phase in roster.here.items():
        paused = wanted[key].phase is DesiredPhase.PAUSED
        if paused and phase in (AdapterPhase.PENDING, AdapterPhase.ACTIVE):
            return Pause(adapter=key)
        if not paused and phase is AdapterPhase.PAUSED:
            return Resume(adapter=key)
    return _joining(wanted, roster)


def _joining(wanted: Iterable[str], roster: Roster) -> AdapterChange | Note | None:
    served = roster.configured + sum(phase in SERVED for phase in roster.here.values())
    for key in wanted:
        known = roster.absent.get(key)
        if key in roster.here or known in (AdapterPhase.FAILED, AdapterPhase.DONE):
            continue
        if served < roster.capacity:
            return Join(adapter=key)
        if known is None:
            full = f"waits for a place: servers hold rollout.max_adapters = {roster.capacity}"
            return Note(adapter=key, phase=AdapterPhase.PENDING, reason=full)
    return None
