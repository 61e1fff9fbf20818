"""Servers relay versions to others: groups of three hosts (addresses of loopback), real processes, real gloo."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import PublishError
from areal_lora.weight_sync.trainer import publisher
from tests.support.clocks import seen, wait_until
from tests.support.weight_sync import processes as ps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORKERS = {1: 2, 3: 2}
TIMEOUT_S = FORM_S = 10.0  # of publishes to a server that hangs: one transfer and one forming of groups wait for it


@pytest.fixture(scope="module")
def tree() -> Iterator[ps.Tree]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "RELAYED_BYTES", 256)
        made = ps.Tree(range(3), WORKERS, most=3)
        try:
            yield made
        finally:
            made.close()


def test_three_hosts_are_one_group_until_there_are_more(tree: ps.Tree) -> None:
    tree.end(tree.begin())
    assert tree.groups() == [(None, ps.names(0, 1, 2))]
    tree.joins(3, 4)
    assert tree.end(tree.begin()).joined == ps.names(3, 4)
    assert tree.groups() == [(None, ps.names(0, 1, 2)), ("server-2", ps.names(3, 4))]
    assert tree.told == [set(ps.names(0, 1, 2, 3, 4))]


def test_relayed_versions_arrive_bit_for_bit(tree: ps.Tree) -> None:
    for _ in range(3):
        report = tree.end(tree.begin())
        assert (report.attempts, report.lost, [s.name for s in report.servers]) == (1, {}, ps.names(0, 1, 2, 3, 4))
        assert (report.probe_mean_abs, report.differs) == (0.0, True)
    assert tree.told == [], "the groups stay"


def test_a_server_that_joins_touches_one_group(tree: ps.Tree) -> None:
    tree.joins(5)
    report = tree.end(tree.begin())
    assert (report.attempts, report.joined) == (1, ["server-5"])
    assert tree.groups()[2:] == [("server-1", ps.names(5))]
    assert tree.told == [set(ps.names(1, 5))]


def test_a_server_that_dies_below_a_relay_costs_its_group_an_attempt(tree: ps.Tree) -> None:
    report = tree.killed("server-4")
    assert report.attempts == 2
    assert tree.groups() == [(None, ps.names(0, 1, 2)), ("server-2", ps.names(3)), ("server-1", ps.names(5))]
    assert tree.told == [set(ps.names(2, 3))]
    assert tree.end(tree.begin()).attempts == 1


def test_a_relay_without_servers_ends_relaying(tree: ps.Tree) -> None:
    assert tree.killed("server-5").attempts == 1, "the others serve the version"
    assert tree.end(tree.begin()).attempts == 1
    assert tree.told == [set(ps.names(1))]
    tree.joins(5)
    assert tree.end(tree.begin()).joined == ["server-5"]
    assert tree.told == [set(ps.names(2, 3, 5))], "where there is room"


def test_a_relay_that_dies_loses_no_version(tree: ps.Tree) -> None:
    report = tree.killed("server-2")
    assert report.attempts == 2
    assert tree.groups() == [(None, ps.names(0, 1)), ("server-1", ps.names(3, 5))]
    assert tree.end(tree.begin()).attempts == 1


def test_a_relay_that_dies_before_the_probe_costs_its_servers_nothing(
    tree: ps.Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, relay = tree.leader._fleet.probe, tree.servers["server-1"].process

    def after_a_death(*args):
        relay.kill()
        relay.join(60)
        return probe(*args)

    monkeypatch.setattr(tree.leader._fleet, "probe", after_a_death)
    report = tree.end(tree.begin(), dead={"server-1"})
    monkeypatch.undo()
    del tree.endpoints["server-1"]
    assert list(report.lost) == ["server-1"]
    assert {s.name for s in report.servers} == set(tree.endpoints)
    assert tree.end(tree.begin()).lost == {}


CASES = {"one group": (4, 32, 1), "below a relay": (7, 3, 6), "a relay": (7, 3, 2)}
"""How many servers there are, how many of them a group takes, and the number of the one that hangs."""


def publishes(servers: int, most: int, number: int) -> object:
    """Of the version in which server ``number`` hangs, the next one and the one after it continues: servers, lost,
    joined."""
    name = f"server-{number}"
    tree = ps.Tree(range(servers), most=most, timeout_s=TIMEOUT_S)
    roster, hung = tree.leader.roster, tree.servers[name]
    assert roster.watcher is not None
    try:
        tree.end(tree.begin())
        assert (len(tree.groups()) > 1) == (servers > most)
        hung.ask("hang")
        reports = [tree.end(tree.begin())]
        wait_until(lambda: roster.wants(tree.endpoints[name]), what="the end of its back-off")
        roster.watcher.look()
        reports.append(tree.end(tree.begin()))
        told = list(tree.told)
        hung.ask("continue")
        wait_until(roster.available, what="its return")
        reports.append(tree.end(tree.begin()))
        return [([s.name for s in r.servers], list(r.lost), r.joined) for r in reports], reports[1].attempts, told
    except PublishError as error:
        return error
    finally:
        hung.ask("continue")
        tree.close()


@pytest.fixture(scope="module")
def hangs() -> Iterator[dict[str, Future[object]]]:
    """All cases at once: they wait for the same deadlines."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(CASES)) as threads:
        patch.setattr(WeightSyncConfig, "form_s", FORM_S)
        patch.setattr(publisher, "RELAYED_BYTES", 256)
        yield {case: threads.submit(excluded, *numbers) for case, numbers in CASES.items()}


def excluded(servers: int, most: int, number: int) -> object:
    name = f"server-{number}"
    everyone = ps.names(*range(servers))
    others = [other for other in everyone if other != name]
    expected = [(others, [name], []), (others, [], []), (everyone, [], [name])], 1, []
    return seen(lambda: publishes(servers, most, number), lambda found: found == expected)


@pytest.mark.timeout(1200)  # ten tries of a minute
@pytest.mark.parametrize("case", CASES)
def test_a_server_that_hangs_and_answers_pings_is_excluded_alone_until_it_continues(
    hangs: dict[str, Future[object]], case: str
) -> None:
    hangs[case].result()
