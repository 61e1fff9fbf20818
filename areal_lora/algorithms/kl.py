"""Per-token KL estimators."""

from __future__ import annotations

from torch import Tensor


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(current || reference), per token [t], never negative.

    ``exp(d) - 1 - d`` with ``d = ref - current``; source: http://joschu.net/blog/kl-approx.html.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - 1.0 - difference
