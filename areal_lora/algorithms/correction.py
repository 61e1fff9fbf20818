"""Choose the behaviour correction of the next step from the mismatch of the one before: `behaviour_correction: auto`.

Both figures of a step are means over the trained sampled tokens of the whole batch, so all ranks choose the same.
"""

import math
from collections.abc import Mapping

from areal_lora.types import Correction

LIMITS: Mapping[Correction, float] = {Correction.TRUNCATE: 0.01, Correction.GEOMETRIC: 0.1}
"""Mean |log w| of a token in nats above which a correction is chosen.

Rounding of bfloat16 alone is about 0.01. Log w that is normal with mean |log w| of m has a divergence of pi m^2 / 4: at
0.1 the geometric mean of w is 0.992, where its published bounds (preset `geo_mis`) still keep a usual answer.
"""
HOLD = 0.5
"""Part of its limit down to which a correction in use remains: a mismatch near a limit does not alternate."""


def choose(current: Correction, mean: float | None) -> Correction:
    """The correction of the next step after one with ``current`` and ``mean`` |log w| of a token.

    Unchanged where nothing was measured (None, 0 or not finite).
    """
    if not mean or not math.isfinite(mean):
        return current
    kept = [to for to, limit in LIMITS.items() if mean > limit * (HOLD if to <= current else 1.0)]
    return max(kept, default=Correction.NONE)
