"""Servers join and leave in virtual time, one in 18 seconds: the leader, its roster, the router and the feed."""

from __future__ import annotations

import pytest

from tests.support.sizes import size
from tests.support.weight_sync.elastic_world import World

SERVERS = size(70, 200)
SECONDS = 18.0 * SERVERS


def check(world: World) -> str:
    """No version is lost, and at the end all parts agree on who is there. Figures."""
    first_reports = [r for i, r in enumerate(world.reports) if i == 0 or r.ref != world.reports[i - 1].ref]
    assert [r.ref.version for r in first_reports] == list(range(world.version + 1)), "a version was lost or repeated"
    living = world.living()
    assert {s.name: s.data_url for s in world.leader.roster.members} == living
    assert {name: server.url for name, server in world.router.servers.items()} == living
    assert world.feed.max_running == world.capacity.groups(len(living))
    names = [s.name for s in world.sessions]
    assert world.happened["joined"] == len(names)
    joined = [name for report in world.reports for name in report.joined]
    left = [name for report in world.reports for name in report.left]
    leavers = {s.endpoint.name for s in world.sessions.values() if s.leaving}
    members = set(joined) | {"server-0"}  # some leave before they have become members
    assert set(left) <= leavers & members
    return (
        f"{world.version + 1} versions, {len(world.reports)} publishes, {world.attempts} attempts, most servers "
        f"{max(len(r.servers) for r in world.reports)}, {len(living)} at the end; "
        f"{dict(sorted(world.happened.items()))}"
    )


@pytest.mark.parametrize("seed", range(size(1, 20)))
def test_servers_come_and_go_in_order(seed: int) -> None:
    world = World(seed, servers=SERVERS, seconds=SECONDS, crashes=0.0)
    world.run()
    print(f"\nseed {seed}: {check(world)}")
    assert world.happened["joined"] == SERVERS + 1
    assert all(report.attempts == 1 and not report.lost for report in world.reports), "nothing failed first"
    # Only an old answer that was handed back may find its version retired on all other servers.
    faults = {what for what in world.happened if what.startswith("fault")}
    assert faults <= {"fault version_retired"}, world.happened
    assert set(world.feed.stats().retried) <= {"version_retired"}
    left = [name for report in world.reports for name in report.left]
    joined = {"server-0", *(name for report in world.reports for name in report.joined)}
    leavers = {s.endpoint.name for s in world.sessions.values() if s.leaving}
    assert sorted(left) == sorted(leavers & joined)


@pytest.mark.parametrize("seed", range(size(1, 20)))
def test_servers_come_and_go_and_some_crash(seed: int) -> None:
    world = World(seed, servers=SERVERS, seconds=SECONDS, crashes=0.3)
    world.run()
    print(f"\nseed {seed}: {check(world)}")
    assert world.happened["crashed"] > 0.15 * SERVERS
    lost = {name for report in world.reports for name in report.lost}
    left = {name for report in world.reports for name in report.left}
    crashed = {s.endpoint.name for s in world.sessions.values() if not s.alive and not s.leaving}
    assert lost <= crashed
    assert left, "others left in order meanwhile"
