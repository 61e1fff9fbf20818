"""Which address of this machine the other nodes of a run can reach.

``cluster.bind`` is an address that is used as it is, or a wildcard (``0.0.0.0``, ``::``): then each process finds an
address of its own node by ``cluster.interface`` and binds to exactly that one. ``choose`` is pure; ``look`` gathers
the facts. Nothing is sent to find out: a UDP socket that is connected knows its route.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from areal_lora.errors import ConfigError

WILDCARDS = ("0.0.0.0", "::")
NODES_VARIABLE = "AREAL_LORA_NODES"
"""Names of all nodes of the job, separated by blanks; the job script sets it."""
_BRIDGES = ("docker", "virbr", "br-", "lxcbr", "lxdbr", "cni", "podman", "flannel", "cali", "veth")
# Networks of documentation: only a default route leads there.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up. ``addresses`` in the system's order, without IPv6 zones."""

    name: str
    addresses: tuple[_Address, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Address that a process binds to. ``interface`` is empty if ``cluster.bind`` is a name."""

    address: str
    interface: str


def bracketed(host: str) -> str:
    """``host`` as URLs and zmq addresses write it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def on_loopback(bind: str) -> bool:
    """Whether only this machine can reach what is bound to ``bind``."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def choose(
    *, bind: str, interface: str, interfaces: Sequence[Interface], routes: Sequence[_Address], nodes: int
) -> Place:
    """The address to bind and to publish.

    ``routes`` are this machine's addresses that face the peers known so far, the default route's last. A wildcard's
    family is preferred. Raises ConfigError, with the addresses that there are.
    """
    if bind in WILDCARDS:
        wanted = ipaddress.ip_address(bind).version
        found = _found(interface, interfaces, routes, nodes)
        found.sort(key=lambda at: at[1].version != wanted)
        if found:
            return Place(address=str(found[0][1]), interface=found[0][0].name)
        what = "leads to the other nodes" if interface == "auto" else f"belongs to {interface!r}"
        fix = "name one of these interfaces, or a network such as 10.0.0.0/8 that holds one address of every node"
        raise ConfigError("cluster.interface", f"no address of this machine {what}; it has {_listing(interfaces)}", fix)
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return Place(address=bind, interface="")
    if address.is_loopback and nodes > 1:
        reason = f"{nodes} nodes cannot reach each other on {bind}; this machine has {_listing(interfaces)}"
        raise ConfigError("cluster.bind", reason, "set cluster.bind=0.0.0.0")
    for one in interfaces:
        # All of 127.0.0.0/8 can be bound, only its first address is listed.
        if address in one.addresses or (address.is_loopback and any(a.is_loopback for a in one.addresses)):
            return Place(address=bind, interface=one.name)
    reason = f"this machine has no address {bind}; it has {_listing(interfaces)}"
    raise ConfigError("cluster.bind", reason, "set cluster.bind=0.0.0.0 and choose with cluster.interface")


def _found(
    wanted: str, interfaces: Sequence[Interface], routes: Sequence[_Address], nodes: int
) -> list[tuple[Interface, _Address]]:
    """Return the addresses that ``wanted`` allows, best first."""
    usable = [
        (one, address)
        for one in interfaces
        for address in one.addresses
        if not address.is_link_local and not (nodes > 1 and address.is_loopback)
    ]
    if wanted != "auto":
        network = as_network(wanted)
        return [(i, a) for i, a in usable if (i.name == wanted if network is None else a in network)]
    # Other machines can be behind it: not so for loopback and for bridges to containers and guests.
    between = {i.name for i in interfaces if not any(a.is_loopback for a in i.addresses)}
    outward = [(i, a) for i, a in usable if i.name in between and not i.name.startswith(_BRIDGES)]
    routed = [(i, a) for route in routes for i, a in outward if a == route]
    if routed:
        return routed[:1]
    if len({i.name for i, _ in outward}) == 1:
        return outward
    return [] if nodes > 1 or outward else [(i, a) for i, a in usable if a.is_loopback]


def as_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """``text`` as a CIDR; None where it is an interface's name. Raises ConfigError for a broken CIDR."""
    if "/" not in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError("cluster.interface", str(error), "write it like 10.0.0.0/8") from None


def _listing(interfaces: Sequence[Interface]) -> str:
    return "; ".join(f"{i.name} {', '.join(map(str, i.addresses))}" for i in interfaces) or "none"


def find_place(*, bind: str, interface: str, nodes: int, peers: Sequence[str]) -> Place:
    """``choose`` with the facts of this machine. ``peers`` are addresses of other processes of the run."""
    interfaces = look()
    mine = {address for one in interfaces for address in one.addresses}
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    routes: list[_Address] = []
    if bind in WILDCARDS and interface == "auto":
        known = [*os.environ.get(NODES_VARIABLE, "").split(), *peers, _ELSEWHERE[family]]
        routes = [a for peer in known for a in _facing(peer, family, mine)]
    return choose(bind=bind, interface=interface, interfaces=interfaces, routes=routes, nodes=nodes)


def look() -> tuple[Interface, ...]:
    """The interfaces that are up and have addresses."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            ipaddress.ip_address(entry.address.partition("%")[0])
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if addresses and name in stats and stats[name].isup:
            found.append(Interface(name=name, addresses=addresses))
    return tuple(found)


def _facing(peer: str, family: socket.AddressFamily, mine: set[_Address]) -> Iterator[_Address]:
    """This machine's address on the route to ``peer``; none where that is this machine, unknown or unreachable."""
    try:
        known = socket.getaddrinfo(peer, 9, family, socket.SOCK_DGRAM)
    except OSError:
        return
    for *_, sockaddr in known[:1]:
        address = ipaddress.ip_address(str(sockaddr[0]).partition("%")[0])
        if address in mine or address.is_loopback:
            return
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(sockaddr)
            except OSError:
                return
            yield ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])


def set_variables(place: Place, *, one_node: bool = False) -> str:
    """Make gloo, NCCL and vLLM use ``place`` instead of their own choice. Call before they are imported.

    ``one_node``: the groups that this process makes by itself stay on its node, as a server's do. Then gloo and vLLM
    get loopback. A variable that is set already wins. Returns a sentence about those that differ, or nothing.
    """
    if not place.interface:
        return ""
    ours = {
        "GLOO_SOCKET_IFNAME": "lo" if one_node else place.interface,
        "NCCL_SOCKET_IFNAME": f"={place.interface}",  # without the sign it would be a prefix
        "VLLM_HOST_IP": "127.0.0.1" if one_node else place.address,
    }
    others = []
    for name, value in ours.items():
        held = os.environ.setdefault(name, value)
        if held.lstrip("=") != value.lstrip("="):
            others.append(f"{name}={held}")
    if not others:
        return ""
    return f"{', '.join(others)} of the environment wins over {place.interface} {place.address} of the configuration"
