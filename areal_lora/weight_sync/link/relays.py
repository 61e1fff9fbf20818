"""Which servers receive a version from which: a tree of groups of at most ``MOST`` servers, the relay's included.

    sources --> servers 1 to 32 --> server 32 relays to servers 33 to 63
                                `-> server 31 relays to servers 64 to 94 ...

Servers on up to ``MOST`` hosts are one group, without relays. Where there are relays, a server that joins or leaves
changes its own group alone, a relay that leaves also the group below it. The first and last relay change all: buckets
are smaller where there are relays, which send them on as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from areal_lora.weight_sync.messages import ServerEndpoint

MOST = 32
RELAYED_BYTES = 8 << 20  # largest bucket where there are relays: one is on its way to each level meanwhile

REQUEST_S, SIGN_IN_S, CONNECT_S = 0.4e-3, 2.1e-3, 0.23e-3
"""Of rank 0 for a request to one server; of a source and of a member, for the member at the source's store (CURVE);
of a member for one of its peers. Measured with gloo on one host's CPUs."""


class RelayGroup(msgspec.Struct, frozen=True):
    """Servers that receive together: from the sources, or from the first worker of ``relay``, of another group."""

    members: tuple[ServerEndpoint, ...]
    relay: ServerEndpoint | None = None


@dataclass(slots=True, eq=False)
class _Branch:
    """A group by the names of its servers and of its relay."""

    names: list[str]
    relay: str | None = None


def relay_tree(
    members: Sequence[ServerEndpoint], before: Sequence[RelayGroup] = (), most: int = MOST
) -> tuple[RelayGroup, ...]:
    """The groups of ``members``, that of the sources first and each after the group of its relay.

    Servers stay where they are in ``before``, also if they were restarted. Two groups are merged when half of a group
    holds both. One group has all if there are too few that can relay.
    """
    few = len({server.host for server in members}) <= most and len(before) < 2
    if few or len(members) <= most:
        return (RelayGroup(tuple(members)),)
    by_name = {server.name: server for server in members}
    branches = [_Branch([])]
    if before and len(before[0].members) <= most:
        branches = _kept(before, by_name, most // 2) or branches
    placed = {name for branch in branches for name in branch.names}
    joining = [name for name in by_name if name not in placed]
    for name in sorted(joining, key=lambda name: not by_name[name].relays):
        roomy = next((b for b in branches if len(b.names) < most - (b is not branches[0])), None)
        if roomy is None:
            branches.append(roomy := _Branch([]))
        roomy.names.append(name)
    able = {name for name, server in by_name.items() if server.relays}
    if (attached := _attached(branches, able)) is None:
        return (RelayGroup(tuple(members)),)
    return tuple(
        RelayGroup(tuple(by_name[name] for name in b.names), None if b.relay is None else by_name[b.relay])
        for b in attached
    )


def _kept(before: Sequence[RelayGroup], by_name: Mapping[str, ServerEndpoint], half: int) -> list[_Branch]:
    """The groups of ``before`` with the servers that remain, small ones merged into earlier ones."""
    kept = list[_Branch]()
    for group in before:
        names = [server.name for server in group.members if server.name in by_name]
        small = next((branch for branch in kept if len(branch.names) + len(names) <= half), None)
        if small is not None:
            small.names += names
        elif names:
            kept.append(_Branch(names, None if group.relay is None else group.relay.name))
    return kept


def _attached(branches: list[_Branch], able: Collection[str]) -> list[_Branch] | None:
    """Give each group a relay that is reached before it: its own, else the nearest ``able`` server that relays nothing.

    None if there is none. The last servers of a group send least in it: gloo's trees have them as leaves.
    """
    branches[0].relay = None
    reached, rest = branches[:1], branches[1:]
    while True:
        for branch in reached:  # also those that are appended meanwhile
            below = [other for other in rest if other.relay in branch.names]
            reached += below
            rest = [other for other in rest if other not in below]
        if not rest:
            return reached
        elsewhere = {name for branch in rest for name in branch.names}
        cut_off = next(branch for branch in rest if branch.relay not in elsewhere)
        relaying = {branch.relay for branch in reached}
        free = (name for branch in reached for name in branch.names[::-1] if name in able and name not in relaying)
        cut_off.relay = next(free, None)
        if cut_off.relay is None:
            return None


def form_s(groups: Sequence[RelayGroup], sources: int) -> float:
    """Rank 0 invites the servers, whose workers and relays sign in at each source's stores, its own among them.

    Each worker signs in and then connects to all others of a group for each source.
    """
    invited = {server for group in groups for server in (*group.members, group.relay)} - {None}
    signed_in = sum(workers_of(group) + (group.relay is not None) for group in groups)
    own_s = sources * (SIGN_IN_S + max(map(workers_of, groups)) * CONNECT_S)
    return len(invited) * REQUEST_S + signed_in * SIGN_IN_S + own_s


def workers_of(group: RelayGroup) -> int:
    """Receivers of a group, which has its root besides."""
    return sum(server.workers for server in group.members)
