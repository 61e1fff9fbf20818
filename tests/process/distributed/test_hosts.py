"""Trainer ranks on two hosts that call themselves 127.0.1.1: who finds whom, and what a third party reaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from tests.support.distributed.namespaces import two_hosts, unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REASON = unavailable()
START_S = 150.0


@pytest.fixture(scope="module")
def hosts():
    if REASON:
        pytest.skip(REASON)
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def ranks(hosts):
    """A process for each host; it joins what it is told to, one world after the other."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"OMP_NUM_THREADS": "1", "AREAL_LORA_NODES": " ".join(h.name for h in hosts)}
    words = (sys.executable, "-m", "tests.support.distributed.host_rank")
    with ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(hosts):
            process = host.start(*words, str(rank), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            ranks.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield ranks


def tell(ranks, line: str) -> None:
    for process in ranks:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def found(ranks) -> list[dict]:
    """What both ranks print."""
    lines = []
    for process in ranks:
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        assert line, f"a rank ended or was silent for {START_S:.0f} s"
        lines.append(json.loads(line))
    return lines


@pytest.mark.parametrize(
    ("bind", "interface", "family"),
    [("0.0.0.0", "auto", "ipv4"), ("0.0.0.0", "10.77.0.0/16", "ipv4"), ("::", "eth0", "ipv6")],
)
def test_ranks_on_two_hosts_meet_and_let_nobody_else_in(hosts, ranks, tmp_path, bind, interface, family):
    create_secret(RunFolder(tmp_path))
    tell(ranks, f"{tmp_path} {bind} {interface}")
    seen = found(ranks)
    assert [r["address"] for r in seen] == [getattr(h, family) for h in hosts]
    assert [r["interface"] for r in seen] == ["eth0", "eth0"]
    assert [r["sum"] for r in seen] == [3.0, 3.0]
    assert [r["got"] for r in seen] == [[7], [7]], "rank 0's bytes"
    published = json.loads((tmp_path / "rendezvous" / "trainer-0.json").read_text())
    assert published["host"] == seen[0]["address"]
    # Only the first host's: the other one is where a stranger sits.
    heard = [(ip, port) for ip, port in seen[0]["listeners"]]
    assert {ip for ip, _ in heard} <= {hosts[0].ipv4, hosts[0].ipv6}, heard
    stranger = hosts[1].start(
        sys.executable,
        "-m",
        "tests.support.distributed.intruder",
        *(f"{ip}:{port}" for ip, port in heard),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        read, _ = stranger.communicate(timeout=START_S)
    finally:
        stranger.kill()
        tell(ranks, "leave")
    assert json.loads(read) == [None] * len(heard), heard
