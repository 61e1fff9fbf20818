"""Rules about a Slurm job: components, directives, the smallest number of servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, warning
from areal_lora.config.sizing.slots import ALL_ROLES, pools_of, seats_of
from areal_lora.errors import ConfigError

_KEYS = {
    "nodes": "cluster.nodes",
    "job-name": "run.name",
    "time": "cluster.slurm.time_limit",
    "partition": "cluster.slurm.partition",
    "account": "cluster.slurm.account",
    "mem": "cluster.slurm.mem",
    "gres": "cluster.devices_per_node and cluster.slurm.gres_type",
    "gpus": "cluster.devices_per_node and cluster.slurm.gres_type",
    "gpus-per-node": "cluster.devices_per_node and cluster.slurm.gres_type",
}
"""Options of sbatch that have a key of their own."""
_OURS = {"signal", "requeue", "no-requeue", "output", "open-mode", "ntasks", "ntasks-per-node", "mincpus", "array"}
"""Options of sbatch that the job script depends on."""
_SHORT = {"N": "nodes", "J": "job-name", "t": "time", "p": "partition", "A": "account"}
_SHORT |= {"G": "gpus", "o": "output", "n": "ntasks", "a": "array"}


def most_devices(config: Config) -> int:
    """Devices of a node of the servers; without a limit on CPUs, and where another rule finds that there are none."""
    if config.cluster.device == "cpu":
        return sys.maxsize
    pools = [pool for pool in pools_of(config.cluster) if "rollout" in pool.roles]
    return (pools[0].devices_per_node if pools else 0) or sys.maxsize


def components_agree(config: Config, facts: Facts) -> Iterator[Finding]:
    """Each role is in one component, with devices if it needs them; a local run has none."""
    cluster, components = config.cluster, config.cluster.slurm.components
    if not components:
        return
    key = "cluster.slurm.components"
    if cluster.kind != "slurm":
        reason = f"a job with cluster.kind = {cluster.kind} has no components"
        yield Finding(key, reason, f"set {key}=[], or cluster.kind=slurm")
        return
    if cluster.nodes not in (1, cluster.total_nodes):
        reason = f"{cluster.nodes} nodes contradict the components, which have {cluster.total_nodes}"
        yield Finding("cluster.nodes", reason, "leave it out")
    for role in ALL_ROLES:
        places = [str(i) for i, component in enumerate(components) for r in component.roles if r == role]
        if not places:
            yield Finding(key, f"no component has the role {role}", f"add {role} to one of them")
        elif len(places) > 1:
            reason = f"{role} is named {len(places)} times: in components {', '.join(places)}"
            yield Finding(f"{key}.{places[1]}.roles", reason, "name each role once")
    for i, (component, pool) in enumerate(zip(components, pools_of(cluster), strict=True)):
        needy = [role for role in component.roles if role != "controller"]
        if needy and cluster.device != "cpu" and not pool.devices_per_node:
            reason = f"{' and '.join(needy)} need {cluster.device} devices and its nodes have none"
            yield Finding(f"{key}.{i}.devices_per_node", reason, "raise it, or leave it out")
        if component.mem is None and cluster.slurm.mem is None and any(part.mem for part in components):
            reason = "another component sets its memory, which Slurm would apply to this one"
            yield Finding(f"{key}.{i}.mem", reason, "set it here, or set cluster.slurm.mem")
        if not needy and component.nodes > 1:
            reason = f"the controller is one process and cannot use {component.nodes} nodes"
            yield Finding(f"{key}.{i}.nodes", reason, "set it to 1")


def own_directives(config: Config, facts: Facts) -> Iterator[Finding]:
    """``extra`` neither repeats a key nor changes what the script depends on."""
    slurm = config.cluster.slurm
    lists = {"cluster.slurm.extra": slurm.extra}
    lists |= {f"cluster.slurm.components.{i}.extra": part.extra for i, part in enumerate(slurm.components)}
    for path, lines in lists.items():
        for line in lines:
            option = _option(line)
            if not line.startswith("-"):
                yield Finding(path, f"{line!r} is not an option of sbatch", "start it with - or --, without #SBATCH")
            elif option in _KEYS:
                yield Finding(path, f"{line!r} has a key of its own", f"use {_KEYS[option]}")
            elif option in _OURS:
                yield Finding(path, f"the job script sets --{option} and depends on it", "remove it")
    for role, lines in slurm.srun_extra.items():
        for line in lines:
            option, _, value = line.replace("=", " ").partition(" ")
            if option == "--gpu-bind" and value.strip().split(",")[-1] != "none":
                reason = f"{line!r} hides devices that the plan gives to a process"
                fix = "leave it out, or set --gpu-bind=none or --gpu-bind=verbose,none"
                yield Finding(f"cluster.slurm.srun_extra.{role}", reason, fix)
    if slurm.gres_type and config.cluster.device == "cpu":
        reason = f"{slurm.gres_type} GPUs contradict cluster.device = cpu"
        yield Finding("cluster.slurm.gres_type", reason, "leave it out, or set cluster.device=cuda")


def _option(line: str) -> str:
    """Name of the option in a #SBATCH line, in its long form where that is known."""
    if line.startswith("--"):
        return line[2:].partition("=")[0].partition(" ")[0]
    return _SHORT.get(line[1:2], "")


def servers_suffice(config: Config, facts: Facts) -> Iterator[Finding]:
    least, servers = config.cluster.min_servers, config.rollout.servers
    if least > servers:
        reason = f"{least} servers are required and rollout.servers = {servers}"
        yield Finding("cluster.min_servers", reason, f"set it to at most {servers}, or raise rollout.servers")


def no_idle_node(config: Config, facts: Facts) -> Iterator[Finding]:
    """A node without a process would be paid for and do nothing."""
    try:
        seats = seats_of(config)
    except ConfigError:
        return  # other rules report it
    if list(components_agree(config, facts)):
        return
    used = {seat.node for seat in (*seats.trainer, *seats.servers, seats.controller)}
    for pool in pools_of(config.cluster):
        idle = sorted(set(range(pool.first_node, pool.first_node + pool.nodes)) - used)
        if idle:
            reason = f"nothing runs on {len(idle)} of {pool.nodes} nodes (node {', '.join(map(str, idle))})"
            yield warning(pool.key, reason, f"set it to {pool.nodes - len(idle)}, or use more ranks or servers")
