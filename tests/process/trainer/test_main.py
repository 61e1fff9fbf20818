"""How trainer ranks meet: real processes, real gloo, and a stranger who knows every port."""

from __future__ import annotations

import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from areal_lora.config.load import load_config
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.trainer.main import join_world
from tests.support.clocks import wait_until
from tests.support.distributed.intruder import intrude, intrude_all
from tests.support.distributed.spawn import forking
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHIPPED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
WORLD = 2


def rank_process(pipe: Connection, folder: Path, rank: int, bind: str) -> None:
    config = load_config(SHIPPED, [f"cluster.bind={bind}"])
    join_world(config, RunFolder(folder), rank, WORLD)
    groups = [dist.new_group(list(range(WORLD))) for _ in range(3)]
    pipe.send("met")
    while pipe.recv() == "sum":
        one = torch.ones(1)
        dist.all_reduce(one, group=groups[-1])
        pipe.send(one.item())
    dist.destroy_process_group()
    pipe.send("left")


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path):
    create_secret(RunFolder(tmp_path))
    context = forking()
    members = []
    for rank in range(WORLD):
        mine, theirs = context.Pipe()
        process = context.Process(target=rank_process, args=(theirs, tmp_path, rank, request.param), daemon=True)
        process.start()
        members.append((process, mine))
    for _, pipe in members:
        assert pipe.poll(150)
        assert pipe.recv() == "met"
    yield members
    for process, _ in members:
        process.kill()
        process.join()


def ask_all(members, what):
    for _, pipe in members:
        pipe.send(what)
    answers = []
    for _, pipe in members:
        assert pipe.poll(150)
        answers.append(pipe.recv())
    return answers


def listeners(pid: int) -> list[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("ranks", ["127.0.0.1"], indirect=True)
def test_nothing_that_trainer_ranks_listen_on_serves_a_stranger(ranks):
    heard = [(host, port) for process, _ in ranks for host, port in listeners(process.pid)]
    assert len(heard) > WORLD, heard  # the store, and gloo's pairs of each rank
    assert {host for host, _ in heard}.isdisjoint({"0.0.0.0", "::"}), heard
    assert intrude_all(heard) == [None] * len(heard), heard
    assert ask_all(ranks, "sum") == [WORLD, WORLD]
    assert ask_all(ranks, "leave") == ["left", "left"]


def test_a_rank_of_another_run_does_not_get_in(tmp_path):
    """It found the endpoint, but its secret is another: an error at once instead of a wait of ten minutes."""
    config = load_config(SHIPPED, ["cluster.bind=127.0.0.1"])
    create_secret(RunFolder(tmp_path))
    context = forking()
    mine, theirs = context.Pipe()
    first = context.Process(target=rank_process, args=(theirs, tmp_path, 0, "127.0.0.1"), daemon=True)
    first.start()
    try:
        wait_until(lambda: (tmp_path / "rendezvous" / "trainer-0.json").exists() or not first.is_alive())
        assert first.is_alive()
        create_secret(RunFolder(tmp_path))
        with pytest.raises(dist.DistNetworkError, match="another run"):
            join_world(config, RunFolder(tmp_path), 1, WORLD)
    finally:
        first.kill()
        first.join()
        mine.close()


def test_the_stranger_would_read_a_store_that_is_open():
    """Else the tests above would show nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            1,
            True,
            timedelta(seconds=150),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    assert intrude("127.0.0.1", port, patience_s=150) == "mine"
    assert store.num_keys() >= 1
