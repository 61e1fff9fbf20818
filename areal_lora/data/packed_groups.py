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


class PackedGroups(msgspec.Struct, frozen=True, eq=False):
    """Trajectories with R runs of versions in all (`types.TokenColumns`), and the columns of those that a rank holds.

    ``columns`` are token ids and log-probabilities (the bits of float32), and those of a teacher if it has scored any
    trajectory; others, which are given, have their own there. ``routes`` are the experts of the tokens, if ``shape`` is
    that of their routes. A message has the number of columns alone.
    """

    rows: list[TrajectoryRow]
    versions: bytes  # [R, 2] int32
    columns: np.ndarray  # [C, H] int32
    shape: RouteShape | None = None
    routes: np.ndarray | None = None  # [H] of ``shape.n_bytes`` bytes

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup], shape: RouteShape | None = None) -> "PackedGroups":
        """Raises AlignmentError for routes that are not of ``shape``."""
        each = [(g, group, t) for g, group in enumerate(groups) for t in group.trajectories]
        columns = [t.columns for _, _, t in each]
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
            )
            for (g, group, t), shared in zip(each, shared_starts([c.ids for c in columns]), strict=True)
        ]
        parts = [[c.token_ids for c in columns], [c.logprobs for c in columns]]
        if any(c.teacher for c in columns):
            parts.append([c.teacher or c.logprobs for c in columns])
        flat = np.frombuffer(bytearray().join(chain(*parts)), "<i4").reshape(len(parts), -1)
        routes = None if shape is None else _routes([t for _, _, t in each], shape)
        return cls(rows, b"".join([c.versions for c in columns]), flat, shape, routes)

    @property
    def runs(self) -> np.ndarray:  # [R, 2] int32
        return np.frombuffer(self.versions, "<i4").reshape(-1, 2)

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


def part_of(flat: np.ndarray, lengths: Sequence[int], held: np.ndarray) -> np.ndarray:
    """A copy of ``flat`` [..., T] of the sequences ``held`` [N] alone."""
    bounds = pairwise(accumulate(lengths, initial=0))
    chosen = [flat[..., a:b] for (a, b), own in zip(bounds, held.tolist(), strict=True) if own]
    return np.concatenate([flat[..., :0], *chosen], axis=-1)


def shared_starts(rows: Sequence[np.ndarray]) -> list[int]:
    """How many tokens each of ``rows`` has in common with the start of the one before."""
    found = [0] * len(rows)
    for i, (before, row) in enumerate(pairwise(rows), 1):
        n = min(len(before), len(row))
        differs = before[:n] != row[:n]
        found[i] = int(differs.argmax()) if differs.any() else n
    return found


def check_alignment(trajectory: Trajectory) -> None:
    """Check contract C10 for one trajectory: nothing predicts token 0. Raises AlignmentError."""
    if not len(trajectory.columns) or trajectory.columns.runs[0, 0] >= 0:
        raise AlignmentError(f"trajectory {trajectory.uid}: entry 0 must exist and be masked")


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
