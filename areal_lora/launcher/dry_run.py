"""Output of ``--dry-run`` (summary, memory, publishes, limits, batch script; with ``--details`` the plan in full) and
of ``--explain-resume``. Reads the run folder; starts and changes nothing.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lora.checkpoint.recover import AdapterResume, check_usable, explain
from areal_lora.config import recorded
from areal_lora.config.facts import machine_memory
from areal_lora.config.models import Config
from areal_lora.config.rules.memory_rules import slurm_bytes
from areal_lora.config.sections.adapter import PRESETS
from areal_lora.config.sections.run import LINK_BITS
from areal_lora.config.sizing import memory as sizing, slots
from areal_lora.config.sizing.memory import GIB, device_bytes
from areal_lora.config.sizing.what_if import what_if
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.families.sites import adapter_size
from areal_lora.launcher.nodes.table import VARIABLES
from areal_lora.launcher.plan import CONTROLLER, PAGE, REMOTE, SERVER, SERVICE, TRAINER, JobPlan, ProcessSpec
from areal_lora.launcher.slurm.script import sbatch_script
from areal_lora.launcher.start import previous_run, with_absolute_root
from areal_lora.network.addresses import WILDCARDS, on_loopback
from areal_lora.obs.console import duration, human_bytes
from areal_lora.rollout.ledger.reconcile import reconciliations
from areal_lora.run_folder.paths import RunFolder
from areal_lora.weight_sync.link.relays import MOST, form_s, relay_tree, workers_of
from areal_lora.weight_sync.messages import ServerEndpoint

_WORDS = {TRAINER: "trainer rank", SERVER: "server", CONTROLLER: "controller", SERVICE: "service", REMOTE: "gateway"}
_SHORT = {"trainer": "rank:", "rollout": "server:", "controller": "controller:"}
SMALL = 4 * GIB
"""Below this many bytes of a process parts are printed in MiB."""


def print_plan(
    config: Config, plan: JobPlan, console: Console, *, full: bool = False, command: Sequence[str] = ()
) -> None:
    """``command`` starts the run."""
    kinds = {"local": "this machine", "slurm": f"Slurm, {plan.nodes} nodes", "nodes": f"{plan.nodes} nodes"}
    where = kinds[config.cluster.kind]
    several = f" of {len(config.adapters)} adapters" if len(config.adapters) > 1 else ""
    steps = f"{sum(recorded.steps_of(config).values())} steps{several}"
    console.print(f"[bold]{config.run.name}[/bold]: {steps} on {where}; nothing is started")
    console.print(_summary(config, plan))
    for line in _adapters(config, plan.shape):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_memory(plan))
    for line in (*_publishes(config, plan), *_slots(config, plan), *_kv(config, plan), _first_to_run_out(config, plan)):
        console.print(line, markup=False, soft_wrap=True)
    if config.cluster.kind == "slurm":
        console.print("\n[bold]Batch script[/bold]")
        console.print(sbatch_script(config, plan), markup=False, soft_wrap=True)
    if config.cluster.kind == "nodes":
        console.print("\n[bold]Commands[/bold], one on each node; all share the run folder")
        for node in range(plan.nodes):
            console.print(f"{VARIABLES[0]}={node} {shlex.join(command)}", markup=False, soft_wrap=True)
    if full:
        for table in details(config, plan):
            console.print(table)


def _summary(config: Config, plan: JobPlan) -> Table:
    """One line for each role and node."""
    rows = []
    limit = device_bytes(config, None)
    for node in range(plan.nodes):
        for role in _WORDS:
            here = [spec for spec in plan.processes if (spec.node, spec.role) == (node, role)]
            if here:
                of_role = "rollout" if role == SERVER else role
                memory = [m for m in plan.memory if m.role == of_role and node in m.nodes]
                devices = _ranges(sorted(d for spec in here for d in spec.devices)) or "none"
                each = max(m.device for m in memory)
                text = f"{_gib(each)}{f' of {_gib(limit)}' if limit else ''}" if each else ""
                host = sum(m.host * m.nodes.count(node) for m in memory)
                rows.append((str(node), _runs(here), devices, text, _gib(host)))
    return make_table("Plan", ("node", "runs", "devices", "GiB per device", "host GiB"), rows, right=("host GiB",))


def _adapters(config: Config, shape: ModelShape) -> Iterator[str]:
    """Of several adapters their steps, part of the tokens, bytes of a publish; what each algorithm and its keys set."""
    runs = recorded.adapter_runs(config)
    weights = sum(run.weight for run in runs.values())
    for adapter in config.adapters if len(runs) > 1 else ():
        run = runs[adapter.name]
        yield (
            f"Adapter {adapter.name}: {run.steps} steps, weight {run.weight:g}, "
            f"{100 * run.weight / weights:.0f}% of the trained tokens while all train, "
            f"{human_bytes(slots.version_bytes(config, shape, adapter))} ({run.wire_dtype}) a version"
        )
    for adapter in config.adapters:
        chosen, changed = adapter.algorithm, adapter.algorithm.changed()
        preset = _pairs({key: value for key, value in PRESETS[chosen.kind].items() if key not in changed})
        own = _pairs(changed)
        line = f"Algorithm of {adapter.name}: {chosen.kind} sets {preset or 'the defaults'}"
        yield line + (f"; the configuration sets {own}" if own else "")
        if adapter.sft.steps:
            yield f"The first {adapter.sft.steps} versions of {adapter.name} are trained on given answers"


def _pairs(values: Mapping[str, Any]) -> str:
    """``a=0.2, b=true``, as overrides are written."""
    return ", ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in values.items())


def _ranges(numbers: list[int]) -> str:
    """``0-3, 6-7``."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))


def _runs(specs: list[ProcessSpec]) -> str:
    """``trainer ranks 0-7``, ``servers 0-3, 2 devices each``."""
    word, numbers = _WORDS[specs[0].role], [spec.index for spec in specs]
    if specs[0].role in (CONTROLLER, SERVICE, REMOTE):
        return word
    text = f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {numbers[0]}-{numbers[-1]}"
    size = len(specs[0].devices)
    return text + (f", {size} devices each" if size > 1 else "")


def _memory(plan: JobPlan) -> Table:
    """Estimates of the largest trainer rank, of a server replica and of the controller: part by part."""
    kinds = [max((m for m in plan.memory if m.role == role), key=lambda m: m.device + m.host) for role in _SHORT]
    names = list(dict.fromkeys(part.name for m in kinds for part in m.parts))
    columns = [(m, where) for m in kinds for where in ("device", "host") if getattr(m, where)]
    titles = [f"{_SHORT[m.role]} {where}" for m, where in columns]
    small = max(getattr(m, where) for m, where in columns) < SMALL
    unit, size, digits = ("MiB", 2**20, 0) if small else ("GiB", GIB, 2)
    rows = []
    for name in names:
        values = [sum(getattr(p, where) for p in m.parts if p.name == name) for m, where in columns]
        if any(values):
            rows.append((name, *(f"{value / size:.{digits}f}" if value else "" for value in values)))
    rows.append(("all", *(f"{getattr(m, where) / size:.{digits}f}" for m, where in columns)))
    title = f"Memory, estimated, in {unit} of one device and of the host"
    table = make_table(title, ("part", *titles), rows, right=titles)
    table.columns[0].no_wrap = True
    return table


def _gib(n: float) -> str:
    return f"{n / GIB:.1f}" if n < 10 * GIB else f"{n / GIB:.0f}"


def _publishes(config: Config, plan: JobPlan) -> Iterator[str]:
    """Bytes and least time of a publish: every worker of a server receives the adapter."""
    servers, ranks = plan.role(SERVER), plan.role(TRAINER)
    remote = [spec for spec in servers if spec.node not in {rank.node for rank in ranks}]
    link = LINK_BITS / 8
    for adapter in config.adapters:
        nbytes = slots.version_bytes(config, plan.shape, adapter)
        dtype = recorded.adapter_run(config, adapter).wire_dtype
        line = f"Publish of {adapter.name}: {human_bytes(nbytes)} ({dtype}) a version"
        if merging_s := slots.merging_s(config, plan.shape, adapter):
            line += f", merged by {slots.source_ranks(config, plan.shape)} trainer ranks in about {merging_s:.2f} s"
        if not remote:
            yield f"{line}; trainer and servers share a node, so no link is a bound"
            continue
        workers = max(sum(s.node == node for s in remote) for node in {s.node for s in remote}) * config.rollout.tp
        most = workers * nbytes
        yield (
            f"{line}, at least {nbytes / link:.2f} s at {LINK_BITS / 1e9:g} Gbit/s; "
            f"{human_bytes(most)} and {most / link:.2f} s if each of the {workers} workers of a node receives a copy"
        )
    if config.adapters:
        yield _groups(config, plan)


def _groups(config: Config, plan: JobPlan) -> str:
    """Number, members and formation of the broadcast groups."""
    sources, tp = slots.source_ranks(config, plan.shape), config.rollout.tp
    places = [(spec.name, f"node {spec.node}") for spec in plan.role(SERVER)]
    tree = relay_tree([ServerEndpoint(name=n, host=h, admin_port=0, data_port=0, workers=tp) for n, h in places])
    members = 1 + max(map(workers_of, tree))
    which = f"{sources} of {members} members, a trainer rank that sends and all workers"
    touched = ""
    if len(tree) > 1:
        which = (
            f"{sources * len(tree)} of at most {members} members, for each of {sources} trainer ranks that send "
            f"its group and {len(tree) - 1} below relays"
        )
        touched = f", one group of at most {MOST} servers each time"
    seconds = f"about {form_s(tree, sources):.2f} s, at most {config.weight_sync.form_s:g} s"
    return f"Broadcast groups: {which}; formed at once, in {seconds}, and again when servers join or leave{touched}"


def _slots(config: Config, plan: JobPlan) -> Iterator[str]:
    """The servers' slots, and what `rollout.expert_parallel` would make of them."""
    if config.rollout.adapter_mode == "merged":
        return
    item, other = DTYPE_BYTES[config.model.dtype], slots.smaller_slot(config, plan.shape)
    smaller = f"; {human_bytes(item * other)} with rollout.expert_parallel=true" if other else ""
    each = item * slots.slot_parameters(config, plan.shape)
    yield f"Slots of a server: {slots.slot_count(config)} of {human_bytes(each)} on each worker{smaller}"


def _kv(config: Config, plan: JobPlan) -> Iterator[str]:
    """What the KV cache of a replica holds."""
    if (tokens := sizing.kv_tokens(config, plan.shape, _server(plan))) is None:
        yield "KV cache: unknown; set cluster.device_memory_gib to the memory of one device"
        return
    longest = config.rollout.max_model_len
    yield (
        f"KV cache of a replica: {tokens:,} tokens, {tokens // longest:,} sequences of {longest} "
        f"(rollout.max_num_seqs = {config.rollout.max_num_seqs})"
    )


def _server(plan: JobPlan) -> sizing.Memory:
    return next(memory for memory in plan.memory if memory.role == "rollout")


def _first_to_run_out(config: Config, plan: JobPlan) -> str:
    """Resources with a known limit, the fullest first."""
    found: list[tuple[str, float, float]] = []
    limit = device_bytes(config, None)
    if limit is not None and config.cluster.device != "cpu":
        rank = max(m.device for m in plan.memory if m.role == "trainer")
        share, staging = config.rollout.gpu_memory_utilization * limit, sizing.staging_of(_server(plan))
        left = limit - share - staging if config.cluster.share_devices else limit
        found.append(("device memory of a trainer rank", rank, left))
        before_kv = _server(plan).device - staging - sizing.kv_part(config, plan.shape)
        found.append(("device memory of a server before its KV cache", before_kv, share))
    limits = {"slurm": slurm_bytes(config.cluster.slurm.mem), "local": machine_memory()}
    host = limits.get(config.cluster.kind)
    most = max(sizing.host_bytes(plan.memory, node) for node in range(plan.nodes))
    if host is not None:
        name = "host memory of a node" if config.cluster.kind == "slurm" else "memory of this machine"
        found.append((name, most, host))
    if not found:
        return f"Host memory of a node: {_gib(most)} GiB; no limit of a resource is known to the plan"
    fullest = sorted(found, key=lambda resource: -resource[1] / resource[2])
    return "Runs out first: " + "; next: ".join(f"{n}: {_gib(used)} of {_gib(all_)} GiB" for n, used, all_ in fullest)


def details(config: Config, plan: JobPlan) -> Iterator[Table]:
    yield from (_processes(plan), _ranks(config))
    yield make_table("Ports", ("process", "plane", "bind", "port"), ports(config), right=("port",))
    yield _sizes(config, plan.shape)
    columns = ("rank: device", "rank: host", "server: device", "server: host")
    rows = ((change, *(f"{n / GIB:.2f}" if n else "" for n in row)) for change, *row in what_if(config, plan.shape))
    title = "What if, estimated, in GiB of one device and of the host"
    yield make_table(title, ("change", *columns), rows, right=columns)
    files = [(name,) for name in file_names(config, plan.run_folder)]
    yield make_table("Files", [f"in RUN = {plan.run_folder}"], files)


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()
) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _processes(plan: JobPlan) -> Table:
    rows = []
    for process in plan.processes:
        devices = ",".join(map(str, process.devices)) or "cpu"
        _, _, module, _, _, *rest = process.argv  # without the run folder, which is the same for all
        rows.append((process.name, str(process.node), devices, str(process.cpus), " ".join([module, *rest])))
    columns = ("process", "node", "devices", "threads", "module")
    return make_table("Processes", columns, rows, right=("node", "threads"))


def rank_coordinates(config: Config) -> Iterator[dict[str, int]]:
    """Position of each trainer rank in the parallel layout, in Megatron's order ``tp-cp-ep-dp-pp``, tp fastest.

    Attention and expert layouts share only the pipeline stage.
    """
    t = config.trainer
    for rank in range(t.world_size):
        pp, within = divmod(rank, t.world_size // t.pp)
        cp, dp = within // t.tp % t.cp, within // (t.tp * t.cp)
        ep, etp = within // t.etp % t.ep, within % t.etp
        yield {"rank": rank, "tp": within % t.tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}


def _ranks(config: Config) -> Table:
    t, rows = config.trainer, list(rank_coordinates(config))
    title = f"Trainer ranks (tp {t.tp}, cp {t.cp}, pp {t.pp}, ep {t.ep}, etp {t.etp})"
    return make_table(title, [*rows[0]], [[str(n) for n in row.values()] for row in rows], right=[*rows[0]])


def ports(config: Config) -> list[tuple[str, str, str, str]]:
    """(process, plane, host, port) of every socket that listens; ``host``: words where each node finds its own."""
    chosen = "chosen by the system"  # and published in ``rendezvous/``
    bind, interface = config.cluster.bind, config.cluster.interface
    host = bind if bind not in WILDCARDS else "the node's address" + ("" if interface == "auto" else f" ({interface})")
    found = [(f"{TRAINER}-0", "store", host, chosen), (f"{CONTROLLER}-0", "control", host, chosen)]
    if config.service is not None and config.service.api is not None:
        found.append((f"{SERVICE}-0", "api", "127.0.0.1", str(config.service.api.port or chosen)))
    found += [(f"{PAGE}-0", "page", "127.0.0.1", chosen)] * config.run.page
    if (remote := config.rollout.remote) is not None:
        found.append((f"{REMOTE}-0", "remote", remote.host, str(remote.port or chosen)))
    servers = range(config.rollout.servers)
    return found + [(f"{SERVER}-{i}", plane, host, chosen) for i in servers for plane in ("data", "admin")]


def _sizes(config: Config, shape: ModelShape) -> Table:
    base = human_bytes(shape.parameters * DTYPE_BYTES[config.model.dtype])
    rows = [("base model (frozen)", f"{shape.parameters:,}", "", base)]
    for adapter in config.adapters:
        size = adapter_size(shape, adapter.spec(""))
        wire = human_bytes(slots.version_bytes(config, shape, adapter))
        file, names = human_bytes(4 * size.file_parameters), f"{size.names:,}"
        rows.append((f"adapter {adapter.name}: PEFT file", f"{size.file_parameters:,}", names, file))
        rows.append((f"adapter {adapter.name}: wire, each publish", f"{size.parameters:,}", f"{size.tensors:,}", wire))
    rows.append(("adapter versions resident on a server", str(config.rollout.resident_versions), "", ""))
    numbers = ("parameters", "tensors", "bytes")
    return make_table("Sizes", ("what", *numbers), rows, right=numbers)


def file_names(config: Config, run: RunFolder) -> list[str]:
    """What a run writes into its folder, of a process once."""
    process = "<role>-<index>"
    files = [run.config, run.secret, run.endpoint(process), run.status(process), run.log(process), run.metrics]
    folders = [run.rollouts, run.tensorboard, run.adapter_export("<name>")]
    keys = [run.ca, run.data_key] if not on_loopback(config.cluster.bind) or slots.has_tenants(config) else []
    names = [*map(str, files), *(f"{path}/" for path in folders), *map(str, [run.report, run.summary, *keys])]
    return [name.removeprefix(f"{run}/") for name in names]


def explain_resume(config: Config) -> Iterator[str]:
    """The effect of a start with ``config``, by line. Raises ConfigError or CheckpointError for one that is refused."""
    config = with_absolute_root(config)
    folder, steps = config.run_folder, recorded.steps_of(config)
    earlier = previous_run(folder)
    if earlier is None:
        yield f"{folder} holds no run: a start would make a new one. Nothing was started."
        return
    if (error := recorded.conflict(earlier.config, config)) is not None:
        raise error
    if earlier.finished(config):
        yield f"The run in {folder} is done: {earlier.steps_done} steps. A start would only report that."
        return
    model = Path(config.model.folder)
    base_is_here = model.is_dir() and not (config.model.commit is not None and recorded.missing_files(model))
    plan = explain(folder, config, base_is_here=base_is_here)
    check_usable(plan)
    yield f"The run in {folder} would resume."
    if not base_is_here:
        yield f"  {config.model.path} is not complete in the hub's cache: a start downloads it and compares it then"
    yield from (f"  changed: {line}" for line in recorded.changes(earlier.config, config))
    versions = {adapter.adapter: adapter.ref.version for adapter in plan}
    snapshots = {adapter.adapter: adapter.newest.manifest.ledger for adapter in plan if adapter.newest}
    sampled = {adapter.name: recorded.sampled_as(config, adapter) for adapter in config.adapters}
    groups = reconciliations(folder, config.run.name, versions, snapshots, sampled)
    for adapter in plan:
        yield from _adapter(adapter, steps[adapter.adapter])
        yield f"  prompt groups: {groups[adapter.adapter]}"
    for path in (path for adapter in plan for path in adapter.leftovers):
        yield f"  {path} was being written when a process died; it would be removed"
    yield "Nothing was started or changed."


def _adapter(adapter: AdapterResume, steps: int) -> Iterator[str]:
    version = adapter.ref.version
    if adapter.newest is None:
        yield f"{adapter.adapter}: no checkpoint was written, step 0 of {steps} is next"
        return
    found = adapter.newest
    written = f"{human_bytes(found.nbytes)}, written {duration(found.age_s())} ago"
    following = f"step {version} of {steps} is next" if version < steps else f"all its {steps} steps are made"
    yield f"{adapter.ref}: from {found.path} ({written}), {following}"
    for line in adapter.lines():
        yield f"  {line}"
