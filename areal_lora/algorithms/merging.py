"""Add an adapter to the weights of its base: ``W + scale * B @ A``, out of place, tensor by tensor.

A stream of named tensors in, the same names out; no tensor of the base is changed. The sum is computed in float32,
whatever the types of its parts, where the weight is, and cast last. The cast loses what is small beside the weight:
`CastLoss` measures it.

`fp8` rounds weights as servers hold them: the values that their products have, in fp32 and out of place. It is
``float8_e4m3fn`` with scales as vLLM 0.32 quantises while it loads (``layers/quantization/online/fp8.py``): the largest
magnitude of an output channel, or of a matrix, becomes 448. Matrices are [out, in] or stacked [n, out, in].
vLLM rounds the inputs of these products, too: not repeated, since any rounding before it decides its ties otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areal_lora.config.sections.run import Quantised
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

    def include(self, other: "CastSums") -> None:
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
        a, b = (adapter[name.removesuffix(_WEIGHT) + side].to(weight.device, torch.float32) for side in (_A, _B))
        if weight.dtype not in FLOATS or weight.shape != (b.shape[0], a.shape[1]):
            raise UnknownTensorError(
                f"{name} has shape {tuple(weight.shape)} and {weight.dtype}, the adapter is for a float of shape "
                f"{(b.shape[0], a.shape[1])}: it belongs to another base"
            )
        delta = (b @ a).mul_(scale_of(name.removesuffix(_WEIGHT)))
        if loss is not None:
            loss.add(weight, delta)
        yield name, delta.add_(weight).to(target)  # one matrix in float32 on the device
    if missing:
        raise UnknownTensorError(f"the base lacks {min(missing)} ({len(missing)} such): it is another model")


_LARGEST = 448.0
_LEAST_SCALE = 1.0 / (_LARGEST * 512)
"""vLLM's, of a channel; of a matrix of zeros, too."""


def magnitudes(weight: Tensor, kind: Quantised) -> Tensor:
    """The largest |w| fp32 of each channel [..., out, 1], or matrix [..., 1, 1]."""
    dims = (-1,) if kind == "fp8_per_channel" else (-2, -1)
    low, high = weight.aminmax(dim=-1, keepdim=True)
    return torch.maximum(low.neg(), high).amax(dims, keepdim=True).float()


def fp8(weight: Tensor, largest: Tensor, kind: Quantised) -> Tensor:
    """``weight`` rounded under scales of the ``largest`` magnitudes, fp32.

    A channel is divided by its scale, a matrix multiplied by the inverse, as vLLM's kernels do: ties differ.
    """
    scale = largest / torch.full((), _LARGEST, device=largest.device)  # a true division on GPUs, too
    scale = scale.clamp_min(_LEAST_SCALE if kind == "fp8_per_channel" else torch.finfo(torch.float32).tiny)
    scaled = weight.float() / scale if kind == "fp8_per_channel" else weight.float() * scale.reciprocal()
    return scaled.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float().mul_(scale)
