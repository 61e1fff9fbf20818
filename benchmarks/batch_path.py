"""The way of a batch from a server's answer to the tensors of a trainer rank: time and bytes a token, stage by stage.

    python benchmarks/batch_path.py [--tokens 2e6] [--length 4096] [--json figures.json]

One process, one thread, no server and no socket: every stage is the function that a run calls, on the result of the
stage before. The answers are groups of 16 of ``--length`` random tokens each, with prompts of 256.

    answer        controller   body of an HTTP answer -> generations
    trajectories  controller   generations -> scored trajectories, and their acceptance
    ledger        controller   -> bytes of the ledger's file
    channel       controller   a step's groups -> bytes of the reply
    decode        rank 0       bytes of the reply -> groups
    pack          rank 0       groups -> rows, and one array
    share         other ranks  message and array (the time on the wire is not in it)
    collate       every rank   -> checked batch

Times are of the processor. ``bytes`` is what a stage's result holds, ``peak`` what was allocated at once meanwhile
without its input; both count Python's and NumPy's allocations, not torch's (the masks, a byte a token each).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.data.prompts import Prompt
from areal_lora.distributed.exchange import Exchange
from areal_lora.rollout import completion_client as cc
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.controller import groups as pool
from areal_lora.rollout.workflow import Episode, single_turn
from areal_lora.tasks.reward_calls import Score
from areal_lora.trainer import work as w
from areal_lora.types import Generation, Outcome, Sample, TokenColumns, TrainBatch, TrajectoryGroup

N_SAMPLES, PROMPT = 16, 256
STATS = m.Stats(
    ready=0,
    running=0,
    leased=0,
    issued=0,
    consumed=0,
    dropped={},
    reissued=0,
    retried={},
    late=0,
    tokens_generated=0,
    idle_s=0.0,
    ahead=0,
    margin_s=0.0,
    spare_s=None,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """``seconds`` and bytes of one stage of all tokens."""

    seconds: float
    held: int
    peak: int


def timed(stage: Callable[[], Any]) -> tuple[Stage, Any]:
    """The best of three, and the bytes of a fourth run."""
    seconds = []
    for _ in range(3):
        gc.collect()
        began = time.process_time()
        result = stage()
        seconds.append(time.process_time() - began)
        del result
    tracemalloc.start()
    result = stage()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Stage(min(seconds), held, peak), result


def body(rng: np.random.Generator, length: int) -> bytes:
    """A server's answer to one prompt: ``N_SAMPLES`` of ``length`` tokens."""
    choices = []
    for i in range(N_SAMPLES):
        ids, scores = rng.integers(0, 150_000, length), -rng.random(length, dtype=np.float32)
        columns = TokenColumns.of(ids, scores, np.full(length, 3))
        choices.append({"index": i, "finish_reason": "length", "text": "x", "columns": columns})
    return msgspec.json.encode({"model": "a@v3", "choices": choices})


def answers(bodies: list[bytes]) -> list[list[Generation]]:
    completions = [msgspec.json.decode(each, type=cc.Completion) for each in bodies]
    return [[cc._generation(choice, None) for choice in completion.choices] for completion in completions]


def episodes(generations: list[list[Generation]]) -> list[Episode]:
    score, made = Score(reward=1.0, outcome=Outcome.OK), []
    for number, group in enumerate(generations):
        sample = Sample(uid=str(number), prompt="", answer=None)
        prompt = Prompt(position=number, uid=f"0:{number}", text="", token_ids=list(range(PROMPT)), sample=sample)
        rows = tuple(single_turn(prompt, i, "a", answer, score) for i, answer in enumerate(group))
        episode = Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=rows), texts=("x",) * len(rows))
        [(t.columns.n_sampled, t.columns.span) for t in rows]  # as `AdapterFeed.finish`
        made.append(episode)
    return made


def encoded(episodes: list[Episode]) -> list[bytes]:
    return [pool._encode(each) for each in episodes]


def stages(bodies: list[bytes], exchange: Exchange) -> Iterator[tuple[str, Stage]]:
    """Each stage is given what the one before made, which is forgotten then."""
    stage, generations = timed(lambda: answers(bodies))
    yield "answer", stage
    stage, made = timed(partial(episodes, generations))
    yield "trajectories", stage
    del generations
    stage, _ = timed(partial(encoded, made))
    yield "ledger", stage
    groups = tuple(each.group for each in made)
    batch = m.Batch(adapter="a", step=3, groups=groups, stats=STATS, samples=(), events=(), snapshot=b"")
    stage, payload = timed(partial(m.encode, batch))
    yield "channel", stage
    del batch, groups, made
    stage, received = timed(partial(m.decode_reply, payload))
    yield "decode", stage
    del payload
    stage, packed = timed(partial(PackedGroups.of, received.groups))
    yield "pack", stage
    del received
    # As on the other ranks: the message is decoded, and an array of the size is filled.
    message = w._encode(w.TrainOn(adapter="a", batch=packed))
    stage, work = timed(lambda: received_work(message, exchange))
    yield "share", stage
    work.batch.columns[:] = packed.columns
    del packed

    def checked() -> TrainBatch:
        batch = collate(work.batch)
        check_batch(batch)
        return batch

    stage, _ = timed(checked)  # what it holds beside the array of before, which the log-probabilities stay in
    yield "collate", stage


def received_work(message: bytes, exchange: Exchange) -> w.TrainOn:
    work = w._decode(exchange.broadcast_bytes(message))
    work.batch.columns.fill(0)  # touches the pages, as the broadcast does
    exchange.broadcast_array(work.batch.columns)
    return work


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
    tokens = n_groups * N_SAMPLES * (chosen.length + PROMPT)
    figures = {}
    table = Table("stage", "ns a token", "bytes a token", "peak", title=f"{tokens:,} tokens")
    for name, stage in stages([body(rng, chosen.length) for _ in range(n_groups)], exchange):
        row = {"ns": 1e9 * stage.seconds / tokens, "bytes": stage.held / tokens, "peak": stage.peak / tokens}
        table.add_row(name, *(f"{x:,.1f}" for x in row.values()))
        figures |= {f"{name}_{key}": round(x, 2) for key, x in row.items()}
    figures["peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    Console(width=120).print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
