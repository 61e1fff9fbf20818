"""Memory of every trainer rank, server replica and controller, estimated from the configuration. Pure.

The docstrings of `_trainer` and `_server` list the parts, with the source of each formula. Other constants are
measured: on CPUs by the memory tests (`memory_runs`). Those of GPUs are typical values, not measured by this project.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.config.models import AdapterConfig, Config, TrainerConfig
from areal_lora.config.sizing import activations, slots
from areal_lora.families.family import COLUMN_PARALLEL, Scope
from areal_lora.families.shape import DTYPE_BYTES, ModelShape, saved_bytes
from areal_lora.families.sites import adapter_size, distinct, linear_elements, linear_sites, pieces_of

MIB = 2**20
GIB = 2**30
FP32 = 4
TRAINER_PROCESS, SERVER_PROCESS, WORKER_PROCESS = 650 * MIB, 710 * MIB, 880 * MIB
CONTROLLER_PROCESS, SERVICE_PROCESS, SCORER_PROCESS, PROGRAM = 120 * MIB, 400 * MIB, 16 * MIB, 1 * GIB
"""Resident sets after imports, before any model: Python, torch, Megatron or vLLM; `tasks.code_reward.TEST_BYTES`."""
GPU_CONTEXT, GPU_GRAPHS = int(1.5 * GIB), 1 * GIB
"""CUDA context, NCCL's buffers and cuBLAS' workspaces of a process; vLLM's captured graphs."""
HEAP_CPU, HEAP_GPU = 1.65, 1.1
"""Memory over live activations. glibc keeps freed blocks below 32 MiB: measured 1.5 to 1.8 after some steps. torch's
caching allocator on GPUs: a typical value."""
GPU_HOST = 3 * GIB
"""Host memory of a process that uses a GPU."""
STAGING_BUFFERS = 3
"""Buffers of one source, and at a receiver of each: `weight_sync.link.inbox.RING`."""
MEASURED = 5 * 16 * MIB
"""Device memory in which tensors are fingerprinted: `weight_sync.strided.MEASURED_BYTES` as int64 and int16."""
LEAST_KV, STAGING, JOINING = "KV cache, least", "staging of publishes", "room for adapters that join"
PACKED = "packed versions"
DEFAULT_KV_GIB = 4.0
"""vLLM's KV cache on CPUs where ``rollout.kv_cache_gib`` is unset."""


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the table. ``device`` bytes are of one device, ``host`` bytes of the process or replica."""

    name: str
    device: int = 0
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Estimate of equal processes (a server counts with its workers). ``nodes`` has the node of each."""

    name: str
    role: str
    nodes: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def device(self) -> int:
        return sum(part.device for part in self.parts)

    @property
    def host(self) -> int:
        return sum(part.host for part in self.parts)


def host_bytes(processes: Sequence[Memory], node: int) -> int:
    return sum(memory.host * memory.nodes.count(node) for memory in processes)


def job_memory(config: Config, shape: ModelShape) -> tuple[Memory, ...]:
    """Estimate all processes of a job, and what a node holds once for all of its ranks.

    Raises ConfigError where they have no place on its nodes.
    """
    seats = slots.seats_of(config)
    trainer = config.trainer
    per_stage = trainer.world_size // trainer.pp
    processes = []
    for stage, layers in enumerate(slots.stages(config, shape)):
        name = "trainer rank" if trainer.pp == 1 else f"trainer rank, stage {stage}"
        nodes = dict[tuple[int, bool], list[int]]()  # by ``owner`` and ``sends`` of `_trainer`
        sending = {rank for adapter in config.adapters for rank in slots.stage_sources(config, shape, adapter, layers)}
        for rank in range(per_stage):
            number, inner = divmod(rank, trainer.etp)
            owner = trainer.ep if inner or number >= trainer.ep else min(number, 1)
            nodes.setdefault((owner, rank in sending), []).append(seats.trainer[stage * per_stage + rank].node)
        for (owner, sends), of_owner in nodes.items():
            parts = tuple(_trainer(config, shape, stage, layers, owner, sends))
            if config.cluster.device == "cpu":  # the device is the host
                parts = tuple(Part(part.name, host=part.host + part.device) for part in parts)
            processes.append(Memory(name=name, role="trainer", nodes=tuple(of_owner), parts=parts))
    if config.model.shared_memory:
        here = tuple(sorted({seat.node for seat in seats.trainer}))
        whole = Part("base in shared memory", host=saved_bytes(shape, config.model.dtype))
        processes.append(Memory(name="node with trainer ranks", role="node", nodes=here, parts=(whole,)))
    servers = tuple(seat.node for seat in seats.servers)
    processes.append(Memory(name="server replica", role="rollout", nodes=servers, parts=_server(config, shape)))
    rewards = [one for adapter in (*config.adapters, *slots.joining_adapters(config)) for one in adapter.rewards]
    scorers = sum(one.workers * (SCORER_PROCESS + PROGRAM * (one.kind == "code")) for one in rewards)
    beside = {"controller": [Part("processes", host=CONTROLLER_PROCESS + scorers)]}
    if slots.has_tenants(config):
        beside["service"] = [Part("processes", host=SERVICE_PROCESS)]
    if (remote := config.rollout.remote) is not None:
        beside["remote"] = [Part("processes", host=SERVICE_PROCESS), _passing(config, shape, remote.store)]
    node = (seats.controller.node,)
    return (*processes, *(Memory(name=role, role=role, nodes=node, parts=tuple(p)) for role, p in beside.items()))


def _passing(config: Config, shape: ModelShape, store: str | None) -> Part:
    """Versions at the gateway, whatever its servers: those of `ShardBases`, and the largest as it arrives."""
    adapters = (*config.adapters, *slots.joining_adapters(config))
    sizes = sorted(slots.version_bytes(config, shape, each) for each in adapters)[-slots.adapter_capacity(config) :]
    bases = 0 if store or config.rollout.adapter_mode == "merged" else 2
    return Part("versions", host=bases * sum(sizes) + (2 if store else 1) * max(sizes, default=0))


def _trainer(
    config: Config, shape: ModelShape, stage: int, layers: Sequence[int], owner: int, sends: bool
) -> list[Part]:
    """Parts of one rank. ``owner``: 0 for the first of `slots.stage_owners`, 1 for the others, ep for no owner.

    ``sends``: whether it is among `slots.stage_sources`.

    - Base with Megatron: column-parallel and row-parallel layers are divided by tp, key/value heads are copied where
      tp exceeds them, experts are divided by ep and etp; norms and routers are whole on every rank. With FSDP: an
      equal shard of everything, embeddings and output layer apart even if tied, and `_gathered_elements`, or all.
    - Adapters: 16 bytes per parameter: weight, gradient and Adam's two moments in fp32, and 2 for a cast of the weight
      where the base is in bf16 (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1). lora_A of a column-parallel
      layer and lora_B of a row-parallel one are whole on every rank. The moments of a stage are divided over its ranks
      (section 5.1). A critic is an adapter of its own rank, a reference has weights only. Those that may join are a row
      of their own: as many as servers have places for, as large as a slot.
    - Activations: the tensors that autograd keeps, counted from this project's modules (`sizing.activations`), in the
      manner of Korthikanti et al., arXiv 2205.05198. With tp the sequence is divided. A stage holds those of
      `activations.in_flight` micro-batches. With recompute one layer is there in full.
    - Buffers: of one layer's backward pass, which on CPUs are part of `HEAP_CPU`, or, on the last stage, of a chunk of
      logits, with hidden states of the whole sequence and their gradient: what is larger.
    - Publish and checkpoint. Host: an owner's copies, which a checkpoint writes. Device: what a source receives of
      tensor-parallel ranks. Packed versions are where the adapter is, and copied where gloo sends; merged ones on the
      host, with a weight's sum and what NCCL sends on the device (`STAGING_BUFFERS`).
    """
    t, on_cpu = config.trainer, config.cluster.device == "cpu"
    item = DTYPE_BYTES[config.model.dtype]
    tokens, in_flight = t.max_tokens_per_microbatch, activations.in_flight(t, stage)
    per_layer = [tokens * activations.layer_elements(config, shape, layer) * item for layer in layers]
    kept, once, away = in_flight * sum(per_layer), 0.0, t.recompute == "offload"
    if t.recompute != "none":
        inputs = tokens * activations.kept_elements(config, shape) * item
        block = 1 << (int(inputs) - 1).bit_length() if away and not on_cpu else inputs  # page-locked: see `_base`
        kept, once = in_flight * len(layers) * block, max(per_layer)
    heap = HEAP_CPU if on_cpu else HEAP_GPU
    logits = min(activations.CHUNK, tokens * shape.vocab // t.tp)
    chunk = activations.chunk_bytes(logits, item) + 2 * tokens * shape.hidden * item if stage == t.pp - 1 else 0
    passes = 0.0 if on_cpu else heap * tokens * item * max(activations.pass_elements(config, shape, n) for n in layers)
    weights, moments, *published = _adapters(config, shape, config.adapters, stage, layers, owner, sends)
    return [
        *_base(config, shape, stage, layers),
        weights,
        moments,
        Part("activations", device=int(((0 if away else kept) + once) * heap), host=int(kept) if away else 0),
        Part("buffers", device=max(chunk, int(passes))),
        *([_served(config, shape, stage, layers)] if config.rollout.served_as else []),
        *published,
        *_joining(config, shape, stage, layers, owner),
        Part("process", device=0 if on_cpu else GPU_CONTEXT, host=TRAINER_PROCESS + (0 if on_cpu else GPU_HOST)),
    ]


def _adapters(
    config: Config,
    shape: ModelShape,
    adapters: Sequence[AdapterConfig],
    stage: int,
    layers: Sequence[int],
    owner: int,
    sends: bool = False,
) -> list[Part]:
    """Parts of one rank: weights and gradients, moments, buffers of publishes and checkpoints, what it sends."""
    t, alone = config.trainer, config.model_copy(update={"trainer": TrainerConfig(world_size=1)})
    held = {adapter.name: _adapter_parameters(config, shape, adapter, layers) for adapter in adapters}
    trained = sum(held[adapter.name] * (1 + adapter.algorithm.has_critic) for adapter in adapters)
    in_stage = sum(_adapter_parameters(alone, shape, a, layers) * (1 + a.algorithm.has_critic) for a in adapters)
    references = sum(held[adapter.name] for adapter in adapters if adapter.algorithm.has_reference)
    item = DTYPE_BYTES[config.model.dtype]
    cast = item * (trained + references) if item < FP32 else 0
    sizes = {a.name: adapter_size(shape, a.spec("")).parameters for a in adapters}
    owners = {a.name: slots.stage_owners(config, shape, a, layers) for a in adapters}
    unique = {name: size * len(layers) // shape.layers // max(1, owners[name]) for name, size in sizes.items()}
    owned, per_stage = [a for a in adapters if owner < owners[a.name]], t.world_size // t.pp
    own = item * sum(unique[a.name] for a in owned)
    sent = (slots.sent_bytes(config, shape, adapter).items() for adapter in adapters)
    wire = sum(max((nbytes for rank, nbytes in each if rank // per_stage == stage), default=0) for each in sent)
    wire = wire or item * max(unique.values(), default=0)  # the source is of another stage
    copied = sum(unique[a.name] * (3 * (1 + a.algorithm.has_critic) + a.algorithm.has_reference) for a in owned)
    # A packer for checkpoints and one for the wire receive what other tensor-parallel ranks send.
    undivided = config.model_copy(update={"trainer": config.trainer.model_copy(update={"tp": 1, "etp": 1})})
    received = 0.0
    for adapter in adapters:
        apart = config.model.dtype != "float32" or config.rollout.adapter_mode == "merged"
        packers = 1 + apart + adapter.algorithm.has_critic
        whole = _adapter_parameters(undivided, shape, adapter, layers)
        received += (whole - held[adapter.name]) * packers
    over_host, on_gpu = slots.broadcast_backend(config) == "gloo", config.cluster.device != "cpu"
    packed = Part(PACKED, device=wire * on_gpu, host=own * over_host)
    if config.rollout.adapter_mode == "merged":
        largest = max((slots.largest_tensor(config, shape, a) for a in adapters), default=0)
        bucket = slots.largest_bucket(wire, slots.bucket_bytes(config, shape), largest)
        device = on_gpu * (2 * FP32 * largest // item + (0 if over_host else STAGING_BUFFERS * bucket))
        locked = 1 << (wire - 1).bit_length() if on_gpu else wire  # page-locked: see `_base`
        packed = Part(PACKED, device=device, host=locked) if sends else Part(PACKED)
    return [
        Part("adapter weights and gradients", device=int(FP32 * (2 * trained + references) + cast)),
        Part("optimizer moments", device=int(2 * FP32 * in_stage / per_stage)),
        Part("publish and checkpoint", device=int(FP32 * received), host=int(FP32 * copied)),
        packed,  # one rank of a node sends for others: the ranks together hold each shard once
    ]


def _joining(config: Config, shape: ModelShape, stage: int, layers: Sequence[int], owner: int) -> list[Part]:
    """All that a rank needs for the adapters that may join, each as large as a slot of the servers."""
    adapters = slots.joining_adapters(config)
    parts = _adapters(config, shape, adapters[:1], stage, layers, owner)
    device, host = sum(part.device for part in parts), sum(part.host for part in parts)
    return [Part(JOINING, device=len(adapters) * device, host=len(adapters) * host)] * bool(adapters)


def _base(config: Config, shape: ModelShape, stage: int, layers: Sequence[int]) -> list[Part]:
    t, item = config.trainer, DTYPE_BYTES[config.model.dtype]
    if t.engine == "megatron":
        return [Part("base weights", device=_base_elements(config, shape, stage, layers) * item)]
    untied, ranks = shape.parameters + (shape.vocab * shape.hidden if shape.tied else 0), t.fsdp_shard or t.world_size
    shard = -(-untied // ranks) * item
    gathered = _gathered_elements(config, shape) * item if ranks > 1 or t.cpu_offload else 0
    # torch's allocator page-locks each shard in a block of a power of two, over many models a third more.
    where = Part("base weights", host=4 * shard // 3) if t.cpu_offload else Part("base weights", device=shard)
    return [where, Part("gathered layer", device=gathered)]


def _served(config: Config, shape: ModelShape, stage: int, layers: Sequence[int]) -> Part:
    """A layer's weights as servers hold them, and three copies in fp32 of what `served_weights` rounds at once."""
    row = max(_base_elements(config, shape, stage, [n]) for n in layers) - _base_elements(config, shape, stage, [])
    largest = shape.checkpoint.largest_layer if shape.checkpoint else row
    return Part("served layer", device=largest * DTYPE_BYTES[config.model.dtype] + 3 * FP32 * min(64 * MIB, largest))


def _gathered_elements(config: Config, shape: ModelShape) -> int:
    """The largest unit that `fully_shard` gathers: as it arrived, as parameters, and the next one, which arrives."""
    ends = shape.vocab * shape.hidden
    if shape.checkpoint is not None:
        return 3 * max(ends, shape.checkpoint.largest_layer)
    alone = config.model_copy(update={"trainer": TrainerConfig(world_size=1)})
    layers = (_base_elements(alone, shape, 0, range(n, n + 1)) for n in range(shape.layers))
    tails = ends if shape.tied else 2 * ends
    return 3 * max(ends, *(elements - tails for elements in layers))


def _base_elements(config: Config, shape: ModelShape, stage: int, layers: Sequence[int]) -> int:
    t, h, d = config.trainer, shape.hidden, shape.head_dim
    kv_heads = max(1, shape.kv_heads // t.tp)
    attention = 2 * h * d * (shape.heads // t.tp) + 2 * h * d * kv_heads
    if shape.family.attention.bias:
        attention += d * (shape.heads // t.tp + 2 * kv_heads)
    experts = shape.experts // t.ep * 3 * h * (shape.expert_ffn // t.etp) + shape.experts * h
    if shape.shared_ffn:
        experts += 3 * h * shape.shared_ffn // t.tp + h
    sparse = len(set(layers) & set(shape.sparse_layers))
    total = len(layers) * (attention + 2 * h + 2 * d)
    total += sparse * experts + (len(layers) - sparse) * 3 * h * shape.ffn // t.tp
    ends = 1 if shape.tied and t.pp == 1 else (stage == 0) + (stage == t.pp - 1)
    return total + ends * shape.vocab * h // t.tp


def _adapter_parameters(config: Config, shape: ModelShape, adapter: AdapterConfig, layers: Sequence[int]) -> int:
    """Parameters of one adapter that one rank holds."""
    t, spec, total = config.trainer, adapter.spec(""), 0
    for key in linear_sites(shape):
        if key.layer not in layers or not key.covered(spec.target_modules):
            continue
        pieces = pieces_of(shape, key)
        rank, inputs, outputs = spec.rank_of(pieces[0].name), pieces[0].in_features, sum(p.out_features for p in pieces)
        routed = key.scope is Scope.EXPERT
        size = t.etp if routed else t.tp
        split_out = key.linear in COLUMN_PARALLEL
        inputs, outputs = (inputs, outputs // size) if split_out else (inputs // size, outputs)
        n_a, n_b = distinct(spec.expert_layout, key.linear, shape.experts // t.ep) if routed else (1, 1)
        total += rank * (n_a * inputs + n_b * outputs)
    return total


def _server(config: Config, shape: ModelShape) -> tuple[Part, ...]:
    """Parts of one replica; ``device`` bytes are of one of its ``rollout.tp`` devices.

    - Weights are divided by tp; one of a linear layer has one byte in fp8. Slots: `slots.slot_parameters`.
    - KV cache: as configured; on GPUs without ``kv_cache_gib`` what ``gpu_memory_utilization`` leaves (`kv_bytes`).
    - Activations: vLLM profiles one step of ``max_num_batched_tokens``: an MLP's projections, or the two buffers of
      its experts' kernels, and the logits of ``max_num_seqs`` sequences in fp32 with a copy for the sampler.
    - Staging of publishes, of each worker: `STAGING_BUFFERS` buckets of every source (`staging_bytes`), on the device
      that NCCL receives on, else page-locked and uploaded one by one; `MEASURED`. Merged: no slots, buckets and a copy
      of one version on the host everywhere (`MergedWeights`), page-locked for a device: a third more of Qwen3's.
    """
    rollout, on_cpu, tp = config.rollout, config.cluster.device == "cpu", config.rollout.tp
    item = DTYPE_BYTES[config.model.dtype]
    merged = rollout.adapter_mode == "merged"
    held_slots = 0 if merged else slots.slot_count(config) * slots.slot_parameters(config, shape) * item
    longest = 0 if slots.splits_prompts(config) else rollout.max_model_len
    tokens = max(rollout.max_num_batched_tokens, rollout.max_num_seqs, longest)
    inner = shape.expert_ffn // tp
    experts = shape.experts_per_token * (max(2 * inner, shape.hidden) + max(inner, shape.hidden))
    width = max(3 * shape.ffn // tp if shape.dense_layers else 0, experts)
    step = tokens * (4 * shape.hidden + width) * item + rollout.max_num_seqs * shape.vocab * 3 * FP32
    weights = shape.parameters * item - (linear_elements(shape) * (item - 1) if rollout.in_fp8("quantization") else 0)
    staging = staging_bytes(config, shape)
    version = sum(slots.version_bytes(config, shape, a) for a in config.adapters) if merged else 0
    if on_cpu:
        return (
            Part("base weights", host=weights),
            Part("adapter slots", host=held_slots * tp),
            Part("KV cache", host=kv_part(config, shape)),
            Part("activations", host=step * tp),
            Part(STAGING, host=staging * tp + version),
            Part("process", host=SERVER_PROCESS + tp * WORKER_PROCESS + (WORKER_PROCESS if tp > 1 else 0)),
        )
    over_host = slots.broadcast_backend(config) == "gloo"
    uploaded = 0 if merged else staging // STAGING_BUFFERS
    on_device = (uploaded if over_host else staging) + (0 if merged else MEASURED)
    on_host = (staging if merged or over_host else 0) + 4 * version // (3 * tp)  # blocks of powers of two, see above
    graphs = 0 if rollout.engine_args.get("enforce_eager") else GPU_GRAPHS
    return (
        Part("base weights", device=weights // tp),
        Part("adapter slots", device=held_slots),
        Part("KV cache" if rollout.kv_cache_gib else LEAST_KV, device=kv_part(config, shape)),
        Part("activations", device=step),
        Part(STAGING, device=on_device, host=on_host * tp),
        Part("process", device=GPU_CONTEXT + graphs, host=(tp + 2) * GPU_HOST),
    )


def kv_token_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one token in the KV cache of one device: keys and values of all layers, heads divided by tp."""
    heads = max(1, shape.kv_heads // config.rollout.tp)
    item = 1 if config.rollout.in_fp8("kv_cache_dtype") else DTYPE_BYTES[config.model.dtype]
    return 2 * shape.layers * heads * shape.head_dim * item


def staging_bytes(config: Config, shape: ModelShape) -> int:
    """Buffers of one worker that receives over the network: `STAGING_BUFFERS` of the largest bucket of each source.

    Not used where receivers read the source's memory (one machine, CPUs), which is known only at run time.
    """
    bucket, largest = slots.bucket_bytes(config, shape), Counter[int]()
    for adapter in (*config.adapters, *slots.joining_adapters(config)):
        tensors = [slots.largest_tensor(config, shape, adapter, dense=dense) for dense in (True, False)]
        for source, nbytes in slots.sent_bytes(config, shape, adapter).items():
            tensor = tensors[source % config.trainer.tp > 0]  # dense layers are sent by first ranks of their groups
            largest[source] = max(largest[source], slots.largest_bucket(nbytes, bucket, tensor))
    return STAGING_BUFFERS * (largest.total() or bucket)


def kv_part(config: Config, shape: ModelShape) -> int:
    """Bytes of the KV cache in the table: as configured, on a CPU the default, else those of one sequence."""
    default = DEFAULT_KV_GIB if config.cluster.device == "cpu" else None
    if (configured := config.rollout.kv_cache_gib or default) is not None:
        return int(configured * GIB)
    return config.rollout.max_model_len * kv_token_bytes(config, shape)


def kv_tokens(config: Config, shape: ModelShape, server: Memory) -> int | None:
    """Tokens that the KV cache of a replica holds; None where the memory of its devices is not configured."""
    on_cpu, limit = config.cluster.device == "cpu", device_bytes(config, None)
    if on_cpu or config.rollout.kv_cache_gib is not None:
        held = kv_part(config, shape) * (config.rollout.tp if on_cpu else 1)
    elif limit is not None:
        held = max(0, kv_bytes(config, shape, server, limit))
    else:
        return None
    return held // kv_token_bytes(config, shape)


def kv_bytes(config: Config, shape: ModelShape, server: Memory, device_bytes: int) -> int:
    """KV cache that remains of one device with ``device_bytes``; negative where the server does not start."""
    taken = server.device - staging_of(server) - kv_part(config, shape)
    return int(config.rollout.gpu_memory_utilization * device_bytes) - taken


def staging_of(server: Memory) -> int:
    """Bytes of one device that publishes take beside vLLM's share of it, which is filled before the first of them."""
    return sum(part.device for part in server.parts if part.name == STAGING)


def device_bytes(config: Config, found: int | None) -> int | None:
    """Memory of one device: as configured, else as ``found`` on this machine; None if unknown."""
    configured = config.cluster.device_memory_gib
    return int(configured * GIB) if configured is not None else found
