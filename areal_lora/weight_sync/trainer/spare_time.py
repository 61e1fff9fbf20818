"""How long servers may take to stage a version without holding a step, from the publishes before it.

    gate open                 staged       active, probed                trainer waits for it
    |------- pace_s ----------|-- after_s --|                            |
    |------------------------------ free_s ------------------------------|
    pace_s + after_s <= min(OF_STEP * free_s, LARGEST_S)

Until a step was measured, and for a publish that ended late, servers write at full speed.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

OF_STEP, LARGEST_S = 0.5, 1.0
"""A publish takes at most this share of the time until the trainer waits for it, and at most these seconds."""
KEPT = 5  # publishes of which the shortest free time counts, because steps differ in length, and the median end


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one publish: from the open gate until the trainer waited for it, and after staging until its end."""

    free_s: float
    after_s: float


class SpareTime:
    """The timings of the newest publishes."""

    def __init__(self) -> None:
        self._seen: deque[Timing] = deque(maxlen=KEPT)

    def add(self, timing: Timing) -> None:
        self._seen.append(timing)

    def pace_s(self) -> float:
        """Seconds for staging the next version; 0: at full speed."""
        if not self._seen:
            return 0.0
        whole_s = min(OF_STEP * min(t.free_s for t in self._seen), LARGEST_S)
        return max(whole_s - statistics.median(t.after_s for t in self._seen), 0.0)
