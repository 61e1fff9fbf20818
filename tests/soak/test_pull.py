"""Servers elsewhere, over a line with 100 ms and 1 % loss: versions are live in time, and no fault costs a sample."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from areal_lora.run_folder.paths import RunFolder
from areal_lora.weight_sync.trainer.decisions import PublishReport
from tests.support.clocks import wait_until
from tests.support.engine.vllm_ext import remote_world
from tests.support.launcher.namespaces import Host, hosts, inside, ip, unavailable
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, config
from tests.support.rollout.running import controllers
from tests.support.sizes import NIGHTLY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not NIGHTLY, reason="ten minutes of faults, and 34 MB over a slow line: make test-all"),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made"),
]
DELAY_S, LOSS, RATE = 0.05, 0.01, "1gbit"
RANK, WIDE, NARROW = 32, 6656, 256  # 34 MB, 1.3 MB
PUBLISHES, SECONDS = 5, 600.0
ETA, B, MOST, END_S = 1, 4, 3, 300.0
FAULTS = ("join", "leave", "kill", "outage", "one wrong byte", "two wrong bytes", "stale token")


class Elsewhere:
    """A server on ``host``, which joins the run of ``world`` by URL and ``token``."""

    def __init__(self, host: Host, world: remote_world.World, folder: Path, token: str) -> None:
        command = [sys.executable, "-m", remote_world.__name__, world.url, str(folder / "run"), str(world.width)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = host.start(*command, **pipes)  # type: ignore[arg-type]
        assert self.process.stdin is not None
        self.process.stdin.write(token.encode() + b"\n")
        self.process.stdin.flush()

    def leave(self) -> int:
        """Let it leave, unless wrong bytes have ended it; returns the number of requests it had, as far as is known."""
        said, error = self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0 or b"wrong bytes 2 times" in error, error.decode()
        return int(said or 0)


@pytest.mark.parametrize(("delay_s", "loss", "limit_s"), [(0.0, 0.0, 1.0), (DELAY_S, 0.0, 2.5), (DELAY_S, LOSS, 2.5)])
def test_a_version_of_34_mb_is_live_in_time(delay_s: float, loss: float, limit_s: float, tmp_path: Path) -> None:
    """From the end of packing to the last acknowledgement. On a busy machine the figures say nothing about the line."""
    idle = os.getloadavg()[0] < 0.5
    with (
        hosts(2, delay_s=delay_s, loss=loss, rate=RATE) as (here, there),
        inside(here),
        remote_world.remote_run(tmp_path, host=here.address, rank=RANK, width=WIDE) as world,
    ):
        world.publish(0).wait()
        machine = Elsewhere(there, world, tmp_path / "elsewhere", world.token)
        wait_until(world.publisher.changed, END_S, "the remote server as one that may join")
        took_s, sent = [], []
        for version in range(1, PUBLISHES + 1):
            before = world.damage.nbytes
            job = world.publish(version)
            began_s = time.monotonic()
            report = job.wait()
            took_s.append(time.monotonic() - began_s)
            sent.append(world.damage.nbytes - before)
            assert (len(report.servers), report.attempts, report.lost) == (2, 1, {})
        machine.leave()
    print(
        f"{report.nbytes / 1e6:.1f} MB, {statistics.median(sent) / 1e6:.1f} sent, {delay_s * 2e3:.0f} ms, {loss:.0%} "
        f"lost: live after {min(took_s):.2f} / {statistics.median(took_s):.2f} / {max(took_s):.2f} s (min / p50 / max)"
    )
    assert max(sent) < report.nbytes
    if idle:
        assert statistics.median(took_s) <= limit_s


def test_ten_minutes_of_faults_cost_no_sample(tmp_path: Path) -> None:
    """Servers join, leave, are killed, lose their line or get wrong bytes at each third step."""
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    print(f"seed {seed}")
    rng, happened, left = random.Random(seed), Counter[str](), Counter[str]()
    machines, refused, requests = list[Elsewhere](), list[Elsewhere](), 0
    trained, lags = set[str](), Counter[int]()

    def announce(report: PublishReport) -> None:
        urls = {server.name: server.data_url for server in report.servers}
        run.client.announce(report.ref, urls, [*report.lost], report.left)
        left.update(lost=len(report.lost), left=len(report.left), joined=len(report.joined))

    with ExitStack() as stack:
        here, there = stack.enter_context(hosts(2, delay_s=DELAY_S, loss=LOSS, rate=RATE))
        stack.enter_context(inside(here))
        run = stack.enter_context(controllers(tmp_path))(FakeServer(), eta=ETA, b=B, steps=10**5)
        made = config(str(remote_world.base_folder(tmp_path / "model")), eta=ETA)
        how = {"host": here.address, "rank": RANK, "width": NARROW, "on_active": announce}
        world = stack.enter_context(remote_world.World(RunFolder(tmp_path), made, **how))
        world.local_data.delay_s = lambda k: 0.3  # others answer most requests
        begins_s, step, faults = time.monotonic(), 0, list[str]()
        while time.monotonic() < begins_s + SECONDS or not happened.keys() >= {*FAULTS}:
            if step % 3 == 2:
                faults = faults or rng.sample(FAULTS, len(FAULTS))
                fault = faults.pop() if len(machines) > 1 else "join"
                happened[fault] += 1
                folder = tmp_path / f"elsewhere {step}"
                match fault:
                    case "join" if len(machines) < MOST:
                        machines.append(Elsewhere(there, world, folder, world.token))
                        wait_until(world.publisher.changed, END_S, "a change of servers")
                    case "leave":
                        requests += machines.pop(rng.randrange(len(machines))).leave()
                    case "kill":
                        machines.pop(rng.randrange(len(machines))).process.kill()
                    case "outage":
                        ip("-n", there.namespace, "link", "set", "eth0", "down")
                        up = threading.Timer(
                            rng.uniform(1.0, 15.0), ip, ["-n", there.namespace, "link", "set", "eth0", "up"]
                        )
                        up.start()
                        stack.callback(up.join)
                    case "one wrong byte":
                        world.damage.left = 1
                    case "two wrong bytes":
                        world.damage.left = 2
                    case "stale token":
                        refused.append(Elsewhere(there, world, folder, "5e" * 32))
            report = world.publish(step).wait()
            happened[f"attempts {report.attempts}"] += 1
            for group in run.batch(step).groups:
                assert group.uid not in trained, f"seed {seed}, step {step}: trained twice"
                trained.add(group.uid)
                lags.update(step - v for t in group.trajectories for v in t.versions if v >= 0)
            run.client.commit(NAME, step)
            step += 1
            machines = [each for each in machines if each.process.poll() is None]  # two wrong bytes end one
        stats = run.stats(NAME)
        requests += sum(machine.leave() for machine in machines)
        for each in refused:
            each.process.wait(END_S)
            assert each.process.returncode
    print(f"{step} steps, {len(trained)} groups, lags {dict(lags)}, {requests} requests at those that left in order")
    print(dict(happened), dict(left), stats)
    held = stats.issued - stats.consumed - sum(stats.dropped.values())
    assert len(trained) == stats.consumed + stats.leased == step * B
    assert held == stats.leased + stats.ready + stats.running
    assert held <= (ETA + 1) * B
    assert max(lags) <= ETA
    assert requests > 0
    assert left["joined"] > 1
    assert left["lost"] + left["left"] > 0
