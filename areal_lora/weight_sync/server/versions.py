"""Record the versions of one server and what keeps each in its slot: requests and pins. No I/O, no clock."""

from __future__ import annotations

import math

from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply
from areal_lora.weight_sync.server.slots import Resident, SlotTable


class ServedVersions:
    """A slot table, the pins on its versions and the acknowledgement of each version.

    ``keep`` versions of an adapter stay in their slots without a request. A pin holds a version like a request,
    until a time that the caller gives. Each ``now`` is the driver's monotonic clock, in seconds.
    """

    def __init__(self, n_slots: int, keep: int) -> None:
        self.slots, self._keep = SlotTable(n_slots), keep
        self._pins: dict[AdapterRef, float] = {}
        self._replies: dict[AdapterRef, PublishReply] = {}
        self._next_id = 1
        self._publishing: AdapterRef | None = None

    def acquire(self, model: str, *, pinned: bool = False, or_newer: bool = False) -> Resident:
        """Count in a request for ``model``; ``or_newer``: for the newest version of its adapter, if not older.

        With ``pinned`` the pins on other versions of the adapter end. Raises UnknownVersionError.
        """
        ref = self.slots.newest_from(model) if or_newer else self.slots.resolve(model).ref
        resident = self.slots.acquire(ref)
        if pinned:
            for other in [pin for pin in self._pins if pin.name == ref.name and pin != ref]:
                self._unpin(other)
        return resident

    def release(self, ref: AdapterRef, pin_until: float | None = None) -> None:
        """Count a request out. With ``pin_until`` the version stays pinned until then."""
        if pin_until is not None:
            if ref not in self._pins:
                self.slots.acquire(ref)
            self._pins[ref] = pin_until
        self.slots.release(ref)

    def expire_pins(self, now: float) -> None:
        for ref in [ref for ref, until in self._pins.items() if until <= now]:
            self._unpin(ref)

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
        """Begin the publish of ``ref``. Raises ValueError during another publish: the driver must serialize them."""
        if self._publishing is not None:
            raise ValueError(f"{ref} cannot be published during the publish of {self._publishing}")
        self._publishing = ref

    def end_turn(self) -> None:
        self._publishing = None

    def retire(self, ref: AdapterRef, now: float) -> Resident:
        """Free the slot of a version. Raises UnknownVersionError; ValueError if it is in use or the newest."""
        self.expire_pins(now)
        return self._retire(ref)

    def make_room(self) -> list[Resident]:
        """Retire unused versions beyond ``keep``; if there are none, the oldest unused version."""
        return [self._retire(ref) for ref in self.slots.retirable(self._keep) or self.slots.retirable(1)[:1]]

    def retire_before(self, incoming: AdapterRef, now: float) -> list[Resident]:
        """Retire the versions that are beyond ``keep`` as soon as ``incoming`` is active."""
        self.expire_pins(now)
        return [self._retire(ref) for ref in self.slots.retirable(self._keep, incoming.name)]

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

    def _retire(self, ref: AdapterRef) -> Resident:
        resident = self.slots.retire(ref)
        del self._replies[ref]
        return resident

    def _unpin(self, ref: AdapterRef) -> None:
        del self._pins[ref]
        self.slots.release(ref)
