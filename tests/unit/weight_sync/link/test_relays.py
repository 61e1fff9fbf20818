"""The tree of relays as data: fresh for 1 to 512 hosts, and under joins, leaves and restarts in a random order."""

from __future__ import annotations

import random

import pytest

from areal_lora.weight_sync.link.relays import MOST_HOSTS, RelayGroup, relay_tree
from areal_lora.weight_sync.messages import ServerEndpoint
from tests.support.sizes import size


def server(host: int, index: int = 0, session: int = 0) -> ServerEndpoint:
    name, port = f"server-{host}-{index}", 10 * session + index
    return ServerEndpoint(name=name, host=f"h{host}", admin_port=port, data_port=port, workers=2)


def hosts(group: RelayGroup) -> set[str]:
    return {member.host for member in group.members}


def depth(tree: tuple[RelayGroup, ...], members: list[ServerEndpoint], most: int = MOST_HOSTS) -> int:
    """Check that every member receives exactly once, from one reached before; return the number of levels."""
    received = [member for group in tree for member in group.members]
    assert sorted(received, key=str) == sorted(members, key=str)
    assert tree[0].relay is None
    level = dict.fromkeys(tree[0].members, 1)
    for group in tree[1:]:
        assert group.relay in level, "a group before that of its relay"
        level |= dict.fromkeys(group.members, level[group.relay] + 1)
    relays = [group.relay.host for group in tree[1:] if group.relay is not None]
    assert len(relays) == len(set(relays)) == len(tree) - 1
    places = [host for group in tree for host in hosts(group)]
    assert len(places) == len(set(places)), "servers of one host are in one group"
    assert max(len(hosts(group)) + (group.relay is not None) for group in tree) <= most
    return max(level.values())


def touched(tree: tuple[RelayGroup, ...], before: tuple[RelayGroup, ...]) -> set[ServerEndpoint | None]:
    """Servers that connect again."""
    return {member for group in set(tree) - set(before) for member in (*group.members, group.relay)} - {None}


def test_up_to_32_hosts_are_one_group_in_the_order_of_the_members() -> None:
    members = [server(host, index) for index in range(2) for host in range(MOST_HOSTS)]
    assert relay_tree(members) == (RelayGroup(tuple(members)),)
    assert relay_tree(members, relay_tree([*members, server(99)])) == (RelayGroup(tuple(members)),)


@pytest.mark.parametrize("n", [33, 64, 65, 100, 256, 511, 512])
def test_more_hosts_have_two_levels_of_full_groups(n: int) -> None:
    members = [server(host) for host in range(n)]
    tree = relay_tree(members)
    assert depth(tree, members) == 2
    full, rest = divmod(n - 32, 31)
    assert [len(group.members) for group in tree] == [32] + [31] * full + [rest] * (rest > 0)


def test_a_server_that_joins_511_touches_at_most_32() -> None:
    members = [server(host) for host in range(511)]
    before = relay_tree(members)
    tree = relay_tree([*members, server(511)], before)
    assert len(set(tree) - set(before)) == 1
    assert len(touched(tree, before)) <= MOST_HOSTS
    assert tree[-1].relay in tree[0].members, "the relay keeps its own group, and is only a sender here"


def test_a_lost_relay_leaves_its_group_to_another_and_the_others_as_they_are() -> None:
    members = [server(host) for host in range(100)]
    before = relay_tree(members)
    left = [member for member in members if member != before[1].relay]
    tree = relay_tree(left, before)
    assert depth(tree, left) == 2
    assert {frozenset(hosts(group)) for group in before[1:]} == {frozenset(hosts(group)) for group in tree[1:]}
    assert set(tree) & set(before) == set(before[2:])


@pytest.mark.parametrize("seed", range(size(6, 60)))
@pytest.mark.parametrize("most", [3, 4, 32])
def test_joins_leaves_and_restarts_touch_one_group(seed: int, most: int) -> None:
    rng = random.Random(1000 * most + seed)
    members = [server(host) for host in range(rng.randint(1, 10 * most))]
    tree, next_host = relay_tree(members, most_hosts=most), len(members)
    for session in range(1, 80):
        before, kind = tree, rng.choice(["join", "join", "leave", "leave", "restart", "beside"])
        relays = {group.relay for group in before}
        changed: ServerEndpoint | None = None
        if kind == "join" or len(members) < 2:
            members.append(server(next_host))
            next_host += 1
        elif kind == "beside":
            members.append(server(int(rng.choice(members).host[1:]), session))
        else:
            changed = members.pop(rng.randrange(len(members)))
            if kind == "restart":
                members.append(server(int(changed.host[1:]), int(changed.name.rpartition("-")[2]), session))
        tree = relay_tree(members, before, most)
        assert set(relay_tree(members, tree, most)) == set(tree)
        levels = depth(tree, members, most)
        n_hosts = len({member.host for member in members})
        if n_hosts <= most:
            assert len(tree) == 1
            continue
        assert levels <= len(tree) if most < 32 else levels <= 3
        formed = set(tree) - set(before)
        if kind == "join":
            assert len({each.host for each in touched(tree, before)}) <= most
        # A relay's end cuts off the group below it; a group that is merged frees its relay.
        assert len(formed) <= 1 + (changed in relays), (kind, seed)
        sizes = sorted(len(hosts(group)) for group in tree)
        assert sum(sizes[:2]) > most // 2, "two groups that are one in half of a group"
