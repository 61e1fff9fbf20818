"""What each expert-parallel rank does: the same replayed passes by Megatron's all-to-all, its sizes counted by layer,
then of all layers at once.

Over gloo it needs an event of its streams, lists in the place of the numbers that a copy from a device leaves, and
collectives of parts of different sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.models import ModelConfig
from areal_lora.engine.layers.output import Readout
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.engine.megatron_utils.cpu_patches import NullStream, install_cpu_patches
from tests.support.distributed.engine_ranks import (
    OPTIMIZER,
    Case,
    export_gradients,
    forget_layout,
    loss_fn,
    make_batch,
    make_routes,
    make_rows,
    make_spec,
    numpy_of,
    own_part,
    scores,
)
from tests.support.distributed.oracle import LAYERS

Seen = tuple[dict[str, np.ndarray], int]
"""Scores and gradients, and how many routings were counted."""


def all_gather(parts: list[Tensor], own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(own)
        dist.broadcast(part, group=group, group_src=rank)


def reduce_scatter(own: Tensor, parts: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    for rank, part in enumerate(parts):
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        if rank == dist.get_rank(group):
            own.copy_(whole)


def both(path: str, case: Case, adapter: dict[str, np.ndarray], names: tuple[str, ...], known: float) -> list[Seen]:
    """With sizes by layer, then with those of all layers at once, which needs routes of all tokens: ``known`` 1.

    The last token of a sequence has none. Adapters ``names`` share the sequences; they drop inputs if the case does.
    What routers choose by themselves is not among the counted routings.
    """
    install_cpu_patches()
    NullStream.record_event = lambda stream: stream  # type: ignore[attr-defined]
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from areal_lora.engine.megatron_utils import megatron_model, modules

    counted, settings, preprocess = 0, megatron_model._settings, MoEAlltoAllTokenDispatcher.preprocess

    def count(self: Any, routing_map: Tensor) -> Tensor:
        nonlocal counted
        counted += 1
        found: Tensor = preprocess(self, routing_map)
        self.input_splits, self.output_splits = self.input_splits.tolist(), self.output_splits.tolist()
        return found

    def as_on_gpus(*args: Any, on_cpu: bool) -> dict[str, Any]:
        return settings(*args, on_cpu=on_cpu) | {"moe_token_dispatcher_type": "alltoall"}

    def passes(exchanging: Any) -> Seen:
        nonlocal counted
        with mock.patch.object(modules, "exchanging", exchanging):
            engine = MegatronEngine(ModelConfig(path=path, dtype="float32"), case.trainer(), torch.device("cpu"))
        for seed, name in enumerate(names):
            spec = replace(make_spec(name, path, case), dropout=0.3 if case.dropout else 0.0)
            engine.add_adapter(spec, OPTIMIZER, seed=seed)
            weights = {key: torch.from_numpy(values) * (1 + seed) for key, values in adapter.items()}
            engine.load_adapter(name, weights)
        rows = make_rows()
        routes = make_routes(rows, LAYERS, known)
        routes[np.cumsum([len(row) for row in rows]) - 1] = -1
        batch = replace(make_batch(rows), routes=routes)
        own, flipped = engine.own_choice(own_part(engine, batch), adapter="a")
        counted, found = 0, {"own": own.numpy(), "flipped": np.array(flipped)}
        found["base"] = scores(engine, own_part(engine, batch), adapter=None)
        owners = np.array(batch.group_ids) * len(names) // len(rows)
        batch = own_part(engine, replace(batch, adapters=tuple(names[i] for i in owners)))
        losses, readout = dict.fromkeys(names, loss_fn), Readout(1.0, True)
        sums = engine.forward_backward_of_each(batch, losses, scores=None, readout=readout)
        for name in names:
            found[f"{name} loss"] = np.array(sums[name]["loss"])
            found |= {f"{name} {key}": values for key, values in numpy_of(export_gradients(engine, name)).items()}
        forget_layout()
        return found, counted

    with (
        mock.patch.object(megatron_model, "_settings", as_on_gpus),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", count),
        mock.patch.object(dist, "all_gather", all_gather),
        mock.patch.object(dist, "reduce_scatter", reduce_scatter),
    ):
        return [passes(lambda _: None), passes(modules.exchanging)]


def padded(path: str, case: Case) -> tuple[list[list[int]], np.ndarray]:
    """How often the padding of a rank goes to each expert, by layer, and the scores; one rank has a short sequence."""
    install_cpu_patches()
    from megatron.core.transformer.moe.moe_layer import MoELayer

    engine = MegatronEngine(ModelConfig(path=path, dtype="float32"), case.trainer(), torch.device("cpu"))
    maps, rows = list[Tensor](), [[1 + i % 90 for i in range(60)], [7, 8, 9, 10]]
    model: Any = engine._model
    for layer in model.module.modules():
        if isinstance(layer, MoELayer):
            layer.router.register_forward_hook(lambda _, args, output: maps.append(output[1]))
    batch = own_part(engine, make_batch(rows))
    found = scores(engine, batch, adapter=None)
    own = [len(row) for row in rows if engine.rank == (len(row) == 4)]
    return [each[sum(own) :].sum(0).tolist() for each in maps], found
