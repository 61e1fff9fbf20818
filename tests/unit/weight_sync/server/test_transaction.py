"""The publish transaction as data: every fact and every time is an argument."""

from __future__ import annotations

import os
from random import Random

import pytest

from areal_lora.errors import ManifestError, PublishError, RefusalReason, UnknownVersionError
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.messages import PublishReply, StageResult
from areal_lora.weight_sync.server.slot_table import ResidentVersion, ServedVersions
from areal_lora.weight_sync.server.transaction import (
    SLOT_WAIT_S,
    AwaitRelease,
    Commit,
    EndedPin,
    PublishTransaction,
    Retire,
    Stage,
    check_turn,
)

SEED = int(os.environ.get("AREAL_LORA_TEST_SEED", "20240607"))


def a(version: int, name: str = "a") -> AdapterRef:
    return AdapterRef(name=name, version=version)


def ok(ref: AdapterRef, slot: int | None, digest: str = "d", **seconds: float) -> StageResult:
    return StageResult(ref=str(ref), slot=-1 if slot is None else slot, ok=True, digest=digest, **seconds)


def no(ref: AdapterRef, reason: str, detail: str = "as told") -> StageResult:
    return StageResult(ref=str(ref), slot=-1, ok=False, reason=reason, detail=detail)


def opened(
    versions: ServedVersions,
    ref: AdapterRef,
    deadline: float = 10.0,
    now: float = 0.0,
    session: int = 0,
    since: int = 0,
) -> PublishTransaction:
    manifest = ShardManifest(
        run="r", ref=ref, parent=None, base_digest="b", layout="l", session=session, resumed_from=since
    )
    return PublishTransaction(versions, manifest, deadline, now)


def reserved(publish: PublishTransaction, now: float = 0.0) -> Stage:
    """The end of a reservation that need not wait."""
    while not isinstance(step := publish.next_step(now), Stage):
        assert isinstance(step, Retire), step
    return step


def published(versions: ServedVersions, ref: AdapterRef, now: float = 0.0, session: int = 0) -> PublishReply:
    publish = opened(versions, ref, now + 10.0, now, session)
    try:
        slot = reserved(publish, now).slot
        commit = publish.staged([ok(ref, slot)], now)
        assert isinstance(commit, Commit)
        return publish.activated(commit, 0.001, now)
    finally:
        publish.end()


def refs(versions: ServedVersions) -> list[int]:
    return [ref.version for ref in sorted(versions.active)]


def test_a_version_is_staged_committed_and_then_requested() -> None:
    versions = ServedVersions(3, keep=2)
    publish = opened(versions, a(0), now=1.0)
    assert publish.next_step(1.0) == Stage(slot=0)
    with pytest.raises(UnknownVersionError):
        versions.acquire("a")
    results = [ok(a(0), 0, wire_s=0.2, write_s=0.1), ok(a(0), 0, wire_s=0.1, verify_s=0.3)]
    commit = publish.staged(results, 2.0)
    assert isinstance(commit, Commit)
    assert (commit.lora_id, commit.slot, commit.retired, commit.undo_ids) == (1, 0, [], [1])
    with pytest.raises(UnknownVersionError):
        versions.acquire("a")
    reply = publish.activated(commit, 0.001, 2.5)
    assert publish.end() is None
    assert (reply.ref, reply.digest) == ("a@v0", "d")
    want = {"wire": 200, "verify": 300, "write": 100, "stage": 1000, "commit": 1, "commit_wait": 500}
    assert reply.phases == pytest.approx(want)
    assert versions.acquire("a").lora_id == 1


def test_the_commit_retires_what_is_beyond_the_kept_versions() -> None:
    versions = ServedVersions(3, keep=2)
    for version in range(4):
        published(versions, a(version))
    assert refs(versions) == [2, 3]
    publish = opened(versions, a(4))
    slot = reserved(publish).slot
    commit = publish.staged([ok(a(4), slot)], 0.0)
    assert isinstance(commit, Commit)
    assert (commit.retired_ids, commit.undo_ids) == ([3], [5, 3])
    assert refs(versions) == [3], "forgotten before the engine is asked"


def test_no_publish_begins_during_another_or_after_its_deadline() -> None:
    versions = ServedVersions(3, keep=2)
    with pytest.raises(PublishError, match=r"a@v0 came while .* late by now"):
        opened(versions, a(0), deadline=1.0, now=1.0)
    with pytest.raises(PublishError, match=r"a join came while .* late by now"):
        check_turn("a join", 1.0, 1.0)
    check_turn("a join", 1.0, 0.9)
    publish = opened(versions, a(0))
    with pytest.raises(ValueError, match="during the publish of a@v0"):
        opened(versions, a(0, "b"))
    publish.end()
    opened(versions, a(0, "b"))


@pytest.mark.parametrize(
    ("results", "error", "reason"),
    [
        ([ok(a(1), 1), no(a(1), RefusalReason.ALPHA)], ManifestError, RefusalReason.ALPHA),
        ([no(a(1), RefusalReason.WIRE), no(a(1), RefusalReason.ALPHA)], ManifestError, RefusalReason.WIRE),
        ([no(a(1), RefusalReason.SLOT)], ManifestError, RefusalReason.SLOT),
        ([no(a(1), RefusalReason.DUPLICATE)], ManifestError, RefusalReason.DUPLICATE),
        ([ok(a(1), 1), ok(a(1), 1, digest="e")], ManifestError, RefusalReason.HASH),
        ([ok(a(1), 1)], PublishError, ""),
    ],
)
def test_a_refused_or_late_version_gives_its_slot_back_and_workers_forget_it(
    results: list[StageResult], error: type[Exception], reason: str
) -> None:
    versions = ServedVersions(2, keep=1)
    published(versions, a(0))
    for _ in range(3):  # a slot that stayed reserved would be missed at the second
        publish = opened(versions, a(1))
        assert reserved(publish).slot == 1
        with pytest.raises(error) as e:
            publish.staged(results, 0.0 if reason else 10.0)
        if isinstance(e.value, ManifestError):
            assert e.value.reason == reason
        else:
            assert "staged too late" in str(e.value)
        assert publish.end() == a(1)
        assert refs(versions) == [0]
    assert published(versions, a(1)).ref == "a@v1"


def test_a_commit_that_fails_gives_its_slot_back_and_its_id_is_not_used_again() -> None:
    versions = ServedVersions(2, keep=1)
    published(versions, a(0))
    publish = opened(versions, a(1))
    slot = reserved(publish).slot
    failed = publish.staged([ok(a(1), slot)], 0.0)
    assert isinstance(failed, Commit)
    assert publish.end() == a(1)
    published(versions, a(1))
    assert versions.acquire("a@v1").lora_id > failed.lora_id


def test_the_newest_version_again_gets_its_first_reply_and_no_slot() -> None:
    versions = ServedVersions(3, keep=2)
    published(versions, a(0))
    reply = published(versions, a(1))
    for reasons in ((RefusalReason.DUPLICATE, RefusalReason.DUPLICATE), (RefusalReason.WIRE, RefusalReason.DUPLICATE)):
        publish = opened(versions, a(1))
        assert publish.next_step(0.0) == Stage(slot=None)
        assert publish.staged([no(a(1), reason) for reason in reasons], 99.0) is reply, "late or not: it is active"
        assert publish.end() is None, "workers must not forget what they serve"
    publish = opened(versions, a(1))
    publish.next_step(0.0)
    with pytest.raises(ManifestError, match="as told") as e:
        publish.staged([no(a(1), RefusalReason.DUPLICATE), no(a(1), RefusalReason.WRONG_BASE)], 0.0)
    assert e.value.reason == RefusalReason.WRONG_BASE
    assert publish.end() is None
    assert refs(versions) == [0, 1]


def test_an_older_active_version_is_drained_and_its_refusal_is_the_workers() -> None:
    versions = ServedVersions(3, keep=2)
    for version in range(2):
        published(versions, a(version))
    publish = opened(versions, a(0))
    step = publish.next_step(0.0)
    assert isinstance(step, Stage)
    assert (step.slot, step.refusal and step.refusal.reason) == (None, RefusalReason.DUPLICATE)
    with pytest.raises(ManifestError) as e:
        publish.staged([no(a(0), RefusalReason.STALE_VERSION)], 0.0)
    assert e.value.reason == RefusalReason.STALE_VERSION
    assert publish.end() is None
    assert refs(versions) == [0, 1]


def test_without_a_slot_a_worker_that_claims_to_have_staged_is_not_believed() -> None:
    versions = ServedVersions(2, keep=1)
    for version in range(2):
        published(versions, a(version))
        versions.acquire(f"a@v{version}")
    publish = opened(versions, a(2))
    assert isinstance(publish.next_step(5.0), Stage)
    with pytest.raises(PublishError, match="staged without a slot"):
        publish.staged([ok(a(2), None)], 5.0)
    assert publish.end() is None


def test_a_publish_waits_half_of_its_time_for_a_slot_and_then_says_what_holds_them() -> None:
    versions = ServedVersions(2, keep=1)
    for version in range(2):
        published(versions, a(version))
        versions.acquire(f"a@v{version}")
    publish = opened(versions, a(2), deadline=12.0, now=2.0)
    assert publish.next_step(2.0) == AwaitRelease(5.0)
    assert publish.next_step(6.5) == AwaitRelease(0.5)
    step = publish.next_step(7.0)
    assert isinstance(step, Stage)
    assert step.slot is None
    assert "held by a@v0 (1 running), a@v1 (1 running)" in str(step.refusal)
    with pytest.raises(ManifestError, match="held by a@v0"):
        publish.staged([no(a(2), RefusalReason.SLOT)], 7.5)
    assert publish.end() is None


def test_a_released_version_makes_room_for_the_waiting_publish() -> None:
    versions = ServedVersions(2, keep=1)
    used = []
    for version in range(2):
        published(versions, a(version))
        used.append(versions.acquire(f"a@v{version}"))
    publish = opened(versions, a(2))
    assert isinstance(publish.next_step(0.0), AwaitRelease)
    versions.release(used[1])
    assert isinstance(publish.next_step(0.0), AwaitRelease), "the newest is not retired, used or not"
    versions.release(used[0])
    step = publish.next_step(0.0)
    assert isinstance(step, Retire)
    assert [(r.ref, r.lora_id) for r in step.residents] == [(a(0), 1)]
    assert publish.next_step(0.0) == Stage(slot=0)


def test_a_pin_holds_until_its_end_and_a_publish_waits_no_longer_than_that() -> None:
    versions = ServedVersions(2, keep=1)
    published(versions, a(0))
    versions.release(versions.acquire("a@v0", pinned=True), pin_until=3.0)
    published(versions, a(1))
    assert refs(versions) == [0, 1], "a commit retires no pinned version"
    assert versions.expire_pins(2.9) == 3.0
    with pytest.raises(ValueError, match="1 requests"):
        versions.free(a(0))
    publish = opened(versions, a(2))
    assert publish.next_step(1.0) == AwaitRelease(2.0)
    step = publish.next_step(3.0)
    assert isinstance(step, Retire)
    assert [r.ref for r in step.residents] == [a(0)]


def test_the_oldest_pin_ends_when_waiting_does_not_help() -> None:
    versions = ServedVersions(3, keep=1)
    for ref in (a(0, "b"), a(0)):
        published(versions, ref)
        versions.release(versions.acquire(str(ref), pinned=True), pin_until=99.0)
    published(versions, a(1))
    publish = opened(versions, a(2))
    assert publish.next_step(0.0) == AwaitRelease(5.0)
    steps = [publish.next_step(5.0) for _ in range(4)]
    assert [type(s) for s in steps] == [EndedPin, EndedPin, Retire, Stage]
    assert [s.ref for s in steps if isinstance(s, EndedPin)] == [a(0, "b"), a(0)]
    assert [r.ref for s in steps if isinstance(s, Retire) for r in s.residents] == [a(0)]


def test_a_pinned_request_ends_the_pins_on_other_versions_of_its_adapter() -> None:
    versions = ServedVersions(4, keep=1)
    for name in ("a", "b"):
        published(versions, a(0, name))
        versions.release(versions.acquire(f"{name}@v0", pinned=True), pin_until=99.0)
        published(versions, a(1, name))
    assert len(versions.active) == 4
    versions.acquire("a@v1", pinned=True)
    assert versions.free(a(0)).ref == a(0)
    with pytest.raises(ValueError, match="1 requests"):
        versions.free(a(0, "b"))


def test_where_several_adapters_wait_a_server_does_not_hold_the_others_up() -> None:
    """The trainer comes back for the slot; meanwhile another adapter's publish has its turn."""
    versions = ServedVersions(4, keep=1, adapters=2)
    for ref in (a(0), a(0, "b"), a(1), a(1, "b")):
        published(versions, ref)
        versions.acquire(str(ref))
    publish = opened(versions, a(2), deadline=10.0)
    assert publish.next_step(0.0) == AwaitRelease(SLOT_WAIT_S)
    step = publish.next_step(SLOT_WAIT_S)
    assert isinstance(step, Stage)
    assert step.slot is None


def test_room_is_made_by_whoever_holds_most_and_by_the_incoming_one_on_a_tie() -> None:
    versions = ServedVersions(6, keep=3, adapters=2)
    for version in range(3):
        published(versions, a(version, "b"))
    for version in range(3):
        published(versions, a(version))
    assert [r.ref for r in versions.make_room("a")] == [a(0)]
    assert [r.ref for r in versions.make_room("a")] == [a(0, "b")]
    assert [r.ref for r in versions.make_room("b")] == [a(1, "b")]


class Identities(list[ResidentVersion]):
    """Residents that left; another one may be equal in all its values."""

    def __contains__(self, resident: object) -> bool:
        return any(resident is other for other in self)


class Model:
    """What a server must hold: nothing about slots, only sets."""

    def __init__(self) -> None:
        self.active: dict[AdapterRef, PublishReply] = {}
        self.running: list[ResidentVersion] = []
        self.left = Identities()

    def leave(self, refs: set[AdapterRef], versions: ServedVersions) -> None:
        self.left += [versions.resolve(str(ref)) for ref in refs]
        self.active = {ref: reply for ref, reply in self.active.items() if ref not in refs}

    def newest(self, name: str) -> AdapterRef | None:
        return max((ref for ref in self.active if ref.name == name), default=None)


class Walk:
    """Random publishes, requests, pins and pauses on one server, compared with a ``Model``."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        sizes = [(2, 1, 1), (3, 2, 1), (4, 2, 2), (6, 3, 1), (6, 3, 2), (5, 1, 3), (6, 1, 4)]
        self.n_slots, self.keep, adapters = self.rng.choice(sizes)
        self.names = ["a", "b", "c", "d"][:adapters]
        self.versions, self.model = ServedVersions(self.n_slots, self.keep, adapters), Model()
        self.now, self.ids = 0.0, set[int]()
        self.session, self.entered = 0, dict.fromkeys(self.names, 0)
        self.resumed: dict[str, int] = {}  # of adapters that the trainer has not published since it started
        self.done = {"activated": 0, "repeated": 0, "refused": 0, "drained": 0, "dropped": 0, "lost": 0}

    def step(self) -> None:
        self.now += self.rng.random()
        often = (self.publish, self.publish, self.request, self.request, self.finish, self.repeat)
        rarely = {0: self.drop, 1: self.restart}.get(self.rng.randrange(40))
        (rarely or self.rng.choice(often))()
        self.check()

    def restart(self) -> None:
        """The trainer starts again; some of its starts reach no server."""
        self.session += self.rng.choice((1, 1, 2))
        for name in self.names:
            newest = self.model.newest(name)
            has = self.resumed.get(name, 0 if newest is None else newest.version)
            self.resumed[name] = max(has - self.rng.randint(0, 2), 0)

    def open(self, ref: AdapterRef, deadline: float) -> PublishTransaction:
        """What the trainer does not have leaves, with the requests that run on it."""
        since = self.resumed.get(ref.name, 0)
        common = self.session - self.entered[ref.name] <= 1
        kept = {r for r in self.model.active if r.name == ref.name and common and r.version <= since}
        if self.session != self.entered[ref.name]:
            mine = {r for r in self.model.active if r.name == ref.name}
            self.model.leave(mine - kept, self.versions)
            self.done["lost"] += len(mine - kept)
        self.entered[ref.name] = self.session
        return opened(self.versions, ref, deadline, self.now, self.session, since)

    def request(self) -> None:
        if self.model.active and len(self.model.running) < self.n_slots:
            ref = self.rng.choice(sorted(self.model.active))
            newer = self.rng.random() < 0.3
            got = self.versions.acquire(str(ref), pinned=self.rng.random() < 0.3, or_newer=newer)
            assert got.ref == (self.model.newest(ref.name) if newer else ref)
            self.model.running.append(got)

    def finish(self) -> None:
        if self.model.running:
            used = self.model.running.pop(self.rng.randrange(len(self.model.running)))
            self.versions.release(used, self.now + self.rng.random() * 20 if self.rng.random() < 0.3 else None)

    def repeat(self) -> None:
        ref = self.model.newest(self.rng.choice(self.names))
        if ref is None or ref.name in self.resumed:
            return
        publish = self.open(ref, self.now + 1.0)
        assert publish.next_step(self.now) == Stage(slot=None)
        drained = self.rng.choice((RefusalReason.DUPLICATE, RefusalReason.SLOT, RefusalReason.WIRE))
        assert publish.staged([no(ref, drained)], self.now) is self.model.active[ref]
        assert publish.end() is None
        self.done["repeated"] += 1

    def drop(self) -> None:
        """Requests that run keep what they have; the name is free at once, and its versions begin anew."""
        name = self.rng.choice(self.names)
        mine = [r for r in self.model.running if r.ref.name == name and r not in self.model.left]
        self.model.leave({ref for ref in self.model.active if ref.name == name}, self.versions)
        assert self.versions.drop(name) >= len(mine), "pins count as nothing"
        assert self.versions.drop(name) == 0
        with pytest.raises(UnknownVersionError):
            self.versions.acquire(name)
        self.done["dropped"] += 1

    def publish(self) -> None:
        name = self.rng.choice(self.names)
        newest = self.model.newest(name)
        ref = a(0 if newest is None else newest.version + self.rng.randint(1, 2), name)
        ref = a(self.resumed.get(name, ref.version), name)
        deadline = self.now + 1.0 + 4.0 * self.rng.random()
        publish = self.open(ref, deadline)
        outcome = "abandoned"
        try:
            outcome = self.transact(publish, ref, deadline)
        except (ManifestError, PublishError):
            outcome = "refused"
        finally:
            dropped = publish.end()
        assert dropped in (None, ref)
        assert (outcome == "activated") <= (dropped is None)
        if outcome == "activated":
            self.resumed.pop(name, None)
        if outcome in self.done:
            self.done[outcome] += 1

    def transact(self, publish: PublishTransaction, ref: AdapterRef, deadline: float) -> str:
        began = self.now
        while not isinstance(step := publish.next_step(self.now), Stage):
            match step:
                case Retire(residents=residents):
                    self.forget(residents)
                case AwaitRelease(timeout_s=timeout_s):
                    assert timeout_s > 0
                    assert self.now + timeout_s <= began + (deadline - began) / 2 + 1e-9
                    self.now += timeout_s * self.rng.choice((1.0, 0.5))
                    self.finish()
            if self.rng.random() < 0.05:
                return "cancelled"
        if step.slot is None and ref in self.model.active:
            assert publish.staged([no(ref, RefusalReason.SLOT)], self.now) is self.model.active[ref]
            return "activated"
        if step.slot is None:
            assert step.refusal is not None
            self.done["drained"] += 1
            publish.staged([no(ref, RefusalReason.SLOT)], self.now)
            raise AssertionError("a version without a slot was not refused")
        assert step.slot not in {self.slot(other) for other in self.model.active}, "a slot in use was given away"
        if self.rng.random() < 0.1:
            return "cancelled"
        result = ok(ref, step.slot) if self.rng.random() < 0.7 else no(ref, RefusalReason.HASH)
        self.now += self.rng.choice((0.0, 0.1, 2.0))
        commit = publish.staged([ok(ref, step.slot), result], self.now)
        assert isinstance(commit, Commit)
        assert self.now < deadline
        assert commit.lora_id not in self.ids
        self.ids.add(commit.lora_id)
        self.forget(commit.retired)
        if self.rng.random() < 0.1:
            return "commit failed"
        reply = publish.activated(commit, 0.0, self.now)
        self.model.active[ref] = reply
        return "activated"

    def forget(self, gone: list[ResidentVersion]) -> None:
        for resident in gone:
            ref = resident.ref
            assert not any(resident is used for used in self.model.running), "a version in use was retired"
            if resident in self.model.left:
                continue
            assert ref != self.model.newest(ref.name), "the newest version was retired"
            del self.model.active[ref]

    def slot(self, ref: AdapterRef) -> int:
        return self.versions.resolve(str(ref)).slot

    def check(self) -> None:
        assert sorted(self.versions.active) == sorted(self.model.active)
        slots = [self.slot(ref) for ref in self.model.active]
        slots += {r.slot for r in self.model.running if r in self.model.left}
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.n_slots))
        for name in self.names:
            if (newest := self.model.newest(name)) is not None:
                assert self.versions.resolve(name).ref == newest

    def drain(self) -> None:
        """Without requests and pins everything can be published again: no slot and no hold was lost."""
        while self.model.running:
            self.finish()
        self.now += 100.0
        for name in self.names:
            newest = self.model.newest(name)
            published(self.versions, a(0 if newest is None else newest.version + 1, name), self.now, self.session)
        assert all(self.versions.resolve(str(ref)).in_use == 0 for ref in sorted(self.versions.active))


def test_random_walks_agree_with_a_model_of_sets() -> None:
    print(f"AREAL_LORA_TEST_SEED={SEED}")
    done = dict.fromkeys(("activated", "repeated", "refused", "drained", "dropped", "lost"), 0)
    for walk_seed in range(SEED, SEED + 40):
        walk = Walk(walk_seed)
        try:
            for _ in range(120):
                walk.step()
            walk.drain()
        except AssertionError:
            print(f"failed in the walk with seed {walk_seed}")
            raise
        for name, count in walk.done.items():
            done[name] += count
    assert min(done.values()) > 30, f"a path was hardly walked: {done}"
