"""Compare an adapter with the modules that a server can adapt, once, before step 0.

vLLM ignores unknown names: a publish would succeed, and parts of the policy would be the base
model's. Therefore names and sizes are compared before training starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from areal_lora.errors import AdapterError, ManifestError
from areal_lora.families.family import covers
from areal_lora.families.registry import path_of, target_of
from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.layout import AdapterLayout, Payload, Shape
from areal_lora.weight_sync.messages import ModulesReply
from areal_lora.weight_sync.refusal import RefusalReason

LORA_A, LORA_B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
SHOWN = 3  # modules named in an error


def covered(module: str, target_modules: Iterable[str]) -> bool:
    """Whether canonical targets cover a Hugging Face module (name without prefix)."""
    found, targets = target_of(module), tuple(target_modules)
    return (found is not None and covers(targets, *found)) or path_of(module) in targets


def lora_shapes(module: str, sizes: tuple[int, int], rank: int) -> dict[str, Shape]:
    """Full names and shapes of a module with ``sizes`` (inputs, outputs) at ``rank``."""
    inputs, outputs = sizes
    return {module + LORA_A: (rank, inputs), module + LORA_B: (outputs, rank)}


def served_shapes(
    modules: Mapping[str, tuple[int, int]], structure: AdapterStructure, payload: Payload = Payload.UNMERGED
) -> dict[str, Shape]:
    """Every full name that a version of an adapter of ``structure`` must have on a server with these modules."""
    shapes: dict[str, Shape] = {}
    for module, (inputs, outputs) in modules.items():
        if not covered(module, structure.target_modules):
            continue
        if payload is Payload.MERGED:
            shapes[module + WEIGHT] = (outputs, inputs)
        else:
            shapes |= lora_shapes(module, (inputs, outputs), structure.rank_of(module))
    return shapes


def check_targets(modules: Iterable[str], structure: AdapterStructure) -> None:
    """Raise ManifestError (``targets``) unless every target of ``structure`` covers one of a server's ``modules``."""
    targets, served = structure.target_modules, list(modules)
    ignored = [t for t in targets if not any(covered(module, [t]) for module in served)]
    if ignored or not targets:
        raise ManifestError(RefusalReason.TARGETS, f"no served module matches {ignored or 'an empty list of targets'}")


def check_served(layout: AdapterLayout, reply: ModulesReply) -> None:
    """Raise AdapterError with the modules' names unless a server adapts exactly the trainer's modules."""
    structure = layout.structure
    if layout.payload is not reply.payload:
        raise AdapterError(
            f"the adapter is published {layout.payload}, the server expects it {reply.payload}; "
            "start trainer and servers with one rollout.adapter_mode"
        )
    if layout.payload is Payload.UNMERGED and structure.max_rank > reply.max_rank:
        raise AdapterError(
            f"the adapter has rank {structure.max_rank}, the servers hold up to {reply.max_rank}; "
            "raise rollout.max_lora_rank"
        )
    wanted = served_shapes(reply.modules, structure, layout.payload)
    wire = {t.name: t.shape for s in layout.shards for t in s.tensors}
    has = wire | {name: wire[target] for name, target in layout.aliases.items()}
    targets = ", ".join(structure.target_modules)
    for what, names in (
        ("vLLM would ignore", has.keys() - wanted.keys()),
        ("the trainer does not adapt, the servers expect them for these targets:", wanted.keys() - has.keys()),
        ("trainer and servers differ in the size of", {n for n in has.keys() & wanted.keys() if has[n] != wanted[n]}),
    ):
        modules = sorted({n.removesuffix(LORA_A).removesuffix(LORA_B).removesuffix(WEIGHT) for n in names})
        if modules:
            shown = ", ".join(modules[:SHOWN]) + (f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else "")
            raise AdapterError(
                f"the adapter ({targets}): {what} {shown}; "
                "change adapters.target_modules, or use one base checkpoint on both sides"
            )
