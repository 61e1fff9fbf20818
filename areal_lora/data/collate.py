"""Pack trajectory groups into one batch, check a batch, cut it into micro-batches that compute common starts once.

The answers to one prompt start with the same tokens. A causal model gives these tokens the same activations in
every answer, so one copy serves all of them: a *tree* has a shared start and one branch per sequence::

    sequences          p p p a a      p p p b        (9 tokens)
    tree               p p p | a a | b               (6 tokens)

The plan is pure. Every data-parallel rank computes the same plan and takes its own trees, so all ranks run the same
number of micro-batches of the same sizes, as the collectives inside a layer require.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_lora.data.packed_groups import PackedGroups, check_rewards, part_of, shared_starts
from areal_lora.errors import AlignmentError, StalenessError
from areal_lora.types import ArrayLike, TrainBatch

# fmt: off
PER_SEQUENCE = (
    "shared_starts", "rewards", "group_ids", "sample_ids", "given", "held", "only", "zero_advantage",
    "truncated", "baselines", "components",
)
# fmt: on
OF_HELD = ("token_ids", "rollout_logprobs", "versions", "routes", "old_routes", "kept", "log_mass")
"""Tensors [N] and [H] of a batch; all others but ``cu_seqlens`` are [T]."""
WORTHWHILE = 16  # tokens: a common start costs every layer a pass of attention
HOST = torch.device("cpu")  # named wherever a batch is made: torch's default device may be another one


def collate(packed: PackedGroups, held: npt.NDArray[np.bool_] | None = None) -> TrainBatch:
    """All trajectories, in order, as one batch of N sequences and T tokens. The columns are not copied.

    ``packed`` has those of the sequences ``held`` [N]; None: of all.

    Raises:
        AlignmentError: nothing to train on, entry 0 of a sequence not masked, or different rewards for the
            trajectories of one sample.
    """
    if not (rows := packed.rows):
        raise AlignmentError("a batch without trajectories cannot be trained on")
    check_rewards([(row.group, row) for row in rows])
    samples: dict[tuple[int, int], int] = {}
    for row in rows:
        samples.setdefault((row.group, row.sample), len(samples))
    truncated = {(row.group, row.sample) for row in rows if row.truncated}
    lengths = np.array([row.n_tokens for row in rows])
    cu_seqlens = np.cumsum([0, *lengths])
    versions = packed.runs[:, 0].repeat(packed.runs[:, 1])
    mask = versions >= 0
    for row, at in zip(rows, cu_seqlens.tolist(), strict=False):
        if not row.n_tokens or mask[at]:
            raise AlignmentError(f"trajectory {row.uid}: entry 0 must exist and be masked")
    baselines = [math.nan if row.baseline is None else row.baseline for row in rows]
    names = sorted({name for row in rows for name in row.components})
    components = [[row.components.get(name, math.nan) for name in names] for row in rows]
    return TrainBatch(
        token_ids=torch.from_numpy(packed.columns[0]),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        loss_mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(packed.columns[1].view(np.float32)),
        routes=_routes(packed),
        kept=torch.from_numpy(packed.columns[-packed.most_kept :].T) if packed.most_kept else None,
        log_mass=torch.from_numpy(packed.columns[-packed.most_kept - 1].view(np.float32)) if packed.most_kept else None,
        versions=torch.from_numpy(versions if held is None else part_of(versions, lengths.tolist(), held)),
        shared_starts=host_tensor([row.shared for row in rows], torch.int64),
        rewards=host_tensor([row.reward for row in rows], torch.float32),
        group_ids=host_tensor([row.group for row in rows], torch.int64),
        sample_ids=host_tensor([samples[row.group, row.sample] for row in rows], torch.int64),
        given=host_tensor([row.given for row in rows], torch.bool),
        adapters=tuple(row.adapter for row in rows),
        held=None if held is None else torch.from_numpy(held),
        truncated=host_tensor([(row.group, row.sample) in truncated for row in rows], torch.bool),
        # Of a teacher, which every rank has of all tokens (`next_work.batch_of`).
        ref_logprobs=torch.from_numpy(packed.columns[2].view(np.float32)) if packed.has_teacher else None,
        baselines=None if all(map(math.isnan, baselines)) else host_tensor(baselines, torch.float32),
        components=host_tensor(components, torch.float32) if names else None,
        component_names=tuple(names),
        turn_rewards=None if (turns := packed.turn_rewards) is None else torch.from_numpy(turns),
    )


def _routes(packed: PackedGroups) -> Tensor | None:
    """[H, L, K] int16, -1 where a token has no route."""
    shape, flat = packed.shape, packed.routes
    if shape is None or flat is None:
        return None
    if shape.dtype == "<u1":  # 255 + 1 is 0: half the time of a comparison and a masked store, of gigabytes
        experts = (flat.view("<u1") + np.uint8(1)).astype(np.int16) - np.int16(1)
    else:
        experts = flat.view(shape.dtype).astype(np.int16)  # 65535 becomes -1
    return torch.from_numpy(experts.reshape(-1, shape.layers, shape.per_token))


def contradiction(batch: TrainBatch) -> str:
    """How mask, versions and log-probabilities disagree on the model's own tokens (contract C10); empty if they agree.

    Finds a shift of one of these arrays against the others without any model.
    """
    mask, versions, logprobs = (x.numpy() for x in (batch.loss_mask, batch.versions, batch.rollout_logprobs))
    first = mask[batch.cu_seqlens[:-1].numpy()]
    if batch.held is not None:
        mask = part_of(mask, batch.cu_seqlens.diff().tolist(), batch.held.numpy())
    wrong = {
        "tokens 0 of their sequences are trained on": first,
        "tokens have a version or are trained on, but not both": (versions >= 0) != mask,
        "tokens that are not trained on have a log-probability": (logprobs != 0) > mask,
        "trained tokens have a log-probability that is not finite": np.isfinite(logprobs) < mask,
    }
    found = [f"{np.count_nonzero(tokens)} {what}" for what, tokens in wrong.items() if tokens.any()]
    return f"of {len(mask)} tokens {'; '.join(found)}: per-token arrays are shifted" if found else ""


def host_tensor(values: list[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=HOST)


def select(batch: TrainBatch, sequences: Sequence[int]) -> TrainBatch:
    """The given sequences, in the given order, as a batch of their own; ``held`` is None if all of them are."""
    device, chosen = batch.token_ids.device, np.array(sequences, dtype=np.int64)
    bounds = batch.cu_seqlens.cpu().numpy()
    lengths = bounds[chosen + 1] - bounds[chosen]
    index = own = torch.from_numpy(runs(bounds[chosen], lengths)).to(device)
    rows = torch.from_numpy(chosen).to(device)
    if batch.held is not None:
        held = batch.held.cpu().numpy()
        starts = np.cumsum([0, *(np.diff(bounds) * held)])[chosen]
        own = torch.from_numpy(runs(starts[held[chosen]], lengths[held[chosen]])).to(device)

    picked: dict[str, Any] = {
        f.name: value[rows if f.name in PER_SEQUENCE else own if f.name in OF_HELD else index]
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and f.name != "cu_seqlens"
    }
    picked["shared_starts"] *= torch.from_numpy(np.diff(chosen, prepend=-2) == 1).to(device)
    if "held" in picked and bool(picked["held"].all()):
        picked["held"] = None
    cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths.tolist()])).to(device)
    adapters = tuple(batch.adapters[i] for i in sequences)
    return replace(batch, cu_seqlens=cu_seqlens, adapters=adapters, **picked)


def runs(first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers ``first[i], first[i] + 1, ...``, ``counts[i]`` of them for each i, one run after the other."""
    ends = counts.cumsum()
    numbers: npt.NDArray[np.int64] = np.arange(counts.sum()) + (first - ends + counts).repeat(counts)
    return numbers


def split_minibatches(batch: TrainBatch, n: int) -> list[TrainBatch]:
    """Cut a batch into ``n`` parts of whole sequences, sizes differing by at most one; empty parts are omitted."""
    if n == 1:
        return [batch]
    total = batch.n_sequences
    cuts = [total * i // n for i in range(n + 1)]
    return [select(batch, range(a, b)) for a, b in pairwise(cuts) if b > a]


def assert_staleness(runs: npt.NDArray[np.int32], version: int, max_staleness: int) -> dict[int, int]:
    """Check contract C7 at consumption of tokens with the versions ``runs`` [R, 2] (`types.TokenColumns`).

    Returns the number of trained tokens by age in versions.

    Raises:
        StalenessError: a trained token is older than the budget, or from the future.
    """
    sampled = runs[runs[:, 0] >= 0]
    ages, index = np.unique(version - sampled[:, 0], return_inverse=True)
    counts = np.bincount(index, sampled[:, 1])
    histogram = {int(age): int(count) for age, count in zip(ages, counts, strict=True)}
    if histogram and (max(histogram) > max_staleness or min(histogram) < 0):
        raise StalenessError(
            f"batch consumed at version {version} holds tokens {histogram} versions old; "
            f"max_staleness is {max_staleness}"
        )
    return histogram


def scoring_batch(rows: Sequence[ArrayLike], adapter: str) -> TrainBatch:
    """Plain sequences as a batch that is only scored: every token but each first one is on the mask."""
    arrays = [np.array(row, np.int32) for row in rows]
    tokens = torch.from_numpy(np.concatenate(arrays))
    cu_seqlens = torch.from_numpy(np.cumsum([0, *map(len, arrays)]))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    return TrainBatch(
        token_ids=tokens,
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens.numel(), device=HOST),
        versions=torch.where(mask, 0, -1).int(),
        shared_starts=host_tensor(shared_starts(arrays), torch.int64),
        rewards=torch.zeros(len(rows), device=HOST),
        group_ids=torch.zeros(len(rows), dtype=torch.int64, device=HOST),
        sample_ids=torch.arange(len(rows), device=HOST),
        given=torch.zeros(len(rows), dtype=torch.bool, device=HOST),
        adapters=(adapter,) * len(rows),
    )


def split_rows(values: torch.Tensor, cu_seqlens: torch.Tensor) -> list[list[float]]:
    """A packed [T] tensor as one list per sequence."""
    flat = values.tolist()
    return [flat[a:b] for a, b in pairwise(cu_seqlens.tolist())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Sequences whose first ``shared`` tokens are equal. ``shared`` is 0 for a single sequence."""

    sequences: tuple[int, ...]
    shared: int

    def size(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens to compute."""
        return self.shared + sum(lengths[i] - self.shared for i in self.sequences)

    def pairs(self, lengths: Sequence[int]) -> int:
        """Return the number of pairs (query, key at or before it) of causal attention, those of the start once."""
        own = (lengths[i] - self.shared for i in self.sequences)
        return _causal(self.shared) + sum(n * self.shared + _causal(n) for n in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPlan:
    """One micro-batch: ``trees[d]`` are what data-parallel rank d computes. All ranks pad to ``n_tokens``.

    A training pass computes it forward only where no sequence has a ``gradient``.
    """

    trees: tuple[tuple[Tree, ...], ...]
    n_tokens: int
    gradient: bool = True


def find_trees(lengths: Sequence[int], shared_starts: Sequence[int], group_ids: Sequence[int]) -> list[Tree]:
    """Find the common start of each run of sequences of one group; each keeps at least one token of its own.

    All have in common what each has in common with the one before (``shared_starts``).
    """
    trees: list[Tree] = []
    for _, run in groupby(range(len(group_ids)), key=lambda i: group_ids[i]):
        members = tuple(run)
        shared = min([*(lengths[i] - 1 for i in members), *(shared_starts[i] for i in members[1:])])
        if len(members) > 1 and shared:
            trees.append(Tree(sequences=members, shared=shared))
        else:
            trees += [Tree(sequences=(i,), shared=0) for i in members]
    return trees


def groups_of_starts(shared_starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N] numbers of the groups to compute as trees, of sequences with ``shared_starts`` [N] of the one before.

    A group is a run. Its tree saves its least common start times all but one of its sequences; the groups save as much
    as possible together. Starts below `WORTHWHILE` tokens are none.
    """
    n = len(shared_starts)
    saved, first = np.zeros(n + 1, np.int64), np.arange(n)
    opened = least = np.arange(0)  # first sequences of groups that may still grow, and the least start of each
    for last, start in enumerate(np.where(shared_starts < WORTHWHILE, 0, shared_starts).tolist()):
        least = np.minimum(least, start)
        totals = saved[opened] + least * (last - opened)
        grows = totals > saved[last]  # else a group from ``last`` on saves as much from here
        saved[last + 1] = saved[last]
        if grows.any():  # else it is alone; of groups that save as much the shortest
            saved[last + 1], first[last] = totals.max(), opened[::-1][totals[::-1].argmax()]
        opened, least = np.append(opened[grows], last), np.append(least[grows], np.iinfo(np.int64).max)
    starts, end = np.zeros(n, np.int64), n
    while end:
        end = first[end - 1]
        starts[end] = 1
    return starts.cumsum() - 1


def plan_microbatches(
    trees: Sequence[Tree],
    lengths: Sequence[int],
    *,
    dp: int,
    token_budget: int,
    multiple: int = 1,
    uniform: bool = False,
    rounds: int = 1,
    only: Sequence[bool] | None = None,
) -> list[MicroPlan]:
    """Distribute the trees over micro-batches and data-parallel ranks, so that ranks wait little for each other.

    In a micro-batch every rank computes ``n_tokens``, padding included, and the attention of its own trees; ranks meet
    in its layers. So its ranks need equal numbers of tokens (`_balance`), and equal numbers of attention's pairs: the
    parts with most pairs meet in one micro-batch. Over the micro-batches each rank gets equal sums of pairs.

    A micro-batch has at most ``token_budget`` tokens per rank; a tree that is larger than an equal share is split,
    and its parts repeat the shared start. A single sequence beyond the budget gets a micro-batch of its own. Sizes
    are rounded up to ``multiple`` (sequence parallelism splits the tokens). ``uniform`` gives every micro-batch the
    same size (pipeline stages pre-allocate), and their number is a multiple of ``rounds`` (virtual stages take turns):
    the last ones may be padding only. Every sequence is computed exactly once; with ``only`` [N], micro-batches without
    any of these are omitted.
    """
    total = sum(tree.size(lengths) for tree in trees)
    count = -(-total // (dp * token_budget * rounds)) * rounds or rounds
    sizes, shared = (np.array(x, np.int64) for x in ([tree.size(lengths) for tree in trees], [t.shared for t in trees]))
    alone, limits = np.array([len(tree.sequences) == 1 for tree in trees], np.bool_), np.zeros_like(sizes)
    cut, loads = list[list[Tree]]([[]] * len(trees)), list[int]()
    while True:
        share = max(1, -(-total // (dp * count)))
        before, pieces = limits, -(-sizes // share)
        limits = np.minimum(token_budget, shared - (shared - sizes) // pieces)
        limits = np.where(alone | (sizes <= min(share, token_budget)), sizes, limits)
        if len(changed := np.flatnonzero(limits != before)):  # of few trees from one count to the next
            for i in changed.tolist():
                cut[i] = _split(trees[i], lengths, int(limits[i]))
            loads = sorted((part.size(lengths) for parts in cut for part in parts), reverse=True)
        if _fits(loads, dp * count, token_budget):
            break
        count += rounds
    bins = _balance([part for parts in cut for part in parts], lengths, dp * count)
    bins.sort(key=lambda held: -_pairs(held, lengths))
    plans, done = [], [0] * dp
    for at in range(0, len(bins), dp):
        # The rank with least so far gets the most.
        by_rank = dict(zip(sorted(range(dp), key=done.__getitem__), bins[at : at + dp], strict=True))
        held = [by_rank[d] for d in range(dp)]
        done = [total + _pairs(part, lengths) for total, part in zip(done, held, strict=True)]
        if largest := max(_load(part, lengths) for part in held):
            rounded = -(-largest // multiple) * multiple
            plans.append(MicroPlan(trees=tuple(map(tuple, held)), n_tokens=rounded))
    if only is not None:
        plans = [p for p in plans if any(only[i] for trees in p.trees for tree in trees for i in tree.sequences)]
    if uniform:
        frame = max((plan.n_tokens for plan in plans), default=0)
        plans = [MicroPlan(trees=plan.trees, n_tokens=frame) for plan in plans]
        plans += [MicroPlan(trees=((),) * dp, n_tokens=frame)] * (-len(plans) % rounds)
    return plans


def _split(tree: Tree, lengths: Sequence[int], limit: int) -> list[Tree]:
    """Cut a tree of more than ``limit`` tokens into parts of at most these, which repeat the shared start."""
    if tree.size(lengths) <= limit:
        return [tree]
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


def _fits(loads: Sequence[int], n: int, token_budget: int) -> bool:
    """Whether `_balance` puts parts of ``loads`` tokens, largest first, into ``n`` bins of the budget each.

    A part beyond the budget cannot be cut further, and may be alone.
    """
    heap = [*reversed(loads[:n])]  # in order: a heap
    return all(heap[0] + load <= token_budget and heapq.heapreplace(heap, heap[0] + load) for load in loads[n:])


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


def _pairs(trees: Sequence[Tree], lengths: Sequence[int]) -> int:
    return sum(tree.pairs(lengths) for tree in trees)


def _causal(n: int) -> int:
    return n * (n + 1) // 2
