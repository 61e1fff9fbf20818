"""Cut a packed batch into micro-batches that compute each common start of sequences once.

The answers to one prompt start with the same tokens. A causal model gives these tokens the same activations in
every answer, so one copy serves all of them: a *tree* has a shared start and one branch per sequence::

    sequences          p p p a a      p p p b        (9 tokens)
    tree               p p p | a a | b               (6 tokens)

The plan is pure. Every data-parallel rank computes the same plan and takes its own trees, so all ranks run the same
number of micro-batches of the same sizes, as the collectives inside a layer require.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Sequences whose first ``shared`` tokens are equal. ``shared`` is 0 for a single sequence."""

    sequences: tuple[int, ...]
    shared: int

    def size(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens to compute."""
        return self.shared + sum(lengths[i] - self.shared for i in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPlan:
    """One micro-batch: ``trees[d]`` are what data-parallel rank d computes. All ranks pad to ``n_tokens``."""

    trees: tuple[tuple[Tree, ...], ...]
    n_tokens: int


def find_trees(token_ids: npt.NDArray[np.int64], bounds: Sequence[int], group_ids: Sequence[int]) -> list[Tree]:
    """Find the common start of each run of sequences of one group.

    ``token_ids`` [T] are packed, sequence i is ``bounds[i]:bounds[i + 1]``, ``group_ids`` has N entries. Every
    sequence keeps at least one token of its own.
    """
    trees: list[Tree] = []
    for _, run in groupby(range(len(group_ids)), key=lambda i: group_ids[i]):
        members = tuple(run)
        shortest = min(bounds[i + 1] - bounds[i] for i in members)
        starts = np.stack([token_ids[bounds[i] : bounds[i] + shortest - 1] for i in members])
        differs = (starts != starts[0]).any(axis=0)
        shared = int(differs.argmax()) if differs.any() else shortest - 1
        if len(members) > 1 and shared:
            trees.append(Tree(sequences=members, shared=shared))
        else:
            trees += [Tree(sequences=(i,), shared=0) for i in members]
    return trees


def plan_microbatches(
    trees: Sequence[Tree],
    lengths: Sequence[int],
    *,
    dp: int,
    token_budget: int,
    multiple: int = 1,
    uniform: bool = False,
) -> list[MicroPlan]:
    """Distribute the trees over micro-batches and data-parallel ranks, with equal numbers of tokens where possible.

    A micro-batch has at most ``token_budget`` tokens per rank; a tree that is larger than an equal share is split,
    and its parts repeat the shared start. A single sequence beyond the budget gets a micro-batch of its own. Sizes
    are rounded up to ``multiple`` (sequence parallelism splits the tokens). ``uniform`` gives every micro-batch the
    same size (pipeline stages pre-allocate). Every sequence is computed exactly once.
    """
    total = sum(tree.size(lengths) for tree in trees)
    count = max(1, -(-total // (dp * token_budget)))
    while True:
        share = max(1, -(-total // (dp * count)))
        parts = [part for tree in trees for part in _split(tree, lengths, share, token_budget)]
        bins = _balance(parts, lengths, dp * count)
        # A lone part beyond the budget cannot be cut further.
        if count >= len(parts) or all(len(held) < 2 or _load(held, lengths) <= token_budget for held in bins):
            break
        count += 1
    bins.sort(key=lambda held: -_load(held, lengths))
    plans = []
    for at in range(0, len(bins), dp):
        held = bins[at : at + dp]
        if largest := max(_load(part, lengths) for part in held):
            plans.append(MicroPlan(trees=tuple(tuple(b) for b in held), n_tokens=_round_up(largest, multiple)))
    if uniform:
        frame = max((plan.n_tokens for plan in plans), default=0)
        plans = [MicroPlan(trees=plan.trees, n_tokens=frame) for plan in plans]
    return plans


def _split(tree: Tree, lengths: Sequence[int], share: int, token_budget: int) -> list[Tree]:
    """Cut a tree that is larger than ``share`` or the budget into equal parts, which repeat the shared start."""
    size = tree.size(lengths)
    if size <= min(share, token_budget) or len(tree.sequences) == 1:
        return [tree]
    pieces = -(-size // share)
    limit = min(token_budget, tree.shared - (tree.shared - size) // pieces)
    parts: list[list[int]] = []
    used = 0
    for i in sorted(tree.sequences, key=lambda i: (-lengths[i], i)):
        own = lengths[i] - tree.shared
        if not parts or used + own > limit:
            parts.append([])
            used = tree.shared
        parts[-1].append(i)
        used += own
    return [Tree(sequences=tuple(part), shared=tree.shared if len(part) > 1 else 0) for part in parts]


def _balance(parts: Sequence[Tree], lengths: Sequence[int], n: int) -> list[list[Tree]]:
    """Give each part, largest first, to the bin with the fewest tokens (Graham's LPT rule)."""
    bins: list[list[Tree]] = [[] for _ in range(n)]
    heap = [(0, b) for b in range(n)]
    for part in sorted(parts, key=lambda part: (-part.size(lengths), part.sequences)):
        load, b = heapq.heappop(heap)
        bins[b].append(part)
        heapq.heappush(heap, (load + part.size(lengths), b))
    return bins


def _load(trees: Sequence[Tree], lengths: Sequence[int]) -> int:
    return sum(tree.size(lengths) for tree in trees)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
