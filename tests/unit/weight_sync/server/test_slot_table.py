from __future__ import annotations

import contextlib

import pytest

from areal_lora.errors import ManifestError, RefusalReason, UnknownVersionError
from areal_lora.weight_sync.messages import PublishReply
from areal_lora.weight_sync.server.slot_table import ServedVersions
from tests.support.weight_sync.helpers import ref


def made(t, version, name="a"):
    t.reserve(ref(version, name))
    activate(t, version, name)


def activate(t, version, name="a"):
    reply = PublishReply(ref=str(ref(version, name)), digest="", phases={})
    t.activate(ref(version, name), next(t.lora_ids), reply)


def table(*versions, n_slots=4):
    t = ServedVersions(n_slots, keep=1)
    for v in versions:
        made(t, v)
    return t


def test_a_version_lives_from_reservation_to_retirement():
    t = ServedVersions(2, keep=1)
    slot = t.reserve(ref(0))
    with pytest.raises(UnknownVersionError):
        t.resolve("a@v0")  # staged, not active: a request must not get it
    activate(t, 0)
    assert (t.resolve("a@v0").slot, t.resolve("a@v0").lora_id) == (slot, 1)
    other = t.reserve(ref(1))
    assert other != slot
    activate(t, 1)
    assert t.resolve("a").ref == ref(1)
    assert t.retirable(keep=1) == [ref(0)]
    assert t.free(ref(0)).slot == slot
    assert t.reserve(ref(2)) == slot


def test_versions_in_use_stay():
    t = table(0, 1, 2)
    t.acquire("a@v0")
    used = t.acquire("a@v0")
    assert t.retirable(keep=1) == [ref(1)]
    with pytest.raises(ValueError, match="2 requests"):
        t.free(ref(0))
    t.release(used)
    t.release(used)
    assert t.retirable(keep=1) == [ref(0), ref(1)]
    with pytest.raises(ValueError, match="more often"):
        t.release(used)


def test_the_newest_version_is_never_retired():
    t = table(0, 1)
    assert t.retirable(keep=2) == []
    assert [r.ref for r in t.make_room("a")] == [ref(0)]
    assert t.make_room("a") == []


def test_room_is_made_for_a_version_about_to_come():
    t = table(0, 1, 2)
    assert t.retirable(keep=3) == []
    assert t.retirable(keep=3, incoming="a") == [ref(0)]
    assert t.retirable(keep=3, incoming="b") == []
    assert t.retirable(keep=1, incoming="a") == [ref(0), ref(1)]  # the newest serves until its successor does


def test_abort_gives_the_slot_back_and_leaves_the_old_version():
    t = table(0, n_slots=2)
    t.reserve(ref(1))
    t.free(ref(1))
    assert t.resolve("a").ref == ref(0)
    t.reserve(ref(1))


def test_full_and_duplicate_are_refusals():
    t = table(0, 1, n_slots=2)
    with pytest.raises(ManifestError, match="a@v0") as e:
        t.reserve(ref(2))
    assert e.value.reason == RefusalReason.SLOT
    with pytest.raises(ManifestError) as e:
        t.reserve(ref(1))
    assert e.value.reason == RefusalReason.DUPLICATE


@pytest.mark.parametrize("name", ["a@v9", "b", "", "a@", "a@vx", "@v0"])
def test_unknown_names_are_errors_that_say_what_is_served(name):
    with pytest.raises(UnknownVersionError, match="a@v0"):
        table(0).resolve(name)


def test_adapters_are_kept_apart():
    t = table(0, 1)
    made(t, 5, "b")
    assert t.resolve("a").ref == ref(1)
    assert t.resolve("b").ref == ref(5, "b")
    assert t.retirable(keep=1) == [ref(0)]


def shared(held, n_slots, adapters):
    """A table in which each named adapter holds so many active versions, the oldest ones in use."""
    t = ServedVersions(n_slots, 1, adapters)
    for name, versions in held.items():
        for v in range(versions):
            made(t, v, name)
            if v < versions - 1:
                t.acquire(str(ref(v, name)))
    return t


@pytest.mark.parametrize(
    ("held", "name", "gets"),
    [
        ({"a": 1, "b": 1}, "a", True),
        ({"a": 2, "b": 1}, "b", True),  # the last one
        ({"a": 2, "b": 1}, "a", False),  # it would leave none to b
        ({"a": 2, "b": 2}, "a", False),  # none is free
        ({"a": 2}, "a", False),  # b is not there yet: its slot, and one on its way
        ({"a": 2}, "b", True),
        ({"a": 1}, "a", True),
    ],
)
def test_an_adapter_that_holds_more_than_another_leaves_the_last_slot(held, name, gets):
    t = shared(held, n_slots=4, adapters=2)
    version = held.get(name, 0)
    if gets:
        t.reserve(ref(version, name))
        return
    with pytest.raises(ManifestError, match=r"a@v0 \(1 running\)") as e:
        t.reserve(ref(version, name))
    assert e.value.reason == RefusalReason.SLOT


def test_every_adapter_gets_its_first_version_whatever_the_others_do():
    t = shared({f"a{i}": 1 for i in range(32)}, n_slots=35, adapters=33)
    for v in range(1, 3):
        with contextlib.suppress(ManifestError):
            t.acquire(f"a0@v{v - 1}")
            made(t, v, "a0")
    t.reserve(ref(0, "a32"))


def test_a_dropped_adapter_is_gone_at_once_and_its_slots_when_its_requests_end():
    t = table(0, 1, n_slots=3)
    used = t.acquire("a@v0")
    incarnation = t.incarnations["a"]
    assert (t.drop("a"), t.drop("a"), t.incarnations, t.active) == (1, 0, {}, {})
    for name in ("a", "a@v0", "a@v1"):
        with pytest.raises(UnknownVersionError):
            t.resolve(name)
    assert [r.ref for r in t.retire_left()] == [ref(1)]
    slot = t.reserve(ref(0))  # the name begins anew beside its last request
    activate(t, 0)
    assert (slot != used.slot, t.incarnations["a"] > incarnation) == (True, True)
    assert t.resolve("a").lora_id != used.lora_id
    assert (t.retire_left(), t.left) == ([], [used])
    t.release(used)
    assert ([r.slot for r in t.retire_left()], t.left) == ([used.slot], [])


def test_an_adapter_is_not_dropped_during_its_publish():
    t = table(0)
    t.reserve(ref(1))
    with pytest.raises(ValueError, match="while it is published"):
        t.drop("a")
