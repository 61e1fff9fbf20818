"""Record the versions of one server and what keeps each in its slot: requests and pins. No I/O, no clock."""

from __future__ import annotations

import math

from areal_lora.errors import UnknownVersionError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply
from areal_lora.weight_sync.server.slot_table import ResidentVersion, SlotTable


class ServedVersions:
    """A slot table for up to ``adapters`` adapters, the pins on its versions and the acknowledgement of each version.

    ``keep`` versions of an adapter stay in their slots without a request; 0: a version ends as its successor starts,
    because both have the same memory (merged weights). A pin holds a version like a request,
    until a time that the caller gives. Each ``now`` is the driver's monotonic clock, in seconds.
    """

    def __init__(self, n_slots: int, keep: int, adapters: int = 1) -> None:
        self.slots, self._keep, self.adapters = SlotTable(n_slots, adapters), keep, adapters
        self._pins: dict[AdapterRef, float] = {}
        self._replies: dict[AdapterRef, PublishReply] = {}
        self._next_id = 1
        self._publishing: AdapterRef | None = None

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
            for other in [pin for pin in self._pins if pin.name == ref.name and pin != ref]:
                self._unpin(other)
        return resident

    def release(self, resident: ResidentVersion, pin_until: float | None = None) -> None:
        """Count a request out. With ``pin_until`` the version stays pinned until then, unless it was dropped."""
        if pin_until is not None and resident.incarnation == self.slots.incarnation(resident.ref.name):
            if resident.ref not in self._pins:
                self.slots.acquire(resident.ref)
            self._pins[resident.ref] = pin_until
        self.slots.release(resident)

    def drop(self, name: str) -> int:
        """Forget adapter ``name``, its pins and acknowledgements; return how many requests run on it.

        Raises ValueError during its publish.
        """
        for ref in [pin for pin in self._pins if pin.name == name]:
            self._unpin(ref)
        running = self.slots.drop(name)
        for ref in [ref for ref in self._replies if ref.name == name]:
            del self._replies[ref]
        return running

    def expire_pins(self, now: float) -> None:
        for ref in [ref for ref, until in self._pins.items() if until <= now]:
            self._unpin(ref)

    @property
    def pinned(self) -> bool:
        return bool(self._pins)

    def next_expiry(self) -> float:
        """Return the time at which the next pin expires; infinite without a pin."""
        return min(self._pins.values(), default=math.inf)

    def end_oldest_pin(self) -> AdapterRef | None:
        """End the oldest pin and return its version; None if no version is pinned."""
        ref = next(iter(self._pins), None)
        if ref is not None:
            self._unpin(ref)
        return ref

    def take_turn(self, ref: AdapterRef) -> None:
        """Start the publish of ``ref``. Raises ValueError during another publish: the driver must serialize them."""
        if self._publishing is not None:
            raise ValueError(f"{ref} cannot be published during the publish of {self._publishing}")
        self._publishing = ref

    def end_turn(self) -> None:
        self._publishing = None

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

    def take_id(self) -> int:
        """Return an adapter id for the engine that was never used before."""
        self._next_id += 1
        return self._next_id - 1

    def activate(self, ref: AdapterRef, lora_id: int, reply: PublishReply) -> None:
        """Make ``ref`` available to requests; ``reply`` acknowledges this and every repeated publish of it."""
        self.slots.activate(ref, lora_id)
        self._replies[ref] = reply

    def reply(self, ref: AdapterRef) -> PublishReply:
        return self._replies[ref]

    def _retire(self, ref: AdapterRef, *, succeeded: bool = False) -> ResidentVersion:
        resident = self.slots.retire(ref, succeeded=succeeded)
        del self._replies[ref]
        return resident

    def _unpin(self, ref: AdapterRef) -> None:
        del self._pins[ref]
        self.slots.release(self.slots.resolve(str(ref)))
