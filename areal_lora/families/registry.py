"""The rows by model type and by the names that they give to modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from areal_lora.errors import ConfigError
from areal_lora.families.family import TARGETS, Family, Scope
from areal_lora.families.family_table import TABLE

ROUTERS = {"router", "gate", "shared_expert_gate", "wg"}
"""Components of names that belong to routers, never to a projection."""
_NUMBER = re.compile(r"\.\d+(?=\.)")


class Families:
    """``rows`` by model type; ``linears`` is Megatron's linear by the last component of a projection's name.

    Raises ValueError if two rows have one model type or give one name two meanings.
    """

    def __init__(self, rows: Iterable[Family]) -> None:
        self.rows: dict[str, Family] = {}
        self.linears: dict[str, str] = {}
        self._modules: dict[str, tuple[str, Scope]] = {}
        for row in rows:
            if row.model_type in self.rows:
                raise ValueError(f"two families have the model type {row.model_type}")
            self.rows[row.model_type] = row
            for scope in row.scopes:
                if scope is Scope.ALL_EXPERTS:  # the names of EXPERT
                    continue
                for linear in TARGETS:
                    for name in row.projections(linear, scope):
                        self._add(name, linear, scope)

    def _add(self, name: str, linear: str, scope: Scope) -> None:
        path, leaf = name.replace("{}", "*"), name.rpartition(".")[2]
        if self._modules.setdefault(path, (linear, scope)) != (linear, scope):
            raise ValueError(f"families disagree about {name}")
        if self.linears.setdefault(leaf, linear) != linear:
            raise ValueError(f"families disagree about {leaf}")

    def target_of(self, module: str) -> tuple[str, Scope] | None:
        """See the function `target_of`."""
        rest = kind_of(module)
        while rest:
            if (found := self._modules.get(rest)) is not None:
                return found
            rest = rest.partition(".")[2]
        return None


FAMILIES = Families(TABLE)


def family_of(model_type: str) -> Family:
    """The row of a Hugging Face ``model_type``. Raises ConfigError for an unsupported one."""
    if model_type not in FAMILIES.rows:
        raise ConfigError(
            "model.path", f"model type {model_type!r} is not supported", f"known: {', '.join(sorted(FAMILIES.rows))}"
        )
    return FAMILIES.rows[model_type]


def supported() -> tuple[str, ...]:
    """Model types that have a row."""
    return tuple(FAMILIES.rows)


def target_of(module: str) -> tuple[str, Scope] | None:
    """Megatron's linear and scope of a Hugging Face module (no ``.weight``, any prefix); None: not adaptable.

    ``model.layers.3.mlp.experts.7.gate_proj`` is ``("linear_fc1", Scope.EXPERT)``. All families are asked,
    so a server needs no model to judge a name.
    """
    return FAMILIES.target_of(module)


def path_of(module: str) -> str | None:
    """The path below its layer of a Hugging Face module, experts as ``*``; None for a router or one outside of layers.

    ``model.layers.3.self_attn.qkv_proj`` is ``self_attn.qkv_proj``: the canonical target of a family without a row.
    """
    _, numbered, path = kind_of(module).partition(".*.")
    return path if numbered and not ROUTERS & set(path.split(".")) else None


def linears() -> Mapping[str, str]:
    """Megatron's linear by the last component of a projection's name: ``linear_qkv`` of ``q_proj``."""
    return FAMILIES.linears


def kind_of(module: str) -> str:
    """The module with its numbers as ``*``: the name of one projection in every layer and expert."""
    return _NUMBER.sub(".*", module)
