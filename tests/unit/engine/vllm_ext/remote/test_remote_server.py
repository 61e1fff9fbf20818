"""Servers elsewhere serve in a run: real groups, real HTTP, a real publisher; only the models are missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_lora.errors import ProcessFailed
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from tests.support.clocks import wait_until
from tests.support.engine.vllm_ext.remote_world import World, base_folder, equal
from tests.support.rollout.helpers import NAME, config
from tests.support.weight_sync.helpers import ref, share, values

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path) as world:
        yield world


def made(tmp_path: Path, **how: float) -> World:
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    create_secret(folder)
    return World(folder, config(str(base_folder(tmp_path / "model"))), **how)


def joined(world: World, tmp_path: Path):
    machine = world.machine(tmp_path)
    wait_until(world.publisher.changed, what="the remote server as one that may join")
    return machine


def test_a_remote_server_joins_and_follows_the_versions(world: World, tmp_path: Path) -> None:
    world.publish(0).wait()
    machine = joined(world, tmp_path)
    for version in (1, 2):
        report = world.publish(version).wait()
        assert [s.name for s in report.servers] == ["server-0", "server-1"]
        assert equal(machine.memory, world.local, version)
    owned, _ = share(values(2))
    name, tensor = owned[0]
    assert np.array_equal(machine.memory.tensors(ref(2, NAME))[name], tensor.numpy())
    assert report.digest == world.local.held.active[ref(2, NAME)].digest if hasattr(report, "digest") else True
