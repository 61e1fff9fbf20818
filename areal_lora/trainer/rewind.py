"""Servers that are ahead of the trainer: after a fallback they hold versions that will be made once more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import PublishError
from areal_lora.obs.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.transport import AdminClient, ServerEndpoint

POLL_S = 0.2
WAIT_LINE_S = 10.0

log = get_logger(__name__)


def versions_ahead(refs: Sequence[str], versions: Mapping[str, int]) -> list[AdapterRef]:
    """Which of a server's ``refs`` are newer than what the trainer goes on from."""
    held = [AdapterRef.parse(ref) for ref in refs]
    return [ref for ref in held if ref.name in versions and ref.version > versions[ref.name]]


def end_servers_ahead(
    present: Callable[[], Sequence[ServerEndpoint]], secret: str, versions: Mapping[str, int],
    config: WeightSyncConfig, timeout_s: float,
) -> None:
    """Tell such servers to end, and wait until the launcher has started others in their place (versions are immutable).

    A server that does not answer is left to the first publish. Raises PublishError after ``timeout_s``.
    """
    ended = [server for server in present() if _end_if_ahead(server, secret, versions, config.ping_s)]
    begun = time.monotonic()
    said_at = begun + WAIT_LINE_S
    while left := [server.name for server in ended if server in present()]:
        now = time.monotonic()
        if now >= begun + timeout_s:
            raise PublishError(f"{', '.join(left)} held newer versions and did not come back; see the servers' logs")
        if now >= said_at:
            said_at += WAIT_LINE_S
            log.info("waiting for %s to be started again since %.0f s", ", ".join(left), now - begun)
        time.sleep(POLL_S)
    if ended:
        _wait_for_all(present, {server.name for server in ended}, begun + timeout_s)


def _end_if_ahead(server: ServerEndpoint, secret: str, versions: Mapping[str, int], timeout_s: float) -> bool:
    client = AdminClient(server, secret)
    try:
        ahead = versions_ahead(client.info(timeout_s).refs, versions)
        if not ahead:
            return False
        log.warning("rollout server %s holds %s, which will be made anew: it is told to end", server, ahead[-1])
        client.shutdown(timeout_s)
    except PublishError as e:
        log.warning("rollout server %s was not asked what it holds: %s", server, e)
        return False
    finally:
        client.close()
    return True


def _wait_for_all(present: Callable[[], Sequence[ServerEndpoint]], names: set[str], until: float) -> None:
    while missing := names - {server.name for server in present()}:
        if time.monotonic() >= until:
            raise PublishError(f"{', '.join(sorted(missing))} did not come back; see the servers' logs")
        time.sleep(POLL_S)
