"""Which servers receive a version from which: a tree of groups of at most ``MOST_HOSTS`` hosts, the relay's included.

    sources --> hosts 1 to 32 --> host 1 relays --> hosts 33 to 63
                              `-> host 2 relays --> hosts 64 to 94 ...

Up to ``MOST_HOSTS`` hosts are one group, without relays. A server that joins or leaves changes its own group alone, a
relay that leaves also the group below it. All servers of a host are in one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from areal_lora.weight_sync.messages import ServerEndpoint

MOST_HOSTS = 32


class RelayGroup(msgspec.Struct, frozen=True):
    """Servers that receive together: from the sources, or from the first worker of ``relay``, of another group."""

    members: tuple[ServerEndpoint, ...]
    relay: ServerEndpoint | None = None


@dataclass(slots=True, eq=False)
class _Branch:
    """A group by its hosts; ``relay`` is the host that sends to it."""

    hosts: list[str]
    relay: str | None = None


def relay_tree(
    members: Sequence[ServerEndpoint], before: Sequence[RelayGroup] = (), most_hosts: int = MOST_HOSTS
) -> tuple[RelayGroup, ...]:
    """The groups of ``members``, that of the sources first and each after the group of its relay.

    Hosts stay where they are in ``before``. Two groups are merged when half of a group holds both.
    """
    on = dict[str, list[ServerEndpoint]]()
    for server in members:
        on.setdefault(server.host, []).append(server)
    if len(on) <= most_hosts:
        return (RelayGroup(tuple(members)),)
    branches = _kept(before, on, most_hosts // 2)
    placed = {host for branch in branches for host in branch.hosts}
    for host in on:
        if host in placed:
            continue
        roomy = next((b for b in branches if len(b.hosts) < most_hosts - (b is not branches[0])), None)
        if roomy is None:
            branches.append(roomy := _Branch([]))
        roomy.hosts.append(host)
    first = {host: servers[0] for host, servers in on.items()}
    first |= {group.relay.host: group.relay for group in before if group.relay in members and group.relay is not None}
    return tuple(
        RelayGroup(
            members=tuple(server for host in branch.hosts for server in on[host]),
            relay=None if branch.relay is None else first[branch.relay],
        )
        for branch in _attached(branches)
    )


def _kept(before: Sequence[RelayGroup], on: dict[str, list[ServerEndpoint]], half: int) -> list[_Branch]:
    """The groups of ``before`` with the hosts that are left, small ones merged into earlier ones."""
    kept = list[_Branch]()
    for group in before:
        hosts = [host for host in dict.fromkeys(server.host for server in group.members) if host in on]
        small = next((branch for branch in kept if len(branch.hosts) + len(hosts) <= half), None)
        if small is not None:
            small.hosts += hosts
        elif hosts:
            kept.append(_Branch(hosts, None if group.relay is None else group.relay.host))
    return kept


def _attached(branches: list[_Branch]) -> list[_Branch]:
    """Give each group a relay that is reached before it: its own, else the nearest host that relays nothing."""
    branches[0].relay = None
    reached, rest = branches[:1], branches[1:]
    while True:
        for branch in reached:  # also those that are appended meanwhile
            below = [other for other in rest if other.relay in branch.hosts]
            reached += below
            rest = [other for other in rest if other not in below]
        if not rest:
            return reached
        elsewhere = {host for branch in rest for host in branch.hosts}
        cut_off = next(branch for branch in rest if branch.relay not in elsewhere)
        relaying = {branch.relay for branch in reached}
        cut_off.relay = next(host for branch in reached for host in branch.hosts if host not in relaying)
