"""Report of a completed publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from areal_lora.algorithms.merging import CastSums
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint
from areal_lora.weight_sync.probe import ProbeResult


class ServerAck(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgement of one server; ``probe_*`` are |logp trainer - logp server|, None without a probe."""

    server: ServerEndpoint
    digest: str
    phases: dict[str, float]
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None
    differs: bool | None = None


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """A completed publish: ``acks`` of the servers that serve the version, reasons for those that were ``lost``.

    ``joined`` became members in it, ``left`` left in order since the last one.

    ``phases`` in milliseconds: ``pack`` (main threads) and ``send`` (publisher threads) of the slowest
    rank, ``ack`` from the call of ``publish`` to the last acknowledgement, ``probe`` after it; the
    slowest server's ``wire``, ``verify``, ``write``, ``commit`` and its further phases.
    ``attempts`` is 1 unless servers were lost or a transfer was repeated. ``differs``: every server
    scores the probe differently from its base; None without a probe. ``cast``: what the cast to the serving dtype
    leaves of a merged adapter; None for one that is not merged.
    """

    ref: AdapterRef
    digest: str
    nbytes: int
    phases: dict[str, float]
    acks: list[ServerAck]
    lost: dict[str, str] = {}
    joined: list[str] = []
    left: list[str] = []
    attempts: int = 1
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None
    differs: bool | None = None
    cast: CastSums | None = None


def server_acks(
    replies: Mapping[ServerEndpoint, PublishReply], probes: Mapping[ServerEndpoint, ProbeResult]
) -> list[ServerAck]:
    return [
        ServerAck(
            server=server,
            digest=reply.digest,
            phases=reply.phases,
            probe_mean_abs=probe.mean_abs if (probe := probes.get(server)) else None,
            probe_max_abs=probe.max_abs if probe else None,
            differs=probe.differs if probe else None,
        )
        for server, reply in replies.items()
    ]


def slowest_phases(replies: Sequence[PublishReply]) -> dict[str, float]:
    """Milliseconds of every phase at the server where the phase took longest."""
    names = {name for reply in replies for name in reply.phases}
    return {name: max(reply.phases.get(name, 0.0) for reply in replies) for name in names}
