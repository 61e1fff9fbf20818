"""The way of a batch from a server's answer to the tensors of a trainer rank: time and bytes a token, stage by stage.

    python benchmarks/batch_path.py [--tokens 2e6] [--length 4096] [--json figures.json]

One process, one thread, no server and no socket: every stage is the function that a run calls, on the result of the
stage before. The answers are groups of 16 of ``--length`` random tokens each, with prompts of 256.

    answer        controller   body of an HTTP answer -> generations
    trajectories  controller   generations -> scored trajectories, and their acceptance
    ledger        controller   -> bytes of the ledger's file
    channel       controller   a step's groups -> bytes of the reply
    decode        rank 0       bytes of the reply -> groups
    share         every rank   groups -> one broadcast -> what the rank holds (world of one rank)
    collate       every rank   -> checked batch

``bytes`` is what a stage's result holds, ``peak`` what was allocated at once meanwhile without its input. Both count
Python's and NumPy's allocations and, of a batch, its tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from areal_lora.data.collate import check_batch, collate
from areal_lora.data.prompts import Prompt
from areal_lora.distributed.exchange import Exchange
from areal_lora.rollout import completion_client as cc
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.controller import groups as pool
from areal_lora.rollout.workflow import Episode, single_turn
from areal_lora.tasks.reward_calls import Score
from areal_lora.trainer import work as w
from areal_lora.types import Sample, TrainBatch, TrajectoryGroup

N_SAMPLES, PROMPT = 16, 256
STATS = dict(ready=0, running=0, leased=0, issued=0, consumed=0, dropped={}, reissued=0, retried={}, late=0)
STATS |= dict(tokens_generated=0, idle_s=0.0, ahead=0, margin_s=0.0, spare_s=None)


@dataclass(frozen=True, slots=True)
class Stage:
    """``seconds`` and bytes of one stage of all tokens."""

    seconds: float
    held: int
    peak: int


def tensor_bytes(result: Any) -> int:
    if not isinstance(result, TrainBatch):
        return 0
    values = (getattr(result, each.name) for each in fields(result))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def timed(stage: Callable[[], Any]) -> tuple[Stage, Any]:
    """The best of two, and the bytes of a third run."""
    seconds = []
    for _ in range(2):
        gc.collect()
        began = time.perf_counter()
        result = stage()
        seconds.append(time.perf_counter() - began)
        del result
    gc.collect()
    tracemalloc.start()
    result = stage()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    extra = tensor_bytes(result)
    return Stage(min(seconds), held + extra, peak + extra), result


def body(rng: np.random.Generator, length: int) -> bytes:
    """A server's answer to one prompt."""
    choices = [
        {
            "index": i,
            "finish_reason": "length",
            "text": "x",
            "token_ids": rng.integers(0, 150_000, length).tolist(),
            "versions": [3] * length,
            "logprobs": {"token_logprobs": (-rng.random(length, dtype=np.float32)).tolist()},
        }
        for i in range(N_SAMPLES)
    ]
    return msgspec.json.encode({"model": "a@v3", "choices": choices})


def answers(bodies: list[bytes]) -> list[list[Any]]:
    completions = [msgspec.json.decode(each, type=cc.Completion) for each in bodies]
    return [[cc._generation(choice, None) for choice in completion.choices] for completion in completions]


def episodes(generations: list[list[Any]]) -> list[Episode]:
    made = []
    for number, group in enumerate(generations):
        sample = Sample(uid=str(number), prompt="", answer=None)
        prompt = Prompt(position=number, uid=f"0:{number}", text="", token_ids=list(range(PROMPT)), sample=sample)
        score = Score(reward=1.0, outcome=pool_outcome())
        rows = tuple(single_turn(prompt, i, "a", answer, score) for i, answer in enumerate(group))
        episode = Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=rows), texts=("x",) * len(rows))
        sum(sum(t.loss_mask) for t in rows)
        versions = [v for t in rows for v in t.versions if v >= 0]
        min(versions), max(versions)
        made.append(episode)
    return made


def pool_outcome() -> Any:
    from areal_lora.types import Outcome

    return Outcome.OK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e6, help="answer tokens, about")
    parser.add_argument("--length", type=int, default=4096, help="of an answer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exchange, rng = Exchange(60.0), np.random.default_rng(0)
    n_groups = max(1, round(chosen.tokens / (N_SAMPLES * chosen.length)))
    bodies = [body(rng, chosen.length) for _ in range(n_groups)]
    tokens = n_groups * N_SAMPLES * (chosen.length + PROMPT)
    found: dict[str, Stage] = {}
    found["answer"], generations = timed(lambda: answers(bodies))
    found["trajectories"], made = timed(lambda: episodes(generations))
    del generations
    found["ledger"], _ = timed(lambda: [pool._encode(each) for each in made])
    groups = tuple(each.group for each in made)
    batch = m.Batch(adapter="a", step=3, groups=groups, stats=m.Stats(**STATS), samples=(), events=(), snapshot=b"")
    found["channel"], payload = timed(lambda: m.encode(batch))
    del batch, groups, made
    found["decode"], received = timed(lambda: m.decode_reply(payload))
    found["share"], work = timed(lambda: w.share(w.TrainOn(adapter="a", groups=list(received.groups)), exchange))

    def checked() -> TrainBatch:
        packed = collate(work.groups)
        check_batch(packed)
        return packed

    found["collate"], _ = timed(checked)
    table = Table("stage", "ns a token", "bytes a token", "peak", title=f"{tokens:,} tokens")
    for name, stage in found.items():
        table.add_row(name, *(f"{x:,.1f}" for x in (1e9 * stage.seconds / tokens, stage.held / tokens, stage.peak / tokens)))
    Console(width=120).print(table)
    if chosen.json:
        flat = {f"{name}_{key}": round(x / tokens, 2) for name, s in found.items() for key, x in
                (("ns", 1e9 * s.seconds), ("bytes", s.held), ("peak", s.peak))}
        chosen.json.write_text(json.dumps(flat, indent=1))


if __name__ == "__main__":
    main()
