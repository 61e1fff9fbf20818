"""One publish on one server as a state machine without I/O; the driver owns event loop, threads and clock.

    PublishTransaction   the order of publishes: one at a time, and none after its deadline
    next_step            Retire | EndedPin | Wait: do that and ask again; Stage ends the reservation
    staged               what the workers' answers mean: a Commit, the reply of a repeated publish, or a refusal
    activated            the version can be requested
    end                  in every case: a version that is not active gives its slot back

Drivers: ``engine.vllm_ext.adapters.ServedAdapters`` (asyncio, vLLM's workers) and
``testing.memory_server.MemoryServer`` (threads). All times are of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from areal_lora.errors import ManifestError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply, StageResult
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.server.slots import Resident
from areal_lora.weight_sync.server.versions import ServedVersions

TAKEN_OFF = (Refusal.DUPLICATE, Refusal.WIRE)
"""Right answers to a repeated version: the worker has drained its bytes, or is in no group and gets none."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Have every worker stage into ``slot``; None: drain and refuse the bytes, because of ``refusal`` if it is set."""

    slot: int | None
    refusal: ManifestError | None = None


@dataclass(frozen=True, slots=True)
class Retire:
    """Have the engine forget these versions, which no longer can be requested."""

    residents: list[Resident]


@dataclass(frozen=True, slots=True)
class EndedPin:
    """A pin was ended early because ``refusal`` would have been the answer: for the log only."""

    ref: AdapterRef
    refusal: ManifestError


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a version is released, at most ``timeout_s``."""

    timeout_s: float


ReserveStep = Stage | Retire | EndedPin | Wait


@dataclass(frozen=True, slots=True)
class Commit:
    """Between two model steps: map ``lora_id`` to ``slot``, forget ``retired``. ``staged`` since ``staged_at``."""

    lora_id: int
    slot: int
    retired: list[Resident]
    staged: Sequence[StageResult]
    staged_at: float

    @property
    def retired_ids(self) -> list[int]:
        return [r.lora_id for r in self.retired]

    @property
    def undo_ids(self) -> list[int]:
        """What the engine must forget after a commit that failed: on no worker rather than on some."""
        return [self.lora_id, *self.retired_ids]


class _Phase(Enum):
    RESERVING = auto()
    STAGING = auto()
    COMMITTING = auto()
    DONE = auto()


def late_turn(what: str) -> PublishError:
    """The refusal of a request whose turn comes after its deadline.

    Its sender has stopped waiting. The next request would wait for it, until that one is late, too.
    """
    return PublishError(f"{what} came while this server was busy, and is late by now; retry")


def check_turn(what: str, deadline: float, now: float) -> None:
    """Raises PublishError at the deadline."""
    if now >= deadline:
        raise late_turn(what)


class PublishTransaction:
    """The publish of ``ref``, in its turn. Raises PublishError after ``deadline``, ValueError during another publish.

    Half of the time until ``deadline`` may go into waiting for a slot. The newest version again needs none: its
    first reply answers it, because the trainer may not have received that.
    """

    def __init__(self, versions: ServedVersions, ref: AdapterRef, deadline: float, now: float) -> None:
        check_turn(str(ref), deadline, now)
        versions.take_turn(ref)
        self.ref = ref
        self._versions, self._deadline = versions, deadline
        self._began, self._wait_until = now, now + (deadline - now) / 2
        self._repeated = ref == versions.slots.newest(ref.name)
        self._phase = _Phase.RESERVING
        self._slot: int | None = None

    def next_step(self, now: float) -> ReserveStep:
        """What to do for a slot. After anything but ``Stage`` the driver asks again.

        The trainer sends already: without a slot the workers still take the bytes off the wire.
        """
        self._require(_Phase.RESERVING)
        if self._repeated:
            return self._stage(None)
        self._versions.expire_pins(now)
        try:
            return self._stage(self._versions.slots.reserve(self.ref))
        except ManifestError as e:
            if e.reason != Refusal.SLOT:
                return self._stage(None, e)
            # A commit retires most versions. Otherwise a request holds an old one: the oldest unused version goes.
            if retired := self._versions.make_room():
                return Retire(retired)
            if now < self._wait_until:
                return Wait(min(self._wait_until, self._versions.next_expiry()) - now)
            ended = self._versions.end_oldest_pin()
            return self._stage(None, e) if ended is None else EndedPin(ended, e)

    def staged(self, results: Sequence[StageResult], now: float) -> Commit | PublishReply:
        """What the answers of all workers mean: all hold the version, verified, or it is not activated.

        Raises ManifestError (refused) or PublishError (late).
        """
        self._require(_Phase.STAGING)
        if self._repeated:
            self._check_repeated(results)
            return self._versions.reply(self.ref)
        self._check_staged(results)
        if self._slot is None:
            raise PublishError(f"{self.ref} was staged without a slot")
        if now >= self._deadline:
            raise PublishError(f"{self.ref} was staged too late: its trainer has stopped waiting")
        self._phase = _Phase.COMMITTING
        return Commit(
            lora_id=self._versions.take_id(),
            slot=self._slot,
            retired=self._versions.retire_before(self.ref, now),
            staged=results,
            staged_at=now,
        )

    def activated(self, commit: Commit, stall_s: float, now: float) -> PublishReply:
        """The engine has done ``commit``, for which generation stood still for ``stall_s``."""
        self._require(_Phase.COMMITTING)
        phases = {p: 1e3 * max(getattr(r, f"{p}_s") for r in commit.staged) for p in ("wire", "verify", "write")}
        phases["stage"], phases["commit"] = 1e3 * (commit.staged_at - self._began), 1e3 * stall_s
        phases["commit_wait"] = 1e3 * (now - commit.staged_at)
        reply = PublishReply(ref=str(self.ref), digest=commit.staged[0].digest, phases=phases)
        self._versions.activate(self.ref, commit.lora_id, reply)
        self._phase = _Phase.DONE
        return reply

    def end(self) -> AdapterRef | None:
        """End the turn. The version that workers must forget if they have staged it; None: there is no such version.

        A worker that is late has passed its own deadline by now and writes no more into the slot.
        """
        self._versions.end_turn()
        if self._phase is _Phase.DONE or self._slot is None:
            return None
        self._versions.slots.abort(self.ref)
        self._phase = _Phase.DONE
        return self.ref

    def _stage(self, slot: int | None, refusal: ManifestError | None = None) -> Stage:
        self._slot, self._phase = slot, _Phase.STAGING
        return Stage(slot, refusal)

    def _check_repeated(self, results: Sequence[StageResult]) -> None:
        for result in results:
            if result.reason not in TAKEN_OFF:
                raise ManifestError(result.reason, result.detail)

    def _check_staged(self, results: Sequence[StageResult]) -> None:
        refused = next((r for r in results if not r.ok), None)
        if refused is not None and refused.reason == Refusal.SLOT:
            raise self._versions.slots.full(self.ref)  # a worker does not know what holds them
        if refused is not None:
            raise ManifestError(refused.reason, refused.detail)
        if len({r.digest for r in results}) > 1:
            raise ManifestError(Refusal.HASH, "workers received different numbers")

    def _require(self, phase: _Phase) -> None:
        if self._phase is not phase:
            raise ValueError(f"publish of {self.ref} is {self._phase.name.lower()}, not {phase.name.lower()}")
