"""Position and ownership of each rank: arithmetic on parallel sizes, no communication.

Megatron numbers ranks with tensor parallelism innermost, then data (dense layers) or expert and
expert-data (experts), then pipeline stages outermost::

    dense   rank = tp  + TP  * (dp + DP * pp)
    expert  rank = etp + ETP * (ep + EP * (edp + EDP * pp))
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from areal_lora.config.models import TrainerConfig
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Parallel sizes of a world and the model's numbers that they divide."""

    world: int
    tp: int
    pp: int
    ep: int
    etp: int
    stage_layers: tuple[int, ...]  # how many layers each pipeline stage has
    experts: int  # 0: a dense model

    @classmethod
    def of(cls, config: TrainerConfig, *, layers: int, experts: int) -> ParallelLayout:
        """Raises ConfigError where the sizes do not fit the world or the model."""
        if config.world_size % (config.tp * config.pp) or config.world_size % (config.ep * config.etp * config.pp):
            raise ConfigError(
                "trainer.world_size",
                f"{config.world_size} is not a multiple of tp*pp and of ep*etp*pp",
                "change the world size or the parallel sizes",
            )
        if experts % config.ep:
            reason = f"{config.ep} does not divide the model's {experts} experts"
            raise ConfigError("trainer.ep", reason, "choose a divisor")
        return cls(
            world=config.world_size,
            tp=config.tp,
            pp=config.pp,
            ep=config.ep,
            etp=config.etp,
            stage_layers=split_layers(config, layers),
            experts=experts,
        )

    @property
    def layers(self) -> int:
        return sum(self.stage_layers)

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense layers."""
        return self.world // (self.tp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ep

    @property
    def ranks_per_stage(self) -> int:
        return self.world // self.pp

    def stage(self, rank: int) -> int:
        return rank // self.ranks_per_stage

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

    def layers_of(self, rank: int) -> range:
        """Global numbers of the layers of this rank's stage."""
        ends = list(accumulate(self.stage_layers))
        stage = self.stage(rank)
        return range(ends[stage] - self.stage_layers[stage], ends[stage])

    def experts_of(self, rank: int) -> range:
        """Global numbers of the experts of this rank, in every layer of its stage that has experts."""
        first = self.ep_rank(rank) * self.experts_per_rank
        return range(first, first + self.experts_per_rank)

    def stage_of(self, layer: int) -> int:
        return next(i for i, end in enumerate(accumulate(self.stage_layers)) if layer < end)

    def owner(self, layer: int, expert: int | None) -> int:
        """The rank that publishes the tensors of a layer, or of one of its experts: the lowest that holds them."""
        first = self.stage_of(layer) * self.ranks_per_stage
        return first if expert is None else first + expert // self.experts_per_rank * self.etp

    def first_rank_of_last_stage(self) -> int:
        return self.world - self.ranks_per_stage


def split_layers(config: TrainerConfig, layers: int) -> tuple[int, ...]:
    """Return the layers of each stage: ``trainer.pp_layers``, else evenly distributed, earlier stages first.

    Raises ConfigError for a stage without layers or numbers that do not add up.
    """
    if config.pp_layers is None:
        if config.pp > layers:
            reason = f"{config.pp} stages for {layers} layers: one would be empty"
            raise ConfigError("trainer.pp", reason, f"use at most {layers}")
        return tuple(layers // config.pp + (stage < layers % config.pp) for stage in range(config.pp))
    if len(config.pp_layers) != config.pp or sum(config.pp_layers) != layers:
        raise ConfigError(
            "trainer.pp_layers",
            f"{config.pp_layers} does not give {config.pp} stages {layers} layers in total",
            "one number per stage, in order",
        )
    return tuple(config.pp_layers)


def check_widths(config: TrainerConfig, shape: ModelShape) -> None:
    """Raises ConfigError where a tensor-parallel size does not divide what it splits."""
    dense = shape.ffn if shape.dense_layers else 0
    for key, size, what, width in (
        ("trainer.tp", config.tp, "vocabulary entries", shape.vocab),
        ("trainer.tp", config.tp, "attention heads", shape.heads),
        ("trainer.tp", config.tp, "columns of the dense MLP", dense),
        ("trainer.tp", config.tp, "columns of the shared expert", shape.shared_ffn),
        ("trainer.tp", config.tp, "rows of linear_qkv", shape.head_dim * (shape.heads + 2 * shape.kv_heads)),
        ("trainer.etp", config.etp, "columns of an expert", shape.expert_ffn),
    ):
        if width % size:
            raise ConfigError(key, f"{size} does not divide the model's {width} {what}", "choose a divisor")
    if shape.kv_heads % config.tp and config.tp % shape.kv_heads:
        raise ConfigError(
            "trainer.tp",
            f"{config.tp} neither divides nor is a multiple of the model's {shape.kv_heads} key/value heads",
            "choose a divisor or a multiple",
        )
