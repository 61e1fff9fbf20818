"""From what a configuration writes in ``target_modules`` and ``exclude_modules`` to canonical targets.

Both lists take, with wildcards: Megatron's names (``linear_fc1``), Hugging Face's (``gate_proj``,
``w1``), scopes (``attention``, ``mlp``, ``experts``, ``shared_expert``), scope and name
(``experts.linear_fc1``), dotted paths of either side (``*.mlp.experts.*``), and ``all-linear``.

Canonical targets are sorted: ``linear_fc1`` where every scope of the model that has it is meant,
else ``expert.linear_fc1`` and the like. They are valid input, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from areal_lora.errors import ConfigError
from areal_lora.families.shape import TARGETS, ModelShape, Scope, covers

ALL_LINEAR = "all-linear"
UNTRAINABLE = (
    "router",
    "gate",
    "shared_expert_gate",
    "embed_tokens",
    "word_embeddings",
    "embedding",
    "lm_head",
    "output_layer",
)
"""Modules that can be neither trained nor served with LoRA here; nothing but their own name means them."""

_FUSED = {"linear_qkv": "qkv_proj", "linear_fc1": "gate_up_proj"}
_PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_MIXTRAL = {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One Hugging Face projection of all layers (and experts): what a pattern may select.

    ``paths`` has one row per module: the names that either side gives it.
    """

    scope: Scope
    linear: str
    projection: str
    paths: tuple[tuple[str, str], ...]

    @property
    def names(self) -> set[str]:
        scopes = {str(self.scope), *(["experts"] if self.scope is Scope.EXPERT else [])}
        linears = {self.linear, self.projection, _FUSED.get(self.linear, self.linear)}
        return scopes | linears | {f"{scope}.{linear}" for scope in scopes for linear in linears}


def resolve(target_modules: Sequence[str], exclude_modules: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Canonical targets for this model. Raises ConfigError, whose path is the name of the list that is wrong."""
    parts = list(_parts(shape))
    chosen = _select("target_modules", target_modules, parts)
    excluded = _select("exclude_modules", [e for e in exclude_modules if e not in UNTRAINABLE], parts)
    left = [part for part in parts if part in chosen and part not in excluded]
    if not left:
        raise ConfigError("exclude_modules", "leaves no module to train", "exclude less")
    for part in parts:
        whole = [p for p in parts if (p.scope, p.linear) == (part.scope, part.linear)]
        missing = [p.projection for p in whole if p not in left]
        if part in left and missing:
            key = "exclude_modules" if part in excluded or set(missing) & {p.projection for p in excluded} else ""
            raise ConfigError(
                key or "target_modules",
                f"{part.projection} without {', '.join(missing)}: Megatron has them in one {part.linear} with one "
                "lora_A, so it is adapted as a whole",
                f"name {', '.join(p.projection for p in whole)}, or {part.linear}",
            )
    return tuple(sorted(_canonical(parts, left)))


def modules(
    target_modules: Sequence[str], exclude_modules: Sequence[str], shape: ModelShape
) -> dict[str, tuple[int, int]]:
    """Hugging Face paths of all modules that the adapter sits on, with (inputs, outputs). Raises like `resolve`."""
    found = resolve(target_modules, exclude_modules, shape)
    return {
        path: _sizes(part, shape)
        for part in _parts(shape)
        if covers(found, part.linear, part.scope)
        for path, _ in part.paths
    }


def _sizes(part: _Part, shape: ModelShape) -> tuple[int, int]:
    heads = shape.kv_heads if part.projection in ("k_proj", "v_proj") else shape.heads
    if part.scope is Scope.ATTENTION:
        inner = heads * shape.head_dim
    else:
        inner = {Scope.MLP: shape.ffn, Scope.SHARED_EXPERT: shape.shared_ffn}.get(part.scope, shape.expert_ffn)
    narrows = part.linear in ("linear_proj", "linear_fc2")
    return (inner, shape.hidden) if narrows else (shape.hidden, inner)


def _canonical(parts: Sequence[_Part], left: Sequence[_Part]) -> Iterator[str]:
    for linear in TARGETS:
        here = {p.scope for p in parts if p.linear == linear}
        wanted = {p.scope for p in left if p.linear == linear}
        yield from [linear] if wanted == here else [f"{scope}.{linear}" for scope in wanted]


def _select(key: str, patterns: Sequence[str], parts: Sequence[_Part]) -> list[_Part]:
    selected = []
    for pattern in patterns:
        found = [part for part in parts if _matches(key, pattern, part)]
        if not found:
            raise _unknown(key, pattern, parts)
        selected += found
    return selected


def _matches(key: str, pattern: str, part: _Part) -> bool:
    """Raises ConfigError for a path that means some layers or experts but not all."""
    if pattern == ALL_LINEAR or any(fnmatchcase(name, pattern) for name in part.names):
        return True
    if "." not in pattern:
        return False
    tails = (pattern, f"*.{pattern}")
    hits = sum(any(fnmatchcase(path, tail) for path in paths for tail in tails) for paths in part.paths)
    if 0 < hits < len(part.paths):
        raise ConfigError(
            key,
            f"{pattern!r} means {hits} of {len(part.paths)} modules {part.projection}; an adapter sits on all "
            "layers and experts of the model",
            "write * for the numbers",
        )
    return hits > 0


def _unknown(key: str, pattern: str, parts: Sequence[_Part]) -> ConfigError:
    if any(fnmatchcase(name, pattern.rpartition(".")[2]) for name in UNTRAINABLE):
        return ConfigError(
            key,
            f"{pattern!r}: router, embeddings and output layer can be neither trained nor served with LoRA yet",
            "leave it out",
        )
    linears = [t for t in TARGETS if any(p.linear == t for p in parts)]
    scopes = [str(s) for s in Scope if any(p.scope is s for p in parts)]
    known = ", ".join([ALL_LINEAR, *linears, *dict.fromkeys(p.projection for p in parts), *scopes])
    return ConfigError(key, f"{pattern!r} matches no module of the model", f"the model has {known}")


def _parts(shape: ModelShape) -> Iterator[_Part]:
    """Every adaptable projection of the model, with all its names."""
    layers, sparse = range(shape.layers), shape.sparse_layers
    dense = [layer for layer in layers if layer not in sparse]
    mixtral = shape.model_type == "mixtral"
    places: list[tuple[Scope, Sequence[int], int, str, str]] = [
        (Scope.ATTENTION, layers, 1, "self_attn", "self_attention"),
        (Scope.MLP, dense, 1, "mlp", "mlp"),
        (Scope.SHARED_EXPERT, sparse if shape.shared_ffn else (), 1, "mlp.shared_expert", "mlp.shared_experts"),
        (
            Scope.EXPERT,
            sparse,
            shape.experts,
            f"{'block_sparse_moe' if mixtral else 'mlp'}.experts.{{}}",
            "mlp.experts.local_experts.{}",
        ),
    ]
    for scope, where, copies, hf, megatron in places:
        for linear in TARGETS:
            if not where or (scope is Scope.ATTENTION) != (linear in ("linear_qkv", "linear_proj")):
                continue
            for projection in _MIXTRAL[linear] if mixtral and scope is Scope.EXPERT else _PROJECTIONS[linear]:
                paths = tuple(
                    (
                        f"model.layers.{i}.{hf}.{projection}".format(e),
                        f"decoder.layers.{i}.{megatron}.{linear}".format(e),
                    )
                    for i in where
                    for e in range(copies)
                )
                yield _Part(scope=scope, linear=linear, projection=projection, paths=paths)
