"""Add an adapter to the weights of its base: ``W + scale * B @ A``, out of place, tensor by tensor.

A stream of named tensors in, the same names out; no tensor of the base is changed. The sum is computed in float32,
whatever the types of its parts, and cast last. The cast loses what is small beside the weight: `CastLoss` measures it.

Detect recorded log-probabilities that are shifted by one token, with any policy close to the sampling one.

A shift by one shows without a tolerance: where neighbouring tokens differ by much, in the records and in the present
policy, the present value of a token is far nearer to the token's own record than to its neighbour's. That holds for
policies that are several versions apart and for coarse arithmetic: a batch of stale tokens can be checked, too.

Of token t and t + 1 of an answer, with records r and present values c::

    late: the record of t is at t + 1          c[t] is at r[t + 1] and not at r[t]
    early: the record of t + 1 is at t         c[t + 1] is at r[t] and not at r[t + 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areal_lora.errors import UnknownTensorError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_LOST = 0.25
"""The largest `CastSums.error` of merged rollouts without a warning: the servers sample from another policy then."""
_A, _B, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


@dataclass(slots=True)
class CastSums:
    """What a cast leaves of the adapter, as sums over tensors; those of several ranks add up.

    ``survives`` is the share of the delta in the stored weights: ``<stored - base, delta> / <delta, delta>``, 1 if
    nothing is lost. ``error`` is ``|stored - base - delta| / |delta|``. ``unmoved`` is the share of elements with a
    delta whose stored value is the base's, bit for bit.
    """

    elements: int = 0
    same: int = 0
    along: float = 0.0
    lost: float = 0.0
    whole: float = 0.0

    def include(self, other: CastSums) -> None:
        for field in fields(CastSums):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def survives(self) -> float:
        return self.along / self.whole if self.whole else 1.0

    @property
    def error(self) -> float:
        return (self.lost / self.whole) ** 0.5 if self.whole else 0.0

    @property
    def unmoved(self) -> float:
        return self.same / self.elements if self.elements else 0.0


@dataclass(slots=True)
class CastLoss(CastSums):
    """The sums of a cast to ``dtype``, of at most ``rows`` rows of each weight, evenly spaced; None: of all."""

    dtype: torch.dtype = torch.bfloat16
    rows: int | None = None

    def add(self, base: Tensor, delta: Tensor) -> None:
        """Count one weight: ``base`` [out, in] as it is stored, ``delta`` [out, in] in float32."""
        if self.rows is not None:
            step = -(-base.shape[0] // self.rows)
            base, delta = base[::step], delta[::step]
        stored, kept = (base.float() + delta).to(self.dtype), base.to(self.dtype)
        moved = stored.float() - kept.float()
        touched = delta != 0
        self.elements += int(touched.sum())
        self.same += int((touched & (stored == kept)).sum())
        self.along += float((moved.double() * delta.double()).sum())
        self.lost += float((moved.double() - delta.double()).square().sum())
        self.whole += float(delta.double().square().sum())

    def sums(self) -> CastSums:
        return CastSums(elements=self.elements, same=self.same, along=self.along, lost=self.lost, whole=self.whole)


def adapted_weights(adapter: Iterable[str]) -> set[str]:
    """Names of the base's tensors that an adapter with these tensor names changes."""
    return {name.removesuffix(_A) + _WEIGHT for name in adapter if name.endswith(_A)}


def merged(
    base: Iterable[tuple[str, Tensor]],
    adapter: Mapping[str, Tensor],
    scale_of: Callable[[str], float],
    *,
    dtype: torch.dtype | None = None,
    loss: CastLoss | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of ``base``, the adapted ones with the adapter added.

    ``adapter`` has lora_A [rank, in] and lora_B [out, rank] under every Hugging Face name, aliases included;
    ``scale_of`` gives the factor of a module's product by its path (`AdapterSpec.scale_of`).
    Floating-point tensors become ``dtype``; without one they keep their type, and those without an adapter are handed
    through. ``loss`` counts what the cast loses. Raises UnknownTensorError for a shape that does not fit or a weight
    that is no plain float, and at the end for adapted weights that did not come.
    """
    missing = adapted_weights(adapter)
    for name, weight in base:
        target = dtype if dtype is not None and weight.dtype in FLOATS else weight.dtype
        if name not in missing:
            yield name, weight.to(target)
            continue
        missing.remove(name)
        a, b = (adapter[name.removesuffix(_WEIGHT) + side] for side in (_A, _B))
        if weight.dtype not in FLOATS or weight.shape != (b.shape[0], a.shape[1]):
            raise UnknownTensorError(
                f"{name} has shape {tuple(weight.shape)} and {weight.dtype}, the adapter is for a float of shape "
                f"{(b.shape[0], a.shape[1])}: it belongs to another base"
            )
        delta = scale_of(name.removesuffix(_WEIGHT)) * (b.float() @ a.float())
        if loss is not None:
            loss.add(weight, delta)
        yield name, (weight.float() + delta).to(target)
    if missing:
        raise UnknownTensorError(f"the base lacks {min(missing)} ({len(missing)} such): it is another model")


TELLING = 0.5  # nats between neighbours, in records and present values; smaller differences can be rounding
NEARER = 4.0  # times; a token that moved half of the way to its neighbour abstains
FEWEST = 30  # votes
SHIFTED = 2 / 3  # of the votes; aligned records get nearly none, shifted ones nearly all


def shift_votes(current: Tensor, recorded: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Count the tokens nearer to their neighbour's record (``late``, ``early``) and to their own (``..._own``).

    ``current``, ``recorded`` and ``mask`` are packed [t]; entry 0 of every sequence is masked, so no pair
    crosses sequences. Each result is [].
    """
    near, far, first, second = recorded[:-1], recorded[1:], current[:-1], current[1:]
    telling = mask[:-1] & mask[1:] & ((near - far).abs() > TELLING) & ((first - second).abs() > TELLING)

    def votes(value: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        to_own, to_other = (value - own).abs(), (value - other).abs()
        at_other, at_own = NEARER * to_other < to_own, NEARER * to_own < to_other
        return (telling & at_other).sum().float(), (telling & at_own).sum().float()

    late, late_own = votes(first, near, far)
    early, early_own = votes(second, far, near)
    return {"late": late, "late_own": late_own, "early": early, "early_own": early_own}


def shifted_share(sums: Mapping[str, float]) -> tuple[float, float]:
    """The number of votes and the share for a neighbour's record, in the direction with more votes.

    A shift in one direction also gets votes for the other one by chance, and none for the own record.
    """
    direction = "late" if sums["late"] > sums["early"] else "early"
    votes = sums[direction] + sums[f"{direction}_own"]
    return votes, sums[direction] / votes if votes else 0.0


def is_shifted(sums: Mapping[str, float]) -> bool:
    """Whether the votes show records shifted by one. False for fewer than ``FEWEST`` votes."""
    votes, share = shifted_share(sums)
    return votes >= FEWEST and share > SHIFTED
