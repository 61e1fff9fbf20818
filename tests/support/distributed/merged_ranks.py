"""What each rank of a test of merged weights does: publish many versions, and hand out what was packed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lora.algorithms.merging import CastLoss
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.errors import UnknownTensorError
from areal_lora.weight_sync.layout import AdapterLayout
from tests.support.distributed.engine_ranks import Case, build, forget_layout, frozen_weights

SEEDS = 3


def wire_tensors(layout: AdapterLayout, seed: int) -> dict[str, Tensor]:
    """An adapter by its wire names, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    names = sorted((t.name, t.shape) for shard in layout.shards for t in shard.tensors)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in names}


def packed(engine: AdapterEngine, loss: CastLoss | None = None) -> np.ndarray:
    """This rank's shard of the adapter as it is."""
    flat = empty(engine)
    for _ in engine.pack_merged("a", loss or CastLoss(dtype=torch.float32), torch.from_numpy(flat)):
        pass
    return flat


def empty(engine: AdapterEngine) -> np.ndarray:
    shards = engine.merged_layout("a", "float32").shards
    return np.zeros(sum(s.nbytes for s in shards if s.source == engine.rank), dtype=np.uint8)


def by_name(engine: AdapterEngine, flat: np.ndarray) -> dict[str, np.ndarray]:
    found = {}
    for shard in engine.merged_layout("a", "float32").shards:
        for t in shard.tensors if shard.source == engine.rank else ():
            found[t.name] = flat[t.offset : t.offset + 4 * int(np.prod(t.shape))].view(np.float32).reshape(t.shape)
    return found


def fill_late(engine: AdapterEngine, later: dict[str, Tensor]) -> np.ndarray:
    """Pack now, and run the iterator only when the adapter has become another."""
    flat = empty(engine)
    parts = engine.pack_merged("a", CastLoss(dtype=torch.float32), torch.from_numpy(flat))
    engine.load_adapter("a", later)
    for _ in parts:
        pass
    return flat


def break_off(engine: AdapterEngine) -> str:
    """Leave packing in its middle: the reader stops, then the base folder lacks a tensor."""
    parts = engine.pack_merged("a", CastLoss(dtype=torch.float32), torch.from_numpy(empty(engine)))
    next(parts, None)
    parts.close()  # type: ignore[attr-defined]
    base = engine._merged["a"]._base
    lost = sorted(n for n in base._files if n.endswith("down_proj.weight"))[-1]
    file = base._files.pop(lost)
    try:
        packed(engine)
    except UnknownTensorError as e:
        return str(e)
    finally:
        base._files[lost] = file
    return ""


def publish_many(path: str, cases: list[Case], versions: int) -> dict[str, Any]:
    """By layout: the packed weights by seed, and whether bytes that must stay have stayed."""
    seen: dict[str, Any] = {}
    for case in cases:
        engine = build(path, case)
        before = {n: t.clone() for n, t in frozen_weights(engine).items()}
        adapters = [wire_tensors(engine.adapter_layout("a"), seed) for seed in range(SEEDS)]
        digests: dict[int, set[str]] = {seed: set() for seed in range(SEEDS)}
        loss = CastLoss(dtype=torch.float32)
        for version in range(versions):
            engine.load_adapter("a", adapters[version % SEEDS])
            digests[version % SEEDS].add(hashlib.blake2b(packed(engine, loss).tobytes()).hexdigest())
        weights, late = {}, []
        for seed in range(SEEDS):
            engine.load_adapter("a", adapters[seed])
            flat = packed(engine)
            weights[seed] = {n: w.copy() for n, w in by_name(engine, flat).items()}
            late.append(bool((fill_late(engine, adapters[(seed + 1) % SEEDS]) == flat).all()))
        broken = break_off(engine)
        after = frozen_weights(engine)
        seen[case.name] = {
            "weights": weights,
            "adapters": {seed: {n: t.numpy() for n, t in a.items()} for seed, a in enumerate(adapters)},
            "aliases": engine.adapter_layout("a").aliases,
            "digests": {seed: len(found) for seed, found in digests.items()},
            "late": late,
            "broken": broken,
            "base": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
            "survives": loss.survives,
            "names": [t.name for s in engine.merged_layout("a", "float32").shards for t in s.tensors],
        }
        forget_layout()
    return seen
