"""Where a rank sits and which rank owns what: arithmetic on parallel sizes, no communication.

Megatron numbers ranks with tensor parallelism innermost, then data (dense layers) or expert and
expert-data (experts), then pipeline stages outermost::

    dense   rank = tp  + TP  * (dp + DP * pp)
    expert  rank = etp + ETP * (ep + EP * (edp + EDP * pp))
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.config.models import TrainerConfig
from areal_lora.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes of a world and the model's numbers that they divide."""

    world: int
    tp: int
    pp: int
    ep: int
    etp: int
    layers: int
    experts: int  # 0: a dense model

    @classmethod
    def of(cls, config: TrainerConfig, *, layers: int, experts: int) -> Layout:
        """Raises ConfigError where a size does not divide what it splits."""
        if config.world_size % (config.tp * config.pp) or config.world_size % (config.ep * config.etp * config.pp):
            raise ConfigError(
                "trainer.world_size", f"{config.world_size} is not a multiple of tp*pp and of ep*etp*pp",
                "change the world size or the parallel sizes",
            )
        if layers % config.pp:
            reason = f"{config.pp} does not divide the model's {layers} layers"
            raise ConfigError("trainer.pp", reason, "choose a divisor")
        if experts % config.ep:
            reason = f"{config.ep} does not divide the model's {experts} experts"
            raise ConfigError("trainer.ep", reason, "choose a divisor")
        return cls(
            world=config.world_size, tp=config.tp, pp=config.pp, ep=config.ep, etp=config.etp,
            layers=layers, experts=experts,
        )

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense layers."""
        return self.world // (self.tp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def layers_per_stage(self) -> int:
        return self.layers // self.pp

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ep

    def stage(self, rank: int) -> int:
        return rank // (self.world // self.pp)

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp % self.ep

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp

    def edp_rank(self, rank: int) -> int:
        return rank // (self.etp * self.ep) % self.edp

    def first_layer(self, rank: int) -> int:
        return self.stage(rank) * self.layers_per_stage

    def first_expert(self, rank: int) -> int:
        return self.ep_rank(rank) * self.experts_per_rank

    def owner(self, layer: int, expert: int | None) -> int:
        """The rank that publishes the tensors of a layer, or of one of its experts."""
        first = layer // self.layers_per_stage * (self.world // self.pp)
        return first if expert is None else first + expert // self.experts_per_rank * self.etp

    def first_rank_of_last_stage(self) -> int:
        return self.world - self.world // self.pp


def check_widths(config: TrainerConfig, *, vocab: int, kv_heads: int, expert_width: int) -> None:
    """Raises ConfigError where a tensor-parallel size does not divide what it splits."""
    for key, size, what, width in (
        ("trainer.tp", config.tp, "vocabulary entries", vocab),
        ("trainer.tp", config.tp, "key/value heads", kv_heads),
        ("trainer.etp", config.etp, "expert rows", expert_width),
    ):
        if width % size:
            raise ConfigError(key, f"{size} does not divide the model's {width} {what}", "choose a divisor")
