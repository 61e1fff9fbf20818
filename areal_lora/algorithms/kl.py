"""Per-token KL estimators, and the exponential that every log-ratio goes through."""

from __future__ import annotations

from torch import Tensor

LARGEST = 20.0  # a ratio of 5e8: beyond it the policies have nothing in common


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(current || reference), per token [t], never negative.

    ``exp(d) - 1 - d`` with ``d = ref - current``; source: http://joschu.net/blog/kl-approx.html.
    """
    difference = ref_logprobs - logprobs
    return ratio_of(difference) - 1.0 - difference


def ratio_of(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, continued along its tangent above ``LARGEST``: value and gradient stay finite.

    ``exp(89)`` is infinite in fp32. A clamp would be finite too, but its gradient is 0 where the policies are
    furthest apart. Tokens that are not trained on must be replaced before, not after: 0 times infinity is NaN.
    """
    beyond = (log_ratio - LARGEST).clamp_min(0.0)
    return log_ratio.clamp_max(LARGEST).exp() * (1.0 + beyond)
