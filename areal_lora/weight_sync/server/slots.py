"""Record which version is in which adapter slot of a server. Pure bookkeeping, for one thread at a time.

reserve -> (staging) -> activate -> acquire/release per request -> retire
                     -> abort
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.errors import ManifestError, UnknownVersionError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.refusal import Refusal


@dataclass(slots=True, kw_only=True)
class Resident:
    """A version in a slot; ``lora_id`` is 0 until it is active. ``in_use`` counts its running requests."""

    ref: AdapterRef
    slot: int
    lora_id: int = 0
    in_use: int = 0

    @property
    def active(self) -> bool:
        return self.lora_id > 0


class SlotTable:
    """Slots 0..n_slots-1, each holding at most one immutable version."""

    def __init__(self, n_slots: int) -> None:
        if n_slots < 2:
            raise ValueError(f"n_slots is {n_slots}; a successor needs a slot beside the version that serves")
        self._free = list(range(n_slots))
        self._residents: dict[AdapterRef, Resident] = {}

    def reserve(self, ref: AdapterRef) -> int:
        """Take a free slot for ``ref``. Raises ManifestError (``duplicate``, ``slot``)."""
        if ref in self._residents:
            raise ManifestError(Refusal.DUPLICATE, f"{ref} is resident already; versions are immutable")
        if not self._free:
            raise self.full(ref)
        slot = self._free.pop(0)
        self._residents[ref] = Resident(ref=ref, slot=slot)
        return slot

    def full(self, ref: AdapterRef) -> ManifestError:
        """Make the refusal of ``ref`` for lack of a slot; it names what holds the slots."""
        held = ", ".join(f"{r.ref} ({r.in_use} running)" for r in self._residents.values())
        return ManifestError(Refusal.SLOT, f"no free adapter slot for {ref}; held by {held}")

    def activate(self, ref: AdapterRef, lora_id: int) -> None:
        """Make ``ref`` available to requests under the engine's ``lora_id`` (> 0, never reused)."""
        if lora_id <= 0 or any(r.lora_id == lora_id for r in self._residents.values()):
            raise ValueError(f"lora_id {lora_id} of {ref} must be positive and unused")
        self._pending(ref).lora_id = lora_id

    def abort(self, ref: AdapterRef) -> None:
        """Give back the slot of a version that was not activated."""
        self._drop(self._pending(ref))

    def acquire(self, ref: AdapterRef) -> Resident:
        """Count a request in. Raises UnknownVersionError."""
        resident = self._active(ref)
        resident.in_use += 1
        return resident

    def release(self, ref: AdapterRef) -> None:
        resident = self._active(ref)
        if resident.in_use == 0:
            raise ValueError(f"{ref} was released more often than acquired")
        resident.in_use -= 1

    def retire(self, ref: AdapterRef) -> Resident:
        """Give back the slot of an unused version that has a successor. Raises UnknownVersionError, ValueError."""
        resident = self._active(ref)
        if resident.in_use:
            raise ValueError(f"{ref} still serves {resident.in_use} requests")
        if ref == self.newest(ref.name):
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

    def resolve(self, model_name: str) -> Resident:
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
            asked = AdapterRef.parse(model_name)
        except ValueError:
            return self.resolve(model_name).ref
        newest = self.newest(asked.name)
        return newest if newest is not None and asked <= newest else self._active(asked).ref

    def _versions(self, name: str) -> list[AdapterRef]:
        return [ref for ref in self.active() if ref.name == name]

    def _active(self, ref: AdapterRef) -> Resident:
        resident = self._residents.get(ref)
        if resident is None or not resident.active:
            raise UnknownVersionError(self._missing(str(ref)))
        return resident

    def _pending(self, ref: AdapterRef) -> Resident:
        resident = self._residents.get(ref)
        if resident is None or resident.active:
            raise ValueError(f"{ref} is not a reserved version awaiting activation")
        return resident

    def _drop(self, resident: Resident) -> None:
        del self._residents[resident.ref]
        self._free.append(resident.slot)

    def _missing(self, name: str) -> str:
        return f"no adapter {name!r} on this server; it serves {', '.join(map(str, self.active())) or 'none yet'}"
