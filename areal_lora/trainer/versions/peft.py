"""The trained adapter as a PEFT folder that stock peft, transformers and vLLM load.

Its tensors go one after another to rank 0, which knows from the layout where each lies in the file::

    source rank:  sections of its shard -> a chunk -> rank 0 -> place in the file;  fsync, rename at the end

So no rank holds more than a chunk of it beyond what it trains. The source ranks take turns.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_lora.checkpoint.adapter_io import PeftWriter, load_peft
from areal_lora.checkpoint.fuse import fused
from areal_lora.distributed.exchange import Exchange
from areal_lora.engine.base import TrainEngine
from areal_lora.engine.common.adapter_memory import initial_tensor
from areal_lora.errors import CheckpointError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import Adapter
from areal_lora.weight_sync.layout import AdapterLayout, ShardLayout, plan_buckets

CHUNK_BYTES = 16 << 20
"""Size of one message; a single tensor may be larger."""


def export_adapter(engine: TrainEngine, adapter: Adapter, exchange: Exchange, run_folder: RunFolder) -> Path:
    """Write the adapter from all source ranks; rank 0 writes. Collective over all ranks.

    What an earlier end of the run has exported is replaced once the new folder is whole. Raises
    CheckpointError if it cannot be written, and PublishError if a rank is lost.
    """
    folder, layout = run_folder.adapter_export(adapter.name), engine.adapter_layout(adapter.name)
    mine = engine.export_adapter(adapter.name)
    if exchange.rank:
        _send(mine, next((s for s in layout.shards if s.source == exchange.rank), None), exchange)
        return folder
    try:
        _write(mine, adapter, layout, exchange, folder)
    except OSError as e:
        raise CheckpointError(
            f"{folder}: the adapter cannot be written: {e.strerror} (fix: make room on the disk, or repair it, then "
            "start the same command: it resumes from the newest checkpoint)"
        ) from e
    return folder


def _write(
    mine: Iterator[tuple[str, Tensor]], adapter: Adapter, layout: AdapterLayout, exchange: Exchange, folder: Path
) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover)  # of an export that a crash has ended
    shapes = {t.name: t.shape for shard in layout.shards for t in shard.tensors}
    spec, revision = adapter.spec, adapter.base_commit
    with PeftWriter(folder, spec, shapes, spec.base_model, layout.aliases, replace=True, revision=revision) as writer:
        for shard in layout.shards:
            for name, tensor in mine if shard.source == exchange.rank else _received(shard, exchange):
                writer.write(name, tensor)


def _received(shard: ShardLayout, exchange: Exchange) -> Iterator[tuple[str, Tensor]]:
    """Another rank's tensors. Each is valid until the next is taken."""
    buckets = plan_buckets(shard, CHUNK_BYTES)
    room = np.empty(max(bucket.nbytes for bucket in buckets), dtype=np.uint8)
    for bucket in buckets:
        exchange.receive(room[: bucket.nbytes], shard.source)
        values = torch.from_numpy(room[: bucket.nbytes]).view(torch.float32)
        for t in shard.tensors[bucket.first : bucket.last]:
            at = (t.offset - bucket.start) // 4
            yield t.name, values[at : at + math.prod(t.shape)].view(t.shape)


def _send(mine: Iterator[tuple[str, Tensor]], shard: ShardLayout | None, exchange: Exchange) -> None:
    buckets = plan_buckets(shard, CHUNK_BYTES) if shard else ()
    room = np.empty(max((bucket.nbytes for bucket in buckets), default=0) // 4, dtype=np.float32)
    values = torch.from_numpy(room)
    for bucket in buckets:
        at = 0
        for _ in range(bucket.first, bucket.last):
            _, tensor = next(mine)
            values[at : at + tensor.numel()] = tensor.flatten()
            at += tensor.numel()
        exchange.send(room.view(np.uint8)[: bucket.nbytes], 0)
    # To the end, also on a rank without a shard: it gives its parts to the ranks that have one.
    rest = [name for name, _ in mine]
    assert not rest, f"{len(rest)} tensors more than the layout has"


def warm_start(engine: TrainEngine, adapter: Adapter, seed: int) -> None:
    """Make the adapter of ``init_from`` the weights of ``adapter``; moments and clock stay those of a new adapter.

    Not collective. Every rank reads the whole folder itself and holds it twice for a moment: one file
    on a shared file system costs less than a second way to cut tensors into ranks' parts.

    Raises:
        AdapterError, UnknownTensorError: the folder changed since the rules judged it, see `fused`.
    """
    folder = adapter.config.init_from
    if folder is None:
        return
    spec, tensors = load_peft(Path(folder).expanduser())
    layout = engine.adapter_layout(adapter.name)
    engine.load_adapter(adapter.name, fused(tensors, spec, layout, partial(initial_tensor, seed=seed)))
