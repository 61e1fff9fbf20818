"""Servers join, leave and are killed at random moments, relays too: real processes, real gloo, relayed versions."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest

from tests.support.sizes import size
from tests.support.weight_sync import processes as ps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVERS, MOST, PUBLISHES = size(6, 32), size(3, 8), size(10, 100)
JOIN, LEAVE, DEATH = 0.2, 0.1, size(5, 1) / 100  # a publish; the last for each server


def test_no_version_is_lost_and_none_is_foreign() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, happened, dead = random.Random(seed), Counter[str](), set[str]()
    tree, number = ps.Tree(range(SERVERS), most=MOST), SERVERS
    try:
        tree.end(tree.begin())
        for n in range(PUBLISHES):
            if rng.random() < JOIN:
                tree.start(number)
                number += 1
            if rng.random() < LEAVE:
                tree.servers[rng.choice(sorted(tree.endpoints))].ask("leave")
            doomed = {name for name in tree.endpoints if rng.random() < DEATH}
            if n == PUBLISHES // 2:
                doomed |= {relay for relay, _ in tree.groups() if relay is not None}
            happened["relays killed"] += len(doomed & {relay for relay, _ in tree.groups()})
            job = tree.begin()
            for name in doomed:
                time.sleep(rng.random() * 0.1)
                os.kill(tree.servers[name].process.pid, signal.SIGKILL)
                del tree.endpoints[name]
            dead |= doomed
            report = tree.end(job, dead)
            happened.update(deaths=len(doomed), joins=len(report.joined), leaves=len(report.left))
            happened[f"attempts {report.attempts}"] += 1
            assert set(report.lost) <= dead, f"seed {seed}: {report.lost}"
            for name in report.left:
                tree.endpoints.pop(name, None)  # it may have been killed, too
        print(dict(happened), f"{len(report.servers)} servers, {len(tree.groups())} groups")
        assert happened["relays killed"], "half way there are groups below a relay"
    finally:
        tree.close()
