"""What each rank of a state test does: train, hand the training state from layout to layout, train on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from areal_lora.checkpoint.state import PARTS
from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.errors import ArealLoraError
from areal_lora.trainer.learn import learning_rate
from tests.support.checkpoint.helpers import tensors_of
from tests.support.distributed.engine_ranks import (
    DENOMINATOR,
    Case,
    build,
    forget_layout,
    loss_fn,
    make_batch,
    make_rows,
)

ADAM = OptimizerConfig(lr=0.01, warmup_steps=3, schedule="linear", max_grad_norm=1e9)
FURTHER = 3  # the first one ends the warm-up
State = tuple[int, dict[str, dict[str, np.ndarray]]]  # step, tensors by part and wire name


def whole_state(engine: AdapterEngine) -> State:
    """All ranks' shares together, on every rank."""
    mine = engine.export_state("a")
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (mine.step, tensors_of(mine)))
    found: dict[str, dict[str, np.ndarray]] = {part: {} for part in PARTS}
    for step, tensors in shares:
        assert step == mine.step
        for part, named in tensors.items():
            assert not named.keys() & found[part].keys(), "two ranks claim a tensor"
            found[part] |= named
    return mine.step, found


def train(engine: AdapterEngine, steps: int) -> list[dict[str, float]]:
    batch, seen = make_batch(make_rows()), []
    for _ in range(steps):
        engine.forward_backward(batch, loss_fn, need_entropy=True)
        lr = learning_rate(ADAM, engine.resident("a").optimizer.step_count, 10)
        seen.append(engine.optim_step("a", DENOMINATOR, lr).values)
    return seen


def begin(path: str, case: Case) -> dict[str, Any]:
    """Two steps, the state, and what ``FURTHER`` steps do."""
    engine = build(path, case, ADAM)
    train(engine, 2)
    state = whole_state(engine)
    after = train(engine, FURTHER)
    moved = whole_state(engine)
    step, tensors = state
    refused = {}
    name = next(iter(tensors["exp_avg"]))
    lacking = {**tensors, "exp_avg": {n: t for n, t in tensors["exp_avg"].items() if n != name}}
    narrow = {**tensors, "exp_avg_sq": {**tensors["exp_avg_sq"], name: np.zeros((1, 1), dtype=np.float32)}}
    for what, parts in {"missing": lacking, "shape": narrow}.items():
        try:
            engine.load_state("a", parts, step)
        except ArealLoraError as e:
            refused[what] = (type(e).__name__, str(e))
    untouched = whole_state(engine)
    forget_layout()
    return {"state": state, "after": after, "moved": moved, "refused": refused, "untouched": untouched}


def carry(path: str, cases: list[Case], state: State) -> dict[str, Any]:
    """Through one layout after the other; each loads what the one before gave."""
    seen: dict[str, Any] = {}
    for case in cases:
        engine = build(path, case, ADAM)
        engine.load_state("a", state[1], state[0])
        state = whole_state(engine)
        seen[case.name] = {"state": state, "after": train(engine, FURTHER), "moved": whole_state(engine)}
        forget_layout()
    return seen
