"""The choice of an address: tables of made-up machines. The last tests ask this one."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sections.run import own_place
from areal_lora.errors import ConfigError
from areal_lora.network import addresses
from areal_lora.network.addresses import Interface, Place, choose, look, set_variables
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint
from tests.support.paths import EXAMPLES

SHIPPED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def interface(name: str, *given: str) -> Interface:
    return Interface(name=name, addresses=tuple(map(ip_address, given)))


LO = interface("lo", "127.0.0.1", "::1")
ETH = interface("eth0", "192.168.1.7", "fe80::7", "2001:db8:1::7")
IB = interface("ib0", "10.4.0.7")
TWO = interface("bond0", "172.20.0.7", "10.9.0.7")
DOCKER = interface("docker0", "172.17.0.1")
V6 = interface("eth1", "fe80::8", "2001:db8:2::8")

# fmt: off
# bind, interface, interfaces, routes (to peers, then the default), nodes, expected address and interface
TABLE = [
    ("0.0.0.0", "auto", [LO, ETH], ["192.168.1.7"], 2, "192.168.1.7", "eth0"),
    ("0.0.0.0", "auto", [LO, ETH, IB], ["10.4.0.7", "192.168.1.7"], 2, "10.4.0.7", "ib0"),  # a peer before the default
    ("0.0.0.0", "auto", [LO, ETH, IB], ["127.0.0.1", "192.168.1.7"], 2, "192.168.1.7", "eth0"),  # as in /etc/hosts
    ("0.0.0.0", "auto", [LO, DOCKER, ETH], ["172.17.0.1", "192.168.1.7"], 2, "192.168.1.7", "eth0"),
    ("0.0.0.0", "auto", [LO, DOCKER, IB], [], 2, "10.4.0.7", "ib0"),  # no route at all, one interface it can be
    ("0.0.0.0", "auto", [LO], [], 1, "127.0.0.1", "lo"),
    ("0.0.0.0", "auto", [LO, DOCKER], ["172.17.0.1"], 1, "127.0.0.1", "lo"),
    ("0.0.0.0", "docker0", [LO, DOCKER, ETH], [], 2, "172.17.0.1", "docker0"),  # by name everything goes
    ("0.0.0.0", "ib0", [LO, ETH, IB], [], 2, "10.4.0.7", "ib0"),
    ("0.0.0.0", "10.0.0.0/8", [LO, ETH, IB], [], 2, "10.4.0.7", "ib0"),
    ("0.0.0.0", "10.0.0.0/8", [LO, ETH, TWO], [], 2, "10.9.0.7", "bond0"),
    ("0.0.0.0", "2001:db8::/32", [LO, ETH], [], 2, "2001:db8:1::7", "eth0"),
    ("0.0.0.0", "eth1", [LO, V6], [], 2, "2001:db8:2::8", "eth1"),  # the other family, if that is all there is
    ("::", "eth0", [LO, ETH], [], 2, "2001:db8:1::7", "eth0"),  # not the link-local one
    ("::", "auto", [LO, ETH], ["2001:db8:1::7"], 2, "2001:db8:1::7", "eth0"),
    ("127.0.0.1", "auto", [LO, ETH], [], 1, "127.0.0.1", "lo"),
    ("127.0.0.2", "auto", [LO, ETH], [], 1, "127.0.0.2", "lo"),
    ("192.168.1.7", "auto", [LO, ETH], [], 1, "192.168.1.7", "eth0"),
]
REFUSED = [
    ("0.0.0.0", "auto", [LO], ["127.0.0.1"], 2, "cluster.interface", ["leads to the other nodes", "lo 127.0.0.1"]),
    ("0.0.0.0", "auto", [LO, DOCKER], ["172.17.0.1"], 2, "cluster.interface", ["docker0 172.17.0.1"]),
    ("0.0.0.0", "auto", [LO, ETH, IB], [], 2, "cluster.interface", ["eth0 192.168.1.7", "ib0 10.4.0.7"]),
    ("0.0.0.0", "lo", [LO, ETH], [], 2, "cluster.interface", ["'lo'", "eth0 192.168.1.7"]),
    ("0.0.0.0", "127.0.0.0/8", [LO, ETH], [], 2, "cluster.interface", ["127.0.0.0/8", "eth0"]),
    ("0.0.0.0", "eth9", [LO, ETH], [], 1, "cluster.interface", ["'eth9'", "eth0 192.168.1.7"]),
    ("0.0.0.0", "10.0.0.0/40", [LO, ETH], [], 1, "cluster.interface", ["10.0.0.0/40", "10.0.0.0/8"]),
    ("127.0.0.1", "auto", [LO, ETH], [], 2, "cluster.bind", ["2 nodes", "eth0 192.168.1.7"]),
    ("10.1.1.1", "auto", [LO, ETH], [], 1, "cluster.bind", ["no address 10.1.1.1", "eth0 192.168.1.7"]),
]
# fmt: on


@pytest.mark.parametrize(("bind", "wanted", "interfaces", "routes", "nodes", "address", "name"), TABLE)
def test_the_address(bind, wanted, interfaces, routes, nodes, address, name):
    place = choose(
        bind=bind, interface=wanted, interfaces=interfaces, routes=list(map(ip_address, routes)), nodes=nodes
    )
    assert place == Place(address=address, interface=name)


@pytest.mark.parametrize(("bind", "wanted", "interfaces", "routes", "nodes", "key", "words"), REFUSED)
def test_a_refusal_says_which_addresses_there_are(bind, wanted, interfaces, routes, nodes, key, words):
    with pytest.raises(ConfigError) as caught:
        choose(bind=bind, interface=wanted, interfaces=interfaces, routes=list(map(ip_address, routes)), nodes=nodes)
    assert caught.value.path == key
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_this_machine_has_loopback():
    assert any(a.is_loopback for one in look() for a in one.addresses)


def test_a_process_stays_where_it_is(tmp_path, monkeypatch):
    """What others publish later does not move it."""
    cluster = load_config(SHIPPED, ["cluster.bind=0.0.0.0"]).cluster
    asked = []
    monkeypatch.setattr(addresses, "_facing", lambda peer, *rest: asked.append(peer) or [])
    monkeypatch.setenv(addresses.NODES_VARIABLE, "n1 n2")
    monkeypatch.setattr(addresses, "look", lambda: (LO, ETH))
    publish_endpoint(RunFolder(tmp_path), "controller", 0, {"control": 1}, host="10.0.0.9")
    first = own_place(cluster, RunFolder(tmp_path))
    assert asked == ["n1", "n2", "10.0.0.9", "192.0.2.1"]
    assert first == Place(address="192.168.1.7", interface="eth0")
    monkeypatch.setattr(addresses, "look", lambda: (LO, IB))
    assert own_place(cluster, RunFolder(tmp_path)) == first


def test_variables_of_the_user_win_and_are_named(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "unset by the test afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    place = Place(address="10.4.0.7", interface="ib0")
    assert set_variables(place) == ""
    found = [addresses.os.environ[n] for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")]
    assert found == ["ib0", "ib0", "10.4.0.7"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "GLOO_SOCKET_IFNAME=eth0 of the environment wins over ib0 10.4.0.7" in set_variables(place)
    assert addresses.os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_groups_inside_a_server_stay_on_loopback(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "unset by the test afterwards")
        monkeypatch.delenv(name)
    assert set_variables(Place(address="10.4.0.7", interface="ib0"), one_node=True) == ""
    found = [addresses.os.environ[n] for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")]
    assert found == ["lo", "=ib0", "127.0.0.1"]


def test_the_name_of_the_host_is_not_asked(tmp_path, monkeypatch):
    """On many machines it is 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: pytest.fail("asked"))
    monkeypatch.setattr(addresses, "look", lambda: (LO, ETH))
    monkeypatch.setattr(addresses, "_facing", lambda *a: [])
    cluster = load_config(SHIPPED, ["cluster.bind=0.0.0.0"]).cluster
    assert own_place(cluster, RunFolder(tmp_path)).address == "192.168.1.7"
