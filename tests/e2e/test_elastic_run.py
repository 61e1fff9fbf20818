"""Servers join a run in progress and leave it: the run does not notice it as a failure."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.clocks import wait_until
from tests.support.e2e.elastic import ElasticRun, elastic_run
from tests.support.sizes import NIGHTLY, size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_servers_join_and_leave_a_run(tmp_path: Path) -> None:
    """Real launcher, trainer, controller and weight sync; the servers are stand-ins, nightly vLLM."""
    with elastic_run(tmp_path, vllm=NIGHTLY) as run:
        run.wait(lambda: len(run.metrics.steps) > 0 if run.run_folder.metrics.exists() else False, "the first step")
        first = run.add(2)
        run.wait(lambda: run.members_changed({"server-1", "server-2"}, "joined"), "two servers' joining")
        run.wait_steps(2)
        busy = sum("server-1" in line or "server-2" in line for line in run.log("controller-0").splitlines())
        assert not busy, "no request failed at them"
        run.leave(1)  # one of the two, by its own process
        run.wait(lambda: run.members_changed({"server-1"}, "left"), "one server's leaving")
        second = run.add(1)
        run.wait(lambda: run.members_changed({"server-3"}, "joined"), "another one's joining: its index is new")
        run.wait_steps(1)
        assert run.servers() == {0, 2, 3}
        assert run.remove_all() == 2
        run.wait(lambda: run.members_changed({"server-2", "server-3"}, "left"), "the others' leaving")
        assert (first.wait(150), second.wait(150)) == (0, 0)
        assert run.servers() == {0}
        run.wait_steps(2)
        assert run.metrics.members[-1].servers == 1
        run.assert_undisturbed()
        # The last ones end with the run, though nothing removes them.
        third = run.add(1)
        run.wait(lambda: run.members_changed({"server-4"}, "joined"), "a last one's joining")
        endpoint = read_endpoint(run.run_folder, "server", 4)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(150) == 130
        began = time.monotonic()
        assert third.wait(150) == 0
        assert endpoint is not None
        wait_until(lambda: not Path(f"/proc/{endpoint.pid}").exists())
        print(f"\nan added server ended {time.monotonic() - began:.1f} s after its run")


@pytest.mark.skipif(not NIGHTLY, reason="ten minutes of real servers: nightly")
def test_twenty_real_servers_come_and_go_in_ten_minutes(tmp_path: Path) -> None:
    with elastic_run(tmp_path, vllm=os.environ.get("AREAL_LORA_STAND_IN") != "1") as run:
        come_and_go(run, size(2, 20), 600.0)


def come_and_go(run: ElasticRun, servers: int, seconds: float) -> None:
    """``servers`` servers join one after the other, evenly over ``seconds``; each leaves as the next but one joins."""
    run.wait(lambda: len(run.metrics.steps) > 0 if run.run_folder.metrics.exists() else False, "the first step")
    began, joins, leaves = time.monotonic(), list[float](), list[float]()
    before = len(run.metrics.steps)
    for n in range(1, servers + 1):
        run.add(1)
        joins.append(run.wait(lambda n=n: run.members_changed({f"server-{n}"}, "joined"), f"joining of server-{n}"))
        if n > 2:
            run.added[n - 3].terminate()
            gone = {f"server-{n - 2}"}
            leaves.append(run.wait(lambda gone=gone: run.members_changed(gone, "left"), f"leaving of {gone}"))
        time.sleep(max(0.0, began + n * seconds / servers - time.monotonic()))
    run.remove_all()
    everyone = {f"server-{n}" for n in range(1, servers + 1)}
    run.wait(lambda: run.members_changed(everyone, "left"), "all servers' leaving")
    assert [p.wait(150) for p in run.added] == [0] * servers
    run.wait_steps(2)
    assert run.servers() == {0}
    assert run.metrics.members[-1].servers == 1
    run.assert_undisturbed()
    took, steps = time.monotonic() - began, len(run.metrics.steps) - before
    publish_ms = [p.total_ms or 0.0 for p in run.metrics.publishes]
    print(f"\n{servers} servers joined and left in {took:.0f} s, {steps} steps, {len(run.metrics.members)} changes")
    for what, values in (("start to member, s", joins), ("signal to released, s", leaves), ("publish, ms", publish_ms)):
        values.sort()
        print(f"{what}: p50 {values[len(values) // 2]:.1f}, worst {values[-1]:.1f}")
