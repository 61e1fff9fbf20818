"""Several adapters in one controller: who is served, what one's faults are to the others. Fake servers, real tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.config.models import MultiTurnWorkflowConfig
from areal_lora.rollout.channel import messages as m
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.rollout.controller import retries
from areal_lora.rollout.testing import FakeServer
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef
from tests.support.clocks import wait_until
from tests.support.rollout.helpers import NAME
from tests.support.rollout.running import Running

BROKEN = """
class Broken:
    def __init__(self):
        raise RuntimeError("no environment today")
"""


def wanted(*names: str, step: int = 0) -> list[m.Wanted]:
    return [m.Wanted(adapter=name, step=step, version=step) for name in names]


def test_the_first_wanted_adapter_that_has_a_batch_is_served(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), twins={"twin": {}}, eta=0)
    reply = run.client.poll(wanted(NAME, "twin"))
    assert isinstance(reply, m.NotReady)
    assert [(each.adapter, each.ready, each.needed) for each in reply.lacking] == [(NAME, 0, 4), ("twin", 0, 4)]
    run.activate(0, "twin")
    while not isinstance(reply, m.Batch):
        reply = run.client.poll(wanted(NAME, "twin"))
    assert reply.adapter == "twin"
    assert {trajectory.adapter.name for group in reply.groups for trajectory in group.trajectories} == {"twin"}
    run.activate(0)
    while reply.adapter != NAME:
        reply = run.client.poll(wanted(NAME, "twin"))
        assert isinstance(reply, m.Batch)
    again = run.client.poll(wanted("twin", NAME))
    assert isinstance(again, m.Batch)
    assert again.adapter == "twin", "a step that is not committed is served again"


def test_results_of_every_adapter_come_with_any_reply(controller: Callable[..., Running]) -> None:
    run = controller(FakeServer(), twins={"twin": {}}, eta=0)
    for name in (NAME, "twin"):
        run.client.request_eval(AdapterRef(name=name, version=0), "e")
        run.activate(0, name)
    got: list[str] = []
    while len(got) < 2:
        run.client.poll(())
        got += [event.adapter for event in run.client.take_events()]
    assert sorted(got) == sorted([NAME, "twin"])


def test_a_workflow_that_breaks_ends_its_adapter_only(
    controller: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "MAX_BACK_OFF_S", 0.01)
    (tmp_path / "environment.py").write_text(BROKEN)
    workflow = MultiTurnWorkflowConfig(environment=f"{tmp_path}/environment.py:Broken")
    run = controller(FakeServer(), twins={"broken": {"workflow": workflow}}, eta=0, steps=3)
    for name in (NAME, "broken"):
        run.activate(0, name)
    reply: object = None
    while not isinstance(reply, m.AdapterFailed):
        reply = run.client.poll(wanted("broken"))
    assert reply.adapter == "broken"
    assert "no environment today" in reply.reason
    run.client.end("broken")
    for step in range(3):
        if step:
            run.activate(step)
        assert len(run.batch(step).groups) == 4
    stats = run.client.stats("broken")
    assert (stats.running, stats.consumed) == (0, 0)
    other = ControllerClient(lambda: run.endpoint, read_secret(RunFolder(run.folder)))
    try:
        other.hello({NAME: 3, "broken": 0}, {})
        assert isinstance(other.poll(wanted("broken")), m.NotReady), "another trainer tries it again"
    finally:
        other.close()


def test_an_adapter_that_has_ended_gets_no_groups_and_leaves_its_places(controller: Callable[..., Running]) -> None:
    server = FakeServer(delay_s=lambda k: 0.02)
    run = controller(server, twins={"twin": {}}, eta=2)
    for name in (NAME, "twin"):
        run.activate(0, name)
    run.batch(0)
    run.client.end("twin")
    wait_until(lambda: run.client.stats("twin").running == 0)
    before = Counter(request["model"] for request in server.requests)["twin@v0"]
    for step in range(1, 3):
        run.activate(step)
        run.batch(step)
    assert Counter(request["model"] for request in server.requests)["twin@v0"] == before
