"""Decide the steps of one publish on one server, without I/O; the driver owns event loop, threads and clock.

    PublishTransaction   take the turn: one publish at a time, none after its deadline
    next_step            Retire | EndedPin | AwaitRelease: do it and call again; Stage ends the reservation
    staged               judge the workers' answers: a Commit, the reply of a repeated publish, or a refusal
    activated            the engine has done the commit: requests can name the version
    end                  always: free the slot of a version that is not active

Drivers: ``engine.vllm_ext.server.adapters.ServedAdapters`` (asyncio, vLLM's workers) and
the tests' ``MemoryServer`` (threads). All times are of one monotonic clock, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.errors import ManifestError, PublishError, RefusalReason
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.messages import PublishReply, StageResult
from areal_lora.weight_sync.server.slot_table import ResidentVersion, ServedVersions, enter_session

SLOT_WAIT_S = 1.0
"""Longest wait for a slot in place where other adapters may be waiting behind: the trainer tries again."""
TAKEN_OFF = (RefusalReason.DUPLICATE, RefusalReason.SLOT, RefusalReason.WIRE)
"""Accepted answers to a repeated version: the worker has drained its bytes, or is in no group and receives none."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Have every worker stage into ``slot``; None: drain and refuse the bytes, because of ``refusal`` if it is set."""

    slot: int | None
    refusal: ManifestError | None = None


@dataclass(frozen=True, slots=True)
class Retire:
    """Have the engine forget these versions; requests can no longer name them."""

    residents: list[ResidentVersion]


@dataclass(frozen=True, slots=True)
class EndedPin:
    """Report in the log that the pin on ``ref`` was ended early, to avoid ``refusal``."""

    ref: AdapterRef
    refusal: ManifestError


@dataclass(frozen=True, slots=True)
class AwaitRelease:
    """Wait until a version is released, at most ``timeout_s``."""

    timeout_s: float


ReserveStep = Stage | Retire | EndedPin | AwaitRelease


@dataclass(frozen=True, slots=True)
class Commit:
    """Between two model steps: map ``lora_id`` to ``slot``, forget ``retired``. ``staged`` since ``staged_at``."""

    lora_id: int
    slot: int
    retired: list[ResidentVersion]
    staged: Sequence[StageResult]
    staged_at: float

    @property
    def retired_ids(self) -> list[int]:
        return [r.lora_id for r in self.retired]

    @property
    def undo_ids(self) -> list[int]:
        """Ids the engine must forget after a failed commit: a version serves on no worker rather than on some."""
        return [self.lora_id, *self.retired_ids]


def late_turn(what: str) -> PublishError:
    """Make the refusal of a request whose turn comes after its deadline.

    The sender has stopped waiting. Serving the request late would delay the next one beyond its deadline, too.
    """
    return PublishError(f"{what} came while this server was busy, and is late by now; retry")


def check_turn(what: str, deadline: float, now: float) -> None:
    """Raise PublishError from the deadline on."""
    if now >= deadline:
        raise late_turn(what)


class PublishTransaction:
    """Publish a version. Raises PublishError from ``deadline`` on, ValueError during another publish.

    At most half of the time until ``deadline`` goes into waiting for a slot, at most ``SLOT_WAIT_S`` where there are
    several adapters. A repeated publish of the newest version gets the first reply again and needs no slot.
    ``lost`` requests run on versions that the trainer has lost with its previous session (`enter_session`).
    """

    def __init__(self, versions: ServedVersions, manifest: ShardManifest, deadline: float, now: float) -> None:
        ref = manifest.ref
        check_turn(str(ref), deadline, now)
        if versions.publishing is not None:
            raise ValueError(f"{ref} cannot be published during the publish of {versions.publishing}")
        versions.publishing = self.ref = ref
        self._versions, self._deadline = versions, deadline
        wait_s = (deadline - now) / 2
        self._began, self._wait_until = now, now + (wait_s if versions.adapters == 1 else min(wait_s, SLOT_WAIT_S))
        self.lost = 0
        self._replaced: ManifestError | None = None
        try:
            self.lost = enter_session(versions, manifest)
        except ManifestError as e:
            self._replaced = e
        self._repeated = ref in versions.active and ref == versions.resolve(ref.name).ref
        self._slot: int | None = None
        """Reserved for ``ref``, which is not active yet."""

    def next_step(self, now: float) -> ReserveStep:
        """Return the next step towards a slot. After any step but ``Stage`` the driver calls again.

        The trainer is sending already: without a slot the workers still drain the bytes.
        """
        if self._repeated or self._replaced:
            return Stage(None, self._replaced)
        next_expiry = self._versions.expire_pins(now)
        try:
            self._slot = self._versions.reserve(self.ref)
            return Stage(self._slot)
        except ManifestError as e:
            if e.reason != RefusalReason.SLOT:
                return Stage(None, e)
            # A commit retires most versions. Otherwise a request holds an old one: the oldest unused version goes.
            if retired := self._versions.make_room(self.ref.name):
                return Retire(retired)
            if now < self._wait_until:
                return AwaitRelease(min(self._wait_until, next_expiry) - now)
            oldest = next(iter(self._versions.pins), None)
            if oldest is None:
                return Stage(None, e)
            self._versions.unpin(oldest)
            return EndedPin(oldest, e)

    def staged(self, results: Sequence[StageResult], now: float) -> Commit | PublishReply:
        """Judge the answers of all workers: unless all hold the verified version, it is not activated.

        Raises ManifestError (refused) or PublishError (late).
        """
        if self._replaced:
            raise self._replaced
        if self._repeated:
            for result in results:
                if result.reason not in TAKEN_OFF:
                    raise ManifestError(result.reason, result.detail)
            return self._versions.active[self.ref]
        for refused in results:
            if not refused.ok and refused.reason == RefusalReason.SLOT:
                raise self._versions.full(self.ref)  # a worker does not know what holds them
            if not refused.ok:
                raise ManifestError(refused.reason, refused.detail)
        if len({r.digest for r in results}) > 1:
            raise ManifestError(RefusalReason.HASH, "workers received different numbers")
        if self._slot is None:
            raise PublishError(f"{self.ref} was staged without a slot")
        if now >= self._deadline:
            raise PublishError(f"{self.ref} was staged too late: its trainer has stopped waiting")
        return Commit(
            lora_id=next(self._versions.lora_ids),
            slot=self._slot,
            retired=self._versions.retire_before(self.ref, now),
            staged=results,
            staged_at=now,
        )

    def activated(self, commit: Commit, stall_s: float, now: float, hold_s: float = 0.0) -> PublishReply:
        """Activate the version after the engine has done ``commit``, which stalled generation for ``stall_s``.

        For ``hold_s`` before it no request could start, because the running ones had to end first.
        """
        worked = ("wire", "verify", "write")
        phases = {p: 1e3 * max(getattr(r, f"{p}_s") for r in commit.staged) for p in worked}
        phases["stage"], phases["commit"] = 1e3 * (commit.staged_at - self._began), 1e3 * stall_s
        if hold_s:
            phases["hold"] = 1e3 * hold_s
        phases["commit_wait"] = 1e3 * (now - commit.staged_at)
        reply = PublishReply(ref=str(self.ref), digest=commit.staged[0].digest, phases=phases)
        self._versions.activate(self.ref, commit.lora_id, reply)
        self._slot = None
        return reply

    def end(self) -> AdapterRef | None:
        """End the turn, and return the version that workers must forget if they have staged it, if any.

        A late worker has passed its own deadline by now and does not write into the slot.
        """
        self._versions.publishing = None
        if self._slot is None:
            return None
        self._slot = None
        self._versions.free(self.ref)
        return self.ref
