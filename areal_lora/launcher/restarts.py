"""Which rollout servers that ended are started again, and when. Pure: time and facts are passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.launcher.plan import SERVER, ProcessSpec
from areal_lora.launcher.supervise import Ended

BACK_OFF_S, LONGER = 1.0, 4.0
_AGAIN_THE_SAME = (0, ConfigError.exit_code, EnvironmentError_.exit_code)


class Restarts:
    """A server that has served once and then failed is started again, up to ``max_restarts`` times each.

    One that ended well, or says that its input is wrong, would do so again.
    """

    def __init__(
        self, specs: Sequence[ProcessSpec], max_restarts: int, has_served: Callable[[ProcessSpec], bool]
    ) -> None:
        self._max, self._has_served = max_restarts, has_served
        self._alive = {spec.index for spec in specs if spec.role == SERVER}
        self._times: dict[int, int] = {}
        self._due: list[tuple[float, Ended]] = []

    def take(self, ended: Ended, now: float) -> str | None:
        """What is done about ``ended``, in words; None if the run cannot go on without it."""
        spec = ended.spec
        if spec.role != SERVER:
            return None
        self._alive.discard(spec.index)
        if ended.code in _AGAIN_THE_SAME or not self._has_served(spec):
            return None
        times = self._times.get(spec.index, 0) + 1
        if times <= self._max:
            self._times[spec.index] = times
            wait_s = BACK_OFF_S * LONGER ** (times - 1)
            self._due.append((now + wait_s, ended))
            return f"{spec.name} {ended.how()}; it is started again in {wait_s:g} s ({times} of {self._max})"
        if self._alive or self._due:
            return f"{spec.name} {ended.how()}; it is not started again, the other servers go on"
        return None

    def due(self, now: float) -> list[Ended]:
        """Those to start again now; each is given out once."""
        ready = [ended for at, ended in self._due if now >= at]
        self._due = [(at, ended) for at, ended in self._due if now < at]
        self._alive |= {ended.spec.index for ended in ready}
        return ready
