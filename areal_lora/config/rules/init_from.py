"""The rule about ``init_from``: it refuses what `checkpoint.fuse.fused` would refuse later, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.rules.findings import Finding, shape_of
from areal_lora.errors import ConfigError
from areal_lora.families import targets
from areal_lora.families.peft_folder import PeftFolder, misfits
from areal_lora.families.registry import kind_of, linears, target_of
from areal_lora.families.shape import ModelShape
from areal_lora.types import ExpertLayout


def init_from(config: Config, facts: Facts) -> Iterator[Finding]:
    """One finding for each adapter whose folder cannot become its version 0."""
    for i, adapter in enumerate(config.adapters):
        if adapter.init_from is None:
            continue
        at = f"adapters.{i}"
        if problem := facts.peft_problems.get(adapter.init_from):
            yield Finding(path=f"{at}.init_from", reason=problem, fix="give the folder of a PEFT LoRA adapter")
        folder, shape = facts.peft_folders.get(adapter.init_from), shape_of(facts)
        if folder is None or shape is None:
            continue
        finding = _modules(at, adapter, folder, shape) or _experts(at, adapter, folder) or _rank(at, adapter, folder)
        if finding is not None:
            yield finding


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
    if adapter.expert_layout is not ExpertLayout.SHARED:
        return None
    firsts: dict[str, str] = {}
    for name in sorted(folder.digests):
        layer, sep, expert = name.partition(".experts.")
        if not sep:
            continue
        first = firsts.setdefault(f"{layer}.{expert.partition('.')[2]}", name)
        if folder.digests[first] != folder.digests[name]:
            return Finding(
                path=f"{at}.expert_layout",
                reason=f"shared, but the experts of {adapter.init_from} differ ({name})",
                fix="set it to per_expert",
            )
    return None


def _rank(at: str, adapter: AdapterConfig, folder: PeftFolder) -> Finding | None:
    rank = folder.spec.rank
    parts = max(_distinct(folder.digests).values())
    if parts * rank <= adapter.rank:
        return None
    layers = f" and Megatron's fused layers hold {parts} of its lora_A" if parts > 1 else ""
    return Finding(
        path=f"{at}.rank",
        reason=f"{adapter.rank} is too small for {adapter.init_from}: it has rank {rank}{layers}",
        fix=f"set it to at least {parts * rank}",
    )


def _distinct(digests: Mapping[str, bytes]) -> dict[tuple[str, str], int]:
    """Return the number of different lora_A that each of Megatron's layers would have to hold."""
    groups: dict[tuple[str, str], set[bytes]] = {}
    for name, digest in digests.items():
        module, sep, _ = name.rpartition(".lora_A.")
        found = target_of(module)
        if sep and found is not None:
            groups.setdefault((module.rpartition(".")[0], found[0]), set()).add(digest)
    return {key: len(values) for key, values in groups.items()}
