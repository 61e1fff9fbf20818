"""The members of publishes on rank 0: admit, check, ping and exclude rollout servers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from areal_lora.errors import ArealLoraError
from areal_lora.processes.log import get_logger
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.fleet import Fleet, answers, errors
from areal_lora.weight_sync.trainer.membership import Membership, ServerFinding, ServerWatch, ServerWatcher, Sign, judge

SCORE_PINGS = 5  # scores of the probe take longer than a ping

log = get_logger(__name__)


class MemberRoster:
    """``joining`` joined during the publish in progress; ``lost`` has the reasons, by name, since the last report.

    ``left`` are the servers that left in order since the last report.

    ``watch``, if given, shows restarted and further servers. Only the publisher thread changes a roster.
    """

    def __init__(
        self, fleet: Fleet, servers: Iterable[ServerEndpoint], *, ping_s: float, watch: ServerWatch | None = None
    ) -> None:
        self._fleet, self._ping_s = fleet, ping_s
        self._membership = Membership(servers)
        self._watcher: ServerWatcher | None = None
        if watch is not None:
            self._watcher = ServerWatcher(watch, self._membership, self._sign)
        self.joining: set[ServerEndpoint] = set()
        self.lost: dict[str, str] = {}
        self.left: list[ServerEndpoint] = []

    @property
    def members(self) -> tuple[ServerEndpoint, ...]:
        return self._membership.members

    @property
    def watched(self) -> bool:
        """Whether further servers can become members."""
        return self._watcher is not None

    def available(self) -> tuple[ServerEndpoint, ...]:
        """Servers that are not members and answer pings; callable from any thread."""
        found = self._watcher.joining() if self._watcher is not None else ()
        return tuple(filter(self._membership.wants, found))

    def changed(self) -> bool:
        """Whether servers are available, leave or do not answer; callable from any thread."""
        watcher = self._watcher
        if watcher is None:
            return False
        return bool(self.available() or watcher.leaving() & set(self.members)) or not watcher.all_answer()

    def admit(self, layout: AdapterLayout, probe: ProbeExpectation | None = None) -> tuple[ServerEndpoint, ...]:
        """Make all members and available servers that answer and can serve ``layout`` the members.

        Servers that leave are released first. Raises AdapterError if an old member cannot serve ``layout``.
        """
        self.release()
        plan, before = self._membership.with_joining(self.available()), set(self.members)
        self.joining |= set(plan) - before
        for server in before - set(plan):
            self._lose(server, "was restarted")
        self._membership.admit(plan)
        self._fleet.keep(plan)
        self.exclude_failed(self._fleet.silent(plan, self._ping_s))
        # Merged: the answer includes the server's first scores.
        patience_s = self._ping_s * (SCORE_PINGS if layout.payload is Payload.MERGED else 1)
        checks = self._fleet.check(self.members, layout, probe, patience_s)
        self.exclude_failed(errors(answers(checks, time.monotonic() + patience_s)))
        return self.members

    def release(self) -> None:
        """Release the members that leave in order."""
        if self._watcher is None:
            return
        released = self._membership.release(self._watcher.leaving())
        for server in released:
            log.info("rollout server %s leaves", server)
        self.left += released
        self._fleet.keep(self.members)

    def exclude_failed(self, failed: Mapping[ServerEndpoint, ArealLoraError]) -> None:
        """Exclude members that failed outside of a transfer. Raises the error of one that refuses the version."""
        findings = [
            ServerFinding(server=s, error=failed.get(s), alive=False, joining=s in self.joining) for s in self.members
        ]
        self.exclude(judge(findings, retried=False).lost)

    def exclude(self, lost: Mapping[ServerEndpoint, str]) -> None:
        """Remove the servers in ``lost``, with the reasons, from the members. One that leaves is no loss."""
        if not lost:
            return
        self.release()
        crashed = {server: reason for server, reason in lost.items() if server not in self.left}
        for server, reason in crashed.items():
            self._lose(server, reason)
        self._membership.lose(crashed)
        self._fleet.keep(self.members)

    def shortage(self, min_servers: int) -> str:
        """Text of how many servers remain and why the others were lost."""
        lost = "; ".join(f"{name} {why}" for name, why in self.lost.items()) or "none was lost in this publish"
        return (
            f"{len(self.members)} rollout servers remain, cluster.min_servers is {min_servers} "
            f"({lost}); see the servers' logs"
        )

    def served(self) -> None:
        """All members serve what was published."""
        self._membership.succeeded()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def _lose(self, server: ServerEndpoint, reason: str) -> None:
        log.error("rollout server %s is excluded: it %s", server, reason)
        self.lost[server.name] = reason

    def _sign(self, server: ServerEndpoint) -> Sign:
        try:
            return Sign.LEAVES if self._fleet.ping(server, self._ping_s).leaving else Sign.ANSWERS
        except ArealLoraError:
            return Sign.SILENT
