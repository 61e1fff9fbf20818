"""Exchange messages between trainer ranks, outside of the groups that train."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from areal_lora.errors import PublishError

INLINE_BYTES = 4096  # messages up to this size need one collective, larger ones a second


def first_problem(mine: str, exchange: "Exchange") -> str:
    """The problem of the first rank that has one; empty if none has. The same on every rank. Collective."""
    return next((raw.decode() for raw in exchange.all_gather_bytes(mine.encode()) if raw), "")


class Exchange:
    """Collectives over a gloo group of its own of all trainer ranks, created collectively.

    Always the same thread of each rank calls them, in the same order. ``timeout_s`` bounds the wait for the other
    ranks; None stands for the exchange's own bound. It is unusable after a PublishError: a rank did not take part.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s
        self.rank = dist.get_rank()
        self._world = dist.get_world_size()

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Return the data of every rank, in rank order. Raises PublishError."""
        heads = self._gather(_framed(data, INLINE_BYTES), timeout_s)
        sizes = [_size(head) for head in heads]
        widest = max(sizes)
        if widest > INLINE_BYTES:
            heads = self._gather(_framed(data, widest), timeout_s)
        return [_unframed(head) for head in heads]

    def broadcast_bytes(self, data: bytes | None, timeout_s: float | None = None) -> bytes:
        """Return the data of rank 0; the other ranks pass None. Raises PublishError."""
        head = self._broadcast(_framed(data or b"", INLINE_BYTES), timeout_s)
        if _size(head) > INLINE_BYTES:
            head = self._broadcast(_framed(data or b"", _size(head)), timeout_s)
        return _unframed(head)

    def scatter(self, part: Callable[[int], np.ndarray], of_ranks: Sequence[int], room: np.ndarray) -> None:
        """Fill ``room`` on each other rank with part number ``of_ranks[rank]``, which ``part`` makes on rank 0.

        Both are contiguous. The ranks of one part pass it on (`_links`). Raises PublishError.
        """
        made = None
        for source, target in _links(of_ranks):
            if target == self.rank:
                self.receive(room, source)
            elif source == self.rank:
                if source == 0 and made != of_ranks[target]:
                    room, made = part(of_ranks[target]), of_ranks[target]
                self.send(room, target)

    def send(self, data: np.ndarray, to: int) -> None:
        """Send ``data`` (contiguous) to rank ``to``, which calls `receive`, alone. Raises PublishError."""
        with self._named():
            self._group.send([torch.from_numpy(data)], to, 0).wait()

    def receive(self, room: np.ndarray, source: int) -> None:
        """Fill ``room`` (contiguous) with the data of rank ``source``. Raises PublishError."""
        with self._named():
            self._group.recv([torch.from_numpy(room)], source, 0).wait()

    def _gather(self, mine: torch.Tensor, timeout_s: float | None) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._world)]
        options = AllgatherOptions()
        options.timeout = self._bound(timeout_s)
        with self._named():
            self._group.allgather([rows], [mine], options).wait()
        return rows

    def _broadcast(self, flat: torch.Tensor, timeout_s: float | None) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._bound(timeout_s)
        with self._named():
            self._group.broadcast([flat], options).wait()
        return flat

    def _bound(self, timeout_s: float | None) -> timedelta:
        return timedelta(seconds=max(self._timeout_s if timeout_s is None else timeout_s, 0.001))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn what torch raises into a PublishError that names the rank."""
        try:
            yield
        except RuntimeError as e:
            reason = str(e).splitlines()[0]
            raise PublishError(
                f"trainer rank {self.rank}: a trainer rank has ended or is late ({reason}); see its log"
            ) from e


def _links(of_ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(Source, target) in order: rank 0 sends to the first rank of each part, from there the part spreads as a tree.

    The part of rank 0 is last, so that the others spread meanwhile.
    """
    links = []
    for part in sorted(set(of_ranks), key=lambda part: part == of_ranks[0]):
        ranks = [rank for rank, own in enumerate(of_ranks) if own == part]
        links += [(0, ranks[0])] if ranks[0] else []
        links += [(ranks[k - (1 << k.bit_length() - 1)], ranks[k]) for k in range(1, len(ranks))]
    return links


def _framed(data: bytes, room: int) -> torch.Tensor:
    """Frame ``data`` as uint8 [8 + room]: its length, then as much of it as fits."""
    frame, n = np.zeros(8 + room, np.uint8), min(len(data), room)
    frame[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
    frame[8 : 8 + n] = np.frombuffer(data, np.uint8, n)
    return torch.from_numpy(frame)


def _size(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:8].numpy().tobytes(), "little")


def _unframed(frame: torch.Tensor) -> bytes:
    data: bytes = frame[8 : 8 + _size(frame)].numpy().tobytes()
    return data
