"""The run's base as the SDK's clients see it: its name, its tokenizer, and what an adapter of it may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.config.sizing.slots import served_targets
from areal_lora.families.family import ATTENTION_LINEARS
from areal_lora.service.queue.requests import Lora
from areal_lora.service.refused import RequestError
from areal_lora.service.tinker.sdk_bodies import LoraConfig, OptimizerBody

ALPHA = 32.0
"""Of every model: the SDK names none."""
NO_OUTPUT_LAYER = "train_unembed is ignored: this service trains attention and MLP, not the output layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """``name`` is the hub's, or that of the model's folder. ``tokenizer`` is what transformers loads it from.

    ``aliases`` are other names for it.
    """

    name: str
    aliases: frozenset[str] = frozenset()
    tokenizer: str
    context: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> Base:
        folder = Path(config.model.path)
        local = folder.is_dir()
        name, aliases = _names(folder) if local else (config.model.path, frozenset())
        return cls(
            name=name,
            aliases=aliases,
            tokenizer=str(folder.resolve()) if local else config.model.path,
            context=config.rollout.max_model_len,
            targets=served_targets(config),
        )

    def check(self, given: str | None) -> None:
        """Raises RequestError for the name of another base."""
        if given not in {None, self.name, self.tokenizer, *self.aliases}:
            reason = f"{str(given)[:64]!r} is not the base of this run"
            raise RequestError(422, "base_model", reason, f"use {self.name}")

    def lora(self, given: LoraConfig | None, optimizer: OptimizerBody | None) -> Lora:
        """The settings of a model. Raises RequestError."""
        if given is None:
            raise RequestError(422, "lora_config", "there is none: only adapters are trained", "send lora_config")
        check_optimizer(optimizer)
        targets = tuple(t for t in self.targets if (given.train_attn if _of_attention(t) else given.train_mlp))
        if not targets:
            reason = f"none of the modules that it names can be adapted here: {', '.join(self.targets)} can"
            raise RequestError(422, "lora_config", reason, "set train_attn or train_mlp")
        return Lora(rank=given.rank, alpha=ALPHA, target_modules=targets, seed=given.seed)

    def shown(self, lora: Lora) -> tuple[bool, bool]:
        """Whether attention and MLP are trained."""
        found = [_of_attention(target) for target in lora.target_modules]
        return any(found), not all(found)


def _names(folder: Path) -> tuple[str, frozenset[str]]:
    """Of a base in a folder: its hub name if it is in the hub's cache, else the folder's; the others that it may have.

    Clients look up tokenizers and templates by the hub's name. A folder ``ORG/MODEL`` has that one as well.
    """
    for each in folder.resolve().parents:
        if each.name.startswith("models--"):  # HUB/models--ORG--MODEL/snapshots/COMMIT
            return each.name.removeprefix("models--").replace("--", "/"), frozenset()
    ways = (folder.absolute(), folder.resolve())
    others = {name for way in ways for name in (way.name, f"{way.parent.name}/{way.name}", str(way))}
    return folder.resolve().name, frozenset(others)


def check_optimizer(optimizer: OptimizerBody | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise RequestError(422, "optimizer_config", f"{optimizer.type[:64]!r} is not supported", "use AdamW")


def _of_attention(target: str) -> bool:
    return target.rpartition(".")[2] in ATTENTION_LINEARS or "attn" in target
