"""Cases of the GPU suite that are the same on every device; ``tests/process/test_gpu_cases.py`` runs them on CPUs."""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch

import tests.support.weight_sync  # registers the backend of sockets  # noqa: F401
from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common.adapter_memory import AdapterMemory, Packer
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.errors import PublishError
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.broadcast_groups import GroupListener
from areal_lora.weight_sync.link.inbox import BucketBytes, Part
from areal_lora.weight_sync.link.same_host import SharedSegment
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.engine.vllm_ext.slots import Full, install, layout_of
from tests.support.gpu.receiver import SECRET, receive
from tests.support.lazy import Lazy
from tests.support.weight_sync.helpers import KEYS, ref
from tests.support.weight_sync.launches import launches

weights = Lazy("areal_lora.engine.vllm_ext.compat.weights")
lora_install = Lazy("areal_lora.engine.vllm_ext.worker.lora_install")

CPU = torch.device("cpu")


def expert_spec(rank: int) -> AdapterSpec:
    return AdapterSpec(
        name="a", base_model="m", rank=rank, alpha=2 * rank, target_modules=("expert.linear_fc1", "expert.linear_fc2")
    )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Expert layers of a served model; the defaults are six layers of Qwen3-30B-A3B at rank 32."""

    layers: int = 6
    experts: int = 128
    hidden: int = 2048
    ffn: int = 768
    rank: int = 32
    slots: int = 3

    def writer(
        self, device: torch.device, on_device: bool | None = None
    ) -> tuple[lora_install.StackedSlotWriter, list[torch.Tensor]]:
        """A writer over bfloat16 stacks of ones, and the stacks."""
        matrices, stacks = [], []
        for layer in range(self.layers):
            for name, n_in, n_out in (
                ("gate", self.hidden, self.ffn),
                ("up", self.hidden, self.ffn),
                ("down", self.ffn, self.hidden),
            ):
                a = torch.ones(self.slots, self.experts, self.rank, n_in, dtype=torch.bfloat16, device=device)
                b = torch.ones(self.slots, self.experts, n_out, self.rank, dtype=torch.bfloat16, device=device)
                stacks += [a, b]
                for e in range(self.experts):
                    module = f"model.layers.{layer}.mlp.experts.{e}.{name}_proj"
                    for suffix, stacked, full in ((".lora_A.weight", a, n_in), (".lora_B.weight", b, n_out)):
                        matrices.append(
                            weights.Matrix(name=module + suffix, stacked=stacked, index=e, start=0, full=full)
                        )
        return lora_install.StackedSlotWriter(matrices, self.rank, on_device=on_device), stacks

    def adapter(self, writer: lora_install.StackedSlotWriter, seed: int) -> tuple[Full, AdapterLayout]:
        spec, rng = expert_spec(self.rank), np.random.default_rng(seed)
        full = {n: rng.standard_normal(shape, dtype=np.float32) for n, shape in writer.expected(spec).items()}
        return full, layout_of(full, spec, "bfloat16")


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Bytes in which two tensors differ."""
    flat = [t.contiguous().cpu().reshape(-1).view(torch.uint8) for t in (left, right)]
    return int((flat[0] != flat[1]).sum())


def write_slot(device: torch.device, experts: Experts, repeats: int = 5) -> dict[str, float]:
    """Write one adapter into slot 1 as views on ``device`` and by the loops of the CPU.

    Differing bytes and fingerprints; launches and speed for a bucket that holds the whole version.
    """
    (ours, stacks), (reference, plain) = experts.writer(device, True), experts.writer(CPU)
    full, layout = experts.adapter(ours, seed=1)
    found, known = (install(writer, 1, layout, full) for writer in (ours, reference))
    wrong = sum(differing(a, b) for a, b in zip(stacks, plain, strict=True))
    changed = int((found.sums != known.sums).sum())
    bucket = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    (plan,) = ours.plan(layout)

    def write() -> None:
        ours.write(plan, 1, BucketBytes(bucket, 0), 0, len(found.sums), found)
        ours.flush(1)

    times, counted = [], launches(write)
    for _ in range(repeats):
        began = time.perf_counter()
        write()
        times.append(time.perf_counter() - began)
    return {
        "differing_bytes": wrong,
        "differing_fingerprints": changed,
        "launches": counted,
        "version_mb": layout.nbytes / 1e6,
        "gb_per_s": layout.nbytes / min(times) / 1e9,
    }


def pack(device: torch.device, hf: dict[str, Any], rank: int) -> dict[str, float]:
    """Pack the same adapter as views on ``device`` and by the loops of the CPU, for both wire types."""
    shape = ModelShape.from_hf(hf)
    layout = ParallelLayout.of(TrainerConfig(world_size=1), layers=shape.layers, experts=shape.experts)
    spec = AdapterSpec(
        name="a",
        base_model="m",
        rank=rank,
        alpha=rank,
        target_modules=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    )
    model = ShardedModel(shape=shape, layout=layout)
    plain, ours = (AdapterMemory(model, spec, 0, where) for where in (CPU, device))
    plain.weights.normal_(generator=torch.Generator().manual_seed(2))
    ours.weights.copy_(plain.weights)
    wrong, nbytes, took = 0, 0, 0.0
    for dtype in ("float32", "bfloat16"):
        shards = []
        for memory, strided, where in ((plain, False, CPU), (ours, True, device)):
            packer = Packer(memory, memory.layout(dtype), strided=strided)
            shard = PackedShard(memory.layout(dtype), 0, KEYS, where, strided=strided)
            shards.append(shard)
            for _ in range(2):  # plans and memory are made once
                shard.reset()
                began = time.perf_counter()
                shard.pack(ref(0), lambda flat: packer.fill(memory.weights, flat, {}))  # noqa: B023
                took = time.perf_counter() - began
        wrong += differing(shards[0].flat, shards[1].flat) + int((shards[0].sums != shards[1].sums).sum())
        nbytes += shards[0].shard.nbytes
    return {"differing_bytes": wrong, "bytes": nbytes, "seconds_bfloat16": took}


# ------------------------------------------------------------------ a publish between two processes on one device


def parts_of(nbytes: int, bucket: int) -> list[Part]:
    return [(a, min(a + bucket, nbytes)) for a in range(0, nbytes, bucket)]


class Pair:
    """This process as the source, another as the receiver, both on ``device``."""

    def __init__(
        self,
        device: torch.device,
        backend: str,
        nbytes: int,
        bucket: int,
        timeout_s: float,
        context: BaseContext | None = None,
    ) -> None:
        self.parts, self.timeout_s = parts_of(nbytes, bucket), timeout_s
        self.segment, self._device = SharedSegment(nbytes, device), device
        self._listener = GroupListener(
            source=0,
            bind="127.0.0.1",
            receivers=["a worker"],
            bucket_bytes=bucket,
            backend=backend,
            timeout_s=timeout_s,
            secret=SECRET,
            device=device,
        )
        context = context or mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.receiver = context.Process(
            target=receive, args=(theirs, self._listener.endpoint, str(device), self.parts, timeout_s), daemon=True
        )
        self.receiver.start()

    def meet(self) -> None:
        """Raises PublishError if the two do not meet in time."""
        self.group = self._listener.accept()
        answer = self.pipe.recv() if self.pipe.poll(self.timeout_s) else "no answer"
        if answer != "joined":
            raise PublishError(answer)

    def send(self, seed: int) -> str:
        """Send one version; returns the digest of what was sent. Raises PublishError."""
        rng = np.random.default_rng(seed)
        self.segment.bytes[:] = rng.integers(0, 256, self.segment.bytes.size, dtype=np.uint8)
        self.pipe.send("receive")
        assert self.pipe.poll(self.timeout_s), "the receiver does not answer"
        assert self.pipe.recv() == "posted"
        return hashlib.blake2b(self._broadcast(time.monotonic() + self.timeout_s)).hexdigest()

    def _broadcast(self, deadline: float) -> bytes:
        flat = torch.from_numpy(self.segment.bytes).to(self._device)  # on a device as a packed shard
        transfers = [self.group.start(flat[a:b], deadline) for a, b in self.parts]
        for transfer in transfers:
            transfer.wait()
        return self.segment.bytes.tobytes()

    def fail(self, timeout_s: float) -> float:
        """Seconds until a send to a receiver that is gone or stopped raises PublishError."""
        began = time.monotonic()
        try:
            for _ in range(100):  # small versions may still fit into the sockets' buffers
                self._broadcast(began + timeout_s)
        except PublishError:
            return time.monotonic() - began
        raise AssertionError("the send did not fail")

    def close(self) -> None:
        self._listener.close()
        self.receiver.kill()
        self.receiver.join()


def modules_with_stacks(
    n: int, width: int, rank: int, device: torch.device
) -> Iterator[tuple[weights.Matrix, torch.Tensor]]:
    """o_proj of ``n`` layers with two slots, bfloat16."""
    for layer in range(n):
        for suffix, shape in ((".lora_A.weight", (2, 1, rank, width)), (".lora_B.weight", (2, 1, width, rank))):
            stack = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            name = f"model.layers.{layer}.self_attn.o_proj{suffix}"
            yield weights.Matrix(name=name, stacked=stack, index=0, start=0, full=width), stack
