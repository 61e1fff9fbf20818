"""Resolve ``target_modules`` and ``exclude_modules`` of a configuration to canonical targets.

Both lists take, with wildcards: Megatron's names (``linear_fc1``), Hugging Face's (``gate_proj``,
``w1``), scopes (``attention``, ``mlp``, ``experts``, ``shared_expert``), scope and name
(``experts.linear_fc1``), dotted paths of either side (``*.mlp.experts.*``), and ``all-linear``.

Canonical targets are sorted: ``linear_fc1`` if every scope of the model that has the layer is selected,
otherwise ``expert.linear_fc1`` and the like. For a family without a row they are paths below a layer,
``self_attn.qkv_proj``, and ``expert.linear_fc1`` and the like for experts. They are valid input, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from areal_lora.errors import ConfigError
from areal_lora.families.family import TARGETS, Scope, covers
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import SiteKey, linear_sites, pieces_of, sites_of
from areal_lora.types import AdapterSpec, ExpertLayout, matches

ALL_LINEAR = "all-linear"
_ROUTER, _SHARED_GATE, _EMBEDDINGS, _OUTPUT = "router", "gate of the shared expert", "embeddings", "output layer"
UNTRAINABLE = {
    "router": _ROUTER,
    "gate": _ROUTER,
    "shared_expert_gate": _SHARED_GATE,
    "embed_tokens": _EMBEDDINGS,
    "word_embeddings": _EMBEDDINGS,
    "embedding": _EMBEDDINGS,
    "lm_head": _OUTPUT,
    "output_layer": _OUTPUT,
}
"""Modules that no training engine adapts, although vLLM can serve some. Only their own names match them."""

_FUSED = {"linear_qkv": "qkv_proj", "linear_fc1": "gate_up_proj"}
_SCOPES = (Scope.LINEAR, Scope.ATTENTION, Scope.MLP, Scope.SHARED_EXPERT, Scope.EXPERT)
_ATTENTION = ("attn", "attention")
"""What the names of attention modules contain, in families without a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """One Hugging Face projection in all layers and experts: the unit that a pattern selects.

    ``paths`` has one row per module: its Hugging Face path and its Megatron path. ``sizes`` are (inputs, outputs).
    """

    scope: Scope
    linear: str
    leaf: str
    sizes: tuple[int, int]
    paths: tuple[tuple[str, str], ...]

    @property
    def names(self) -> set[str]:
        if self.scope is Scope.LINEAR:
            module = self.linear.partition(".")[0]
            where = Scope.ATTENTION if any(word in module for word in _ATTENTION) else module
            return {self.linear, self.leaf, str(where)}
        scopes = {str(self.scope), *(["experts"] if self.scope is Scope.EXPERT else [])}
        linears = {self.linear, self.leaf, _FUSED.get(self.linear, self.linear)}
        return scopes | linears | {f"{scope}.{linear}" for scope in scopes for linear in linears}


def resolve(target_modules: Sequence[str], exclude_modules: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Canonical targets for this model. Raises ConfigError; its path is the name of the wrong list."""
    parts = _projections(shape)
    chosen = _select("target_modules", target_modules, parts, shape)
    excluded = _select("exclude_modules", [e for e in exclude_modules if e not in UNTRAINABLE], parts, shape)
    remaining = [part for part in parts if part in chosen and part not in excluded]
    if not remaining:
        raise ConfigError("exclude_modules", "leaves no module to train", "exclude less")
    for part in parts:
        whole = [p for p in parts if (p.scope, p.linear) == (part.scope, part.linear)]
        missing = [p.leaf for p in whole if p not in remaining]
        if part in remaining and missing:
            key = "exclude_modules" if part in excluded or set(missing) & {p.leaf for p in excluded} else ""
            raise ConfigError(
                key or "target_modules",
                f"{part.leaf} without {', '.join(missing)}: Megatron has them in one {part.linear} with one "
                "lora_A, so it is adapted as a whole",
                f"name {', '.join(p.leaf for p in whole)}, or {part.linear}",
            )
    canonical = list[str]()
    for linear in dict.fromkeys(p.linear for p in parts):
        here = {p.scope for p in parts if p.linear == linear}
        wanted = {p.scope for p in remaining if p.linear == linear}
        # In a family without a row linear_fc1 would also name what other families call so.
        alone = wanted == here and (here == {Scope.LINEAR} or all(p.scope is not Scope.LINEAR for p in parts))
        canonical += [linear] if alone else [f"{scope}.{linear}" for scope in wanted]
    return tuple(sorted(canonical))


def modules(
    target_modules: Sequence[str], exclude_modules: Sequence[str], shape: ModelShape
) -> dict[str, tuple[int, int]]:
    """Hugging Face paths of all adapted modules, with (inputs, outputs). Raises like `resolve`."""
    found = resolve(target_modules, exclude_modules, shape)
    return {
        path: part.sizes
        for part in _projections(shape)
        if covers(found, part.linear, part.scope)
        for path, _ in part.paths
    }


def _select(key: str, patterns: Sequence[str], parts: Sequence[_Projection], shape: ModelShape) -> list[_Projection]:
    selected = []
    for pattern in patterns:
        found = [part for part in parts if _matches(key, pattern, part)]
        if not found:
            raise _untrainable(key, pattern, shape) or _unknown(key, pattern, parts)
        selected += found
    return selected


def _matches(key: str, pattern: str, part: _Projection) -> bool:
    """Raises ConfigError for a path that matches some layers or experts but not all."""
    if pattern == ALL_LINEAR or any(fnmatchcase(name, pattern) for name in part.names):
        return True
    if "." not in pattern:
        return False
    tails = (pattern, f"*.{pattern}")
    hits = sum(any(fnmatchcase(path, tail) for path in paths for tail in tails) for paths in part.paths)
    if 0 < hits < len(part.paths):
        raise ConfigError(
            key,
            f"{pattern!r} matches {hits} of {len(part.paths)} modules {part.leaf}; an adapter covers all "
            "layers and experts of the model",
            "write * for the numbers",
        )
    return hits > 0


def _untrainable(key: str, pattern: str, shape: ModelShape) -> ConfigError | None:
    """The refusal of a module that the model has, but no training engine adapts; None for another pattern."""
    names = [name for name in UNTRAINABLE if fnmatchcase(name, pattern.rpartition(".")[2])]
    present = {_EMBEDDINGS, _OUTPUT} | ({_ROUTER} if shape.experts else set())
    present |= {_SHARED_GATE} if shape.shared_ffn else set()
    found = [part for part in dict.fromkeys(UNTRAINABLE[name] for name in names) if part in present]
    if not found:
        return None
    served = ""
    if shape.checkpoint is None:
        embeds = shape.family.vllm_embeddings or not {_EMBEDDINGS, _OUTPUT} & set(found)
        kind = shape.family.model_type
        served = "vLLM could serve LoRA on it, but " if embeds else f"vLLM serves no LoRA on it in {kind} models, and "
    return ConfigError(
        key,
        f"{pattern!r} names the {' and the '.join(found)}: {served}the training engines adapt only "
        "projections of attention, MLP and experts",
        "leave it out",
    )


def _unknown(key: str, pattern: str, parts: Sequence[_Projection]) -> ConfigError:
    linears = list(dict.fromkeys(p.linear for p in parts))
    scopes = [str(s) for s in Scope if any(p.scope is s for p in parts)]
    known = ", ".join([ALL_LINEAR, *linears, *dict.fromkeys(p.leaf for p in parts), *scopes])
    return ConfigError(key, f"{pattern!r} matches no module of the model", f"the model has {known}")


@lru_cache(maxsize=8)
def _projections(shape: ModelShape) -> tuple[_Projection, ...]:
    paths: dict[tuple[Scope, str, str], list[tuple[str, str]]] = {}
    sizes: dict[tuple[Scope, str, str], tuple[int, int]] = {}
    for key in sites_of(shape, ExpertLayout.PER_EXPERT):
        megatron = _megatron_path(key)
        for piece in pieces_of(shape, key):
            group = (key.scope, key.linear, piece.name.rpartition(".")[2])
            paths.setdefault(group, []).append((piece.name, megatron))
            sizes[group] = (piece.in_features, piece.out_features)
    found = [
        _Projection(scope=scope, linear=linear, leaf=leaf, sizes=sizes[scope, linear, leaf], paths=tuple(own))
        for (scope, linear, leaf), own in paths.items()
    ]
    order = {linear: number for number, linear in enumerate(TARGETS)}
    return tuple(sorted(found, key=lambda part: (_SCOPES.index(part.scope), order.get(part.linear, 0))))


def _megatron_path(key: SiteKey) -> str:
    if key.scope is Scope.LINEAR:
        return key.linear
    parent = {
        Scope.ATTENTION: "self_attention",
        Scope.MLP: "mlp",
        Scope.SHARED_EXPERT: "mlp.shared_experts",
        Scope.EXPERT: f"mlp.experts.local_experts.{key.expert}",
    }[key.scope]
    return f"decoder.layers.{key.layer}.{parent}.{key.linear}"


def check_targets(shape: ModelShape, spec: AdapterSpec) -> None:
    """Raise ConfigError unless every target module of ``spec`` is a layer of the model."""
    sites = sites_of(shape, spec.expert_layout)
    for target in spec.target_modules:
        if not any(key.covered([target]) for key in sites):
            known = ", ".join(dict.fromkeys(f"{key.scope}.{key.linear}" for key in sites))
            reason = f"{target!r} matches no layer of this model"
            raise ConfigError("adapters.target_modules", reason, f"it has {known}")


def check_patterns(shape: ModelShape, spec: AdapterSpec) -> None:
    """Raise ConfigError unless every pattern of ``spec`` names modules, and every layer has one rank and one alpha.

    q, k and v (gate and up) have one lora_A, and the experts of a layer are computed together. The error's path is the
    name of the wrong key.
    """
    if not spec.rank_pattern and not spec.alpha_pattern:
        return
    layers = [
        [
            piece.name
            for expert in (range(shape.experts) if first.scope is Scope.EXPERT else [None])
            for piece in pieces_of(shape, replace(first, expert=expert))
        ]
        for first in linear_sites(shape)
        if first.covered(spec.target_modules)
    ]
    for key, pairs in (("rank_pattern", spec.rank_pattern), ("alpha_pattern", spec.alpha_pattern)):
        for pattern, _ in pairs:
            _check_pattern(key, pattern, layers)
        for modules in layers if pairs else ():
            number = {m: next((n for pattern, n in pairs if matches(pattern, m)), None) for m in modules}
            other = next((m for m in modules if number[m] != number[modules[0]]), None)
            if other is not None:
                numbers = f"{number[modules[0]] or 'default'}, {number[other] or 'default'}"
                raise ConfigError(
                    key,
                    f"{modules[0]} and {other} differ ({numbers}), "
                    "but they are adapted as one layer: q, k and v (gate and up) have one lora_A, and the experts of a "
                    "layer are computed together",
                    "write a pattern that matches all of them, such as (q|k|v)_proj or experts.*(gate|up)_proj",
                )


def _check_pattern(key: str, pattern: str, layers: list[list[str]]) -> None:
    try:
        found = any(matches(pattern, module) for modules in layers for module in modules)
    except re.error as error:
        raise ConfigError(
            key, f"{pattern!r} is no regular expression: {error}", "escape what is no expression"
        ) from None
    if not found:
        raise ConfigError(
            key, f"{pattern!r} matches no adapted module", f"match paths such as {layers[0][0]}, or leave it out"
        )
