"""Ranks and alphas of single modules: whether a model's layers can have them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from areal_lora.errors import ConfigError
from areal_lora.families.family import Scope
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import SiteKey, linear_sites, pieces_of
from areal_lora.types import AdapterSpec, matches


def check_patterns(shape: ModelShape, spec: AdapterSpec) -> None:
    """Raise ConfigError unless every pattern of ``spec`` names modules, and every layer has one rank and one alpha.

    q, k and v (gate and up) have one lora_A, and the experts of a layer are computed together. The error's path is the
    name of the wrong key.
    """
    if not spec.rank_pattern and not spec.alpha_pattern:
        return
    layers = [
        [name for key in _experts(shape, first) for name in _modules(shape, key)]
        for first in linear_sites(shape)
        if first.covered(spec.target_modules)
    ]
    for key, pairs in (("rank_pattern", spec.rank_pattern), ("alpha_pattern", spec.alpha_pattern)):
        for pattern, _ in pairs:
            _check_pattern(key, pattern, layers)
        if not pairs:
            continue
        for modules in layers:
            number = {module: _first(pairs, module) for module in modules}
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


def _first(pairs: tuple[tuple[str, float], ...], module: str) -> float | None:
    return next((number for pattern, number in pairs if matches(pattern, module)), None)


def _experts(shape: ModelShape, first: SiteKey) -> Iterator[SiteKey]:
    if first.scope is not Scope.EXPERT:
        yield first
        return
    for expert in range(shape.experts):
        yield SiteKey(linear=first.linear, layer=first.layer, scope=first.scope, expert=expert)


def _modules(shape: ModelShape, key: SiteKey) -> list[str]:
    return [piece.name for piece in pieces_of(shape, key)]
