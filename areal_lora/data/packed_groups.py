"""A step's groups as they travel between trainer ranks: a row per trajectory, and the columns of each rank's part.

And checks of trajectories before that (contract C10). No torch: the rollout controller uses them.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import msgspec
import numpy as np

from areal_lora.errors import AlignmentError
from areal_lora.types import RouteShape, Trajectory, TrajectoryGroup


class TrajectoryRow(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory of group number ``group``, without its columns of ``n_tokens`` tokens.

    Its first ``shared`` tokens are those of the trajectory before it.
    """

    uid: str
    n_tokens: int
    shared: int
    group: int
    sample: int
    reward: float
    given: bool
    adapter: str
    baseline: float | None
    components: dict[str, float] = {}
    truncated: bool = False
    turn_rewards: tuple[tuple[int, float], ...] = ()


class PackedGroups(msgspec.Struct, frozen=True, eq=False):
    """Trajectories with R runs of versions in all (`types.TokenColumns`), and the columns of those that a rank holds.

    ``columns`` are token ids and log-probabilities (the bits of float32), and those of a teacher if it has scored any
    trajectory; others, which are given, have their own there. Where a truncated distribution sampled any token, the
    last are ``log_mass`` and ``most_kept`` for the ids kept, after which -1 follows. ``routes`` are the experts of the
    tokens, if ``shape`` is that of their routes. A message has the number of columns alone.
    """

    rows: list[TrajectoryRow]
    versions: bytes  # [R, 2] int32
    columns: np.ndarray  # [C, H] int32
    shape: RouteShape | None = None
    routes: np.ndarray | None = None  # [H] of ``shape.n_bytes`` bytes
    most_kept: int = 0

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup], shape: RouteShape | None = None) -> "PackedGroups":
        """Raises AlignmentError for routes that are not of ``shape``, or a token that is not among its kept ids."""
        each = [(g, group, t) for g, group in enumerate(groups) for t in group.trajectories]
        columns = [t.columns for _, _, t in each]
        kept = _kept([t for _, _, t in each])
        texts = [c.ids for c in columns]  # what equal tokens have in common: their ids, and those kept for them
        if kept is not None:
            ends = pairwise(accumulate(map(len, texts), initial=0))
            texts = [np.column_stack([own, kept[a:b]]) for own, (a, b) in zip(texts, ends, strict=True)]
        rows = [
            TrajectoryRow(
                uid=t.uid,
                n_tokens=len(t.columns),
                shared=shared,
                group=g,
                sample=t.sample,
                reward=t.reward,
                given=t.given,
                adapter=t.adapter.name,
                baseline=group.baseline,
                components=t.components,
                truncated=t.truncated,
                turn_rewards=t.turn_rewards,
            )
            for (g, group, t), shared in zip(each, shared_starts(texts), strict=True)
        ]
        parts = [[c.token_ids for c in columns], [c.logprobs for c in columns]]
        if any(c.teacher for c in columns):
            parts.append([c.teacher or c.logprobs for c in columns])
        if kept is not None:
            parts.append([c.masses.tobytes() for c in columns])
        flat = np.frombuffer(bytearray().join(chain(*parts)), "<i4").reshape(len(parts), -1)
        if kept is not None:
            flat = np.concatenate([flat, kept.T])
        routes = None if shape is None else _routes([t for _, _, t in each], shape)
        versions = b"".join([c.versions for c in columns])
        return cls(rows, versions, flat, shape, routes, 0 if kept is None else kept.shape[1])

    @property
    def has_teacher(self) -> bool:
        return len(self.columns) > 2 + (1 + self.most_kept if self.most_kept else 0)

    @property
    def runs(self) -> np.ndarray:  # [R, 2] int32
        return np.frombuffer(self.versions, "<i4").reshape(-1, 2)

    @property
    def turn_rewards(self) -> np.ndarray | None:  # [T] float32
        if not any(row.turn_rewards for row in self.rows):
            return None
        starts = [*accumulate((row.n_tokens for row in self.rows), initial=0)]
        found = np.zeros(starts[-1], np.float32)
        for row, start in zip(self.rows, starts, strict=False):
            for at, reward in row.turn_rewards:
                found[start + at] += reward
        return found

    def part(self, held: np.ndarray) -> np.ndarray:
        """A copy of the columns [C, H] of the trajectories ``held`` [N] alone, of the columns of all."""
        return part_of(self.columns, [row.n_tokens for row in self.rows], held)

    def routes_of(self, held: np.ndarray) -> np.ndarray:
        """A copy of the routes [H, n_bytes] uint8 of the trajectories ``held`` [N] alone, of the routes of all."""
        assert self.routes is not None
        part = part_of(self.routes, [row.n_tokens for row in self.rows], held)
        return part.view("<u1").reshape(-1, self.routes.itemsize)


def _routes(trajectories: Sequence[Trajectory], shape: RouteShape) -> np.ndarray:
    """[T] of all trajectories. Tokens without a route have bytes 255. Raises AlignmentError."""
    parts = []
    for t in trajectories:
        found, n_bytes = t.columns.routes, shape.n_bytes * len(t.columns)
        if found and len(found) != n_bytes:
            raise AlignmentError(f"trajectory {t.uid}: {len(found)} bytes of routes, {n_bytes} for {shape}")
        parts.append(found or b"\xff" * n_bytes)
    return np.frombuffer(bytearray().join(parts), f"V{shape.n_bytes}")


def _kept(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """[T, most] int32 of all trajectories: kept ids of each token, then -1; None without any. Raises AlignmentError."""
    counts = [t.columns.kept_counts for t in trajectories]
    most = max([int(each.max(initial=0)) for each in counts], default=0)
    if not most:
        return None
    found = np.full((sum(map(len, counts)), most), -1, "<i4")
    found[np.arange(most) < np.concatenate(counts)[:, None]] = np.concatenate(
        [np.frombuffer(t.columns.kept, "<i4") for t in trajectories]
    )
    at = 0
    for t, each in zip(trajectories, counts, strict=True):
        missing = (found[at : at + len(each)] != t.columns.ids[:, None]).all(axis=1) & (each > 0)
        at += len(each)
        if missing.any():
            raise AlignmentError(f"trajectory {t.uid}: {missing.sum()} tokens are not among the ids kept for them")
    return found


def part_of(flat: np.ndarray, lengths: Sequence[int], held: np.ndarray) -> np.ndarray:
    """A copy of ``flat`` [..., T] of the sequences ``held`` [N] alone."""
    bounds = pairwise(accumulate(lengths, initial=0))
    chosen = [flat[..., a:b] for (a, b), own in zip(bounds, held.tolist(), strict=True) if own]
    return np.concatenate([flat[..., :0], *chosen], axis=-1)


def shared_starts(rows: Sequence[np.ndarray]) -> list[int]:
    """How many tokens [..., T or T, n] each of ``rows`` has in common with the start of the one before."""
    found = [0] * len(rows)
    for i, (before, row) in enumerate(pairwise(rows), 1):
        n = min(len(before), len(row))
        differs = before[:n] != row[:n]
        differs = differs if differs.ndim == 1 else differs.any(axis=1)
        found[i] = int(differs.argmax()) if differs.any() else n
    return found


def check_alignment(trajectory: Trajectory) -> None:
    """Check contract C10 for one trajectory: nothing predicts token 0, turns end within. Raises AlignmentError."""
    if not len(trajectory.columns) or trajectory.columns.runs[0, 0] >= 0:
        raise AlignmentError(f"trajectory {trajectory.uid}: entry 0 must exist and be masked")
    if any(not 0 <= at < len(trajectory.columns) for at, _ in trajectory.turn_rewards):
        raise AlignmentError(f"trajectory {trajectory.uid}: a turn with a reward ends beyond its last token")


def check_rewards(rows: Sequence[tuple[int, Trajectory | TrajectoryRow]]) -> None:
    """Check that trajectories of one sample have one reward; ``rows`` are pairs (group number, trajectory).

    Raises AlignmentError.
    """
    rewards: dict[tuple[int, int], float] = {}
    for g, trajectory in rows:
        if rewards.setdefault((g, trajectory.sample), trajectory.reward) != trajectory.reward:
            raise AlignmentError(
                f"trajectory {trajectory.uid}: reward {trajectory.reward}, another one of its sample has "
                f"{rewards[g, trajectory.sample]}"
            )
