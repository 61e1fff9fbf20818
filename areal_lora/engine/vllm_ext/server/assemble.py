"""Build the parts of a server from the configuration: engine, adapters, the two apps."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import psutil
from starlette.types import ASGIApp
from vllm import AsyncEngineArgs
from vllm.config.lora import MaxLoRARanks
from vllm.v1.engine.async_llm import AsyncLLM

from areal_lora.config import support
from areal_lora.config.models import Config
from areal_lora.config.sections.run import own_place
from areal_lora.config.sizing import slots
from areal_lora.data.prompts import keep_byte_level
from areal_lora.engine.vllm_ext.compat.engine import start_engine
from areal_lora.engine.vllm_ext.server.adapters import ServedAdapters, VersionLease
from areal_lora.engine.vllm_ext.server.admin_routes import AdminPlane
from areal_lora.engine.vllm_ext.server.data_plane import DataPlane
from areal_lora.engine.vllm_ext.server.generate import Generator, RequestCounters
from areal_lora.engine.vllm_ext.server.guards import guarded
from areal_lora.engine.vllm_ext.server.leaving import Stop
from areal_lora.engine.vllm_ext.server.sampling import Sampler
from areal_lora.engine.vllm_ext.server.tool_calls import ToolCallParsers, configured_parsers
from areal_lora.engine.vllm_ext.worker.channel import WorkerChannel
from areal_lora.engine.vllm_ext.worker.extension import AdapterWorkerExtension, WorkerDescription, WorkerSetup
from areal_lora.engine.vllm_ext.worker.lora_install import vllm_modules
from areal_lora.errors import ConfigError
from areal_lora.families.family import TARGETS, Scope
from areal_lora.families.shape import longrope_context, read_hf_config, read_shape, with_dense_layers
from areal_lora.processes import shared_memory
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import MOST_KEPT, ExpertLayout
from areal_lora.weight_sync.layout import Payload
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.messages import InfoReply, ModulesReply

SAMPLED = 1
"""vLLM samples at least one token, for which its context has room behind a prompt that fills ours. The token is not
read: a model needs no position for it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    engine: AsyncLLM
    channel: WorkerChannel
    adapters: ServedAdapters
    counters: RequestCounters
    data_app: ASGIApp
    admin_app: ASGIApp
    n_slots: int
    shared_before: set[str]

    def close(self) -> None:
        """Kill the engine's processes, which hold nothing that must be saved, and remove their shared memory."""
        shared = shared_memory.used_by(p.pid for p in psutil.Process().children(recursive=True)) - self.shared_before
        try:
            self.channel.close()
            self.engine.shutdown(0.0)  # as vLLM's own server by default
        finally:
            shared_memory.remove(shared)  # an engine that is killed leaves it


def engine_context(longest: int, hf_config: Mapping[str, Any]) -> int:
    """vLLM's context of tokens for a run's ``longest`` sequence: room for `SAMPLED` more.

    Not where that would be above the original context of a model with LongRoPE: vLLM then takes the long factors at
    every position, and the trainer, which goes by ``longest``, the short ones.
    """
    return longest if longest == longrope_context(hf_config) else longest + SAMPLED


def engine_args(config: Config) -> AsyncEngineArgs:
    """Derive vLLM's arguments; reads config.json. Raises ConfigError for a rank or target that vLLM cannot hold."""
    rollout, on_cpu = config.rollout, config.cluster.device == "cpu"
    hf_config = read_hf_config(Path(config.model.folder))
    longest = engine_context(rollout.max_model_len, hf_config)
    targets = list(slots.served_targets(config))
    unknown = [t for t in targets if not vllm_modules([t])]
    if unknown:
        raise ConfigError(
            "adapters.target_modules",
            f"{unknown} cannot be served",
            f"choose from {', '.join(TARGETS)}, alone or behind one of {', '.join(Scope)} and a dot",
        )
    extra: dict[str, Any] = {}
    replays = config.behaviour.router_replay == "rollout"
    if replays and not on_cpu:
        extra["enable_return_routed_experts"] = True
    if on_cpu:
        extra["enforce_eager"] = True
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from areal_lora.engine.vllm_ext.compat.cpu_scheduler import ROUTES, GroupScheduler

        # vLLM's default of 128 hides short prompts from the prefix cache; its CPU attention needs multiples of 32.
        extra["block_size"] = 32
        # A prompt in two chunks would rewind the request's random generator, which fails on a CPU and ends vLLM.
        extra["enable_chunked_prefill"] = False
        extra["additional_config"] = {ROUTES: replays}
        extra["scheduler_cls"] = GroupScheduler  # not on GPUs: their default schedules ahead of the model
        if rollout.tp == 1:
            extra["distributed_executor_backend"] = UniProcExecutor  # saves one process and its wake-ups
    if rollout.kv_cache_gib is not None:
        extra["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
    if rollout.adapter_mode == "unmerged":
        extra |= _lora(config, targets)
    elif not on_cpu:
        extra["moe_backend"] = "triton"  # takes experts as they are loaded; others reorder every version
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in sorted(rollout.engine_args.keys() - known):
        near = difflib.get_close_matches(name, known - support.ENGINE_ARGS.keys())
        fix = f"use {near[0]}" if near else "see vLLM's EngineArgs"
        raise ConfigError(f"rollout.engine_args.{name}", "this vLLM has no such argument", fix)
    return AsyncEngineArgs(
        model=config.model.folder,
        dtype=config.model.dtype,
        seed=config.run.seed,
        tensor_parallel_size=rollout.tp,
        enable_expert_parallel=rollout.expert_parallel,
        max_model_len=longest,
        max_num_seqs=max_num_seqs(config),
        max_num_batched_tokens=max(
            rollout.max_num_batched_tokens, rollout.max_num_seqs, 0 if slots.splits_prompts(config) else longest
        ),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        scheduling_policy="priority",  # probes first; a sequence that was cut continues before later requests start
        enable_prefix_caching=not rollout.deterministic,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=MOST_KEPT,
        worker_extension_cls=f"{AdapterWorkerExtension.__module__}.{AdapterWorkerExtension.__qualname__}",
        **(extra | with_dense_layers(rollout.engine_args, hf_config)),
    )


def _lora(config: Config, targets: list[str]) -> dict[str, Any]:
    rank = config.rollout.max_lora_rank
    ranks = [r for r in sorted(get_args(MaxLoRARanks)) if r >= rank]
    if not ranks:
        raise ConfigError("rollout.max_lora_rank", f"{rank} is above vLLM's limit")
    # On a CPU, vLLM lets tokens without an adapter read the last slot in places: it stays empty.
    max_loras = slots.adapter_slots(config) + (config.cluster.device == "cpu")
    return {
        "enable_lora": True,
        "max_lora_rank": ranks[0],
        "max_loras": max_loras,
        "max_cpu_loras": max_loras,
        "lora_target_modules": vllm_modules(targets),
        "enable_moe_shared_loras": slots.slot_layout(config) is ExpertLayout.SHARED_OUTER,
    }


def max_num_seqs(config: Config) -> int:
    return 1 if config.rollout.deterministic else config.rollout.max_num_seqs


async def assemble(config: Config, run_folder: RunFolder, index: int, secret: str, stop: Stop) -> Parts:
    """Start the engine and connect all parts; the server can serve when this returns."""
    digest = base_digest(config.model.folder)
    parsers = configured_parsers(config)
    ToolCallParsers(None, parsers)  # a name that is wrong ends the server before it loads a model
    keep_byte_level(config.model.folder)
    shared_before = shared_memory.entries()
    engine = start_engine(engine_args(config))
    channel = WorkerChannel(secret)
    payload = Payload(config.rollout.adapter_mode)
    setup = WorkerSetup(
        run=config.run.name,
        run_folder=str(run_folder),
        base_digest=digest,
        ports=channel.ports,
        index=index,
        declared={a.name: a.spec(config.model.path) for a in config.adapters},
        bind=own_place(config.cluster, run_folder).address,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        model=config.model.folder,
        payload=payload,
        adapters=slots.adapter_capacity(config),
    )
    answers: list[bytes] = await engine.collective_rpc("al_setup", args=(msgspec.msgpack.encode(setup),))
    described = [msgspec.msgpack.decode(answer, type=WorkerDescription) for answer in answers]
    first = described[0]
    await channel.connect(len(described))
    counters = RequestCounters()
    adapters = ServedAdapters(
        engine,
        channel,
        n_workers=len(described),
        n_slots=slots.adapter_slots(config),
        resident=slots.kept_versions(config) + 1,
        adapters=slots.adapter_capacity(config),
        merged=payload is Payload.MERGED,
    )
    model = engine.model_config
    generator = Generator(
        engine=engine, max_model_len=config.rollout.max_model_len, vocab_size=model.get_vocab_size(), counters=counters
    )
    await generator.score([0, 0], VersionLease())  # the first request takes seconds
    info = InfoReply(
        run=config.run.name,
        model=config.model.path,
        base_digest=digest,
        workers=len(described),
        max_lora_rank=first.max_rank,
    )
    slot_bytes = sum(worker.slot_bytes for worker in described)
    modules = ModulesReply(
        modules=first.modules,
        slots=slots.adapter_slots(config),
        max_rank=first.max_rank,
        slot_bytes=slot_bytes,
        payload=payload,
    )
    tokenizer = engine.get_tokenizer()
    sampler = Sampler(
        generator, adapters, partial(tokenizer.decode, skip_special_tokens=True), config.rollout.in_flight_policy
    )
    host = own_place(config.cluster, run_folder).address
    replays = config.behaviour.router_replay == "rollout"
    shape = read_shape(Path(config.model.folder)) if replays else None
    data_plane = DataPlane(adapters, generator, tokenizer, sampler, ToolCallParsers(tokenizer, parsers), shape)
    data_app = guarded(data_plane.app(), host, secret, closed=slots.has_tenants(config))
    return Parts(
        engine=engine,
        channel=channel,
        adapters=adapters,
        counters=counters,
        n_slots=slots.adapter_slots(config),
        shared_before=shared_before,
        data_app=data_app,
        admin_app=AdminPlane(adapters, generator, info, modules, stop).app(secret),
    )
