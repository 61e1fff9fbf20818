"""Processes that only beat, in virtual time, on a mount with an attribute cache."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import ProcessExit
from areal_lora.run_folder.paths import RunFolder
from tests.support.clocks import Clock

CACHE_S = 60.0
"""What NFS mounts with ``actimeo=60`` have."""


class CachedMount:
    """The processes of a launcher. Each beats once a second of ``clock``, but one in ``stuck``.

    ``stat`` of a heartbeat file is answered from the cache for ``CACHE_S``, as by the client of a network file system.
    Opening it is a request to the server: they count in ``opened``. ``ended`` has the times at which processes were.
    """

    def __init__(self, folder: RunFolder, specs: Iterable[ProcessSpec], patch: pytest.MonkeyPatch) -> None:
        self.clock, self.stuck, self.ended = Clock(), set[str](), dict[str, float]()
        self.opened, self._folder, self._running = Counter[str](), folder, list(specs)
        folder.heartbeats.mkdir(parents=True)
        stat, open_, known = Path.stat, Path.open, dict[Path, tuple[float, os.stat_result]]()

        def cached(path: Path, **options: Any) -> os.stat_result:
            if path.parent != folder.heartbeats:
                return stat(path, **options)
            if path not in known or self.clock.now >= known[path][0] + CACHE_S:
                known[path] = self.clock.now, stat(path, **options)
            return known[path][1]

        def opened(path: Path, *args: Any, **options: Any) -> Any:
            if path.parent == folder.heartbeats:
                self.opened[path.name] += 1
            return open_(path, *args, **options)

        patch.setattr(Path, "stat", cached)
        patch.setattr(Path, "open", opened)
        self.sleep(0.0)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds
        for spec in self._running:
            if spec.name not in self.stuck:
                path = self._folder.heartbeat(spec.name)
                path.touch()
                os.utime(path, (int(self.clock.now), int(self.clock.now)))

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        self.stuck -= {spec.name for spec in specs}
        self._running += specs

    def poll(self) -> list[ProcessExit]:
        return []

    def end(self, specs: Collection[ProcessSpec], grace_s: float = 0.0, why: str = "") -> list[ProcessExit]:
        there = [spec for spec in self._running if spec in specs]
        self._running = [spec for spec in self._running if spec not in specs]
        self.ended |= {spec.name: self.clock.now for spec in there}
        return [ProcessExit(spec=spec, code=-9, log=Path("log"), why=why) for spec in there]

    def running(self) -> list[ProcessSpec]:
        return list(self._running)

    def ask_stacks(self) -> None: ...
