"""Per-token KL estimators, and the exponential that every log-ratio goes through.

Schulman's estimators of KL(current || reference) from samples of the current policy, with
``d = reference - current``; source: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

GAIN, MOST_ERROR = 0.1, 0.2
LARGEST = 20.0  # a ratio of 5e8: beyond it the policies have nothing in common

Estimator = Callable[[Tensor, Tensor], Tensor]
"""``estimator(logprobs [t], ref_logprobs [t]) -> [t]``."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``-d``: unbiased, may be negative. As a loss it has a gradient of mean zero, so it belongs into the reward."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``d^2 / 2``: never negative, biased; as a loss its gradient is that of the KL divergence on policy."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``exp(d) - 1 - d``: never negative, unbiased."""
    difference = ref_logprobs - logprobs
    return ratio_of(difference) - 1.0 - difference


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


def adapted(scale: float, kl: float | None, target: float | None) -> float:
    """The factor of the KL coefficient after a step with mean divergence ``kl`` of a token.

    ``scale (1 + 0.1 clip(kl / target - 1, -0.2, 0.2))``: Ziegler et al., arXiv 1909.08593, section 2.2. Unchanged
    without a target, and where nothing was measured (None, 0 or not finite).
    """
    if target is None or not kl or not math.isfinite(kl):
        return scale
    return scale * (1.0 + GAIN * min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, continued along its tangent above ``LARGEST``: value and gradient stay finite.

    ``exp(89)`` is infinite in fp32. A clamp would be finite too, but its gradient is 0 where the policies are
    furthest apart. Tokens that are not trained on must be replaced before, not after: 0 times infinity is NaN.
    """
    beyond = (log_ratio - LARGEST).clamp_min(0.0)
    return log_ratio.clamp_max(LARGEST).exp() * (1.0 + beyond)
