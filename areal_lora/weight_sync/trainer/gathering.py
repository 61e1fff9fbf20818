"""One source for the ranks of a node, where broadcast groups are communicators of a device.

    rank 0   packs its part | gathered from rank 1 | from rank 2 |  --> broadcast to the servers
    rank 1   packs its part ------------^                  |
    rank 2   packs its part -------------------------------^

Every source has communicators with all servers: each costs memory on every server's devices, and time to form.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from areal_lora.errors import ArealLoraError
from areal_lora.weight_sync.layout import AdapterLayout, ShardLayout, make_layout
from areal_lora.weight_sync.trainer.publish_job import Pack

LAYOUTS = 16
"""Structures of adapters whose layouts are kept, a few megabytes each: a publish does no work per name."""


def by_place(layout: AdapterLayout, places: Sequence[int]) -> AdapterLayout:
    """``layout`` with one shard for the owners of one place: their tensors by owner, sent by the first of them.

    ``places`` are those of the trainer ranks.
    """
    shards = sorted(layout.shards, key=lambda shard: shard.source)
    source = {places[shard.source]: shard.source for shard in reversed(shards)}
    sent: dict[int, list[tuple[str, tuple[int, ...]]]] = {rank: [] for rank in source.values()}
    for shard in shards:
        sent[source[places[shard.source]]] += ((tensor.name, tensor.shape) for tensor in shard.tensors)
    return make_layout(layout.structure, layout.dtype, sent, layout.aliases, layout.payload)


class PlaceGather:
    """The ranks at one place, which send their shards as one. Build it on all ranks of the trainer (collective).

    ``places`` are those of the trainer ranks, ``rank`` is this one, ``device`` has the packed shards.
    """

    def __init__(self, places: Sequence[int], rank: int, device: torch.device) -> None:
        members = [[r for r, p in enumerate(places) if p == place] for place in sorted(set(places))]
        self._places, self._rank = places, rank
        self._group, _ = dist.new_subgroups_by_enumeration(members)
        self._ranks = members[sorted(set(places)).index(places[rank])]
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)
        self._sent: dict[str, AdapterLayout] = {}  # by the digest of the owners' layout

    def of(self, layout: AdapterLayout, pack: Pack) -> tuple[AdapterLayout, Pack]:
        """The layout that sources send, and what packs this rank's shard of it, from those of the owners.

        That pack is collective over the ranks at this place.
        """
        owned = {shard.source: shard for shard in layout.shards if shard.source in self._ranks}
        if len(owned) > 1:
            pack = partial(self._gathered, owned, pack)
        if layout.digest not in self._sent:
            self._sent = dict([*self._sent.items()][1 - LAYOUTS :])  # the newest
            self._sent[layout.digest] = by_place(layout, self._places)
        return self._sent[layout.digest], pack

    def _gathered(self, owned: Mapping[int, ShardLayout], pack: Pack, flat: torch.Tensor) -> Iterator[int]:
        source, rest = min(owned), sorted(owned)[1:]
        own = owned.get(self._rank, ShardLayout(source=self._rank, tensors=(), nbytes=0))
        sends = self._rank in rest
        if sends and len(self._packed) < own.nbytes:
            self._packed = torch.empty(own.nbytes, dtype=torch.uint8, device=self._packed.device)
        packed, received = (self._packed[: own.nbytes], flat) if sends else (flat[: own.nbytes], flat[own.nbytes :])
        failure: ArealLoraError | None = None
        try:
            for done in pack(packed):
                if self._rank == source:
                    yield done
        except ArealLoraError as e:  # not before the others have what they wait for: NaN, which servers refuse
            failure = e
            packed.fill_(255)
        dist.all_to_all_single(
            received,
            packed if sends else packed[:0],
            [owned[r].nbytes if self._rank == source and r in rest else 0 for r in self._ranks],
            [own.nbytes if sends and r == source else 0 for r in self._ranks],
            group=self._group,
        )
        if failure is not None:
            raise failure
        done = len(own.tensors)
        for rank in rest if self._rank == source else ():
            done += len(owned[rank].tensors)
            yield done
