"""Adapter slots of a rollout server, and the pools of nodes of a job with the seat of every process on them. Pure.

    newest of each adapter | one on its way | one that an evaluation keeps | old versions that sequences still use
             N             |       1        |              1               | finish: max_staleness x N
                                                                           | otherwise: max_staleness

Under ``finish`` every adapter's sequences may hold each version that is still trainable. Under ``interrupt`` and
``keep`` sequences follow the newest version, so the adapters share the rest. Adapters are evaluated one by one.

A job has one pool, or one for each component of a heterogeneous Slurm job. Nodes are numbered over all pools.

- Devices: in a pool, trainer ranks fill nodes in rank order. Each server takes ``rollout.tp`` devices of one node
  after them, or with ``cluster.share_devices`` from the first device on; it starts on the next rather than on two.
- CPUs: a node takes ``devices_per_node`` trainer ranks, or more if there are too few nodes. Servers are distributed
  over the nodes of their pool without ranks, or are on its last node where all have ranks.
- The controller is on the first node of its pool; in a job with one pool, beside trainer rank 0.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.sections.run import ClusterConfig, Role
from areal_lora.config.sections.task import ClientWorkflowConfig
from areal_lora.errors import ConfigError
from areal_lora.families.family import COLUMN_PARALLEL, MLP_LINEARS, Scope, covers
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.families.sites import adapter_size, distinct, linear_sites, pieces_of
from areal_lora.types import ExpertLayout


def adapter_capacity(config: Config) -> int:
    """Adapters that a server holds at a time."""
    return config.rollout.max_adapters or len(config.adapters)


def served_targets(config: Config) -> tuple[str, ...]:
    """Targets that servers have room for, sorted: those of the listed adapters and of joining ones."""
    of_service = config.service.target_modules if config.service else ()
    return tuple(sorted({*of_service, *(t for adapter in config.adapters for t in adapter.target_modules)}))


def has_tenants(config: Config) -> bool:
    """Whether tenants that do not trust each other have adapters: servers then require a key on loopback, too."""
    return config.service is not None and config.service.api is not None


def adapter_slots(config: Config) -> int:
    """Slots of a server; on CPUs vLLM has one more, which stays empty. Merged weights are one version, and the next."""
    rollout, adapters = config.rollout, adapter_capacity(config)
    if rollout.adapter_mode == "merged":
        return 2
    holders = adapters if rollout.in_flight == "finish" else 1
    return adapters + 2 + rollout.max_staleness * holders


def slot_parameters(config: Config, shape: ModelShape) -> int:
    """Parameters of one adapter slot of a worker: all projections apart, padded to the largest rank.

    vLLM keeps lora_A and lora_B of each projection of a fused layer (q, k, v; gate, up) and of each expert, but for
    what `slot_layout` shares, wherever one of the adapters has a target: a slot fits all of them. With tp lora_A of a
    column-parallel layer and lora_B of a row-parallel one are whole on every worker; expert parallel divides experts.
    """
    r, total = config.rollout, 0
    for key in linear_sites(shape):
        if not key.covered(served_targets(config)):
            continue
        routed, pieces = key.scope is Scope.EXPERT, pieces_of(shape, key)
        whole = routed and r.expert_parallel
        size, modules = 1 if whole else r.tp, shape.experts // (r.tp if whole else 1) if routed else 1
        inputs, outputs = pieces[0].in_features, sum(p.out_features for p in pieces)
        if key.linear in COLUMN_PARALLEL:
            outputs //= size
        else:
            inputs //= size
        n_a, n_b = distinct(slot_layout(config), key.linear, modules)
        total += r.max_lora_rank * (n_a * len(pieces) * inputs + n_b * outputs)
    return total


def smaller_slot(config: Config, shape: ModelShape) -> int:
    """`slot_parameters` with expert parallelism where these are fewer, else 0."""
    rollout = config.rollout.model_copy(update={"expert_parallel": True})
    apart = slot_parameters(config.model_copy(update={"rollout": rollout}), shape)
    return apart if apart < slot_parameters(config, shape) else 0


def slot_layout(config: Config) -> ExpertLayout:
    """How slots hold experts: what `shared_outer` shares once, unless an adapter that is listed or may join differs."""
    layouts = {
        adapter.expert_layout
        for adapter in config.adapters
        if any(covers(adapter.target_modules, linear, Scope.EXPERT) for linear in MLP_LINEARS)
    }
    apart = config.service is not None or not layouts or ExpertLayout.PER_EXPERT in layouts
    return ExpertLayout.PER_EXPERT if apart else ExpertLayout.SHARED_OUTER


def slot_count(config: Config) -> int:
    """Slots that vLLM allocates: on CPUs one more than are used stays empty."""
    return adapter_slots(config) + (config.cluster.device == "cpu")


def kept_versions(config: Config) -> int:
    """Versions of each adapter that keep their slots without a request: all of them fit beside the two others."""
    return (adapter_slots(config) - 2) // adapter_capacity(config)


def splits_prompts(config: Config) -> bool:
    """Whether a server computes a long prompt in several steps; not on CPUs (`server.assemble`)."""
    return config.cluster.device != "cpu" and config.rollout.engine_args.get("enable_chunked_prefill") is not False


def joining_adapters(config: Config) -> list[AdapterConfig]:
    """The largest adapters that can join beside the listed ones; none without a service.

    Each has the rank ``rollout.max_lora_rank`` and all targets that servers can adapt.
    """
    if config.service is None:
        return []
    sizes = {"rank": config.rollout.max_lora_rank, "alpha": 1.0, "target_modules": list(served_targets(config))}
    settings, places = {"workflow": ClientWorkflowConfig(), **sizes}, adapter_capacity(config) - len(config.adapters)
    return [AdapterConfig.model_validate({"name": f"joining-{i}", **settings}) for i in range(places)]


RAMP = 2  # doublings from the first bucket to a full one
LEAST_BUCKET = 8 << 20  # below this latency counts; relays' buckets, which all members cut alike, are no larger
HOST_BYTES_PER_S = 10e9  # of one pass over host memory
MERGERS, WIDE = 8, 1 << 29
"""Ranks that share the merging, if there are replicas: more would merge faster than a link takes it in. They are fewer
where as many weights of the largest size have more numbers than ``WIDE``: receivers have buffers for each of them.
"""


def bucket_ends(nbytes: int, bucket_bytes: int) -> list[int]:
    """Ideal ends of buckets if tensors could be cut anywhere: a ramp up, equal buckets, a ramp down, ``nbytes``."""
    ramp = [max(bucket_bytes >> k, 1) for k in range(RAMP, 0, -1)]
    while ramp and 2 * sum(ramp) > nbytes:
        ramp.pop()  # too little for the whole ramp
    down = ramp[::-1]
    inner = nbytes - 2 * sum(ramp)
    if ramp and inner <= ramp[-1]:  # a short bucket between long ones would cost a round for nothing
        inner += ramp.pop()
    n = -(-inner // bucket_bytes)
    sizes = [*ramp, *(inner * (k + 1) // n - inner * k // n for k in range(n)), *down]
    return [total for total in accumulate(sizes) if total]


def largest_bucket(nbytes: int, bucket_bytes: int, tensor_bytes: int) -> int:
    """Bytes of the largest bucket of a shard, whose largest tensor has ``tensor_bytes``; 0 for an empty one."""
    ends = [0, *bucket_ends(nbytes, bucket_bytes)]
    return min(nbytes, max(tensor_bytes, *(b - a for a, b in pairwise(ends)))) if nbytes else 0


def bucket_of(bucket_bytes: int, sources: int) -> int:
    """The largest bucket of one of ``sources`` that send at once: receivers have buffers for each."""
    return max(bucket_bytes // max(sources, 1), min(bucket_bytes, LEAST_BUCKET))


ALL_ROLES: tuple[Role, ...] = ("trainer", "rollout", "controller")
"""Those that some component must have."""
WITHOUT_DEVICES = {"controller", "environment"}


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind. ``key`` is the configuration key of its number of nodes."""

    name: str
    key: str
    roles: tuple[Role, ...]
    first_node: int
    nodes: int
    devices_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Place of one process: a node of the job, and devices of that node (none on CPUs)."""

    node: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Places of all processes. ``local_ranks`` number the trainer ranks of each node."""

    trainer: tuple[Seat, ...]
    local_ranks: tuple[int, ...]
    servers: tuple[Seat, ...]
    controller: Seat


def pools_of(cluster: ClusterConfig) -> tuple[Pool, ...]:
    """The pools of a job in the order of the components."""
    components = cluster.slurm.components
    if not components:
        devices = 0 if cluster.device == "cpu" else cluster.devices_per_node
        return (Pool("all", "cluster.nodes", ALL_ROLES, 0, cluster.nodes, devices),)
    pools: list[Pool] = []
    for i, component in enumerate(components):
        devices = 0 if WITHOUT_DEVICES.issuperset(component.roles) else cluster.devices_per_node
        devices = devices if component.devices_per_node is None else component.devices_per_node
        key, first = f"cluster.slurm.components.{i}.nodes", sum(pool.nodes for pool in pools)
        devices = 0 if cluster.device == "cpu" else devices
        pools.append(Pool("+".join(component.roles), key, tuple(component.roles), first, component.nodes, devices))
    return tuple(pools)


def pool_of(pools: tuple[Pool, ...], role: Role) -> Pool:
    """The pool that holds ``role``. Raises ConfigError where none does."""
    for pool in pools:
        if role in pool.roles:
            return pool
    raise ConfigError("cluster.slurm.components", f"no component has the role {role}", f"add {role} to one of them")


def seats_of(config: Config) -> Seats:
    """Place every process. Raises ConfigError where it does not fit."""
    pools = pools_of(config.cluster)
    place = _on_cpus if config.cluster.device == "cpu" else _on_devices
    trainer, servers = place(config, pools)
    nodes = [seat.node for seat in trainer]
    return Seats(
        trainer=tuple(trainer),
        local_ranks=tuple(nodes[:i].count(node) for i, node in enumerate(nodes)),
        servers=tuple(servers),
        controller=Seat(node=pool_of(pools, "controller").first_node),
    )


def shared_devices(config: Config) -> set[tuple[int, int]]:
    """(node, device) of the devices that a trainer rank and a server both use. Raises ConfigError as `seats_of`."""
    seats = seats_of(config)
    roles = seats.trainer, seats.servers
    ranks, servers = ({(seat.node, device) for seat in role for device in seat.devices} for role in roles)
    return ranks & servers


def _on_cpus(config: Config, pools: tuple[Pool, ...]) -> tuple[list[Seat], list[Seat]]:
    world = config.trainer.world_size
    pool = pool_of(pools, "trainer")
    per_node = max(config.cluster.devices_per_node, -(-world // pool.nodes))
    trainer = [Seat(node=pool.first_node + rank // per_node) for rank in range(world)]
    pool = pool_of(pools, "rollout")
    every = range(pool.first_node, pool.first_node + pool.nodes)
    taken = {seat.node for seat in trainer}
    free = [node for node in every if node not in taken] or [every[-1]]
    count = config.rollout.servers
    return trainer, [Seat(node=free[i * len(free) // max(count, len(free))]) for i in range(count)]


def _on_devices(config: Config, pools: tuple[Pool, ...]) -> tuple[list[Seat], list[Seat]]:
    next_device = dict.fromkeys(pools, 0)
    trainers, servers = pool_of(pools, "trainer"), pool_of(pools, "rollout")

    def seat(pool: Pool, size: int, process: str) -> Seat:
        per_node = pool.devices_per_node
        if size > per_node:
            reason = f"{process} needs {size} devices of one node and has {per_node}"
            raise ConfigError(pool.key, reason, "use nodes with more devices")
        free = next_device[pool]
        if free % per_node + size > per_node:
            free += per_node - free % per_node
        next_device[pool] = free + size
        node, first = divmod(free, per_node)
        if node >= pool.nodes:
            nodes = f"{pool.nodes} nodes" if pool.nodes > 1 else "1 node"
            reason = f"{process} of {size} devices has no room on {nodes} of {per_node}"
            raise ConfigError(pool.key, reason, f"raise {pool.key}, or choose sizes that fill nodes evenly")
        return Seat(node=pool.first_node + node, devices=tuple(range(first, first + size)))

    ranks = [seat(trainers, 1, f"trainer rank {i}") for i in range(config.trainer.world_size)]
    if config.cluster.share_devices:
        next_device[servers] = 0
    return ranks, [seat(servers, config.rollout.tp, f"server {i}") for i in range(config.rollout.servers)]


OF_DEVICES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The library that sends the memory of each kind of device."""


def broadcast_backend(config: Config) -> str:
    """The name of a row of ``weight_sync.link.backends``; the same in every process of a run.

    NCCL and HCCL refuse two members on one device. gloo sends host memory, page-locked where there are devices.
    Raises ConfigError where the processes do not fit their nodes.
    """
    chosen = config.weight_sync.backend
    if chosen != "auto":
        return chosen
    return "gloo" if shared_devices(config) else OF_DEVICES[config.cluster.device]


def send_places(config: Config) -> tuple[int, ...]:
    """Places of the trainer ranks: those at one place send what they own as one source.

    On devices a place is a node, for a source has communicators with all servers. Each rank is a place on CPUs, where
    receivers read the memory of every rank, for merged weights, and with several adapters: a source keeps the packed
    shards of each, and one device would hold those of a node. Raises ConfigError as `seats_of`.
    """
    alone = adapter_capacity(config) == 1 and config.rollout.adapter_mode == "unmerged"
    if config.cluster.device == "cpu" or not alone:
        return tuple(range(config.trainer.world_size))
    return tuple(seat.node for seat in seats_of(config).trainer)


def merging_ranks(shape: ModelShape, *, ranks: int, tp: int, ep: int, etp: int, pp: int) -> list[int]:
    """Ranks of a stage of ``ranks`` that merge, by number in it: evenly distributed replicas of all it holds.

    A replica's are one rank for each part of the experts. Those that ``tp`` divides hold dense layers.
    """
    replica = math.lcm(tp, ep * etp)
    found = ranks // replica
    used = min(found, max(1, min(MERGERS, WIDE // _largest_weight(shape)) // (ep * pp)))
    return [i * found // used * replica + part * etp for i in range(used) for part in range(ep)]


@lru_cache(maxsize=8)
def _largest_weight(shape: ModelShape) -> int:
    pieces = (piece for key in linear_sites(shape) for piece in pieces_of(shape, key))
    return max(piece.in_features * piece.out_features for piece in pieces)


def stage_owners(config: Config, shape: ModelShape, adapter: AdapterConfig, layers: Sequence[int]) -> int:
    """Ranks of a stage that own tensors of ``adapter``: one, or each expert-parallel rank where experts are apart."""
    keys = [key for key in linear_sites(shape) if key.layer in layers and key.covered(adapter.target_modules)]
    apart = adapter.expert_layout is not ExpertLayout.SHARED and any(key.scope is Scope.EXPERT for key in keys)
    return config.trainer.ep if apart else min(1, len(keys))


def stage_sources(config: Config, shape: ModelShape, adapter: AdapterConfig, layers: Sequence[int]) -> list[int]:
    """Ranks of a stage, by number in it, that own tensors of ``adapter``, or share the weights that it changes."""
    t, owners = config.trainer, stage_owners(config, shape, adapter, layers)
    if config.rollout.adapter_mode == "unmerged" or not owners:
        return [part * t.etp for part in range(owners)]
    ranks = merging_ranks(shape, ranks=t.world_size // t.pp, tp=t.tp, ep=t.ep, etp=t.etp, pp=t.pp)
    sparse = set(layers) & set(shape.sparse_layers)
    routed = sparse and any(covers(adapter.target_modules, linear, Scope.EXPERT) for linear in MLP_LINEARS)
    return [rank for rank in ranks if routed or rank % t.tp == 0]


def stages(config: Config, shape: ModelShape) -> list[list[int]]:
    """Layers of each pipeline stage: as given, else evenly distributed, earlier stages first."""
    t = config.trainer
    sizes = t.pp_layers or [shape.layers // t.pp + (stage < shape.layers % t.pp) for stage in range(t.pp)]
    owners = [i % t.pp for i, size in enumerate(sizes) for _ in range(size)]
    return [[layer for layer, owner in enumerate(owners) if owner == stage] for stage in range(t.pp)]


def sent_bytes(config: Config, shape: ModelShape, adapter: AdapterConfig) -> dict[int, int]:
    """Bytes of a version by the source rank that sends them: the first owner at each of `send_places`."""
    t, places, whole = config.trainer, send_places(config), version_bytes(config, shape, adapter)
    sources, sent = dict[int, int](), Counter[int]()
    for stage, layers in enumerate(stages(config, shape)):
        owners = stage_sources(config, shape, adapter, layers)
        for owner in owners:
            rank = stage * (t.world_size // t.pp) + owner
            source = sources.setdefault(places[rank], rank)
            sent[source] += whole * len(layers) // shape.layers // len(owners)
    return sent


def source_ranks(config: Config, shape: ModelShape) -> int:
    """Number of trainer ranks that send tensors of an adapter: each has broadcast groups."""
    return len(set[int]().union(*(sent_bytes(config, shape, adapter) for adapter in config.adapters)))


def bucket_bytes(config: Config, shape: ModelShape) -> int:
    """The largest bucket of each source, if no tensor is larger."""
    return bucket_of(config.weight_sync.bucket_bytes, source_ranks(config, shape))


def largest_tensor(config: Config, shape: ModelShape, adapter: AdapterConfig, *, dense: bool = True) -> int:
    """Bytes of the largest tensor of a version, of routed experts or also of ``dense`` layers."""
    spec, merged = adapter.spec(""), config.rollout.adapter_mode == "merged"
    keys = [key for key in linear_sites(shape) if dense or key.scope is Scope.EXPERT]
    pieces = (piece for key in keys if key.covered(spec.target_modules) for piece in pieces_of(shape, key))
    sizes = ((p.in_features, p.out_features, spec.rank_of(p.name)) for p in pieces)
    numbers = max((a * b if merged else rank * max(a, b) for a, b, rank in sizes), default=0)
    return numbers * DTYPE_BYTES[config.model.dtype]


def merging_s(config: Config, shape: ModelShape, adapter: AdapterConfig) -> float:
    """Seconds of the rank that merges most: weights go to its device and to the host again. 0: none are merged."""
    if config.rollout.adapter_mode == "unmerged":
        return 0.0
    return 2 * max(sent_bytes(config, shape, adapter).values(), default=0) / HOST_BYTES_PER_S


def version_bytes(config: Config, shape: ModelShape, adapter: AdapterConfig) -> int:
    size = adapter_size(shape, adapter.spec(""))
    numbers = size.weights if config.rollout.adapter_mode == "merged" else size.parameters
    return numbers * DTYPE_BYTES[config.model.dtype]
