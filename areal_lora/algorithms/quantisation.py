"""Round weights as servers hold them: the values that their products have, in fp32 and out of place.

fp8 is ``float8_e4m3fn`` with scales as vLLM 0.32 quantises while it loads (``layers/quantization/online/fp8.py``): the
largest magnitude of an output channel, or of a matrix, becomes 448. Matrices are [out, in] or stacked [n, out, in].
vLLM rounds the inputs of these products, too: not repeated, since any rounding before it decides its ties otherwise.
"""

import torch
from torch import Tensor

from areal_lora.config.sections.run import Quantised

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
