"""The tree of relays as data: fresh for 1 to 512 servers, and under joins, leaves and restarts in a random order."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from areal_lora.weight_sync.link.relays import CONNECT_S, MOST, REQUEST_S, SIGN_IN_S, RelayGroup, form_s, relay_tree
from areal_lora.weight_sync.messages import ServerEndpoint
from tests.support.sizes import size


def server(number: int, session: int = 0, per_host: int = 1) -> ServerEndpoint:
    host = f"h{number // per_host}"
    return ServerEndpoint(name=f"server-{number}", host=host, admin_port=session, data_port=session, workers=2)


def depth(tree: tuple[RelayGroup, ...], members: list[ServerEndpoint], most: int = MOST) -> int:
    """Check that every member receives exactly once, from one reached before; return the number of levels."""
    received = [member for group in tree for member in group.members]
    assert sorted(received, key=str) == sorted(members, key=str)
    assert tree[0].relay is None
    level = dict.fromkeys(tree[0].members, 1)
    for group in tree[1:]:
        assert group.relay in level, "a group before that of its relay"
        level |= dict.fromkeys(group.members, level[group.relay] + 1)
    relays = [group.relay for group in tree[1:]]
    assert len(relays) == len(set(relays)), "a server relays to one group"
    assert max(len(group.members) + (group.relay is not None) for group in tree) <= most
    return max(level.values())


def touched(tree: tuple[RelayGroup, ...], before: tuple[RelayGroup, ...]) -> set[ServerEndpoint | None]:
    """Servers that connect again."""
    return {member for group in set(tree) - set(before) for member in (*group.members, group.relay)} - {None}


def test_servers_on_32_hosts_are_one_group_in_the_order_of_the_members() -> None:
    for per_host in (1, 8):
        members = [server(number, per_host=per_host) for number in range(MOST * per_host)]
        assert relay_tree(members) == relay_tree(members, relay_tree(members[1:])) == (RelayGroup(tuple(members)),)


def test_a_tree_stays_one_until_a_group_holds_all() -> None:
    members = [server(number) for number in range(MOST + 2)]
    before = relay_tree(members)
    assert [len(group.members) for group in before] == [32, 2]
    assert len(relay_tree(members[1:], before)) == 2
    assert relay_tree(members[2:], before) == (RelayGroup(tuple(members[2:])),)


@pytest.mark.parametrize("able", [0, 2, 3, 60])
def test_servers_that_cannot_relay_only_receive(able: int) -> None:
    """94 servers need two relays."""
    members = [replace(server(number), relays=number >= 94 - able) for number in range(94)]
    tree = relay_tree(members)
    assert (len(tree) > 1) == (able >= 2)
    assert all(group.relay.relays for group in tree if group.relay is not None)
    assert sorted(member.name for group in tree for member in group.members) == sorted(m.name for m in members)
    assert relay_tree(members, tree) == tree


@pytest.mark.parametrize("n", [33, 64, 65, 100, 256, 511, 512])
@pytest.mark.parametrize("per_host", [1, 4])
def test_servers_on_more_hosts_have_two_levels_of_full_groups(n: int, per_host: int) -> None:
    members = [server(number, per_host=per_host) for number in range(n * per_host)]
    tree = relay_tree(members)
    assert depth(tree, members) == 2 if n * per_host <= 32 * 32 else 3
    full, rest = divmod(len(members) - 32, 31)
    assert [len(group.members) for group in tree] == [32] + [31] * full + [rest] * (rest > 0)


def test_a_server_that_joins_511_touches_at_most_32() -> None:
    members = [server(number) for number in range(511)]
    before = relay_tree(members)
    tree = relay_tree([*members, server(511)], before)
    assert len(set(tree) - set(before)) == 1
    assert len(touched(tree, before)) <= MOST
    assert tree[-1].relay in tree[0].members, "the relay keeps its own group, and is only a sender here"


def test_a_source_serves_the_store_of_each_worker_and_relay() -> None:
    members = [server(number) for number in range(63)]  # of two workers
    tree = relay_tree(members)
    assert form_s(tree, 4) == pytest.approx(63 * REQUEST_S + (126 + 1 + 4) * SIGN_IN_S + 4 * 64 * CONNECT_S)
    assert form_s(tree[1:], 4) == pytest.approx(32 * REQUEST_S + (62 + 1 + 4) * SIGN_IN_S + 4 * 62 * CONNECT_S)


def test_a_lost_relay_leaves_its_group_to_another_and_the_others_as_they_are() -> None:
    members = [server(number) for number in range(100)]
    before = relay_tree(members)
    left = [member for member in members if member != before[1].relay]
    tree = relay_tree(left, before)
    assert depth(tree, left) == 2
    assert {group.members for group in before[1:]} == {group.members for group in tree[1:]}
    assert set(tree) & set(before) == set(before[2:])


@pytest.mark.parametrize("seed", range(size(6, 60)))
@pytest.mark.parametrize("most", [3, 4, 32])
def test_joins_leaves_and_restarts_touch_one_group(seed: int, most: int) -> None:
    rng = random.Random(1000 * most + seed)
    members = [server(number) for number in range(rng.randint(1, 8 * most))]
    tree, joined = relay_tree(members, most=most), len(members)
    for session in range(1, 60):
        before, kind = tree, rng.choice(["join", "leave", "leave", "restart", "join"])
        relays, changed = {group.relay for group in before}, None
        if kind == "join" or len(members) < 2:
            members.append(server(joined))
            joined += 1
        else:
            changed = members.pop(rng.randrange(len(members)))
            if kind == "restart":
                members.append(server(int(changed.name.removeprefix("server-")), session))
        tree = relay_tree(members, before, most)
        assert set(relay_tree(members, tree, most)) == set(tree)
        levels = depth(tree, members, most)
        if len(members) <= most:
            assert len(tree) == 1
            continue
        assert levels <= 3 or most < 32
        formed = len(set(tree) - set(before))
        assert formed <= 1 + (changed in relays), f"{kind} at {session}, seed {seed}"
        assert kind != "join" or len(touched(tree, before)) <= most
        sizes = sorted(len(group.members) for group in tree)
        assert sum(sizes[:2]) > most // 2, "two groups that are one in half of a group"
