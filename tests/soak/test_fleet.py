"""Servers join, leave and are killed at random moments, relays too: real processes, real gloo, relayed versions."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter

import pytest

from areal_lora.config.models import WeightSyncConfig
from tests.support.sizes import size
from tests.support.weight_sync import processes as ps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVERS, MOST, PUBLISHES = size(6, 32), size(3, 8), size(10, 100)
JOIN, LEAVE, DEATH = 0.2, 0.1, size(5, 1) / 100  # a publish; the last for each server


def test_no_version_is_lost_and_none_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightSyncConfig, "ping_s", 30.0)  # a process that stands still is not dead
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"seed {seed}")
    rng, happened, dead = random.Random(seed), Counter[str](), set[str]()
    tree, number = ps.Tree(range(SERVERS), most=MOST), SERVERS
    try:
        stay = set(tree.endpoints)  # members that neither leave nor die
        tree.end(tree.begin())
        for n in range(PUBLISHES):
            if rng.random() < JOIN:
                tree.start(number)
                number += 1
            relays = {relay for relay, _ in tree.groups() if relay is not None}
            fatal = relays if n == PUBLISHES // 2 else set()
            # More than MOST servers are more than one group.
            spare = len(stay - fatal) - (MOST + 1 if n < PUBLISHES // 2 else 1)
            if rng.random() < LEAVE and spare > 0:
                tree.servers[leaving := rng.choice(sorted(stay - fatal))].ask("leave")
                stay.remove(leaving)
                spare -= 1
            doomed = [name for name in sorted(tree.endpoints) if rng.random() < DEATH]
            doomed = fatal.union(doomed[: max(spare, 0)])
            happened["relays killed"] += len(doomed & relays)
            job = tree.begin()
            for name in sorted(doomed):
                time.sleep(rng.random() * 0.1)
                with contextlib.suppress(ProcessLookupError):  # it has left
                    os.kill(tree.servers[name].process.pid, signal.SIGKILL)
                tree.endpoints.pop(name, None)  # it may leave, too
            dead |= doomed
            stay -= doomed
            report = tree.end(job, dead)
            happened.update(deaths=len(doomed), joins=len(report.joined), leaves=len(report.left))
            happened[f"attempts {report.attempts}"] += 1
            assert set(report.lost) <= dead, f"seed {seed}: {report.lost}"
            stay |= set(report.joined) - dead
            for name in report.left:
                tree.endpoints.pop(name, None)
        print(dict(happened), f"{len(report.servers)} servers, {len(tree.groups())} groups")
        assert happened["relays killed"], "half way there are groups below a relay"
    finally:
        tree.close()
