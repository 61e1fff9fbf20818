"""When clients of open sessions were last there.

In memory: after a restart of the service every open session counts from the start, so that its downtime ends none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

SILENT_S = 3600.0
"""A session without a sign for that long ends."""
DEAD_S = 45.0
"""It ends after that long if another client waits for its places: the SDK sends a heartbeat every 10 s."""


class Signs:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last: dict[str, tuple[str, float]] = {}

    def opened(self, session: str, tenant: str) -> None:
        self._last[session] = (tenant, self._now_s())

    def heard(self, session: str, tenant: str) -> bool:
        """Note a sign; False for a session that is not open, or not the tenant's."""
        known = session in self._last and self._last[session][0] == tenant
        if known:
            self.opened(session, tenant)
        return known

    def ended(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._last.pop(session, None)

    def renew(self) -> None:
        """The service itself was stopped: no client could give a sign."""
        for session, (tenant, _) in list(self._last.items()):
            self.opened(session, tenant)

    def silent(self, for_s: float) -> list[str]:
        """Sessions without a sign for longer than ``for_s``, the longest silent first."""
        now = self._now_s()
        found = [(at, session) for session, (_, at) in self._last.items() if now - at > for_s]
        return [session for _, session in sorted(found)]
