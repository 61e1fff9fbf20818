"""Rules about tasks, sampling, evaluation sets and the folder that an adapter starts from; no rows are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, shape_of, warning
from areal_lora.config.sections.task import DatasetTask, TaskConfig, WordProblemsTask
from areal_lora.errors import ConfigError
from areal_lora.families import targets
from areal_lora.families.family import Scope
from areal_lora.families.peft_folder import PeftFolder, misfits
from areal_lora.families.registry import kind_of, linears, target_of
from areal_lora.families.shape import ModelShape
from areal_lora.types import ExpertLayout


def _tasks(config: Config) -> Iterator[tuple[str, TaskConfig]]:
    """All tasks with their keys: those that are trained on, and those of evaluation sets."""
    for i, adapter in enumerate(config.adapters):
        yield f"adapters.{i}.task", adapter.task
        for j, chosen in enumerate(adapter.evals):
            if chosen.task is not None:
                yield f"adapters.{i}.evals.{j}.task", chosen.task


def chat_template(config: Config, facts: Facts) -> Iterator[Finding]:
    """The format chat needs a chat template, and messages need the format chat."""
    for at, task in _tasks(config):
        chat = task.format.is_chat
        if chat and facts.chat_template is False:
            reason = f"the tokenizer in {config.model.folder} has no chat template"
            yield Finding(f"{at}.format.kind", reason, "set it to template, or use an instruction-tuned model")
        if isinstance(task, DatasetTask) and task.columns.messages is not None and not chat:
            reason = "messages are written by a chat template, and task.format.kind is template"
            yield Finding(f"{at}.columns.messages", reason, "set task.format.kind=chat")


def columns_exist(config: Config, facts: Facts) -> Iterator[Finding]:
    """A task that is computed has no columns to name."""
    for i, adapter in enumerate(config.adapters):
        if adapter.sft.column is not None and isinstance(adapter.task, WordProblemsTask):
            yield Finding(
                f"adapters.{i}.sft.column",
                f"{adapter.sft.column!r} names a column, and task.kind {adapter.task.kind} has none: its "
                "problems are computed",
                "leave it out to train on the computed answers, or use task.kind dataset",
            )


def sampling_is_trained(config: Config, facts: Facts) -> Iterator[Finding]:
    """Log-probabilities are those of the whole distribution: what restricts sampling is a bias."""
    for i, adapter in enumerate(config.adapters):
        sampling, at = adapter.sampling, f"adapters.{i}.sampling"
        if sampling.min_tokens > sampling.max_new_tokens:
            reason = f"{sampling.min_tokens} is more than max_new_tokens = {sampling.max_new_tokens}"
            yield Finding(f"{at}.min_tokens", reason, "lower it, or raise max_new_tokens")
        limits = (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0), ("min_p", sampling.min_p, 0.0))
        for key, value, off in (*limits, ("min_tokens", sampling.min_tokens, 0)):
            if value != off:
                reason = f"{value:g} restricts sampling, and the trained log-probabilities do not know it"
                yield warning(f"{at}.{key}", reason, f"leave it at {off:g}, or accept the bias (docs/en/algorithms.md)")


LEAST_TEMPERATURE = 0.01
"""vLLM's minimum above 0."""


def eval_sets(config: Config, facts: Facts) -> Iterator[Finding]:
    longest = config.rollout.max_model_len
    for i, adapter in enumerate(config.adapters):
        for name, count in Counter(chosen.name for chosen in adapter.evals).items():
            if count > 1:
                yield Finding(f"adapters.{i}.evals", f"{count} sets are named {name!r}", "give each its own name")
        for j, chosen in enumerate(adapter.evals):
            at = f"adapters.{i}.evals.{j}"
            if chosen.n_samples > 1 and chosen.temperature == 0:
                reason = f"at 0 all {chosen.n_samples} answers to a problem are the same"
                yield Finding(f"{at}.temperature", reason, "raise it, for example to 0.8, or set n_samples=1")
            elif 0 < chosen.temperature < LEAST_TEMPERATURE:
                reason = f"vLLM's minimum above 0 is {LEAST_TEMPERATURE}"
                yield Finding(f"{at}.temperature", reason, "set it to 0 for greedy answers")
            if chosen.max_new_tokens is not None and chosen.max_new_tokens >= longest:
                yield Finding(
                    f"{at}.max_new_tokens",
                    f"{chosen.max_new_tokens} new tokens leave no room for a prompt in "
                    f"rollout.max_model_len = {longest}",
                    f"lower it, or raise rollout.max_model_len above {chosen.max_new_tokens}",
                )


def init_from(config: Config, facts: Facts) -> Iterator[Finding]:
    """The reasons why an adapter's folder cannot become its version 0; its modules decide whether others make sense."""
    for i, adapter in enumerate(config.adapters):
        if adapter.init_from is None:
            continue
        at = f"adapters.{i}"
        if problem := facts.peft_problems.get(adapter.init_from):
            yield Finding(f"{at}.init_from", problem, "give the folder of a PEFT LoRA adapter")
        folder, shape = facts.peft_folders.get(adapter.init_from), shape_of(facts)
        if folder is None or shape is None:
            continue
        if (wrong := _modules(at, adapter, folder, shape)) is not None:
            yield wrong
            continue
        differ = _experts(at, adapter, folder)
        # Experts that differ in a shared_outer adapter count as ranks of one lora_A: the same mistake.
        small = None if differ and adapter.expert_layout is ExpertLayout.SHARED_OUTER else _rank(at, adapter, folder)
        yield from (finding for finding in (differ, small) if finding is not None)


def _modules(at: str, adapter: AdapterConfig, folder: PeftFolder, shape: ModelShape) -> Finding | None:
    try:
        wanted = targets.modules(adapter.target_modules, adapter.exclude_modules, shape)
    except ConfigError:
        return None  # the rule about targets reports it
    source = adapter.init_from
    every = targets.modules([targets.ALL_LINEAR], [], shape)
    if foreign := sorted(folder.modules - every.keys()):
        reason = f"{source} adapts {foreign[0]}, which this model does not have or LoRA cannot sit on here"
        return Finding(f"{at}.init_from", reason, "give an adapter of this model's projections")
    for module in sorted(folder.modules):
        file = (folder.shapes[f"{module}.lora_A.weight"][1], folder.shapes[f"{module}.lora_B.weight"][0])
        if file != every[module]:
            reason = f"{source} has {file[0]} inputs and {file[1]} outputs at {module}, this model {every[module]}"
            return Finding(f"{at}.init_from", reason, "give an adapter of this model")
    extra, absent = misfits(folder.modules, wanted)
    if extra:
        reason = f"{source} adapts {kind_of(extra[0])}, which is not among them"
        return Finding(f"{at}.target_modules", reason, f"name {linears()[extra[0].rpartition('.')[2]]} too")
    if absent:
        reason = f"{source} adapts {kind_of(absent[0])} but not {absent[0]}"
        return Finding(f"{at}.init_from", reason, "give an adapter of all layers and experts")
    return None


def _experts(at: str, adapter: AdapterConfig, folder: PeftFolder) -> Finding | None:
    if adapter.expert_layout is ExpertLayout.PER_EXPERT:
        return None
    outer = adapter.expert_layout is ExpertLayout.SHARED_OUTER
    firsts: dict[str, str] = {}
    for name in sorted(folder.digests):
        layer, sep, expert = name.partition(".experts.")
        if not sep or (outer and not (name.endswith(".lora_B.weight") and _linear(name) == "linear_fc2")):
            continue  # different lora_A of gate and up are stacked, see `_distinct`
        first = firsts.setdefault(f"{layer}.{expert.partition('.')[2]}", name)
        if folder.digests[first] != folder.digests[name]:
            reason = f"{adapter.expert_layout}, but the experts of {adapter.init_from} differ ({name})"
            return Finding(f"{at}.expert_layout", reason, "set it to per_expert")
    return None


def _rank(at: str, adapter: AdapterConfig, folder: PeftFolder) -> Finding | None:
    spec = adapter.spec("")
    for module, ranks in _distinct(folder, adapter.expert_layout).items():
        if sum(ranks) > (room := spec.rank_of(module)):
            layers = f" and Megatron's fused layers hold {len(ranks)} of its lora_A" if len(ranks) > 1 else ""
            reason = f"{room} is too small for {adapter.init_from}: at {module} it has rank {ranks[0]}{layers}"
            fix = f"set it to at least {sum(ranks)}"
            return Finding(f"{at}.rank" if room == adapter.rank else f"{at}.rank_pattern", reason, fix)
    return None


def _linear(tensor: str) -> str:
    found = target_of(tensor.rpartition(".lora_")[0])
    return found[0] if found else ""


def _distinct(folder: PeftFolder, layout: ExpertLayout) -> dict[str, list[int]]:
    """The ranks of the different lora_A that each of Megatron's layers would have to hold, by its first module."""
    groups: dict[tuple[str, str], tuple[str, dict[bytes, int]]] = {}
    for name, digest in sorted(folder.digests.items()):
        module, sep, _ = name.rpartition(".lora_A.")
        found = target_of(module)
        if sep and found is not None:
            parent = module.rpartition(".")[0]
            if layout is ExpertLayout.SHARED_OUTER and found == ("linear_fc1", Scope.EXPERT):
                parent = parent.rpartition(".")[0]  # one lora_A for all experts
            _, ranks = groups.setdefault((parent, found[0]), (module, {}))
            ranks[digest] = folder.shapes[name][0]
    return {module: list(ranks.values()) for module, ranks in groups.values()}
