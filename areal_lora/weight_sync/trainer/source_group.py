"""The broadcast group of one trainer rank, from forming it to leaving it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch

from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.exchange import Exchange
from areal_lora.errors import ManifestError, PublishError, undo_on_error
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup, GroupListener
from areal_lora.weight_sync.messages import ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.trainer.decisions import Failure, agree
from areal_lora.weight_sync.trainer.publish_job import Job
from areal_lora.weight_sync.trainer.role import Role


class SourceGroup:
    """Group of this rank with the workers of all members; none for a rank that is not among ``sources``.

    ``sources`` are all ranks that may own tensors of some adapter: the groups are formed once, and a version uses
    those of the ranks that own its tensors.
    ``bind`` is this rank's own address, which the workers must reach; ``backend`` names a
    ``link.backends`` row; ``device`` is the device that this rank computes on.
    """

    def __init__(
        self,
        *,
        config: WeightSyncConfig,
        exchange: Exchange,
        sources: frozenset[int],
        secret: str,
        bind: str,
        backend: str,
        device: torch.device,
    ) -> None:
        self._config, self._exchange, self._secret = config, exchange, secret
        self._is_source = exchange.rank in sources
        self._bind, self._backend, self._device = bind, backend, device
        self._group: BroadcastGroup | None = None

    @property
    def same_host(self) -> bool:
        """Whether the receivers read this rank's memory."""
        return self._group is not None and self._group.same_host

    def form(self, job: Job, members: Sequence[ServerEndpoint], role: Role, deadline: float) -> None:
        """Replace the group: sources listen, rank 0 invites every member, all meet (collective).

        Raises PublishError on every rank if a member or worker does not join in time.
        """
        self.leave()
        listener = self._listen(members, deadline - time.monotonic()) if self._is_source else None
        with undo_on_error(listener.close if listener else lambda: None):
            mine = msgspec.msgpack.encode(listener.endpoint if listener else None)
            gathered = self._exchange.all_gather_bytes(mine, job.budget.patience_s)
            sources = [e for raw in gathered if (e := msgspec.msgpack.decode(raw, type=SourceEndpoint | None))]
            role.invite(members, sources, deadline)
        failure: Failure | None = None
        try:
            if listener is not None:
                self._group = listener.accept()
            role.await_joins()
        except (PublishError, ManifestError) as e:
            failure = Failure.of(e)
        # No rank sends unless all have met: the version is announced only then.
        if (failed := agree(self._exchange, failure, job.budget.patience_s)) is not None:
            raise failed.error()

    def send(self, job: Job, deadline: float) -> None:
        """Send the shard of this rank. Raises PublishError."""
        if self._group is not None and job.shard.is_source:
            job.shard.send(self._group, deadline)

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _listen(self, members: Sequence[ServerEndpoint], timeout_s: float) -> GroupListener:
        return GroupListener(
            source=self._exchange.rank,
            bind=self._bind,
            world=1 + sum(s.workers for s in members),
            backend=self._backend,
            timeout_s=timeout_s,
            bucket_bytes=int(self._config.bucket_mib * 2**20),
            secret=self._secret,
            device=self._device,
        )
