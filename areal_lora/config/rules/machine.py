"""Rules about the cluster and this machine: devices, addresses, ports, the service."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts, server_ports
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding
from areal_lora.config.rules.slurm import components_agree, most_devices
from areal_lora.config.sizing.pools import pools_of, seats_of
from areal_lora.config.sizing.slots import has_tenants
from areal_lora.errors import ConfigError
from areal_lora.network.addresses import WILDCARDS, as_network


def ports_free(config: Config, facts: Facts) -> Iterator[Finding]:
    for port in server_ports(config):
        if port > 65535:
            yield Finding(path="rollout.port", reason=f"{port} is not a port number", fix="use 0 or 1024..65535")
        elif port in facts.ports_in_use:
            yield Finding(
                path="rollout.port",
                reason=f"port {port} on {config.cluster.bind} is in use or may not be bound",
                fix="set rollout.port=0 to let the system choose, or another port",
            )


def devices_of(config: Config, ranks: int, served: int) -> int:
    """Devices of ``ranks`` trainer ranks and of servers on ``served`` devices."""
    return max(ranks, served) if config.cluster.share_devices else ranks + served


def devices_suffice(config: Config, facts: Facts) -> Iterator[Finding]:
    """Each pool has the devices that its roles need, and every process finds its devices on one node."""
    if list(components_agree(config, facts)) or config.rollout.tp > most_devices(config):
        return
    cluster, rollout = config.cluster, config.rollout
    needed = devices_of(config, config.trainer.world_size, rollout.servers * rollout.tp)
    if cluster.device != "cpu":
        for pool in pools_of(cluster):
            ranks = config.trainer.world_size if "trainer" in pool.roles else 0
            served = rollout.servers * rollout.tp if "rollout" in pool.roles else 0
            declared = pool.nodes * pool.devices_per_node
            if devices_of(config, ranks, served) > declared:
                parts = [f"{ranks} trainer"] * bool(ranks) + [f"{rollout.servers} x {rollout.tp} rollout"] * bool(
                    served
                )
                yield Finding(
                    path=pool.key,
                    reason=f"{devices_of(config, ranks, served)} devices are needed ({', '.join(parts)}) and "
                    f"{declared} are declared",
                    fix=f"raise {pool.key} or devices_per_node, or lower trainer.world_size or rollout.servers",
                )
                return
    try:
        seats_of(config)
    except ConfigError as error:
        yield Finding(path=error.path, reason=error.reason, fix=error.fix)
        return
    if facts.devices is not None and facts.devices < needed:
        yield Finding(
            path="cluster.device",
            reason=f"{needed} {cluster.device} devices are needed and {facts.devices} are visible here",
            fix="lower trainer.world_size or rollout.servers, or set cluster.device=cpu",
        )


def cluster_is_reachable(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.kind == "local" and cluster.nodes > 1:
        yield Finding(
            path="cluster.nodes",
            reason=f"cluster.kind = local means this machine, not {cluster.nodes} nodes",
            fix="set cluster.nodes=1, or cluster.kind=slurm",
        )
    elif cluster.total_nodes > 1 and cluster.bind.startswith("127."):
        yield Finding(
            path="cluster.bind",
            reason=f"{cluster.total_nodes} nodes cannot reach each other on {cluster.bind}",
            fix="set cluster.bind=0.0.0.0",
        )


def interface_counts(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    try:
        as_network(cluster.interface)
    except ConfigError as error:
        yield Finding(path=error.path, reason=error.reason, fix=error.fix)
        return
    if cluster.interface != "auto" and cluster.bind not in WILDCARDS:
        yield Finding(
            path="cluster.interface",
            reason=f"{cluster.interface!r} contradicts cluster.bind = {cluster.bind}, which is used as it is",
            fix="set cluster.bind=0.0.0.0, or leave cluster.interface out",
        )
    elif (
        facts.address_problem is not None and cluster.total_nodes == 1
    ):  # several nodes: not a question about this machine
        problem = facts.address_problem
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)


def service_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    if not has_tenants(config):
        return
    if config.cluster.kind != "local":
        yield Finding(
            path="cluster.kind",
            reason="the service listens on the loopback address of the launcher's machine, and a Slurm job has several",
            fix="start it with cluster.kind=local, inside an allocation for example",
        )
    for problem in facts.service_problems:
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)
