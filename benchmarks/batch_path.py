"""The way of a batch from a server's answer to the tensors of a trainer rank: time and bytes a token, stage by stage.

    python benchmarks/batch_path.py [--tokens 2e6] [--length 4096] [--ranks 2 4 8] [--routes 48 8] [--json figures.json]

One process, one thread, no server and no socket: every stage is the function that a run calls, on the result of the
stage before. The answers are groups of 16 of ``--length`` random tokens each, with prompts of 256. ``--routes``: of a
mixture with so many sparse layers, in each of which a token uses so many of 128 experts.

    answer        controller   body of an HTTP answer -> generations
    trajectories  controller   generations -> scored trajectories, and their acceptance
    ledger        controller   -> bytes of the ledger's file
    channel       controller   a step's groups -> bytes of the reply
    decode        rank 0       bytes of the reply -> groups
    pack          rank 0       groups -> rows, and one array
    collate       rank 0       -> checked batch

With ``--ranks`` so many processes each, data-parallel ones, take the batch from rank 0 over gloo, as a training step
does: seconds of the slowest rank from the message to the batch, and the bytes that reach a rank other than 0. Rank 0
requests it of the controller's socket: ``assembled`` are the seconds from that request to the last rank's batch,
``GiB`` the most that rank 0 holds.

Times are of the processor. ``bytes`` is what a stage's result holds, ``peak`` what was allocated at once meanwhile
without its input; both count Python's and NumPy's allocations, not torch's (the masks, a byte a token each).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing as mp
import re
import resource
import socket
import sys
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zmq
from rich.console import Console
from rich.table import Table

from areal_lora.data.collate import collate, contradiction
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.data.prompts import Prompt
from areal_lora.distributed.store import Exchange
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.common.micro_batches import parts_of
from areal_lora.network.rpc import Connection
from areal_lora.obs.trace import Spans
from areal_lora.rollout import completion_client as cc
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.controller import groups as pool
from areal_lora.rollout.workflow import Episode, single_turn
from areal_lora.tasks.reward_calls import Score
from areal_lora.trainer import work as w
from areal_lora.trainer.collective.next_work import batch_of
from areal_lora.types import Generation, Outcome, RouteShape, Sample, TokenColumns, TrainBatch, TrajectoryGroup

N_SAMPLES, PROMPT = 16, 256
SECRET = "batch-path"
CONTROLLER = ("answer", "trajectories", "ledger", "channel")
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
    gc.collect()
    for _ in range(3):
        began = time.process_time()
        result = stage()
        seconds.append(time.process_time() - began)
        del result
    tracemalloc.start()
    result = stage()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Stage(min(seconds), held, peak), result


def body(rng: np.random.Generator, length: int, shape: RouteShape | None = None) -> bytes:
    """A server's answer to one prompt: ``N_SAMPLES`` of ``length`` tokens."""
    choices = []
    for i in range(N_SAMPLES):
        ids, scores = rng.integers(0, 150_000, length), -rng.random(length, dtype=np.float32)
        routes = b"" if shape is None else rng.integers(0, shape.experts, (length, shape.n_bytes), np.uint8).tobytes()
        columns = TokenColumns.of(ids, scores, np.full(length, 3), routes)
        choices.append({"index": i, "finish_reason": "length", "text": "x", "columns": columns})
    choices[0]["prompt_routes"] = b"" if shape is None else bytes(PROMPT * shape.n_bytes)
    return msgspec.json.encode({"model": "a@v3", "choices": choices})


def answers(bodies: list[bytes]) -> list[list[Generation]]:
    completions = [msgspec.json.decode(each, type=cc.Completion) for each in bodies]
    routes = [completion.choices[0].prompt_routes for completion in completions]
    return [
        [cc._generation(choice, None, of_prompt, PROMPT) for choice in completion.choices]
        for completion, of_prompt in zip(completions, routes, strict=True)
    ]


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


def replied(episodes: list[Episode]) -> m.Batch:
    groups = tuple(each.group for each in episodes)
    return m.Batch(adapter="a", step=3, groups=groups, stats=STATS, texts=(), events=(), snapshot=b"")


def stages(bodies: list[bytes], shape: RouteShape | None = None) -> Iterator[tuple[str, Stage]]:
    """Each stage is given what the one before made, which is forgotten then."""
    stage, generations = timed(lambda: answers(bodies))
    yield "answer", stage
    stage, made = timed(partial(episodes, generations))
    yield "trajectories", stage
    del generations
    stage, _ = timed(partial(encoded, made))
    yield "ledger", stage
    batch = replied(made)
    stage, payload = timed(partial(m.encode, batch))
    yield "channel", stage
    del batch, made
    stage, received = timed(partial(m.decode_reply, payload))
    yield "decode", stage
    del payload
    stage, packed = timed(partial(PackedGroups.of, received.groups, shape))
    yield "pack", stage
    del received

    def checked() -> TrainBatch:
        batch = collate(packed)
        assert not contradiction(batch)
        return batch

    stage, _ = timed(checked)  # what it holds beside the arrays of before, which the columns stay in
    yield "collate", stage


def control_port(batch: m.Batch) -> int:
    """Of a controller's socket that answers every request with ``batch``, until the process ends."""
    port = Future[int]()

    async def answer(_: m.Request) -> m.Reply:
        return batch

    async def serve() -> None:
        control = m.ControlSocket("127.0.0.1", SECRET)
        port.set_result(control.port)
        async with asyncio.TaskGroup() as tasks:
            await control.serve(answer, tasks)

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    return port.result(60.0)


def on_rank(rank: int, world: int, port: int, control: int, shape: RouteShape | None, found: Any) -> None:
    """Take the batch of rank 0 four times; put the seconds, and the bytes that arrived, of the best into ``found``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    exchange = Exchange(600.0)
    layout = ParallelLayout(world=world, tp=1, pp=1, ep=1, etp=1, stage_layers=(1,), experts=0)
    parts = lambda batch, minibatches: (parts_of(batch, minibatches, layout, 32_768), list(range(world)))  # noqa: E731
    adapter = SimpleNamespace(run=SimpleNamespace(max_staleness=1), config=SimpleNamespace(minibatches=1))
    shaping = SimpleNamespace(kl_coef=0.0)
    tuned = SimpleNamespace(algorithm=SimpleNamespace(shaping=shaping))
    state: Any = SimpleNamespace(name="a", version=3, adapter=adapter, tuned=tuned)
    trainer: Any = SimpleNamespace(control=exchange, engine=SimpleNamespace(parts=parts), spans=defaultdict(Spans))
    controller = Connection(zmq.Context(), "127.0.0.1", control, SECRET, m.WIRE) if rank == 0 else None
    runs = []
    for _ in range(4):
        work = None
        dist.barrier()
        requested = time.perf_counter()
        if controller:
            received = m.decode_reply(controller.exchange(m.encode(m.GetBatch(wanted=(), timeout_s=0.0)), 600.0))
            work = w.TrainOn(adapter="a", batch=PackedGroups.of(received.groups, shape))
            del received
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        taken = w.share(work, exchange)
        assert isinstance(taken, w.TrainOn)
        batch, _ = batch_of(trainer, state, taken.batch)
        ended = time.perf_counter()
        runs.append((ended - began, time.process_time() - used, ended - requested))
        n_tokens, message = batch.token_ids.numel(), len(w._encode(taken))
        del batch, taken, work
    if controller:
        controller.close()
    held = 8 + (0 if shape is None else shape.n_bytes)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak
    found.put((rank, *map(min, zip(*runs, strict=True)), message + (n_tokens * held if rank else 0), int(peak[1])))
    dist.barrier()


def over_ranks(world: int, batch: m.Batch, shape: RouteShape | None, tokens: int) -> dict[str, float]:
    """Of a token of the batch: ns until the last rank has its batch, of the processor on the slowest rank, and bytes
    that reach a rank other than 0, the mean. Then ``assembled`` and ``GiB``."""
    context = mp.get_context("spawn")
    found = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    control = control_port(batch)
    ranks = [context.Process(target=on_rank, args=(rank, world, port, control, shape, found)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    rows = [found.get(timeout=600.0) for _ in ranks]
    for rank in ranks:
        rank.join()
    _, wall_s, used_s, assembled_s, nbytes, peak_kib = zip(*sorted(rows), strict=True)
    return {
        "ns": 1e9 * max(wall_s) / tokens,
        "ns_cpu": 1e9 * max(used_s) / tokens,
        "bytes": sum(nbytes[1:]) / (world - 1) / tokens,
        "assembled_s": max(assembled_s),
        "gib": peak_kib[0] / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e6, help="answer tokens, about")
    parser.add_argument("--length", type=int, default=4096, help="of an answer")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="numbers of ranks to measure over gloo")
    parser.add_argument("--routes", type=int, nargs=2, help="layers with experts, experts of a token")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    n_groups = max(1, round(chosen.tokens / (N_SAMPLES * chosen.length)))
    tokens = n_groups * N_SAMPLES * (chosen.length + PROMPT)
    figures = {}
    shape = RouteShape(*chosen.routes, experts=128) if chosen.routes else None
    bodies = [body(rng, chosen.length, shape) for _ in range(n_groups)]
    table = Table("stage", "ns a token", "bytes a token", "peak", title=f"{tokens:,} tokens")
    for name, stage in stages(bodies, shape):
        row = {"ns": 1e9 * stage.seconds / tokens, "bytes": stage.held / tokens, "peak": stage.peak / tokens}
        table.add_row(name, *(f"{x:,.1f}" for x in row.values()))
        figures |= {f"{name}_{key}": round(x, 2) for key, x in row.items()}
    figures["controller_tokens_s"] = 1e9 / sum(figures[f"{name}_ns"] for name in CONTROLLER)
    figures["peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    Console(width=120).print(table)
    columns = ("ranks", "ns a token", "ns of the processor", "bytes a token and rank", "assembled", "GiB")
    table = Table(*columns, title=f"{tokens:,} tokens, controller {figures['controller_tokens_s']:,.0f} tokens/s")
    batch = replied(episodes(answers(bodies)))
    del bodies
    for world in chosen.ranks:
        row = over_ranks(world, batch, shape, tokens)
        table.add_row(str(world), *(f"{x:,.2f}" for x in row.values()))
        figures |= {f"ranks_{world}_{key}": round(x, 2) for key, x in row.items()}
    if chosen.ranks:
        Console(width=120).print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
