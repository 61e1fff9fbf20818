"""The rule about ``init_from``: it refuses what `checkpoint.fuse.fused` would refuse later, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, shape_of
from areal_lora.errors import ConfigError
from areal_lora.families import targets
from areal_lora.families.family import Scope
from areal_lora.families.peft_folder import PeftFolder, misfits
from areal_lora.families.registry import kind_of, linears, target_of
from areal_lora.families.shape import ModelShape
from areal_lora.types import ExpertLayout


def init_from(config: Config, facts: Facts) -> Iterator[Finding]:
    """The reasons why an adapter's folder cannot become its version 0; its modules decide whether others make sense."""
    for i, adapter in enumerate(config.adapters):
        if adapter.init_from is None:
            continue
        at = f"adapters.{i}"
        if problem := facts.peft_problems.get(adapter.init_from):
            yield Finding(path=f"{at}.init_from", reason=problem, fix="give the folder of a PEFT LoRA adapter")
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
        return Finding(
            path=f"{at}.init_from",
            reason=f"{source} adapts {foreign[0]}, which this model does not have or LoRA cannot sit on here",
            fix="give an adapter of this model's projections",
        )
    for module in sorted(folder.modules):
        file = (folder.shapes[f"{module}.lora_A.weight"][1], folder.shapes[f"{module}.lora_B.weight"][0])
        if file != every[module]:
            reason = f"{source} has {file[0]} inputs and {file[1]} outputs at {module}, this model {every[module]}"
            return Finding(path=f"{at}.init_from", reason=reason, fix="give an adapter of this model")
    extra, absent = misfits(folder.modules, wanted)
    if extra:
        return Finding(
            path=f"{at}.target_modules",
            reason=f"{source} adapts {kind_of(extra[0])}, which is not among them",
            fix=f"name {linears()[extra[0].rpartition('.')[2]]} too",
        )
    if absent:
        return Finding(
            path=f"{at}.init_from",
            reason=f"{source} adapts {kind_of(absent[0])} but not {absent[0]}",
            fix="give an adapter of all layers and experts",
        )
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
            return Finding(
                path=f"{at}.expert_layout",
                reason=f"{adapter.expert_layout}, but the experts of {adapter.init_from} differ ({name})",
                fix="set it to per_expert",
            )
    return None


def _rank(at: str, adapter: AdapterConfig, folder: PeftFolder) -> Finding | None:
    spec = adapter.spec("")
    for module, ranks in _distinct(folder, adapter.expert_layout).items():
        if sum(ranks) > (room := spec.rank_of(module)):
            layers = f" and Megatron's fused layers hold {len(ranks)} of its lora_A" if len(ranks) > 1 else ""
            return Finding(
                path=f"{at}.rank" if room == adapter.rank else f"{at}.rank_pattern",
                reason=f"{room} is too small for {adapter.init_from}: at {module} it has rank {ranks[0]}{layers}",
                fix=f"set it to at least {sum(ranks)}",
            )
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
