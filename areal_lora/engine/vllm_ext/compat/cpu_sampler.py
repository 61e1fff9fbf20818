"""Draw tokens on a CPU as vLLM does, with fewer tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

AHEAD = 32  # numbers of a generator that are drawn at once
HERE = 3  # references to a generator that nothing but its stream holds, while they are counted


class Numbers:
    """The numbers that rows with a generator of their own take, one a step.

    vLLM draws each through a tensor of its own. A generator gives the same numbers one by one and many at once.
    """

    def __init__(self) -> None:
        self._streams: dict[int, tuple[torch.Generator, Iterator[int]]] = {}  # by id, which the generator here keeps

    def take(self, generators: Mapping[int, torch.Generator]) -> list[int]:
        """The next number of each, in their order. Generators that no request holds any more are forgotten."""
        taken = []
        for generator in generators.values():
            known = self._streams.get(id(generator))
            if known is None:
                known = self._streams[id(generator)] = generator, _stream(generator)
            taken.append(next(known[1]))
        if len(self._streams) > 2 * len(generators) + AHEAD:
            # Held by a stream and its tuple, and here by a name and an argument. A preempted request has its own.
            self._streams = {i: known for i, known in self._streams.items() if sys.getrefcount(known[0]) > HERE}
        return taken


def _stream(generator: torch.Generator) -> Iterator[int]:
    drawn = torch.empty(AHEAD, dtype=torch.int64)
    while True:
        yield from drawn.random_(0, 2**31, generator=generator).tolist()


class CpuDraw:
    """vLLM's ``forward_cpu``; one object for a sampler."""

    def __init__(self) -> None:
        self._numbers = Numbers()

    def __call__(
        self, logits: torch.Tensor, generators: Mapping[int, torch.Generator], k: Any, p: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the tokens that vLLM draws from ``logits`` [B, V], and return log-probabilities [B, V].

        ``generators`` are by row. Nothing else may take numbers from them.
        """
        logits = apply_top_k_top_p(logits, k, p).float()
        seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long)
        if generators:
            seeds.numpy()[list(generators)] = self._numbers.take(generators)
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), logits.log_softmax(dim=-1)
