"""Resolve the address that a process of a run binds to, from ``cluster`` and the published peers."""

from __future__ import annotations

from functools import cache

from areal_lora.config.cluster import ClusterConfig
from areal_lora.network.addresses import WILDCARDS, Place, find_place
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_hosts


def own_place(cluster: ClusterConfig, run_folder: RunFolder) -> Place:
    """Return the address that this process binds to until it exits. Raises ConfigError."""
    return _own_place(cluster.bind, cluster.interface, cluster.total_nodes, run_folder)


@cache  # endpoints published later must not move a process to another address
def _own_place(bind: str, interface: str, nodes: int, run_folder: RunFolder) -> Place:
    peers = published_hosts(run_folder) if bind in WILDCARDS else []
    return find_place(bind=bind, interface=interface, nodes=nodes, peers=peers)
