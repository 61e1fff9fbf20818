"""The firewall's rules of docs/en/cluster.md, in a network namespace that stands for a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.docs import commands
from tests.support.launcher.namespaces import ip, unavailable
from tests.support.packages import missing, search_path
from tests.support.paths import ROOT

NODE, PEER = f"al-fw-{os.getpid()}", f"al-fp-{os.getpid()}"
RULES = [c.text for c in commands(ROOT / "docs" / "en" / "cluster.md") if c.text.startswith("iptables ")]
CONNECT = """
import socket, sys
to, source = sys.argv[1], sys.argv[2]
try:
    socket.create_connection((to, 5000), timeout=2.0, source_address=(source, 0)).close()
except TimeoutError:
    sys.exit(3)
"""


def inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


def reaches(namespace: str, to: str, source: str) -> bool:
    code = subprocess.run(inside(namespace, sys.executable, "-c", CONNECT, to, source), check=False).returncode
    assert code in (0, 3)
    return code == 0


@pytest.fixture
def node() -> Iterator[None]:
    """``ib0`` with 10.4.0.1 of the nodes' network, ``eth1`` with 192.168.9.1, and a server on every address."""
    if reason := unavailable():
        pytest.skip(reason)
    if reason := missing(["iptables"], ["iptables"]):
        pytest.skip(reason)
    with ExitStack() as undo:
        for name in (NODE, PEER):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        for link, here, there in (
            ("ib0", ("10.4.0.1/24", "10.9.0.1/24"), ("10.4.0.2/24", "10.9.0.2/24")),
            ("eth1", ("192.168.9.1/24",), ("192.168.9.2/24",)),
        ):
            ip("-n", NODE, "link", "add", link, "type", "veth", "peer", "name", link, "netns", PEER)
            for name, addresses in ((NODE, here), (PEER, there)):
                for address in addresses:
                    ip("-n", name, "addr", "add", address, "dev", link)
                ip("-n", name, "link", "set", link, "up")
        server = "import socket; s = socket.create_server(('', 5000)); print(flush=True)\nwhile True: s.accept()"
        process = subprocess.Popen(inside(NODE, sys.executable, "-c", server), stdout=subprocess.PIPE)
        undo.callback(process.wait)
        undo.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        yield


@pytest.mark.usefixtures("node")
def test_only_nodes_and_the_node_itself_reach_the_ports() -> None:
    nodes, outside = "10.4.0.2", "10.9.0.2"
    assert reaches(PEER, "10.4.0.1", nodes)
    assert reaches(PEER, "10.4.0.1", outside), "the rules would not be what stops it"
    ip("-n", PEER, "route", "add", "10.4.0.1/32", "via", "192.168.9.1", "src", "192.168.9.2")
    assert reaches(PEER, "10.4.0.1", "192.168.9.2")
    ip("-n", PEER, "route", "del", "10.4.0.1/32")
    assert len(RULES) == 3
    for rule in RULES:
        environment = os.environ | {"PATH": search_path()}
        subprocess.run(inside(NODE, "bash", "-c", rule), env=environment, check=True)
    assert reaches(PEER, "10.4.0.1", nodes)
    assert reaches(NODE, "10.4.0.1", "10.4.0.1")
    assert not reaches(PEER, "10.4.0.1", outside)
    ip("-n", PEER, "route", "add", "10.4.0.1/32", "via", "192.168.9.1", "src", "192.168.9.2")
    assert not reaches(PEER, "10.4.0.1", "192.168.9.2")
