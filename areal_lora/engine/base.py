"""What callers give a trainer engine: loss functions over micro-batches, and the values of an optimizer step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from areal_lora.config.models import OptimizerConfig
from areal_lora.types import TrainBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MicroBatch = TrainBatch
"""A few whole sequences of a `TrainBatch`, packed 1-D without padding, on the engine's device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Result of a loss function for one micro-batch: plain sums, no denominators.

    ``loss`` is a scalar with grad: the SUM over the micro-batch's tokens (the engine never
    divides by anything but ``optim_step``'s denominator). ``stats`` are sums as well; the
    engine adds them up over micro-batches and data-parallel ranks.
    """

    loss: torch.Tensor
    stats: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], LossSums]
"""``loss_fn(micro_batch, scores [t] fp32 with grad, entropy [t] fp32 or None) -> LossSums``.

``scores[i]`` describes token i of the micro-batch; off the mask it is 0. It is the token's
log-probability, or, of an adapter with a value head, the value of the state before the token. Entropy
at entry i is that of the distribution token i was drawn from. With tensor parallelism
every tensor-parallel rank calls it on equal inputs and must return equal sums.
"""

EPS = 1e-8
"""Added to the root of Adam's second moment, where no client of the service gives its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamValues:
    """What an optimizer step takes besides its rate. ``max_grad_norm`` None: no clipping."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float | None

    @classmethod
    def of(cls, config: OptimizerConfig) -> "AdamValues":
        return cls(
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=EPS,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
