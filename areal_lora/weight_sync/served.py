"""Compare an adapter with the modules that a server can adapt, once, before step 0.

vLLM ignores unknown names: a publish would succeed, and parts of the policy would be the base
model's. Therefore names and sizes are compared before training starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from areal_lora.errors import AdapterError
from areal_lora.families.family import covers
from areal_lora.families.registry import target_of
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.layout import AdapterLayout, Shape
from areal_lora.weight_sync.messages import ModulesReply

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
SHOWN = 3  # modules named in an error


def covered(module: str, target_modules: Iterable[str]) -> bool:
    """Whether canonical targets cover a Hugging Face module (name without prefix)."""
    found = target_of(module)
    return found is not None and covers(tuple(target_modules), *found)


def lora_shapes(module: str, sizes: tuple[int, int], rank: int) -> dict[str, Shape]:
    """Full names and shapes of a module with ``sizes`` (inputs, outputs) at ``rank``."""
    inputs, outputs = sizes
    return {module + LORA_A: (rank, inputs), module + LORA_B: (outputs, rank)}


def served_shapes(modules: Mapping[str, tuple[int, int]], spec: AdapterSpec) -> dict[str, Shape]:
    """Every full name that an adapter ``spec`` must have on a server with these modules."""
    shapes: dict[str, Shape] = {}
    for module, sizes in modules.items():
        if covered(module, spec.target_modules):
            shapes |= lora_shapes(module, sizes, spec.rank)
    return shapes


def check_served(layout: AdapterLayout, reply: ModulesReply) -> None:
    """Raise AdapterError with the modules' names unless a server adapts exactly the trainer's modules."""
    spec = layout.spec
    if spec.rank > reply.max_rank:
        raise AdapterError(
            f"adapter {spec.name!r} has rank {spec.rank}, the servers hold up to {reply.max_rank}; "
            "raise rollout.max_lora_rank"
        )
    wanted = served_shapes(reply.modules, spec)
    wire = {t.name: t.shape for s in layout.shards for t in s.tensors}
    has = wire | {name: wire[target] for name, target in layout.aliases.items()}
    targets = ", ".join(spec.target_modules)
    for what, names in (
        ("vLLM would ignore", has.keys() - wanted.keys()),
        ("the trainer does not adapt, the servers expect them for these targets:", wanted.keys() - has.keys()),
        ("trainer and servers differ in the size of", {n for n in has.keys() & wanted.keys() if has[n] != wanted[n]}),
    ):
        modules = sorted({n.removesuffix(LORA_A).removesuffix(LORA_B) for n in names})
        if modules:
            shown = ", ".join(modules[:SHOWN]) + (f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else "")
            raise AdapterError(
                f"adapter {spec.name!r} ({targets}): {what} {shown}; "
                "change adapters.target_modules, or use one base checkpoint on both sides"
            )
