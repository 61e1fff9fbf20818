"""Record which version is in which adapter slot of a server. Pure bookkeeping, for one thread at a time.

reserve -> (staging) -> activate -> acquire/release per request -> free, of what has a successor
                     -> free                                    -> drop -> (running requests end) -> retire_left

All adapters share the slots: the newest version of each, old versions in use, and one that is on its way. An adapter
that holds more than another one leaves the last free slot to it.

A restarted trainer resumes from an older version. What its previous session made beyond that is lost: it leaves the
table as a dropped adapter does, and its names are free for the versions that are made now.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from areal_lora.errors import ManifestError, RefusalReason, UnknownVersionError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.messages import PublishReply


@dataclass(slots=True, kw_only=True)
class ResidentVersion:
    """A version in a slot; ``lora_id`` is 0 until it is active. ``in_use`` counts its running requests.

    An adapter that is dropped and published again has another ``incarnation``, a number that is never used twice.
    ``session`` is the last one of the trainer to which the version is known to belong.
    """

    ref: AdapterRef
    slot: int
    incarnation: int
    session: int = 0
    lora_id: int = 0
    in_use: int = 0


class ServedVersions:
    """Slots 0..n_slots-1, each with at most one immutable version, for up to ``adapters`` adapters at a time.

    ``active`` maps the versions that can be requested to the acknowledgement of their publish, ``incarnations`` the
    adapters to their incarnation. ``left`` are lost versions and those of dropped adapters, on which requests may run.
    ``session`` is the trainer's newest. ``keep`` versions of an adapter stay in their slots without a request; 0: one
    ends as its successor starts, in its memory (merged). ``pins`` hold versions, until a time of the caller's clock.
    """

    def __init__(self, n_slots: int, keep: int, adapters: int = 1) -> None:
        if n_slots < 2:
            raise ValueError(f"n_slots is {n_slots}; a successor needs a slot beside the version that serves")
        self._free, self._keep, self.adapters = list(range(n_slots)), keep, adapters
        self._residents: dict[AdapterRef, ResidentVersion] = {}
        self._numbers = itertools.count(1)  # of incarnations
        self.active: dict[AdapterRef, PublishReply] = {}
        self.incarnations: dict[str, int] = {}
        self.left: list[ResidentVersion] = []
        self.session = 0
        self.pins: dict[AdapterRef, float] = {}
        self.lora_ids = itertools.count(1)  # ids for the engine, each used once
        self.follow_ids: dict[str, int] = {}
        """By adapter, the id of requests that the engine computes under its newest version (policy ``keep``)."""
        self.publishing: AdapterRef | None = None

    def reserve(self, ref: AdapterRef) -> int:
        """Take a free slot for ``ref``. Raises ManifestError (``duplicate``, ``slot``).

        Each absent adapter has one, and the last one is for an adapter that holds fewer than another.
        """
        if ref in self._residents:
            raise ManifestError(RefusalReason.DUPLICATE, f"{ref} is resident already; versions are immutable")
        held = Counter(resident.name for resident in self._residents)
        reserved = 0  # for other adapters
        if mine := held.pop(ref.name, 0):
            absent = max(self.adapters - len(held) - 1, 0)
            others = [*held.values()] + [1] * bool(absent)
            reserved = absent + (mine > min(others, default=mine))
        if len(self._free) <= reserved:
            raise self.full(ref)
        slot = self._free.pop(0)
        incarnation = self.incarnations.setdefault(ref.name, next(self._numbers))
        self._residents[ref] = ResidentVersion(ref=ref, slot=slot, incarnation=incarnation, session=self.session)
        return slot

    def full(self, ref: AdapterRef) -> ManifestError:
        """Make the refusal of ``ref`` for lack of a slot; it names what holds the slots."""
        held = ", ".join(f"{r.ref} ({r.in_use} running)" for r in [*self._residents.values(), *self.left])
        return ManifestError(RefusalReason.SLOT, f"no free adapter slot for {ref}; held by {held}")

    def activate(self, ref: AdapterRef, lora_id: int, reply: PublishReply) -> None:
        """Make the reserved ``ref`` available to requests under the engine's ``lora_id``, one of ``lora_ids``."""
        self._residents[ref].lora_id = lora_id
        self.active[ref] = reply

    def free(self, ref: AdapterRef) -> ResidentVersion:
        """Give back the slot of a version. Raises ValueError if requests run on it."""
        resident = self._residents[ref]
        if resident.in_use:
            raise ValueError(f"{ref} still serves {resident.in_use} requests")
        del self._residents[ref]
        self.active.pop(ref, None)
        self._free.append(resident.slot)
        if all(other.name != ref.name for other in self._residents):
            del self.incarnations[ref.name]
        return resident

    def resolve(self, model: str, *, or_newer: bool = False) -> ResidentVersion:
        """Find the version ``name@vN``, or the newest one of a bare adapter name. Raises UnknownVersionError.

        With ``or_newer`` the newest version of the adapter, if it is not older than that in the name.
        """
        try:
            ref = AdapterRef.parse(model)
        except ValueError:
            ref = None
        name = model if ref is None else ref.name
        newest = max((version for version in self.active if version.name == name), default=None)
        if newest is not None and (ref is None or (or_newer and ref <= newest)):
            ref = newest
        if ref is None or ref not in self.active:
            served = ", ".join(map(str, sorted(self.active))) or "none yet"
            raise UnknownVersionError(f"no adapter {model!r} on this server; it serves {served}")
        return self._residents[ref]

    def acquire(
        self, model: str, *, pinned: bool = False, or_newer: bool = False, incarnation: int | None = None
    ) -> ResidentVersion:
        """Count in a request for ``model``, as `resolve` finds it.

        With ``pinned`` the pins on other versions of the adapter end. With ``incarnation`` an adapter that got the name
        after that one was dropped is another one. Raises UnknownVersionError.
        """
        resident = self.resolve(model, or_newer=or_newer)
        ref = resident.ref
        if incarnation is not None and incarnation != resident.incarnation:
            raise UnknownVersionError(f"adapter {ref.name!r} was deleted; another one has its name now")
        resident.in_use += 1
        if pinned:
            for other in [pin for pin in self.pins if pin.name == ref.name and pin != ref]:
                self.unpin(other)
        return resident

    def release(self, resident: ResidentVersion, pin_until: float | None = None) -> None:
        """Count a request out. With ``pin_until`` the version stays pinned until then, unless it has left."""
        if resident.in_use == 0:
            raise ValueError(f"{resident.ref} was released more often than acquired")
        if pin_until is not None and self._residents.get(resident.ref) is resident:
            resident.in_use += resident.ref not in self.pins
            self.pins[resident.ref] = pin_until
        resident.in_use -= 1

    def unpin(self, ref: AdapterRef) -> None:
        del self.pins[ref]
        self._residents[ref].in_use -= 1

    def expire_pins(self, now: float) -> float:
        """End the pins that are over, and return when the next one expires; infinite without a pin."""
        for ref in [ref for ref, until in self.pins.items() if until <= now]:
            self.unpin(ref)
        return min(self.pins.values(), default=math.inf)

    def drop(self, name: str, lost: list[AdapterRef] | None = None) -> int:
        """Forget adapter ``name``, or only its ``lost`` versions, and their pins; return how many requests run on them.

        ``retire_left`` frees the slots. Raises ValueError during its publish.
        """
        mine = [ref for ref in self._residents if ref.name == name and (lost is None or ref in lost)]
        if not all(ref in self.active for ref in mine):
            raise ValueError(f"{name} cannot be dropped while it is published")
        for ref in self.pins.keys() & mine:
            self.unpin(ref)
        leaving = [self._residents.pop(ref) for ref in mine]
        for ref in mine:
            del self.active[ref]
        if mine:
            self.follow_ids.pop(name, None)  # requests that have it stay on the version that leaves
        self.left += leaving
        if lost is None:
            self.incarnations.pop(name, None)
        return sum(r.in_use for r in leaving)

    def retire_left(self) -> list[ResidentVersion]:
        """Give back the slots of versions that have left and that no request uses."""
        retired = [r for r in self.left if not r.in_use]
        self.left = [r for r in self.left if r.in_use]
        self._free += [r.slot for r in retired]
        return retired

    def make_room(self, incoming: str) -> list[ResidentVersion]:
        """Retire unused versions of dropped adapters and those beyond ``keep``; if there are none, the oldest unused
        version of the adapter that holds most slots, of ``incoming`` on a tie."""
        if retired := [*self.retire_left(), *map(self.free, self.retirable(max(1, self._keep)))]:
            return retired
        held = Counter(ref.name for ref in self._residents)
        unused = self.retirable(1)
        most = max(unused, key=lambda ref: (held[ref.name], ref.name == incoming, -ref.version), default=None)
        return [] if most is None else [self.free(most)]

    def retire_before(self, incoming: AdapterRef, now: float) -> list[ResidentVersion]:
        """Retire what is beyond ``keep`` once ``incoming`` is active. Raises ValueError for a version still in use."""
        self.expire_pins(now)
        beyond = self.retirable(self._keep, incoming.name) if self._keep else sorted(self.active)
        return [*self.retire_left(), *map(self.free, beyond)]

    def retirable(self, keep: int, incoming: str | None = None) -> list[AdapterRef]:
        """List unused versions beyond the newest ``keep`` (>= 1) active ones of their adapter, oldest first.

        A version of ``incoming`` that is about to become active is counted in; the one before it is never listed.
        """
        kept: set[AdapterRef] = set()
        for name in self.incarnations:
            versions = sorted(ref for ref in self.active if ref.name == name)
            kept.update(versions[-max(1, keep - (name == incoming)) :])
        return sorted(ref for ref in self.active if ref not in kept and not self._residents[ref].in_use)


def enter_session(versions: ServedVersions, manifest: ShardManifest) -> int:
    """Drop an adapter's versions that the trainer of ``manifest`` does not have; return how many requests run on them.

    Raises ManifestError (``stale_version``) for a trainer that another session has replaced.
    """
    if manifest.session < versions.session:
        text = f"{manifest.ref} is of session {manifest.session} of the trainer; session {versions.session} runs now"
        raise ManifestError(RefusalReason.STALE_VERSION, text)
    versions.session = manifest.session
    mine = [versions.resolve(str(ref)) for ref in versions.active if ref.name == manifest.ref.name]
    lost = [resident.ref for resident in mine if not manifest.shares(resident.ref, resident.session)]
    for resident in mine:
        resident.session = manifest.session
    return versions.drop(manifest.ref.name, lost)
