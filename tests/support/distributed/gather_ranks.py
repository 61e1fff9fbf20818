"""What each rank of two places packs: its own tensors, gathered by the first owner of the place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.errors import AdapterError
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.trainer.gathering import PlaceGather
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import KEYS, ref


def gathered(
    layouts: list[AdapterLayout], places: list[int], tensors: dict[str, np.ndarray], failing: int
) -> list[tuple[str, list[int], bytes, bytes]]:
    """Per layout: digest of what is sent, tensors that were complete at each step, this rank's bytes, fingerprints.

    The pack of the last layout fails on rank ``failing``, midway; on that rank the error has the place of the bytes.
    """
    rank, found = dist.get_rank(), []
    gather = PlaceGather(places, rank, torch.device("cpu"))
    given = {name: torch.from_numpy(t) for name, t in tensors.items()}
    for layout in layouts:
        steps = list[int]()
        packs = pack_of(layout, rank, given)

        def pack(flat: torch.Tensor, last: bool = layout is layouts[-1], packs=packs) -> Iterator[int]:
            for done in packs(flat):
                if last and rank == failing:
                    raise AdapterError("no tensor")
                yield done

        sent, whole = gather.of(layout, pack)
        shard = PackedShard(sent, rank, KEYS)

        def counted(flat: torch.Tensor, whole=whole, steps=steps) -> Iterator[int]:
            for done in whole(flat):
                steps.append(done)
                yield done

        shard.reset()
        try:
            shard.pack(ref(0), counted)
        except AdapterError as e:
            found.append((sent.digest, steps, str(e).encode(), b""))
            continue
        found.append((sent.digest, steps, shard.flat.numpy().tobytes(), shard.sums.tobytes()))
    return found
