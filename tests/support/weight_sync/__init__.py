"""Publishes: servers without a model, writers into dictionaries, ranks that are threads.

Importing any of them registers the backend ``SOCKETS``, which sends bytes as between machines, where gloo would
have receivers read the source's memory.
"""

from __future__ import annotations

from dataclasses import replace

from areal_lora.weight_sync.link.backends import Backend, GroupSeat, gloo, register_backend

SOCKETS = "gloo-sockets"


def over_sockets(seat: GroupSeat) -> Backend:
    """gloo as it is between machines."""
    return replace(gloo(seat), same_host=False)


register_backend(SOCKETS, over_sockets)
PATIENT = property(lambda config: 0.1 * config.timeout_s)
"""`WeightSyncConfig.ping_s` without its limit of 2 s: the first ping that a server misses excludes it."""
