"""Which snapshot leaves for another adapter."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from areal_lora.service.queue.placement import (
    OTHERS_IDLE_S,
    OWN_IDLE_S,
    Places,
    SnapshotAdapter,
    abandoned,
    evicted,
    fits,
)

NOW = 1000.0


def places(taken: int = 0, mine: int = 0) -> Places:
    return Places(taken=taken, capacity=4, mine=mine, quota=2)


def snapshot(model: str, tenant: str = "acme", idle_s: float = 100.0) -> SnapshotAdapter:
    return SnapshotAdapter(model=model, tenant=tenant, used_s=NOW - idle_s)


def test_none_leaves_while_there_is_room() -> None:
    assert evicted(places(), [snapshot("a")], "acme", NOW) is None
    assert fits(places(3, 1))
    assert not fits(places(4, 1))
    assert not fits(places(3, 2))


def test_at_its_quota_a_tenant_loses_its_own_oldest() -> None:
    rows = [snapshot("a", idle_s=20), snapshot("b", idle_s=30), snapshot("c", "bolt", idle_s=999)]
    assert evicted(places(mine=2), rows, "acme", NOW) == "b"
    assert evicted(places(mine=2), [snapshot("a", idle_s=OWN_IDLE_S - 1)], "acme", NOW) is None
    assert evicted(places(mine=2), [snapshot("c", "bolt", idle_s=999)], "acme", NOW) is None


def test_on_full_servers_the_tenants_own_leaves_first_then_anothers_that_is_long_unused() -> None:
    rows = [snapshot("a", idle_s=20), snapshot("c", "bolt", idle_s=999)]
    assert evicted(places(taken=4), rows, "acme", NOW) == "a"
    assert evicted(places(taken=4), rows[1:], "acme", NOW) == "c"
    assert evicted(places(taken=4), [snapshot("c", "bolt", idle_s=OTHERS_IDLE_S - 1)], "acme", NOW) is None


def test_a_silent_session_ends_where_its_place_helps() -> None:
    sessions = [("a", "bolt"), ("b", "acme")]
    assert abandoned(places(taken=3, mine=1), sessions, "acme") is None
    assert abandoned(places(taken=4, mine=1), sessions, "acme") == "a"
    assert abandoned(places(taken=4, mine=2), sessions, "acme") == "b", "of a full quota only the tenant's own helps"
    assert abandoned(places(taken=4, mine=2), sessions[:1], "acme") is None
    assert abandoned(places(taken=4, mine=1), [], "acme") is None


SNAPSHOTS = st.lists(
    st.builds(
        SnapshotAdapter,
        model=st.text("abc", min_size=1),
        tenant=st.sampled_from(["acme", "bolt"]),
        used_s=st.floats(0, NOW),
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(SNAPSHOTS, st.integers(0, 5), st.integers(0, 3))
def test_what_leaves_is_not_in_use_and_of_the_tenant_where_its_quota_is_full(
    rows: list[SnapshotAdapter], taken: int, mine: int
) -> None:
    found = evicted(places(taken, mine), rows, "acme", NOW)
    if found is not None:
        assert not fits(places(taken, mine))
        left = [each for each in rows if each.model == found]
        assert any(NOW - each.used_s >= OWN_IDLE_S for each in left)
        assert mine < 2 or any(each.tenant == "acme" for each in left)
