"""Rules about parallel sizes, devices that a trainer rank and a server share, the library that carries versions, and
the components and directives of a Slurm job.

`engine.common.arena` would refuse the trainer's sizes later.
"""

import difflib
import sys
from collections.abc import Iterator
from typing import get_args

from areal_lora.config import support
from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, of_each_adapter, warning
from areal_lora.config.sections.run import Role
from areal_lora.config.sections.task import WorkerWorkflowConfig
from areal_lora.config.sizing.slots import ALL_ROLES, OF_DEVICES, WITHOUT_DEVICES, pools_of, seats_of, shared_devices
from areal_lora.errors import ConfigError
from areal_lora.families.registry import PUBLISHED, is_hub_name, supported
from areal_lora.families.shape import ModelShape
from areal_lora.network.http_server import too_large


def engine_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    """Keys of ``trainer`` that do not apply to the engine."""
    t = config.trainer
    if t.engine == "megatron":
        if t.cpu_offload:
            reason = "the Megatron engine keeps the base on its device"
            yield Finding("trainer.cpu_offload", reason, "set it to false, or trainer.engine=fsdp")
        if t.fsdp_shard is not None:
            reason = "the Megatron engine divides the base by tp, pp, ep and etp"
            yield Finding("trainer.fsdp_shard", reason, "leave it out, or set trainer.engine=fsdp")
        return
    if t.fsdp_shard is not None and t.world_size % t.fsdp_shard:
        reason = f"{t.world_size} ranks cannot be divided into copies of the base on {t.fsdp_shard} ranks each"
        yield Finding("trainer.fsdp_shard", reason, "set it to a divisor of trainer.world_size")
    sizes = {"tp": t.tp, "pp": t.pp, "ep": t.ep, "etp": t.etp}
    for key in (key for key, size in sizes.items() if size > 1):
        reason = f"{sizes[key]}, but trainer.engine = fsdp shards the base and divides nothing else"
        yield Finding(f"trainer.{key}", reason, "set it to 1, or trainer.engine=megatron")
    if t.pp_layers is not None:
        yield Finding("trainer.pp_layers", "trainer.engine = fsdp has no stages", "leave it out")
    if t.cpu_offload and config.cluster.device == "cpu":
        yield Finding("trainer.cpu_offload", "on CPUs the shards are in host memory anyway", "set it to false")


def trainer_layout(config: Config, facts: Facts) -> Iterator[Finding]:
    t, shape = config.trainer, facts.shape
    against_model = list(_trainer_against_model(config, shape)) if shape else []
    yield from against_model
    if against_model:
        # A size that is wrong for the model makes the products below wrong too; one line is enough.
        return
    for names, size in (("tp x cp x pp", t.tp * t.cp * t.pp), ("etp x ep x pp", t.etp * t.ep * t.pp)):
        if t.world_size % size:
            reason = f"{t.world_size} ranks cannot be divided by {names} = {size}"
            yield Finding("trainer.world_size", reason, f"use a multiple of {size}")


def _trainer_against_model(config: Config, shape: ModelShape) -> Iterator[Finding]:
    t = config.trainer
    yield from _tensor_parallel("trainer.tp", t.tp, shape)
    yield from _divides("trainer.tp", t.tp, shape.head_dim * (shape.heads + 2 * shape.kv_heads), "rows of linear_qkv")
    yield from _divides("trainer.tp", t.tp, shape.vocab, "vocabulary entries")
    if t.pp > shape.layers:
        reason = f"{t.pp} stages are more than the model's {shape.layers} layers"
        yield Finding("trainer.pp", reason, f"use at most {shape.layers}")
    elif t.pp_layers is not None and (not t.chunks or sum(t.pp_layers) != shape.layers):
        reason = f"{t.pp_layers} does not give {t.pp} stages the model's {shape.layers} layers"
        yield Finding("trainer.pp_layers", reason, "write one number for each stage or virtual stage, or leave it out")
    if shape.experts:
        yield from _divides("trainer.ep", t.ep, shape.experts, "experts")
        yield from _divides("trainer.etp", t.etp, shape.expert_ffn, "columns of an expert")
    elif t.ep > 1 or t.etp > 1:
        key = "trainer.ep" if t.ep > 1 else "trainer.etp"
        yield Finding(key, "the model is dense: it has no experts to divide", "set it to 1")


def rollout_layout(config: Config, facts: Facts) -> Iterator[Finding]:
    tp, per_node, least = config.rollout.tp, most_devices(config), config.cluster.min_servers
    merged_on_cpus = config.rollout.adapter_mode == "merged" and config.cluster.device == "cpu"
    if least > (servers := config.rollout.servers):
        reason = f"{least} servers are required and rollout.servers = {servers}"
        yield Finding("cluster.min_servers", reason, f"set it to at most {servers}, or raise rollout.servers")
    shape = facts.shape
    if config.rollout.expert_parallel and shape is not None and not shape.experts:
        reason = "the model is dense: it has no experts to share out"
        yield Finding("rollout.expert_parallel", reason, "set it to false")
    elif config.rollout.expert_parallel and merged_on_cpus:
        reason = "without LoRA, vLLM's expert kernel for CPUs ends the process with distributed experts"
        yield Finding("rollout.expert_parallel", reason, "set it to false, or rollout.adapter_mode=unmerged")
    if config.rollout.in_flight == "keep" and config.rollout.adapter_mode == "merged":
        reason = "merged servers have one version, whose KV cache no other one reads"
        yield Finding("rollout.in_flight", reason, "set it to interrupt, or rollout.adapter_mode=unmerged")
    if tp > per_node:
        reason = f"one server of {tp} devices does not fit a node of {per_node}"
        yield Finding("rollout.tp", reason, f"set it to at most {per_node}")
    if shape is None:
        return
    yield from _tensor_parallel("rollout.tp", tp, shape)
    if shape.experts and not config.rollout.expert_parallel:
        yield from _divides("rollout.tp", tp, shape.expert_ffn, "columns of an expert")


def _tensor_parallel(key: str, tp: int, shape: ModelShape) -> Iterator[Finding]:
    yield from _divides(key, tp, shape.heads, "attention heads")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        reason = f"{tp} is neither a divisor nor a multiple of the model's {shape.kv_heads} key/value heads"
        yield Finding(key, reason, f"use a divisor or a multiple of {shape.kv_heads}")
    if shape.dense_layers:
        yield from _divides(key, tp, shape.ffn, "columns of the dense MLP")
    if shape.shared_ffn:
        yield from _divides(key, tp, shape.shared_ffn, "columns of the shared expert")


def _divides(key: str, size: int, total: int, what: str) -> Iterator[Finding]:
    if total % size:
        options = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(options, key=lambda n: abs(n - size))[:4]
        reason = f"{size} does not divide the model's {total} {what}"
        yield Finding(key, reason, f"use a divisor of {total}, such as {', '.join(map(str, sorted(near)))}")


def devices_are_shared(config: Config, facts: Facts) -> Iterator[Finding]:
    """``cluster.share_devices`` has an effect, and the server's memory does not depend on the trainer's."""
    if not config.cluster.share_devices:
        return
    if config.cluster.device == "cpu":
        reason = "on CPUs there is no device, and processes share the machine anyway"
        yield Finding("cluster.share_devices", reason, "set it to false")
        return
    if config.rollout.kv_cache_gib is None:
        reason = "vLLM would measure what is free on a device while a trainer rank takes its part of it"
        yield Finding("rollout.kv_cache_gib", reason, "set it, for example to 4")
    if _share(config) is False:
        reason = "trainer ranks and servers are on different nodes, so no device is shared"
        yield Finding("cluster.share_devices", reason, "set it to false")


def backend_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    """The named library sends between these devices."""
    backend, device = config.weight_sync.backend, config.cluster.device
    if backend in ("auto", "gloo"):
        return
    if backend != OF_DEVICES[device]:
        reason = f"{backend} does not send the memory of cluster.device = {device}"
        yield Finding("weight_sync.backend", reason, "set it to auto")
    elif _share(config):
        reason = f"{backend} refuses two members on one device, and a trainer rank and a server share one"
        yield Finding("weight_sync.backend", reason, "set it to auto")


def _share(config: Config) -> bool | None:
    """Whether a trainer rank and a server share a device; None if they have no place, which other rules report."""
    try:
        return bool(shared_devices(config))
    except ConfigError:
        return None


def engine_args_are_free(config: Config, facts: Facts) -> Iterator[Finding]:
    decided = dict(support.ENGINE_ARGS)
    if config.rollout.adapter_mode == "merged":  # weights are written as they are loaded
        decided["quantization"] = "rollout.adapter_mode = merged"
    for name in sorted(config.rollout.engine_args.keys() & decided.keys()):
        yield Finding(f"rollout.engine_args.{name}", f"{decided[name]} decides it", "leave it out")


def deterministic(config: Config, facts: Facts) -> Iterator[Finding]:
    """Bit-identical answers need versions that do not change under them, and arithmetic without a choice of order."""
    rollout = config.rollout
    if not rollout.deterministic:
        return
    required = (
        ("rollout.max_staleness", rollout.max_staleness, 0),
        ("rollout.in_flight", rollout.in_flight, "finish"),
        ("rollout.adapter_mode", rollout.adapter_mode, "unmerged"),
        ("model.dtype", config.model.dtype, "float32"),
        ("cluster.device", config.cluster.device, "cpu"),
    )
    wrong = [(key, value, want) for key, value, want in required if value != want]
    if wrong:
        reason = f"answers cannot be repeated with {', '.join(f'{key} = {value}' for key, value, _ in wrong)}"
        fix = f"set {', '.join(f'{key}={want}' for key, _, want in wrong)}, or rollout.deterministic=false"
        yield Finding("rollout.deterministic", reason, fix)


def time_outs(config: Config, facts: Facts) -> Iterator[Finding]:
    run, sync = config.run, config.weight_sync
    longest_s = sync.publish_s + sync.rejoin_s
    if run.stall_s <= longest_s:
        waits = f"a publish may take that waits for servers, {longest_s:g} s"
        reason = f"{run.stall_s:g} s is not longer than {waits}: trainer rank 0 sends no heartbeat meanwhile"
        yield Finding("run.stall_s", reason, "raise it, or lower weight_sync.timeout_s")


def profiled_steps(config: Config, facts: Facts) -> Iterator[Finding]:
    """An adapter of a client has no number of steps; those that join bring theirs."""
    last = max((adapter.steps or config.run.steps for adapter in config.adapters), default=0)
    if config.service is None and (latest := max(config.run.profile or (), default=0)) > last:
        yield Finding("run.profile", f"{latest} is after the last step, {last}", f"give steps from 1 to {last}")


def model_readable(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.hf_config is None:
        fix = "give a Hugging Face model folder"
        if is_hub_name(config.model.path):
            close = difflib.get_close_matches(config.model.path, PUBLISHED, n=1)
            fix += ", start the run where a hub is reachable"
            fix += f", or did you mean {close[0]}" if close else ""
        yield Finding("model.path", facts.model_problem, fix)
        return
    if support.engines(facts.hf_config) and facts.shape is None:
        known = facts.hf_config["model_type"] in supported() or facts.checkpoint is not None
        reason = "the layers of a family without a row are read from its safetensors files, which are not here"
        reason = "config.json lacks sizes of the model" if known else reason
        yield Finding("model.path", reason, "use a complete folder")
    if not facts.model_is_local:
        reason = f"{config.model.path} is not whole in the hub's cache and is downloaded when the run starts"
        yield warning("model.path", reason, "none needed where a hub is reachable")


def model_trainable(config: Config, facts: Facts) -> Iterator[Finding]:
    """An engine trains a model with this config.json."""
    if facts.hf_config is None:
        return
    if kind := support.quantised(facts.hf_config):
        fix = "use its 16-bit checkpoint; rollout.engine_args.quantization=fp8_per_channel has servers quantise that"
        yield Finding("model.path", f"its weights are quantised ({kind}), and trainers read 16 and 32 bits", fix)
        return
    possible = support.engines(facts.hf_config)
    if not possible:
        problems = {engine: support.engine_problems(engine, facts.hf_config) for engine in support.ENGINES}
        reasons = [f"{engine}: {why}" for engine, found in problems.items() for why in found]
        fix = f"use a model of type {', '.join(supported())}, or one that docs/en/models.md lists"
        yield Finding("model.path", f"no engine trains it; {'; '.join(reasons)}", fix)
    elif config.trainer.engine not in possible:
        reason = "; ".join(support.engine_problems(config.trainer.engine, facts.hf_config))
        yield Finding("model.path", reason, f"set trainer.engine={possible[0]}, or use another model")


def servers_can_serve(config: Config, facts: Facts) -> Iterator[Finding]:
    """The workers of a server can divide this family's adapters, and its kernels take their type."""
    kind, tp = facts.hf_config.get("model_type") if facts.hf_config else None, config.rollout.tp
    if facts.hf_config and support.group_of(str(kind)) == "no row" and tp > 1:
        reason = f"{tp}, but adapters of model type {kind!r}, which has no row, are not divided"
        yield Finding("rollout.tp", reason, "set it to 1")
    if config.cluster.device == "cuda" and config.model.dtype == "float32":
        reason = "vLLM's LoRA kernels on GPUs take 16-bit types only, and would end the servers while they start"
        yield Finding("model.dtype", reason, "set model.dtype=bfloat16")


@of_each_adapter
def answers_fit(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    longest, sampling = config.rollout.max_model_len, adapter.sampling
    sizes = [("sampling", sampling.max_new_tokens, sampling.n_samples)]
    sizes += [(f"evals.{j}", chosen.max_new_tokens or 0, chosen.n_samples) for j, chosen in enumerate(adapter.evals)]
    for at, new, n in sizes:
        if new >= longest:
            reason = f"{new} new tokens leave no room for a prompt in rollout.max_model_len = {longest}"
            yield Finding(f"{at}.max_new_tokens", reason, f"lower it, or raise rollout.max_model_len above {new}")
        if too_much := too_large(1, n, longest):
            yield Finding(f"{at}.n_samples", too_much, "lower it, or rollout.max_model_len")


def lengths(config: Config, facts: Facts) -> Iterator[Finding]:
    t, longest, shape = config.trainer, config.rollout.max_model_len, facts.shape
    if (held := t.max_tokens_per_microbatch * t.cp) < longest:
        reason = f"{held} tokens of {t.cp} context-parallel ranks" if t.cp > 1 else f"{held}"
        reason += f" cannot hold one sequence of rollout.max_model_len = {longest} tokens"
        yield Finding("trainer.max_tokens_per_microbatch", reason, f"set it to at least {-(-longest // t.cp)}")
    if shape and shape.max_positions and longest > shape.max_positions:
        reason = f"{longest} is beyond the model's {shape.max_positions} positions"
        yield Finding("rollout.max_model_len", reason, f"set it to at most {shape.max_positions}")


def combinations(config: Config, facts: Facts) -> Iterator[Finding]:
    family, shape = str((facts.hf_config or {}).get("model_type")), facts.shape
    seen: set[tuple[str, str]] = set()
    of_adapters = [support.combination_of(config, adapter, family, shape) for adapter in config.adapters]
    for i, combination in enumerate(of_adapters or [support.combination_of_run(config, family, shape)]):
        for refusal in support.refusals(combination):
            at, reason = refusal.key.format(i=i), refusal.text(family)
            if refusal.key == support.MODEL or (at, reason) in seen:
                continue
            seen.add((at, reason))
            yield Finding(at, reason, refusal.fix, subject=reason)


_KEYS = {
    "nodes": "cluster.nodes",
    "job-name": "run.name",
    "time": "cluster.slurm.time_limit",
    "partition": "cluster.slurm.partition",
    "mem": "cluster.slurm.mem",
}
_KEYS |= dict.fromkeys(("gres", "gpus", "gpus-per-node"), "cluster.devices_per_node and cluster.slurm.gres_type")
"""Options of sbatch that have a key of their own."""
_OURS = {"signal", "requeue", "no-requeue", "output", "open-mode", "ntasks", "ntasks-per-node", "mincpus", "array"}
"""Options of sbatch that the job script depends on."""
_SHORT = {"N": "nodes", "J": "job-name", "t": "time", "p": "partition"}
_SHORT |= {"G": "gpus", "o": "output", "n": "ntasks", "a": "array", "M": "clusters"}


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
    for role in get_args(Role):
        places = [str(i) for i, component in enumerate(components) for r in component.roles if r == role]
        if not places and role in ALL_ROLES:
            yield Finding(key, f"no component has the role {role}", f"add {role} to one of them")
        elif len(places) > 1:
            reason = f"{role} is named {len(places)} times: in components {', '.join(places)}"
            yield Finding(f"{key}.{places[1]}.roles", reason, "name each role once")
    for i, (component, pool) in enumerate(zip(components, pools_of(cluster), strict=True)):
        needy = [role for role in component.roles if role not in WITHOUT_DEVICES]
        if needy and cluster.device != "cpu" and not pool.devices_per_node:
            reason = f"{' and '.join(needy)} need {cluster.device} devices and its nodes have none"
            yield Finding(f"{key}.{i}.devices_per_node", reason, "raise it, or leave it out")
        if component.mem is None and cluster.slurm.mem is None and any(part.mem for part in components):
            reason = "another component sets its memory, which Slurm would apply to this one"
            yield Finding(f"{key}.{i}.mem", reason, "set it here, or set cluster.slurm.mem")
        if component.roles == ["controller"] and component.nodes > 1:
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
            elif option == "clusters":
                reason = f"{line!r} makes a job of another cluster, where its queries do not find it"
                yield Finding(
                    path, reason, "leave it out, and submit on a machine of that cluster, or with its SLURM_CONF"
                )
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


def no_idle_node(config: Config, facts: Facts) -> Iterator[Finding]:
    """A node without a process would be paid for and do nothing."""
    try:
        seats = seats_of(config)
    except ConfigError:
        return  # other rules report it
    if list(components_agree(config, facts)):
        return
    used = {seat.node for seat in (*seats.trainer, *seats.servers, seats.controller)}
    chosen = [adapter.workflow for adapter in config.adapters]
    workers = max((each.workers for each in chosen if isinstance(each, WorkerWorkflowConfig)), default=0)
    for pool in pools_of(config.cluster):
        if "environment" in pool.roles:
            used |= set(range(pool.first_node, pool.first_node + workers))
        idle = sorted(set(range(pool.first_node, pool.first_node + pool.nodes)) - used)
        if idle:
            reason = f"nothing runs on {len(idle)} of {pool.nodes} nodes (node {', '.join(map(str, idle))})"
            yield warning(
                pool.key, reason, f"set it to {pool.nodes - len(idle)}, or use more ranks, servers or workflow.workers"
            )
