"""``adapter_config.json`` of an adapter, for stock peft and stock vLLM.

transformers 5 has the experts of a layer as two parameters, ``gate_up_proj`` and ``down_proj``. peft turns an adapter
of single experts into one of these parameters when it loads it, with twice the rank for gate and up, and looks for
their numbers under their own names. So patterns of such modules are written a second time, for these names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from areal_lora.families.family import Scope
from areal_lora.families.peft_folder import module_of
from areal_lora.families.registry import target_of
from areal_lora.types import AdapterSpec

_EXPERT = re.compile(r"(layers\.\d+\.).*\.experts\.0\.[^.]+$")


def peft_config(
    spec: AdapterSpec, modules: Sequence[str], names: Iterable[str], base_model_path: str, revision: str | None
) -> dict[str, object]:
    """The file's content. ``modules`` are the last parts of the adapted paths, ``names`` all wire names."""
    ranks, alphas = _fused_patterns(spec, names)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_path,
        "revision": revision,
        "r": spec.rank,
        "lora_alpha": _number(spec.alpha),
        "lora_dropout": spec.dropout,
        "target_modules": list(modules),
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": False,
        "use_rslora": spec.rslora,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {**ranks, **dict(spec.rank_pattern)},
        "alpha_pattern": {**alphas, **{pattern: _number(alpha) for pattern, alpha in spec.alpha_pattern}},
    }


def _fused_patterns(spec: AdapterSpec, names: Iterable[str]) -> tuple[dict[str, int], dict[str, float]]:
    """Ranks and alphas of fused expert parameters that differ from those that peft would derive."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module in sorted({module_of(name) for name in names}):
        found, target = _EXPERT.search(module), target_of(module)
        if found is None or target is None or target[1] is not Scope.EXPERT:
            continue
        fused, parts = ("gate_up_proj", 2) if target[0] == "linear_fc1" else ("down_proj", 1)
        path = re.escape(f"{found[1]}mlp.experts.{fused}")
        rank = parts * spec.rank_of(module)
        alpha = spec.scale_of(module) * (math.sqrt(rank) if spec.rslora else rank)
        if rank != parts * spec.rank:
            ranks[path] = rank
        if not math.isclose(alpha, parts * spec.alpha):
            alphas[path] = _number(alpha)
    return ranks, alphas


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value  # peft declares an int
