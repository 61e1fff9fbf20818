from __future__ import annotations

import pytest

from areal_lora.errors import ManifestError, UnknownVersionError
from areal_lora.weight_sync.manifest import Refusal
from areal_lora.weight_sync.server.slots import SlotTable
from tests.support.weight_sync.helpers import ref


def table(*versions, n_slots=4):
    t = SlotTable(n_slots)
    for v in versions:
        t.reserve(ref(v))
        t.activate(ref(v), v + 1)
    return t


def test_a_version_lives_from_reservation_to_retirement():
    t = SlotTable(2)
    assert t.newest("a") is None
    slot = t.reserve(ref(0))
    with pytest.raises(UnknownVersionError):
        t.resolve("a@v0")  # staged, not active: a request must not get it
    t.activate(ref(0), 7)
    assert (t.resolve("a@v0").slot, t.resolve("a@v0").lora_id) == (slot, 7)
    other = t.reserve(ref(1))
    assert other != slot
    t.activate(ref(1), 8)
    assert t.resolve("a").ref == ref(1)
    assert t.retirable(keep=1) == [ref(0)]
    assert t.retire(ref(0)).slot == slot
    assert t.reserve(ref(2)) == slot


def test_versions_in_use_stay():
    t = table(0, 1, 2)
    t.acquire(ref(0))
    t.acquire(ref(0))
    assert t.retirable(keep=1) == [ref(1)]
    with pytest.raises(ValueError, match="2 requests"):
        t.retire(ref(0))
    t.release(ref(0))
    t.release(ref(0))
    assert t.retirable(keep=1) == [ref(0), ref(1)]
    with pytest.raises(ValueError, match="more often"):
        t.release(ref(0))


def test_the_newest_version_is_never_retired():
    t = table(0, 1)
    assert t.retirable(keep=2) == []
    with pytest.raises(ValueError, match="newest"):
        t.retire(ref(1))
    with pytest.raises(ValueError, match="keep"):
        t.retirable(keep=0)


def test_room_is_made_for_a_version_about_to_come():
    t = table(0, 1, 2)
    assert t.retirable(keep=3) == []
    assert t.retirable(keep=3, incoming="a") == [ref(0)]
    assert t.retirable(keep=3, incoming="b") == []
    assert t.retirable(keep=1, incoming="a") == [ref(0), ref(1)]  # the newest serves until its successor does


def test_abort_gives_the_slot_back_and_leaves_the_old_version():
    t = table(0, n_slots=2)
    t.reserve(ref(1))
    t.abort(ref(1))
    assert t.resolve("a").ref == ref(0)
    t.reserve(ref(1))
    with pytest.raises(ValueError, match="awaiting"):
        t.abort(ref(0))


def test_full_and_duplicate_are_refusals():
    t = table(0, 1, n_slots=2)
    with pytest.raises(ManifestError, match="a@v0") as e:
        t.reserve(ref(2))
    assert e.value.reason == Refusal.SLOT
    with pytest.raises(ManifestError) as e:
        t.reserve(ref(1))
    assert e.value.reason == Refusal.DUPLICATE


@pytest.mark.parametrize("name", ["a@v9", "b", "", "a@", "a@vx", "@v0"])
def test_unknown_names_are_errors_that_say_what_is_served(name):
    with pytest.raises(UnknownVersionError, match="a@v0"):
        table(0).resolve(name)


def test_adapters_are_kept_apart():
    t = table(0, 1)
    t.reserve(ref(5, "b"))
    t.activate(ref(5, "b"), 99)
    assert t.newest("a") == ref(1)
    assert t.newest("b") == ref(5, "b")
    assert t.retirable(keep=1) == [ref(0)]


def test_lora_ids_are_unique():
    t = table(0)
    t.reserve(ref(1))
    for lora_id in (1, 0, -1):
        with pytest.raises(ValueError, match="unused"):
            t.activate(ref(1), lora_id)
