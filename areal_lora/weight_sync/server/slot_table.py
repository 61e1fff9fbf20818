"""Record which version is in which adapter slot of a server. Pure bookkeeping, for one thread at a time.

reserve -> (staging) -> activate -> acquire/release per request -> retire
                     -> abort                                   -> drop -> (running requests end) -> retire_left

All adapters share the slots: the newest version of each, old versions in use, and one that is on its way. An adapter
that holds more than another one leaves the last free slot to it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from areal_lora.errors import ManifestError, UnknownVersionError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply
from areal_lora.weight_sync.refusal import RefusalReason


@dataclass(slots=True, kw_only=True)
class ResidentVersion:
    """A version in a slot; ``lora_id`` is 0 until it is active. ``in_use`` counts its running requests.

    An adapter that is dropped and published again has another ``incarnation``, a number that is never used twice.
    """

    ref: AdapterRef
    slot: int
    incarnation: int
    lora_id: int = 0
    in_use: int = 0

    @property
    def active(self) -> bool:
        return self.lora_id > 0

    @property
    def engine_name(self) -> str:
        """Name for the engine, whose prefix cache goes by it: never that of another version or incarnation."""
        return f"{self.ref}#{self.lora_id}"


class SlotTable:
    """Slots 0..n_slots-1, each holding at most one immutable version, for up to ``adapters`` adapters at a time."""

    def __init__(self, n_slots: int, adapters: int = 1) -> None:
        if n_slots < 2:
            raise ValueError(f"n_slots is {n_slots}; a successor needs a slot beside the version that serves")
        self._free = list(range(n_slots))
        self._residents: dict[AdapterRef, ResidentVersion] = {}
        self._left: list[ResidentVersion] = []  # of dropped adapters, with running requests
        self._incarnations: dict[str, int] = {}
        self._adapters, self._last_incarnation = adapters, 0

    def reserve(self, ref: AdapterRef) -> int:
        """Take a free slot for ``ref``. Raises ManifestError (``duplicate``, ``slot``)."""
        if ref in self._residents:
            raise ManifestError(RefusalReason.DUPLICATE, f"{ref} is resident already; versions are immutable")
        if not self._may_take(ref.name):
            raise self.full(ref)
        slot = self._free.pop(0)
        if ref.name not in self._incarnations:
            self._last_incarnation += 1
            self._incarnations[ref.name] = self._last_incarnation
        self._residents[ref] = ResidentVersion(ref=ref, slot=slot, incarnation=self._incarnations[ref.name])
        return slot

    def held(self) -> Counter[str]:
        """Count the slots of each adapter, without those of dropped ones."""
        return Counter(ref.name for ref in self._residents)

    def _may_take(self, name: str) -> bool:
        """Whether a free slot may go to ``name``.

        Each absent adapter has one, and the last one is for an adapter that holds fewer than another.
        """
        held = self.held()
        if not held[name]:
            return bool(self._free)
        absent = max(self._adapters - len(held), 0)
        others = [n for other, n in held.items() if other != name] + [1] * bool(absent)
        return len(self._free) - absent > (held[name] > min(others, default=held[name]))

    def full(self, ref: AdapterRef) -> ManifestError:
        """Make the refusal of ``ref`` for lack of a slot; it names what holds the slots."""
        held = ", ".join(f"{r.ref} ({r.in_use} running)" for r in [*self._residents.values(), *self._left])
        return ManifestError(RefusalReason.SLOT, f"no free adapter slot for {ref}; held by {held}")

    def activate(self, ref: AdapterRef, lora_id: int) -> None:
        """Make ``ref`` available to requests under the engine's ``lora_id`` (> 0, never reused)."""
        if lora_id <= 0 or any(r.lora_id == lora_id for r in self._residents.values()):
            raise ValueError(f"lora_id {lora_id} of {ref} must be positive and unused")
        self._pending(ref).lora_id = lora_id

    def abort(self, ref: AdapterRef) -> None:
        """Give back the slot of a version that was not activated."""
        self._drop(self._pending(ref))
        if not self.held()[ref.name]:
            del self._incarnations[ref.name]

    def acquire(self, ref: AdapterRef) -> ResidentVersion:
        """Count a request in. Raises UnknownVersionError."""
        resident = self._active(ref)
        resident.in_use += 1
        return resident

    def release(self, resident: ResidentVersion) -> None:
        if resident.in_use == 0:
            raise ValueError(f"{resident.ref} was released more often than acquired")
        resident.in_use -= 1

    def drop(self, name: str) -> int:
        """Forget adapter ``name`` and return how many requests run on it; ``retire_left`` frees its slots.

        Raises ValueError during its publish.
        """
        dropped = [r for r in self._residents.values() if r.ref.name == name]
        if not all(r.active for r in dropped):
            raise ValueError(f"{name} cannot be dropped while it is published")
        for resident in dropped:
            del self._residents[resident.ref]
        self._left += dropped
        self._incarnations.pop(name, None)
        return sum(r.in_use for r in dropped)

    def retire_left(self) -> list[ResidentVersion]:
        """Give back the slots of dropped adapters that no request uses."""
        retired = [r for r in self._left if not r.in_use]
        self._left = [r for r in self._left if r.in_use]
        self._free += [r.slot for r in retired]
        return retired

    @property
    def draining(self) -> bool:
        """Whether requests run on dropped adapters."""
        return bool(self._left)

    def incarnation(self, name: str) -> int:
        """Return the incarnation of adapter ``name``; 0 if it has no version."""
        return self._incarnations.get(name, 0)

    def retire(self, ref: AdapterRef, *, succeeded: bool = False) -> ResidentVersion:
        """Give back the slot of an unused version that has a successor. Raises UnknownVersionError, ValueError.

        ``succeeded``: the version that is about to become active is its successor.
        """
        resident = self._active(ref)
        if resident.in_use:
            raise ValueError(f"{ref} still serves {resident.in_use} requests")
        if not succeeded and ref == self.newest(ref.name):
            raise ValueError(f"{ref} is the newest version of {ref.name!r} and must keep serving")
        self._drop(resident)
        return resident

    def retirable(self, keep: int, incoming: str | None = None) -> list[AdapterRef]:
        """List unused versions beyond the newest ``keep`` (>= 1) active ones of their adapter, oldest first.

        A version of adapter ``incoming`` that is about to become active is counted in; the newest
        version before it is never listed.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; the newest version must keep serving")
        kept: set[AdapterRef] = set()
        for name in {r.name for r in self._residents}:
            kept.update(self._versions(name)[-max(1, keep - (name == incoming)) :])
        return [r for r in self.active() if r not in kept and not self._residents[r].in_use]

    def active(self) -> list[AdapterRef]:
        """List every version that can be requested, sorted."""
        return sorted(ref for ref, r in self._residents.items() if r.active)

    def newest(self, name: str) -> AdapterRef | None:
        """Return the newest active version of an adapter; None if it has none."""
        versions = self._versions(name)
        return versions[-1] if versions else None

    def resolve(self, model_name: str) -> ResidentVersion:
        """Find the version ``name@vN``, or the newest one of a bare adapter name. Raises UnknownVersionError."""
        newest = self.newest(model_name)
        if newest is not None:
            return self._residents[newest]
        try:
            ref = AdapterRef.parse(model_name)
        except ValueError as e:
            raise UnknownVersionError(self._missing(model_name)) from e
        return self._active(ref)

    def newest_from(self, model_name: str) -> AdapterRef:
        """Return the newest version of the named adapter, if it is not older than a version in the name.

        Raises UnknownVersionError.
        """
        try:
            requested = AdapterRef.parse(model_name)
        except ValueError:
            return self.resolve(model_name).ref
        newest = self.newest(requested.name)
        return newest if newest is not None and requested <= newest else self._active(requested).ref

    def _versions(self, name: str) -> list[AdapterRef]:
        return [ref for ref in self.active() if ref.name == name]

    def _active(self, ref: AdapterRef) -> ResidentVersion:
        resident = self._residents.get(ref)
        if resident is None or not resident.active:
            raise UnknownVersionError(self._missing(str(ref)))
        return resident

    def _pending(self, ref: AdapterRef) -> ResidentVersion:
        resident = self._residents.get(ref)
        if resident is None or resident.active:
            raise ValueError(f"{ref} is not a reserved version awaiting activation")
        return resident

    def _drop(self, resident: ResidentVersion) -> None:
        del self._residents[resident.ref]
        self._free.append(resident.slot)

    def _missing(self, name: str) -> str:
        return f"no adapter {name!r} on this server; it serves {', '.join(map(str, self.active())) or 'none yet'}"


class ServedVersions:
    """A slot table for up to ``adapters`` adapters, the pins on its versions and the acknowledgement of each version.

    ``keep`` versions of an adapter stay in their slots without a request; 0: a version ends as its successor starts,
    because both have the same memory (merged weights). A pin holds a version like a request,
    until a time that the caller gives. Each ``now`` is the driver's monotonic clock, in seconds.
    """

    def __init__(self, n_slots: int, keep: int, adapters: int = 1) -> None:
        self.slots, self._keep, self.adapters = SlotTable(n_slots, adapters), keep, adapters
        self.pins: dict[AdapterRef, float] = {}
        self.replies: dict[AdapterRef, PublishReply] = {}  # also to a repeated publish
        self.lora_ids = itertools.count(1)  # ids for the engine, each used once
        self.publishing: AdapterRef | None = None

    def acquire(
        self, model: str, *, pinned: bool = False, or_newer: bool = False, incarnation: int | None = None
    ) -> ResidentVersion:
        """Count in a request for ``model``; ``or_newer``: for the newest version of its adapter, if not older.

        With ``pinned`` the pins on other versions of the adapter end. With ``incarnation`` an adapter that got the name
        after that one was dropped is another one. Raises UnknownVersionError.
        """
        ref = self.slots.newest_from(model) if or_newer else self.slots.resolve(model).ref
        if incarnation is not None and incarnation != self.slots.incarnation(ref.name):
            raise UnknownVersionError(f"adapter {ref.name!r} was deleted; another one has its name now")
        resident = self.slots.acquire(ref)
        if pinned:
            for other in [pin for pin in self.pins if pin.name == ref.name and pin != ref]:
                self._unpin(other)
        return resident

    def release(self, resident: ResidentVersion, pin_until: float | None = None) -> None:
        """Count a request out. With ``pin_until`` the version stays pinned until then, unless it was dropped."""
        if pin_until is not None and resident.incarnation == self.slots.incarnation(resident.ref.name):
            if resident.ref not in self.pins:
                self.slots.acquire(resident.ref)
            self.pins[resident.ref] = pin_until
        self.slots.release(resident)

    def drop(self, name: str) -> int:
        """Forget adapter ``name``, its pins and acknowledgements; return how many requests run on it.

        Raises ValueError during its publish.
        """
        for ref in [pin for pin in self.pins if pin.name == name]:
            self._unpin(ref)
        running = self.slots.drop(name)
        for ref in [ref for ref in self.replies if ref.name == name]:
            del self.replies[ref]
        return running

    def expire_pins(self, now: float) -> None:
        for ref in [ref for ref, until in self.pins.items() if until <= now]:
            self._unpin(ref)

    def next_expiry(self) -> float:
        """Return the time at which the next pin expires; infinite without a pin."""
        return min(self.pins.values(), default=math.inf)

    def end_oldest_pin(self) -> AdapterRef | None:
        """End the oldest pin and return its version; None if no version is pinned."""
        ref = next(iter(self.pins), None)
        if ref is not None:
            self._unpin(ref)
        return ref

    def retire(self, ref: AdapterRef, now: float) -> ResidentVersion:
        """Free the slot of a version. Raises UnknownVersionError; ValueError if it is in use or the newest."""
        self.expire_pins(now)
        return self._retire(ref)

    def make_room(self, incoming: str) -> list[ResidentVersion]:
        """Retire unused versions of dropped adapters and those beyond ``keep``.

        If there are none, the oldest unused version of the adapter that holds most slots, of ``incoming`` on a tie.
        """
        if retired := [*self.slots.retire_left(), *map(self._retire, self.slots.retirable(max(1, self._keep)))]:
            return retired
        held = self.slots.held()
        unused = self.slots.retirable(1)
        most = max(unused, key=lambda ref: (held[ref.name], ref.name == incoming, -ref.version), default=None)
        return [] if most is None else [self._retire(most)]

    def retire_before(self, incoming: AdapterRef, now: float) -> list[ResidentVersion]:
        """Retire the versions that are beyond ``keep`` as soon as ``incoming`` is active. Raises ValueError if a
        version is in use that cannot be kept."""
        self.expire_pins(now)
        left = self.slots.retire_left()
        if not self._keep:
            return [*left, *(self._retire(ref, succeeded=True) for ref in self.slots.active())]
        return [*left, *map(self._retire, self.slots.retirable(self._keep, incoming.name))]

    def _retire(self, ref: AdapterRef, *, succeeded: bool = False) -> ResidentVersion:
        resident = self.slots.retire(ref, succeeded=succeeded)
        del self.replies[ref]
        return resident

    def _unpin(self, ref: AdapterRef) -> None:
        del self.pins[ref]
        self.slots.release(self.slots.resolve(str(ref)))
