"""Small states, and two trainer ranks as threads of one process."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from areal_lora.checkpoint.checkpoint_store import CheckpointStore, Snapshot
from areal_lora.checkpoint.state import PARTS, AdapterState, Clock, Disk, Evaluation, Manifest, RankRandom
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, AdapterSpec

SPEC = AdapterSpec(name="math", base_model="m", rank=2, alpha=4.0, target_modules=("linear_qkv", "linear_fc1"))
WORLD = 2
COMPANION = 10  # added to a rank for what its companion holds
R = TypeVar("R")


class ThreadExchange:
    """Collective over threads; ``Exchange`` without processes."""

    def __init__(self, rank: int, world: int, shared: dict[str, Any]) -> None:
        self.rank, self._world, self._shared = rank, world, shared

    @staticmethod
    def make(world: int) -> list[ThreadExchange]:
        shared: dict[str, Any] = {"barrier": threading.Barrier(world, timeout=100.0), "slots": [b""] * world}
        return [ThreadExchange(rank, world, shared) for rank in range(world)]

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        self._shared["slots"][self.rank] = data
        self._shared["barrier"].wait()
        slots = list(self._shared["slots"])
        self._shared["barrier"].wait()
        return slots

    def broadcast_bytes(self, data: bytes | None, timeout_s: float | None = None) -> bytes:
        return self.all_gather_bytes(data or b"", timeout_s)[0]

    def scatter(self, part: Callable[[int], np.ndarray], of_ranks: Sequence[int], room: np.ndarray) -> None:
        if self.rank == 0:
            self._shared["parts"] = [part(number) for number in of_ranks]
        self._shared["barrier"].wait()
        if self.rank:
            room[:] = self._shared["parts"][self.rank]
        self._shared["barrier"].wait()


def state_of(version: int, rank: int) -> AdapterState:
    """Random; differs by version and rank. The sizes are odd on purpose."""
    shapes = {f"layers.{rank}.q.lora_A.weight": (2, 7), f"layers.{rank}.q.lora_B.weight": (5, 2)}
    random = np.random.default_rng([version, rank])
    return AdapterState(
        step=3 * version, shapes=shapes, parts={p: random.standard_normal(24).astype(np.float32) for p in PARTS}
    )


def tensors_of(state: AdapterState) -> dict[str, dict[str, np.ndarray]]:
    """Views of the tensors by part, then by wire name."""
    sizes = [math.prod(shape) for shape in state.shapes.values()]
    places = list(zip(state.shapes.items(), itertools.accumulate([0, *sizes]), sizes, strict=False))
    return {
        part: {name: flat[at : at + size].reshape(shape) for (name, shape), at, size in places}
        for part, flat in state.parts.items()
    }


def manifest_of(version: int, evaluations: dict[int, Evaluation] | None = None) -> Manifest:
    return Manifest(
        run="r",
        version=version,
        spec=SPEC,
        base_digest="base",
        layout={"world_size": WORLD},
        clock=Clock(step=3 * version, total_steps=9, lr=0.1, settings={"lr": 0.1, "schedule": "linear"}),
        files=(),
        random=(),
        ledger=b"ledger %d" % version,
        evaluations=evaluations or {},
        written_s=0.0,
    )


def snapshot_of(version: int, rank: int, evaluations: dict[int, Evaluation] | None = None) -> Snapshot:
    return Snapshot(
        ref=AdapterRef(name=SPEC.name, version=version),
        state=state_of(version, rank),
        companions={"critic": state_of(version, COMPANION + rank)},
        random=RankRandom(host=b"random %d" % rank),
        manifest=manifest_of(version, evaluations),
    )


def on_ranks(work: Callable[[int], R], world: int = WORLD) -> list[R | Exception]:
    """``work(rank)`` on threads at once; what each returned or raised."""
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as e:  # noqa: BLE001
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive(), "a rank hangs"
    return results


def stores(run_folder: Path, disks: Sequence[Disk] = (Disk(), Disk())) -> list[CheckpointStore]:
    return [
        CheckpointStore(RunFolder(run_folder), e, disk)
        for e, disk in zip(ThreadExchange.make(WORLD), disks, strict=True)
    ]


def write(
    made: Sequence[CheckpointStore], version: int, evaluations: dict[int, Evaluation] | None = None
) -> list[Exception | None]:
    def write_one(rank: int) -> None:
        assert made[rank].write(snapshot_of(version, rank, evaluations)) > 0

    return on_ranks(write_one)


def written(run_folder: Path, *versions: int) -> None:
    made = stores(run_folder)
    for version in versions:
        assert write(made, version) == [None, None]
