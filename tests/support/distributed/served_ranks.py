"""What each rank of a test of served weights does: score with what servers hold, in many layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.config.sections.run import ServedAs
from tests.support.distributed.engine_ranks import (
    Case,
    build,
    every_token,
    forget_layout,
    frozen_weights,
    make_batch,
    make_rows,
    own_part,
    scores,
)

KINDS: tuple[ServedAs, ...] = ("fp8_per_channel", "fp8_per_tensor", "merged")
ONLY = 5  # of the sequences


def score_as_served(paths: dict[str, str], cases: list[Case], wires: dict[str, dict[str, np.ndarray]]) -> Any:
    """By layout: scores [T] by what servers hold, the policy's own, some of `ONLY`; which base weights have changed."""
    found = {}
    for case in cases:
        engine = build(paths[case.model], case)
        engine.load_adapter("a", {n: torch.from_numpy(v) for n, v in wires[case.kind].items()})
        batch, frozen, seen = own_part(engine, every_token(make_batch(make_rows()))), frozen_weights(engine), {}
        for kind in KINDS:
            own = engine.served(batch, kind, adapter="a" if kind == "merged" else None)
            dist.all_reduce(own, dist.ReduceOp.MIN)
            seen[kind] = own.numpy()
        seen["lora"] = scores(engine, batch, adapter="a")
        few = replace(batch, only=torch.arange(batch.n_sequences) == ONLY)
        seen["only"] = scores(engine, few, adapter="a")
        own = engine.served(few, KINDS[0], adapter=None)
        dist.all_reduce(own, dist.ReduceOp.MIN)
        seen["only served"] = own.numpy()
        seen["moved"] = [n for n, p in frozen_weights(engine).items() if not torch.equal(p, frozen[n])]
        found[case.name] = seen
        del engine, frozen
        forget_layout()
    return found
