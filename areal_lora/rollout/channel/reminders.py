"""Messages to repeat for a restarted controller: who joined or ended, newest versions, pending evaluations."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

from areal_lora.rollout.channel import messages as m


class Reminders:
    """Shared by the threads of one trainer."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._lock = threading.Lock()
        self._loaded = False
        self._versions: dict[str, int] = {}
        self._snapshots: dict[str, bytes] = {}
        self._joined: dict[str, m.JoinAdapter] = {}
        self._announced: dict[str, m.AnnounceVersion] = {}
        self._ended = set[str]()
        self._pending: dict[tuple[str, int, str], m.Evaluate] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was loaded yet."""
        return not self._loaded

    def loaded(self, versions: Mapping[str, int], snapshots: Mapping[str, bytes]) -> None:
        with self._lock:
            self._loaded = True
            self._versions, self._snapshots = dict(versions), dict(snapshots)

    def joined(self, request: m.JoinAdapter) -> None:
        with self._lock:
            self._joined[request.adapter] = request

    def paused(self, adapter: str, paused: bool) -> m.JoinAdapter:
        """``adapter`` has joined; returns what says that it is paused, or is not."""
        with self._lock:
            request = self._joined[adapter] = msgspec.structs.replace(self._joined[adapter], paused=paused)
            return request

    def received(self, batch: m.Batch, version: int) -> None:
        """``batch`` is consumed at ``version``."""
        with self._lock:
            if (joined := self._joined.get(batch.adapter)) is not None:
                self._joined[batch.adapter] = msgspec.structs.replace(
                    joined, version=version + 1, snapshot=batch.snapshot
                )
            else:
                self._versions[batch.adapter], self._snapshots[batch.adapter] = version + 1, batch.snapshot

    def announced(self, request: m.AnnounceVersion) -> None:
        with self._lock:
            # For a new controller no server is lost or has left: it knows of none.
            self._announced[request.adapter] = msgspec.structs.replace(request, lost=(), left=())

    def ended(self, adapter: str) -> None:
        """A new controller hears of the end of ``adapter``, not of its newest version; of one that joined, nothing."""
        with self._lock:
            if self._joined.pop(adapter, None) is None:
                self._ended.add(adapter)
            self._announced.pop(adapter, None)
            self._pending = {key: request for key, request in self._pending.items() if key[0] != adapter}

    def requested(self, evaluation: m.Evaluate) -> None:
        with self._lock:
            self._pending[evaluation.adapter, evaluation.version, evaluation.tag] = evaluation

    def settle(self, result: m.EvalResult) -> bool:
        """Whether ``result`` was pending; it is not pending any more."""
        with self._lock:
            return self._pending.pop((result.adapter, result.version, result.tag), None) is not None

    @property
    def pending(self) -> list[m.Evaluate]:
        with self._lock:
            return list(self._pending.values())

    def greeting(self) -> tuple[m.Hello, list[m.SessionRequest]]:
        """The greeting of a new session, and the requests that follow it."""
        with self._lock:
            hello = m.Hello(trainer=self._trainer, versions=dict(self._versions), snapshots=dict(self._snapshots))
            ended = [m.EndAdapter(adapter=name) for name in sorted(self._ended)]
            return hello, [*ended, *self._joined.values(), *self._announced.values(), *self._pending.values()]
