"""Rules about single adapters: targets, ranks, code, tasks, sampling, evaluation sets, `init_from`. No row is read."""

from collections import Counter
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, of_each_adapter, warning
from areal_lora.config.sections.task import DatasetTask, WordProblemsTask
from areal_lora.config.sizing.slots import has_tenants, served_targets
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families import targets
from areal_lora.families.family import Scope
from areal_lora.families.peft_folder import PeftFolder, misfits
from areal_lora.families.registry import kind_of, path_of, target_of
from areal_lora.families.shape import ModelShape
from areal_lora.types import MOST_KEPT, ExpertLayout

LOW_RATE = 1e-5
"""Below it LoRA hardly learns at alpha / rank <= 1: lora_B starts at 0, and Adam moves it by about the rate a step."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""


def adapter_list(config: Config, facts: Facts) -> Iterator[Finding]:
    for name, count in Counter(adapter.name for adapter in config.adapters).items():
        if count > 1:
            yield Finding("adapters", f"{count} adapters are named {name!r}", "give each its own name")
    room, staleness = config.rollout.max_adapters, config.rollout.max_staleness
    if room is not None and room < len(config.adapters):
        fix = f"set rollout.max_adapters={len(config.adapters)}, or leave it out"
        yield Finding("rollout.max_adapters", f"servers hold {room} adapters, {len(config.adapters)} are listed", fix)
    for i, adapter in enumerate(config.adapters):
        if adapter.max_staleness is not None and adapter.max_staleness > staleness:
            of_servers = f"rollout.max_staleness = {staleness}, for which servers have room"
            fix = f"raise rollout.max_staleness, or lower it to {staleness}"
            yield Finding(f"adapters.{i}.max_staleness", f"{adapter.max_staleness} is above {of_servers}", fix)


def service_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    """Joining adapters are called ``name.incarnation``."""
    if config.service is None:
        return
    if config.rollout.max_adapters is None:
        reason = "with a service the list does not state how many adapters there will be"
        yield Finding("rollout.max_adapters", reason, "set it to the number of adapters that servers hold at a time")
    for i, adapter in enumerate(config.adapters):
        if "." in adapter.name:
            reason = f"{adapter.name!r} has a dot, and the names of a service's adapters end in .N"
            yield Finding(f"adapters.{i}.name", reason, "use a name without a dot")
    if has_tenants(config) and config.cluster.kind != "local":
        reason = "the service listens on the loopback address of the launcher's machine, and this run may have several"
        yield Finding("cluster.kind", reason, "start it with cluster.kind=local, inside an allocation for example")
    if (shape := facts.shape) is not None:
        try:
            targets.resolve(config.service.target_modules, [], shape)
        except ConfigError as error:
            yield Finding(f"service.{error.path}", error.reason, error.fix)


@of_each_adapter
def targets_exist(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    if (shape := facts.shape) is None:
        return
    try:
        found = targets.resolve(adapter.target_modules, adapter.exclude_modules, shape)
        targets.check_patterns(shape, adapter.model_copy(update={"target_modules": list(found)}).spec(""))
    except ConfigError as error:
        yield Finding(error.path, error.reason, error.fix)


def ranks_fit(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.rollout.adapter_mode == "merged":
        return  # no server holds an adapter
    limit = config.rollout.max_lora_rank
    if limit not in VLLM_LORA_RANKS:
        reason = f"vLLM does not take {limit}"
        yield Finding("rollout.max_lora_rank", reason, f"use one of {', '.join(map(str, VLLM_LORA_RANKS))}")
    for i, adapter in enumerate(config.adapters):
        highest = adapter.spec("").max_rank
        if highest > limit:
            key = "rank" if highest == adapter.rank else "rank_pattern"
            reason = f"rank {highest} is above the servers' rollout.max_lora_rank = {limit}"
            yield Finding(f"adapters.{i}.{key}", reason, f"raise rollout.max_lora_rank or lower the rank to {limit}")


@of_each_adapter
def rates_suit_lora(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    """A rate for full fine-tuning is about a tenth of one for LoRA."""
    whole = adapter.model_copy(update={"rank_pattern": {}, "alpha_pattern": {}})
    optimizer, scale = adapter.optimizer, whole.spec("").scale_of("")
    if scale <= 1 and optimizer.lr * optimizer.lora_plus_ratio < LOW_RATE and not adapter.is_client:
        reason = f"{optimizer.lr:g} is low for LoRA whose product is scaled by {scale:g}: little may be learned"
        yield warning("optimizer.lr", reason, "use 1e-5 to 5e-5, or a higher alpha (docs/en/models.md)")


def unserved(config: Config, adapter: AdapterConfig, facts: Facts) -> Finding | None:
    """Modules of a joining adapter for which servers have no room, since these are fixed when the servers start."""
    if (shape := facts.shape) is None:
        return None
    has = targets.modules(served_targets(config), [], shape)
    lacks = sorted(targets.modules(adapter.target_modules, adapter.exclude_modules, shape).keys() - has.keys())
    if not lacks:
        return None
    fix = f"choose from {', '.join(served_targets(config))}, or start the run with other service.target_modules"
    return Finding("adapters.0.target_modules", f"servers have no room for {lacks[0]}", fix)


def router_replay(config: Config, facts: Facts) -> Iterator[Finding]:
    key, shape, chosen = "behaviour.router_replay", facts.shape, config.behaviour.router_replay
    if chosen == "off":
        return
    if shape is not None and not shape.experts:
        yield Finding(key, "the model is dense: it has no router", "set it to off")
    if config.adapters and all(adapter.sft.steps >= config.run.steps for adapter in config.adapters):
        yield Finding(
            key, "every step trains on given answers: no server sampled them, no ratio moves", "set it to off"
        )
    if chosen == "old":
        if config.adapters and not any(each.algorithm.needs_prox(each.minibatches) for each in config.adapters):
            reason = "no step has a proximal pass: that takes several minibatches and no behaviour_correction=in_ratio"
            yield Finding(key, reason, "raise adapters[].minibatches, or set it to off")
        return
    device = config.cluster.device
    if device == "npu":
        yield Finding(key, "vLLM's first model runner returns no routes on NPUs", "set it to off")
    if config.rollout.deterministic and device == "cuda":
        reason = "rollout.deterministic switches vLLM's prefix cache off, beside which GPUs keep routes"
        yield Finding(key, reason, "set one of them to off")
    if config.rollout.adapter_mode == "merged":
        reason = "vLLM returns no routes from the fused kernel of experts without LoRA"
        yield Finding(key, reason, "set rollout.adapter_mode=unmerged, or set it to off")
    if "additional_config" in config.rollout.engine_args and device == "cpu":
        reason = "rollout.engine_args.additional_config replaces the setting by which servers return routes"
        yield Finding(key, reason, "leave that out, or set it to off")


def moe_dispatcher(config: Config, facts: Facts) -> Iterator[Finding]:
    t = config.trainer
    reasons = {
        "trainer.engine = fsdp sends no tokens to experts": t.engine == "fsdp",
        "its kernels run on GPUs": config.cluster.device == "cpu",
        "with ep x etp = 1 every expert is on the token's rank": t.ep * t.etp == 1,
        "it sends bfloat16 only": config.model.dtype != "bfloat16",
        "it does not send the keys of adapters.dropout": any(adapter.dropout for adapter in config.adapters),
    }
    for reason in (reason for reason, holds in reasons.items() if holds and t.moe_dispatcher != "alltoall"):
        yield Finding("trainer.moe_dispatcher", f"{t.moe_dispatcher}, but {reason}", "set it to alltoall")


def user_code(config: Config, facts: Facts) -> Iterator[Finding]:
    for problem in facts.code_problems:
        yield Finding(problem.path, problem.reason, problem.fix)


@of_each_adapter
def no_clients(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    """It would never be driven: the service knows the adapters that it has made."""
    if adapter.is_client:
        fix = "start the run with --serve, and create the adapter through the service"
        yield Finding("workflow.kind", "only the service of a run makes adapters of clients", fix)


@of_each_adapter
def batches(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    if adapter.is_client:
        return
    t, sampling = config.trainer, adapter.sampling
    replicas = max(1, t.world_size // (t.tp * t.cp * t.pp))
    if adapter.minibatches > sampling.prompts_per_step:
        reason = f"{adapter.minibatches} minibatches cannot be cut from {sampling.prompts_per_step} prompts"
        yield Finding("minibatches", reason, f"set it to at most {sampling.prompts_per_step}")
    elif sampling.prompts_per_step * (1 if adapter.sft.steps else sampling.n_samples) < replicas * adapter.minibatches:
        reason = f"a minibatch has fewer sequences than the trainer's {replicas} data-parallel replicas"
        yield Finding("sampling.prompts_per_step", reason, "raise it")


@of_each_adapter
def chat_template(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    """The format chat needs a chat template, and messages need the format chat."""
    sets = [(f"evals.{j}.task", chosen.task) for j, chosen in enumerate(adapter.evals) if chosen.task is not None]
    for at, task in [("task", adapter.task), *sets]:
        chat = task.format.is_chat
        if chat and facts.chat_template is False:
            reason = f"the tokenizer in {config.model.folder} has no chat template"
            yield Finding(f"{at}.format.kind", reason, "set it to template, or use an instruction-tuned model")
        if isinstance(task, DatasetTask) and task.columns.messages is not None and not chat:
            reason = "messages are written by a chat template, and task.format.kind is template"
            yield Finding(f"{at}.columns.messages", reason, "set task.format.kind=chat")


@of_each_adapter
def columns_exist(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    """A task that is computed has no columns to name."""
    staged = adapter.sampling.staged
    columns = {"sft.column": adapter.sft.column, "sampling.difficulty": staged.column if staged else None}
    for key, column in columns.items() if isinstance(adapter.task, WordProblemsTask) else ():
        if column is not None:
            reason = f"{column!r} names a column, and task.kind {adapter.task.kind} has none: it is computed"
            yield Finding(key, reason, "leave it out, or use task.kind dataset")


@of_each_adapter
def sampling_is_trained(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    """Log-probabilities are normalised over the ids that sampling keeps, which servers return: `top_k` bounds them."""
    sampling = adapter.sampling
    if sampling.min_tokens > sampling.max_new_tokens:
        reason = f"{sampling.min_tokens} is more than max_new_tokens = {sampling.max_new_tokens}"
        yield Finding("sampling.min_tokens", reason, "lower it, or raise max_new_tokens")
    kind = adapter.rewards[0].kind
    if sampling.difficulty == "learnability" and adapter.workflow.kind == "single_turn" and kind in ("judge", "model"):
        reason = f"reward {kind} does not state which answers are correct, so all prompts would stay equal"
        yield Finding("sampling.difficulty", reason, "leave it at uniform, or put a reward with `correct` first")
    if sampling.truncates:
        if adapter.algorithm.teacher:
            reason = "a served model states log-probabilities of the whole distribution, and sampling is truncated"
            yield Finding("algorithm.reference", reason, "set sampling.top_k=0, or leave reference at base")
        return
    for key, off in {"top_p": 1.0, "min_p": 0.0}.items():
        if (value := getattr(sampling, key)) != off:
            reason = f"{value:g} alone bounds no number of tokens, and each needs the ids it was sampled from"
            yield Finding(f"sampling.{key}", reason, f"set sampling.top_k, at most {MOST_KEPT}, or leave it at {off:g}")
    if sampling.min_tokens:
        reason = f"{sampling.min_tokens} restricts sampling, and the trained log-probabilities do not know it"
        fix = "leave it at 0, set sampling.top_k, or accept the bias (docs/en/algorithms.md)"
        yield warning("sampling.min_tokens", reason, fix)


LEAST_TEMPERATURE = 0.01
"""vLLM's minimum above 0."""


@of_each_adapter
def eval_sets(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    for name, count in Counter(chosen.name for chosen in adapter.evals).items():
        if count > 1:
            yield Finding("evals", f"{count} sets are named {name!r}", "give each its own name")
    for j, chosen in enumerate(adapter.evals):
        at = f"evals.{j}.temperature"
        if chosen.n_samples > 1 and chosen.temperature == 0:
            reason = f"at 0 all {chosen.n_samples} answers to a problem are the same"
            yield Finding(at, reason, "raise it, for example to 0.8, or set n_samples=1")
        elif 0 < chosen.temperature < LEAST_TEMPERATURE:
            yield Finding(at, f"vLLM's minimum above 0 is {LEAST_TEMPERATURE}", "set it to 0 for greedy answers")


def measured_versions(config: Config, facts: Facts) -> Iterator[Finding]:
    every, apart = config.eval.every_steps, config.checkpoint.every_steps
    last = max((adapter.steps or config.run.steps for adapter in config.adapters if not adapter.is_client), default=0)
    between = range(every, last, every) if every else ()
    if between and all(version % apart for version in between):
        reason = f"no multiple of {every} before step {last} has a checkpoint: such versions are measured and not kept"
        yield warning("eval.every_steps", reason, f"make it a multiple of checkpoint.every_steps = {apart}")


@of_each_adapter
def init_from(config: Config, facts: Facts, adapter: AdapterConfig) -> Iterator[Finding]:
    """The reasons why an adapter's folder cannot become its version 0; its modules decide whether others make sense."""
    if adapter.init_from is None:
        return
    folder, shape = facts.peft_folders.get(adapter.init_from), facts.shape
    if isinstance(folder, AdapterError):
        yield Finding("init_from", " ".join(str(folder).split()), "give the folder of a PEFT LoRA adapter")
        return
    if folder is None or shape is None:
        return
    if (wrong := _modules(adapter, folder, shape)) is not None:
        yield wrong
        return
    differ = _experts(adapter, folder)
    # Experts that differ in a shared_outer adapter count as ranks of one lora_A: the same mistake.
    small = None if differ and adapter.expert_layout is ExpertLayout.SHARED_OUTER else _rank(adapter, folder, shape)
    yield from (finding for finding in (differ, small) if finding is not None)


def _modules(adapter: AdapterConfig, folder: PeftFolder, shape: ModelShape) -> Finding | None:
    try:
        wanted = targets.modules(adapter.target_modules, adapter.exclude_modules, shape)
    except ConfigError:
        return None  # the rule about targets reports it
    source = adapter.init_from
    every = targets.modules([targets.ALL_LINEAR], [], shape)
    if foreign := sorted(folder.modules - every.keys()):
        reason = f"{source} adapts {foreign[0]}, which this model does not have or LoRA cannot sit on here"
        return Finding("init_from", reason, "give an adapter of this model's projections")
    for module in sorted(folder.modules):
        file = (folder.shapes[f"{module}.lora_A.weight"][1], folder.shapes[f"{module}.lora_B.weight"][0])
        if file != every[module]:
            reason = f"{source} has {file[0]} inputs and {file[1]} outputs at {module}, this model {every[module]}"
            return Finding("init_from", reason, "give an adapter of this model")
    extra, absent = misfits(folder.modules, wanted)
    if extra:
        reason = f"{source} adapts {kind_of(extra[0])}, which is not among them"
        return Finding("target_modules", reason, f"name {_layer(extra[0], shape)} too")
    if absent:
        reason = f"{source} adapts {kind_of(absent[0])} but not {absent[0]}"
        return Finding("init_from", reason, "give an adapter of all layers and experts")
    return None


def _experts(adapter: AdapterConfig, folder: PeftFolder) -> Finding | None:
    if adapter.expert_layout is ExpertLayout.PER_EXPERT:
        return None
    outer = adapter.expert_layout is ExpertLayout.SHARED_OUTER
    firsts: dict[str, str] = {}
    for name in sorted(folder.digests):
        layer, sep, expert = name.partition(".experts.")
        if not sep or (outer and target_of(name.removesuffix(".lora_B.weight")) != ("linear_fc2", Scope.EXPERT)):
            continue  # different lora_A of gate and up are stacked, see `_distinct`
        first = firsts.setdefault(f"{layer}.{expert.partition('.')[2]}", name)
        if folder.digests[first] != folder.digests[name]:
            reason = f"{adapter.expert_layout}, but the experts of {adapter.init_from} differ ({name})"
            return Finding("expert_layout", reason, "set it to per_expert")
    return None


def _rank(adapter: AdapterConfig, folder: PeftFolder, shape: ModelShape) -> Finding | None:
    spec = adapter.spec("")
    for module, ranks in _distinct(folder, adapter.expert_layout, shape).items():
        if sum(ranks) > (room := spec.rank_of(module)):
            layers = f" and Megatron's fused layers hold {len(ranks)} of its lora_A" if len(ranks) > 1 else ""
            reason = f"{room} is too small for {adapter.init_from}: at {module} it has rank {ranks[0]}{layers}"
            key = "rank" if room == adapter.rank else "rank_pattern"
            return Finding(key, reason, f"set it to at least {sum(ranks)}")
    return None


def _layer(module: str, shape: ModelShape) -> str:
    """The target that has ``module``: without a row, only routed experts are fused. Empty for no projection."""
    found = target_of(module)
    alone = shape.checkpoint is not None and (found is None or found[1] is not Scope.EXPERT)
    return (path_of(module) or "") if alone else found[0] if found else ""


def _distinct(folder: PeftFolder, layout: ExpertLayout, shape: ModelShape) -> dict[str, list[int]]:
    """The ranks of the different lora_A that each layer of the engine would have to hold, by its first module."""
    groups: dict[tuple[str, str], tuple[str, dict[bytes, int]]] = {}
    for name, digest in sorted(folder.digests.items()):
        module, sep, _ = name.rpartition(".lora_A.")
        if sep and (layer := _layer(module, shape)):
            parent = module.rpartition(".")[0]
            if layout is ExpertLayout.SHARED_OUTER and target_of(module) == ("linear_fc1", Scope.EXPERT):
                parent = parent.rpartition(".")[0]  # one lora_A for all experts
            _, ranks = groups.setdefault((parent, layer), (module, {}))
            ranks[digest] = folder.shapes[name][0]
    return {module: list(ranks.values()) for module, ranks in groups.values()}
