"""Rules about the cluster and this machine: devices, memory, addresses, ports."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts, server_ports
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity, shape_of
from areal_lora.errors import ConfigError
from areal_lora.families.shape import base_bytes
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


def devices_suffice(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.device == "cpu":
        return
    needed = config.trainer.world_size + config.rollout.servers * config.rollout.tp
    declared = cluster.nodes * cluster.devices_per_node
    if needed > declared:
        yield Finding(
            path="cluster.nodes",
            reason=f"{needed} devices are needed ({config.trainer.world_size} trainer, "
            f"{config.rollout.servers} x {config.rollout.tp} rollout) and {declared} are declared",
            fix="raise cluster.nodes or cluster.devices_per_node, or lower trainer.world_size or rollout.servers",
        )
    elif facts.devices is not None and facts.devices < needed:
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
    elif cluster.nodes > 1 and cluster.bind.startswith("127."):
        yield Finding(
            path="cluster.bind",
            reason=f"{cluster.nodes} nodes cannot reach each other on {cluster.bind}",
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
    elif facts.address_problem is not None and cluster.nodes == 1:  # several nodes: not a question about this machine
        problem = facts.address_problem
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)


def memory_suffices(config: Config, facts: Facts) -> Iterator[Finding]:
    shape = shape_of(facts)
    if config.cluster.device != "cpu" or facts.memory_bytes is None or shape is None:
        return
    copies = config.trainer.world_size + config.rollout.servers
    needed = copies * base_bytes(shape, config.model.dtype)
    needed += int(config.rollout.servers * (config.rollout.kv_cache_gib or 4.0) * 2**30)
    if needed > facts.memory_bytes:
        yield Finding(
            path="rollout.kv_cache_gib",
            reason=f"about {needed / 2**30:.0f} GiB are needed and this machine has {facts.memory_bytes / 2**30:.0f}",
            fix="use a smaller model, fewer processes or a smaller rollout.kv_cache_gib",
            severity=Severity.WARNING,
        )
