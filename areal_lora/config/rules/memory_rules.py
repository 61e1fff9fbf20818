"""Rules about memory: what the estimate of `config.sizing.memory` finds about devices and hosts, a quantised base."""

from collections.abc import Iterator, Sequence

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity, resolve_targets, warning
from areal_lora.config.rules.layout_rules import components_agree, most_devices, trainer_layout
from areal_lora.config.sections.run import LINK_BITS
from areal_lora.config.sizing import memory as sizing, slots
from areal_lora.config.sizing.memory import GIB, Memory
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape, saved_bytes
from areal_lora.network.addresses import WILDCARDS, as_network, on_loopback


def slurm_bytes(mem: str | None) -> int | None:
    """Bytes of ``cluster.slurm.mem``; None where Slurm's default, or all memory of the node, is requested."""
    if mem is None or not int(mem.rstrip("KMGTkmgt")):
        return None
    unit = mem[-1].upper() if mem[-1].isalpha() else "M"
    return int(mem.rstrip("KMGTkmgt")) << 10 * ("KMGT".index(unit) + 1)


EXACT = {sizing.LEAST_KV, "KV cache", sizing.STAGING, "base weights", "gathered layer", "adapter slots"}
EXACT |= {"adapter weights and gradients", "optimizer moments", sizing.PACKED}
"""Parts that follow from sizes alone. Where these do not fit, it is an error; else a warning."""


def memory_suffices(config: Config, facts: Facts) -> Iterator[Finding]:
    shape = facts.shape
    if shape is None or list(trainer_layout(config, facts)):
        return
    try:
        config = resolve_targets(config, facts)
        memory = sizing.job_memory(config, shape)
    except ConfigError:
        return  # other rules report it
    yield from _transfers(config, shape)
    yield from _hosts(config, facts, memory)
    limit = sizing.device_bytes(config, facts.device_bytes)
    if config.cluster.device == "cpu" or limit is None:
        return
    rank = max((m for m in memory if m.role == "trainer"), key=lambda m: m.device)
    replica = next(m for m in memory if m.role == "rollout")
    if slots.shared_devices(config):
        yield from _both(config, rank, replica, limit)
    else:
        yield from _rank(config, rank, limit)
    yield from _replica(config, shape, replica, limit)


def shared_base_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    """Files keep the type in which they were saved, so a file may be larger than the base in ``model.dtype``."""
    shape, have = facts.shape, facts.shared_bytes
    if not config.model.shared_memory or shape is None or have is None:
        return
    need = saved_bytes(shape, config.model.dtype)
    if need > have:
        reason = f"the base takes {need / GIB:.1f} GiB and /dev/shm holds {have / GIB:.1f}"
        fix = "mount it larger (docker run --shm-size, or mount -o remount,size=...), or set it to false"
        yield Finding("model.shared_memory", reason, fix)


FP8_BLOCK = 128
QUANTIZATION = "rollout.engine_args.quantization"


def base_can_be_rounded(config: Config, facts: Facts) -> Iterator[Finding]:
    """vLLM quantises this base, and the trainer knows how."""
    kind, shape = config.rollout.engine_args.get("quantization"), facts.shape
    if kind is None or config.rollout.adapter_mode == "merged":
        return
    if config.model.dtype == "float32":
        yield Finding("model.dtype", f"vLLM quantises ({kind}) 16-bit types only", "set model.dtype=bfloat16")
    if config.cluster.device == "cpu" and (kind != "fp8_per_channel" or (shape and shape.experts)):
        reason = "vLLM's CPU build quantises only linear layers, with fp8_per_channel, and no experts"
        yield Finding(QUANTIZATION, reason, "leave it out, or use fp8_per_channel and a dense model")
    elif kind == "fp8_per_block" and (padded := _padded_experts(config, shape)):
        reason = f"vLLM pads a device's part of an expert from {padded} columns to whole blocks of {FP8_BLOCK}"
        yield Finding(QUANTIZATION, f"{reason}, slots do not", "use fp8_per_channel, or rollout.expert_parallel=true")
    elif config.rollout.quantised is None:
        reason = f"the trainer cannot round as {kind}: it counts as numerics of the mismatch"
        fix = "use fp8_per_channel or fp8_per_tensor, or set weight_sync.probe_tolerance"
        yield warning(QUANTIZATION, reason, fix)


def _padded_experts(config: Config, shape: ModelShape | None) -> int:
    """Columns of an expert on a device, where they are no whole blocks of vLLM's fp8_per_block; else 0."""
    rollout = config.rollout
    columns = 0 if shape is None or rollout.expert_parallel else shape.expert_ffn // rollout.tp
    return columns if columns % FP8_BLOCK else 0


def _transfers(config: Config, shape: ModelShape) -> Iterator[Finding]:
    """A version reaches servers on other nodes within the time of an attempt, over a link that does nothing else."""
    seats, sync = slots.seats_of(config), config.weight_sync
    if {seat.node for seat in seats.servers} <= {seat.node for seat in seats.trainer}:
        return
    least_s = 8 / LINK_BITS * max((slots.version_bytes(config, shape, each) for each in config.adapters), default=0)
    if least_s >= sync.attempt_s:
        reason = f"a version takes at least {least_s:.0f} s over a link and an attempt {sync.attempt_s:g} s"
        fix = f"raise weight_sync.timeout_s to {5 * least_s:.0f}, and run.stall_s, or publish less"
        yield warning("weight_sync.timeout_s", reason, fix)


def _hosts(config: Config, facts: Facts, memory: Sequence[Memory]) -> Iterator[Finding]:
    has = "cluster.slurm.mem is" if config.cluster.kind == "slurm" else "this machine has"
    for i, pool in enumerate(slots.pools_of(config.cluster)):
        of_pool = "" if pool.name == "all" else f" of {pool.name}"
        limit, path, fix = _node_memory(config, facts, i)
        nodes = range(pool.first_node, pool.first_node + pool.nodes)
        node = max(nodes, key=lambda node: sizing.host_bytes(memory, node))
        needed = sizing.host_bytes(memory, node)
        if limit is None or needed <= limit:
            continue
        staged = ((m, part) for m in memory for part in m.parts if part.name == sizing.STAGING)
        pinned = sum(part.host * m.nodes.count(node) for m, part in staged)
        if needed - pinned <= limit:
            fix = f"lower weight_sync.bucket_mib, or {fix}"
        reason = f"about {needed / GIB:.0f} GiB of host memory are needed on a node{of_pool}, {pinned / GIB:.0f} of"
        yield warning(path, f"{reason} them for the staging of publishes, and {has} {limit / GIB:.0f}", fix)


def _node_memory(config: Config, facts: Facts, pool: int) -> tuple[int | None, str, str]:
    """Host memory of a node of a pool, bytes, None if unknown; the key that sets it; a fix."""
    cluster = config.cluster
    if cluster.kind == "slurm":
        fix = "raise it, or use fewer processes on a node"
        if cluster.slurm.components and (own := cluster.slurm.components[pool].mem) is not None:
            return slurm_bytes(own), f"cluster.slurm.components.{pool}.mem", fix
        return slurm_bytes(cluster.slurm.mem), "cluster.slurm.mem", fix
    path = "rollout.kv_cache_gib" if cluster.device == "cpu" else "cluster.nodes"
    return facts.memory_bytes, path, "use a smaller model, fewer processes or a smaller rollout.kv_cache_gib"


def _rank(config: Config, rank: Memory, limit: int) -> Iterator[Finding]:
    if rank.device <= limit:
        return
    largest = max(rank.parts, key=lambda part: part.device)
    reason = f"a {rank.name} needs about {rank.device / GIB:.0f} GiB and a device has {limit / GIB:.0f}"
    if largest.name == sizing.JOINING:
        path, fix = "rollout.max_adapters", "lower it or rollout.max_lora_rank, or use more ranks"
    elif largest.name == "activations":
        path, fix = "trainer.max_tokens_per_microbatch", "lower it, set trainer.recompute=full, or raise trainer.tp"
    else:
        path, fix = "trainer.world_size", "use more ranks with larger trainer.tp, trainer.pp or trainer.ep"
    reason = f"{reason}; the largest part is {largest.name} with {largest.device / GIB:.0f}"
    yield Finding(path, reason, fix, severity=_severity(rank, limit))


def _replica(config: Config, shape: ModelShape, replica: Memory, limit: int) -> Iterator[Finding]:
    used, configured = config.rollout.gpu_memory_utilization, config.rollout.kv_cache_gib
    staging = sizing.staging_of(replica)
    left = limit - (int(used * limit) if configured is None else replica.device - staging)
    if staging > left and not slots.shared_devices(config):
        needs = f"publishes need about {staging / GIB:.1f} GiB of a server's device"
        reason = f"{needs}, and {used:g} leaves {left / GIB:.1f} of {limit / GIB:.0f} beside vLLM's share"
        fix = "lower it, or weight_sync.bucket_mib"
        yield Finding("rollout.gpu_memory_utilization", reason, fix)
    if (short := sizing.kv_part(config, shape) - sizing.kv_bytes(config, shape, replica, limit)) > 0:
        lower = "rollout.max_model_len" if configured is None else "rollout.kv_cache_gib"
        why = "for one sequence" if configured is None else f"with a KV cache of {configured:g}"
        fix = "raise rollout.tp or " if config.rollout.tp < most_devices(config) else "raise "
        held = sum(part.device for part in replica.parts if part.name == "adapter slots")
        if held > short:
            why = f"{why}, {held / GIB:.0f} of them for adapter slots,"
            fewer = "lower rollout.max_staleness, rollout.max_adapters or rollout.max_lora_rank"
            fix = f"{'set rollout.expert_parallel=true' if slots.smaller_slot(config, shape) else fewer}, {fix}"
        gets = f"{used * limit / GIB:.0f} ({used:g} of {limit / GIB:.0f})"
        reason = f"a device of a server needs about {(replica.device - staging) / GIB:.0f} GiB {why} and gets {gets}"
        fix = f"{fix}rollout.gpu_memory_utilization, or lower {lower}"
        yield Finding("rollout.tp", reason, fix, severity=_severity(replica, int(used * limit) + staging))


def _both(config: Config, rank: Memory, replica: Memory, limit: int) -> Iterator[Finding]:
    """One device that a trainer rank and a server share: vLLM claims its fraction of all memory at its start."""
    used = config.rollout.gpu_memory_utilization
    staging = sizing.staging_of(replica)
    free = int((1 - used) * limit) - staging
    if rank.device > free:
        leaves = f"{free / GIB:.0f} of {limit / GIB:.0f} GiB to the {rank.name} on the same device"
        reason = f"{used:g} leaves {leaves}, which needs about {rank.device / GIB:.0f}"
        smaller = "lower trainer.max_tokens_per_microbatch, or set trainer.recompute=full"
        fix = f"lower it to the {(replica.device - staging) / limit:.2f} that a server needs, {smaller}"
        yield Finding("rollout.gpu_memory_utilization", reason, fix, severity=_severity(rank, free))


def _severity(memory: Memory, limit: int) -> Severity:
    exact = sum(part.device for part in memory.parts if part.name in EXACT)
    return Severity.ERROR if exact > limit else Severity.WARNING


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
        for pool in slots.pools_of(cluster):
            ranks = config.trainer.world_size if "trainer" in pool.roles else 0
            served = rollout.servers * rollout.tp if "rollout" in pool.roles else 0
            declared = pool.nodes * pool.devices_per_node
            if devices_of(config, ranks, served) > declared:
                parts = {f"{ranks} trainer": ranks, f"{rollout.servers} x {rollout.tp} rollout": served}
                roles = ", ".join(text for text, devices in parts.items() if devices)
                all_of_pool = devices_of(config, ranks, served)
                reason = f"{all_of_pool} devices are needed ({roles}) and {declared} are declared"
                fix = f"raise {pool.key} or devices_per_node, or lower trainer.world_size or rollout.servers"
                yield Finding(pool.key, reason, fix)
                return
    try:
        slots.seats_of(config)
    except ConfigError as error:
        yield Finding(error.path, error.reason, error.fix)
        return
    needed = min(needed, cluster.devices_per_node) if cluster.kind == "nodes" else needed
    if facts.devices is not None and facts.devices < needed:
        reason = f"{needed} {cluster.device} devices are needed and {facts.devices} are visible here"
        fix = "lower trainer.world_size or rollout.servers, or set cluster.device=cpu"
        yield Finding("cluster.device", reason, fix)


def cluster_is_reachable(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.kind == "local" and cluster.nodes > 1:
        reason = f"cluster.kind = local means this machine, not {cluster.nodes} nodes"
        yield Finding("cluster.nodes", reason, "set cluster.nodes=1, or cluster.kind=slurm or nodes")
    elif cluster.total_nodes > 1 and cluster.bind.startswith("127."):
        reason = f"{cluster.total_nodes} nodes cannot reach each other on {cluster.bind}"
        yield Finding("cluster.bind", reason, "set cluster.bind=0.0.0.0")


def interface_counts(config: Config, facts: Facts) -> Iterator[Finding]:
    cluster = config.cluster
    try:
        as_network(cluster.interface)
    except ConfigError as error:
        yield Finding(error.path, error.reason, error.fix)
        return
    if cluster.interface != "auto" and cluster.bind not in WILDCARDS:
        reason = f"{cluster.interface!r} contradicts cluster.bind = {cluster.bind}, which is used as it is"
        yield Finding("cluster.interface", reason, "set cluster.bind=0.0.0.0, or leave cluster.interface out")
    elif (problem := facts.address_problem) is not None and (
        cluster.kind == "nodes" or cluster.total_nodes == 1  # else other machines decide
    ):
        yield Finding(problem.path, problem.reason, problem.fix)


def remote_servers_fit(config: Config, facts: Facts) -> Iterator[Finding]:
    if (remote := config.rollout.remote) is None:
        return
    if not on_loopback(remote.host) and remote.certificate is None:
        reason = f"the token of remote servers would be sent to {remote.host} without TLS"
        yield Finding("rollout.remote.certificate", reason, "name a PEM file, or a loopback host behind a proxy")
    if slots.broadcast_backend(config) != "gloo":
        reason = "the gateway for remote servers receives versions in host memory"
        yield Finding("weight_sync.backend", reason, "set it to gloo")
