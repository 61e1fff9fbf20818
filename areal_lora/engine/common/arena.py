"""The arrangement of an adapter in the flat fp32 memory of a trainer rank: arithmetic, no communication.

All adapter parameters of a rank are views of one flat tensor, and so are their gradients::

    | dense, split | dense, whole | experts, split | experts, whole |

*split* parts are divided over a tensor-parallel group, *whole* ones are replicated over it; dense
sites use the tensor-parallel group, routed experts the expert-tensor-parallel one. Each range is
in site order, so a run of consecutive sites is one piece of memory to gather; zeros fill it up, so that
the ranks that share it can each step an equal part. Zeros also let every stack start at a multiple of `ALIGN` elements.
The matrices of a rank's experts of one linear layer are stacked, whether Megatron keeps the experts in one module or in
one each.

Column-parallel layers (qkv, fc1) split lora_B over its rows, row-parallel ones (proj, fc2) split
lora_A over its columns. All ranks of a pipeline stage have the same arrangement. The value head of a critic is at the
end of "dense, whole" on the last stage: its weight, then its bias.

Megatron numbers ranks with tensor parallelism innermost, then context and data (dense layers) or expert and
expert-data (experts), then pipeline stages outermost::

    dense   rank = tp  + TP  * (cp + CP * (dp + DP * pp))
    expert  rank = etp + ETP * (ep + EP * (edp + EDP * pp))
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import NamedTuple

from areal_lora.config.models import TrainerConfig
from areal_lora.config.sizing.slots import merging_ranks
from areal_lora.errors import ConfigError
from areal_lora.families.family import COLUMN_PARALLEL, Scope
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import LORA_A, LORA_B, Piece, RowRanges, SiteKey, pieces_of, sites_of
from areal_lora.types import AdapterSpec

HYBRIDEP_CHUNK = 128
"""Tokens of a chunk of DeepEP's HybridEP kernels, by default; a part of one is an error, or a hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Parallel sizes of a world and the model's numbers that they divide."""

    world: int
    tp: int
    pp: int
    ep: int
    etp: int
    stage_layers: tuple[int, ...]  # how many layers each virtual stage has; stage i of pp has the i-th of every pp
    experts: int  # 0: a dense model
    cp: int = 1
    chunk: int = 1  # a rank computes a multiple of so many tokens

    @classmethod
    def of(cls, config: TrainerConfig, *, layers: int, experts: int) -> "ParallelLayout":
        """Raises ConfigError where the sizes do not fit the world or the model."""
        dense, experts_too = config.tp * config.cp * config.pp, config.ep * config.etp * config.pp
        if config.world_size % dense or config.world_size % experts_too:
            raise ConfigError(
                "trainer.world_size",
                f"{config.world_size} is not a multiple of tp*cp*pp and of ep*etp*pp",
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
            cp=config.cp,
            chunk=HYBRIDEP_CHUNK if config.moe_dispatcher == "hybridep" else 1,
        )

    @property
    def dp(self) -> int:
        """How many groups of ranks compute different sequences in the dense layers."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ep

    @property
    def ranks_per_stage(self) -> int:
        return self.world // self.pp

    def dp_rank(self, rank: int) -> int:
        return rank // (self.tp * self.cp) % self.dp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp

    def chunks_of(self, rank: int) -> list[range]:
        """Global numbers of the layers of each virtual stage of this rank, of which Megatron makes a model chunk."""
        chunks = [range(end - n, end) for n, end in zip(self.stage_layers, accumulate(self.stage_layers), strict=True)]
        return chunks[rank // self.ranks_per_stage :: self.pp]

    def experts_of(self, rank: int) -> range:
        """Global numbers of the experts of this rank, in every layer of its stage that has experts."""
        first = rank // self.etp % self.ep * self.experts_per_rank
        return range(first, first + self.experts_per_rank)

    def owner(self, layer: int, expert: int | None) -> int:
        """The rank that publishes the tensors of a layer, or of one of its experts: the lowest that holds them."""
        stage = next(i for i, end in enumerate(accumulate(self.stage_layers)) if layer < end) % self.pp
        first = stage * self.ranks_per_stage
        return first if expert is None else first + expert // self.experts_per_rank * self.etp

    def first_rank_of_last_stage(self) -> int:
        return self.world - self.ranks_per_stage

    def reporting(self) -> range:
        """One rank per data-parallel part that computes the loss: last stage, tensor- and context-parallel rank 0."""
        return range(self.first_rank_of_last_stage(), self.world, self.tp * self.cp)


def context_groups(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """The ranks of each context-parallel group, in the order of their parts."""
    block = layout.tp * layout.cp
    starts = (first + tp for first in range(0, layout.world, block) for tp in range(layout.tp))
    return [tuple(range(start, start + block, layout.tp)) for start in starts]


def split_layers(config: TrainerConfig, layers: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage: ``trainer.pp_layers``, else of each stage, evenly distributed.

    Raises ConfigError for a stage without layers or numbers that do not add up.
    """
    if config.pp_layers is None:
        if config.pp > layers:
            reason = f"{config.pp} stages for {layers} layers: one would be empty"
            raise ConfigError("trainer.pp", reason, f"use at most {layers}")
        return tuple(layers // config.pp + (stage < layers % config.pp) for stage in range(config.pp))
    if not config.chunks or sum(config.pp_layers) != layers:
        raise ConfigError(
            "trainer.pp_layers",
            f"{config.pp_layers} does not give {config.pp} stages {layers} layers in total",
            "one number per stage, or per virtual stage, in order",
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


HEAD_WEIGHT, HEAD_BIAS = "value_head.weight", "value_head.bias"

ALIGN = 8
"""Elements: 16 bytes of a 16-bit type, as torch's grouped matrix product on GPUs requires of an address."""


class Range(IntEnum):
    """The four parts of a rank's memory, in order."""

    DENSE_SPLIT = 0
    DENSE_WHOLE = 1
    EXPERT_SPLIT = 2
    EXPERT_WHOLE = 3


def is_routed(scope: Scope) -> bool:
    """Whether the expert-tensor-parallel group divides a scope. The shared expert is divided like a dense layer."""
    return scope in (Scope.EXPERT, Scope.ALL_EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bank:
    """The adapters of one linear layer on one rank: its experts stacked, a dense layer as a stack of one.

    lora_A is ``a_shape`` [n, r, in] at element ``a`` of the memory, lora_B ``b_shape`` [n, out, r] at ``b``,
    both as this rank has them. ``experts`` are global numbers, empty unless every expert has an adapter of its own.
    ``shared`` is the side that they have in common all the same, a stack of one; it is never a split one.
    """

    linear: str
    layer: int
    scope: Scope
    experts: range
    shared: str
    a: int = 0
    b: int = 0
    a_shape: tuple[int, int, int]
    b_shape: tuple[int, int, int]

    @property
    def column_parallel(self) -> bool:
        return self.linear in COLUMN_PARALLEL

    @property
    def split(self) -> Range:
        """Of its split side; the whole one is in the next range."""
        return Range.EXPERT_SPLIT if is_routed(self.scope) else Range.DENSE_SPLIT

    @property
    def keys(self) -> list[SiteKey]:
        numbers: Sequence[int | None] = self.experts or [None]
        return [
            SiteKey(linear=self.linear, layer=self.layer, scope=self.scope, expert=e, shared=self.shared)
            for e in numbers
        ]

    def place(self, index: int) -> tuple[int, int]:
        """Elements at which lora_A and lora_B of the expert number ``index`` of the stack start."""
        return (
            self.a + index % self.a_shape[0] * self.a_shape[1] * self.a_shape[2],
            self.b + index % self.b_shape[0] * self.b_shape[1] * self.b_shape[2],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """A model in a parallel layout: enough to plan every adapter on every rank."""

    shape: ModelShape
    layout: ParallelLayout

    def every_site(self, spec: AdapterSpec) -> list[SiteKey]:
        """All sites that an adapter with this expert layout could have, in the order of `sites_of`."""
        return sites_of(self.shape, spec.expert_layout)

    def sites(self, spec: AdapterSpec) -> list[SiteKey]:
        """The sites that the adapter has, in the same order."""
        return [key for key in self.every_site(spec) if key.covered(spec.target_modules)]

    def pieces(self, key: SiteKey) -> list[Piece]:
        return pieces_of(self.shape, key)

    def merging_ranks(self) -> list[int]:
        """The ranks of the first stage that merge weights; those of others have as many."""
        where = self.layout
        sizes = {"tp": where.tp, "ep": where.ep, "etp": where.etp, "pp": where.pp}
        return merging_ranks(self.shape, ranks=where.ranks_per_stage, **sizes)

    def holders(self, key: SiteKey, ranks: Sequence[int]) -> list[int]:
        """The ranks of the stage, among its ``ranks`` by number, that have a site's adapter or gather it."""
        where, first = self.layout, self.layout.owner(key.layer, None)
        if key.expert is not None:
            return [first + rank for rank in ranks if key.expert in where.experts_of(rank)]
        return [first + rank for rank in ranks if is_routed(key.scope) or rank % where.tp == 0]

    def head(self, spec: AdapterSpec) -> dict[str, tuple[int]]:
        """Shapes of the value head's tensors by wire name; none if the adapter has no value head."""
        return {HEAD_WEIGHT: (self.shape.hidden,), HEAD_BIAS: (1,)} if spec.value_head else {}

    def split_over(self, split: Range) -> int:
        """How many ranks a split range is divided over."""
        return self.layout.etp if split is Range.EXPERT_SPLIT else self.layout.tp

    def group_size(self, scope: Scope) -> int:
        return self.layout.etp if is_routed(scope) else self.layout.tp

    def group_rank(self, scope: Scope, rank: int) -> int:
        return self.layout.etp_rank(rank) if is_routed(scope) else self.layout.tp_rank(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """The memory of one rank: ``bounds`` are the element offsets at which its four ranges start, and its size.

    ``head`` is the element at which a value head starts; None on a rank without one.
    """

    banks: tuple[Bank, ...]
    bounds: tuple[int, ...]
    head: int | None = None

    def extent(self, part: Range) -> tuple[int, int]:
        return self.bounds[part], self.bounds[part + 1]

    @property
    def size(self) -> int:
        return self.bounds[-1]


def arrange(model: ShardedModel, spec: AdapterSpec, rank: int) -> Arena:
    """The arena of ``rank``; every rank of its stage has the same but for the numbers of its experts."""
    sizes = [0, 0, 0, 0]
    placed: list[tuple[Bank, Range, Range]] = []  # a bank at its offsets in the ranges of its lora_A and lora_B
    for bank in _banks(model, spec, rank):
        whole = Range(bank.split + 1)
        a_part, b_part = (whole, bank.split) if bank.column_parallel else (bank.split, whole)
        placed.append((replace(bank, a=sizes[a_part], b=sizes[b_part]), a_part, b_part))
        sizes[a_part] += _rounded(math.prod(bank.a_shape), ALIGN)
        sizes[b_part] += _rounded(math.prod(bank.b_shape), ALIGN)
    before_head = sizes[Range.DENSE_WHOLE]
    has_head = spec.value_head and rank >= model.layout.first_rank_of_last_stage()  # all ranks of the last stage
    if has_head:
        sizes[Range.DENSE_WHOLE] += sum(size for (size,) in model.head(spec).values())
    unit = math.lcm(model.layout.ranks_per_stage, ALIGN)  # a multiple of the replicas of every range
    bounds = tuple(accumulate((_rounded(size, unit) for size in sizes), initial=0))
    return Arena(
        banks=tuple(replace(bank, a=bounds[a] + bank.a, b=bounds[b] + bank.b) for bank, a, b in placed),
        bounds=bounds,
        head=bounds[Range.DENSE_WHOLE] + before_head if has_head else None,
    )


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Span(NamedTuple):
    """Elements [start, end) of the memory, all of lora_B where ``is_b``, else all of lora_A or mixed."""

    start: int
    end: int
    is_b: bool


def spans(arena: Arena, *, apart: bool) -> list[Span]:
    """The memory in as few spans as possible: one of everything, or lora_A and lora_B ``apart``.

    A value head learns at the rate of lora_A.
    """
    if not apart or not arena.banks:
        return [Span(0, arena.size, False)]
    starts = [(bank.a, False) for bank in arena.banks] + [(bank.b, True) for bank in arena.banks]
    if arena.head is not None:
        starts.append((arena.head, False))
    runs = [next(run) for _, run in groupby(sorted(starts), key=itemgetter(1))]
    ends = [start for start, _ in runs[1:]] + [arena.size]
    return [Span(start, end, is_b) for (start, is_b), end in zip(runs, ends, strict=True)]


def _banks(model: ShardedModel, spec: AdapterSpec, trainer_rank: int) -> Iterator[Bank]:
    """The bank of each linear layer of the rank's stage, at element 0."""
    layers, mine = set(chain(*model.layout.chunks_of(trainer_rank))), model.layout.experts_of(trainer_rank)
    for key in model.sites(spec):
        # One stack per linear layer, made at the first of the rank's experts.
        if key.layer not in layers or (key.expert is not None and key.expert != mine.start):
            continue
        pieces = model.pieces(key)
        n_in, n_out = pieces[0].in_features, sum(p.out_features for p in pieces)
        size = model.group_size(key.scope)
        if key.linear in COLUMN_PARALLEL:
            n_out //= size
        else:
            n_in //= size
        n = 1 if key.expert is None else len(mine)
        experts = range(0) if key.expert is None else mine
        rank = spec.rank_of(pieces[0].name)
        n_a, n_b = (1 if key.shared == side else n for side in (LORA_A, LORA_B))
        yield Bank(
            linear=key.linear,
            layer=key.layer,
            scope=key.scope,
            experts=experts,
            shared=key.shared,
            a_shape=(n_a, rank, n_in),
            b_shape=(n_b, n_out, rank),
        )


def held_rows(linear: str, rows: int, size: int) -> Callable[[int], RowRanges]:
    """Which of ``rows`` output rows of a column-parallel layer rank k of ``size`` holds, in its own order.

    fc1 is cut within its gate rows and within its up rows, so that each rank can multiply the two.
    """
    halves = 2 if linear == "linear_fc1" else 1
    half = rows // halves
    each = half // size
    return lambda k: tuple((h * half + k * each, h * half + (k + 1) * each) for h in range(halves))
