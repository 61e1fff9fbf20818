from __future__ import annotations

import asyncio

import pytest

from areal_lora.rollout.routing import KEEP_VERSIONS, MAX_COOL_DOWN_S, Home, Router, VersionRetired
from areal_lora.types import AdapterRef
from tests.support.clocks import Clock, in_virtual_time

REF = AdapterRef(name="math", version=1)
NEXT = AdapterRef(name="math", version=2)
BOTH = {"server-0": "a", "server-1": "b"}


def chosen(router: Router, ref: AdapterRef = REF) -> str:
    async def choose() -> str:
        async with asyncio.timeout(1) as clock, router.lease(ref, 1, clock) as lease:
            return lease.server.url

    return in_virtual_time(choose())


def test_least_outstanding_sequences_win_and_are_given_back() -> None:
    async def run() -> None:
        router = Router()
        router.announce(REF, BOTH)
        async with asyncio.timeout(9) as clock, router.lease(REF, 8, clock) as first:
            async with router.lease(REF, 2, clock) as second, router.lease(REF, 2, clock) as third:
                assert (first.server.url, second.server.url, third.server.url) == ("a", "b", "b")
                assert [s.outstanding for s in router.servers.values()] == [8, 4]
        assert [s.outstanding for s in router.servers.values()] == [0, 0]

    in_virtual_time(run())


def test_only_servers_that_hold_the_version_are_asked() -> None:
    router = Router()
    with pytest.raises(VersionRetired):
        chosen(router)
    router.announce(REF, BOTH)
    router.retired(router.servers["server-0"], REF)
    assert chosen(router) == "b"
    router.retired(router.servers["server-1"], REF)
    with pytest.raises(VersionRetired, match="math@v1"):
        chosen(router)


def test_a_failed_server_cools_down_longer_each_time_until_it_succeeds() -> None:
    clock = Clock()
    router = Router(clock)
    router.announce(REF, BOTH)
    bad = router.servers["server-0"]
    waits = []
    for _ in range(8):
        router.failed(bad)
        router.failed(bad)  # a second request that was sent before the first failed
        waits.append(bad.down_until_s - clock.now)
        assert chosen(router) == "b"
        clock.now = bad.down_until_s
        assert chosen(router) == "a"
    assert waits[:3] == [0.25, 0.5, 1.0]
    assert waits[-1] == MAX_COOL_DOWN_S
    router.succeeded(bad)
    router.failed(bad)
    assert bad.down_until_s - clock.now == 0.25


def test_with_all_servers_down_it_waits_for_the_first_to_be_tried() -> None:
    async def wait() -> None:
        clock = asyncio.get_running_loop().time
        router = Router(clock)
        router.announce(REF, {"server-0": "a"})
        router.failed(router.servers["server-0"])
        async with asyncio.timeout(1) as limit, router.lease(REF, 1, limit) as lease:
            server = lease.server
            assert server.url == "a"
        assert clock() >= 0.25

    in_virtual_time(wait())


def test_a_server_that_is_not_announced_with_the_newest_version_gets_nothing_until_it_is() -> None:
    router = Router()
    router.announce(REF, BOTH)
    router.announce(NEXT, {"server-1": "b"}, lost=["server-0"])
    assert chosen(router) == chosen(router, NEXT) == "b"
    router.retired(router.servers["server-1"], REF)
    with pytest.raises(VersionRetired):
        chosen(router)  # the lost one held it, and is not asked
    router.announce(NEXT, BOTH)
    router.retired(router.servers["server-1"], NEXT)
    assert chosen(router, NEXT) == "a"


@pytest.mark.parametrize(("url", "lost"), [("c", ()), ("a", ("server-0",))], ids=["another port", "the same port"])
def test_a_new_life_of_a_server_starts_with_no_versions(url: str, lost: tuple[str, ...]) -> None:
    router = Router()
    router.announce(REF, {"server-0": "a"})
    router.announce(NEXT, {"server-0": url}, lost)
    assert chosen(router, NEXT) == url
    with pytest.raises(VersionRetired):
        chosen(router)


def test_what_runs_on_a_lost_server_is_cut_off_at_once_and_the_rest_goes_on() -> None:
    async def run() -> None:
        router = Router()
        router.announce(REF, BOTH)

        async def request(seconds: float) -> str:
            async with asyncio.timeout(60) as clock, router.lease(REF, 1, clock) as lease:
                server = lease.server
                try:
                    await asyncio.sleep(seconds)
                except asyncio.CancelledError:
                    return f"{server.url} cut {server.lost}"
                return server.url
            return "timeout"

        running = [asyncio.create_task(request(0.2)) for _ in range(2)]
        await asyncio.sleep(0.05)
        router.announce(NEXT, {"server-1": "b"}, lost=["server-0"])
        await asyncio.sleep(0.01)
        assert running[0].done()
        assert await asyncio.gather(*running, return_exceptions=True) == ["a cut True", "b"]

    in_virtual_time(run())


def test_what_is_remembered_of_a_server_does_not_grow_with_the_run() -> None:
    router, other = Router(), AdapterRef(name="code", version=3)
    router.announce(other, BOTH)
    for version in range(500):
        router.announce(AdapterRef(name="math", version=version), BOTH)
    assert {name: len(held) for name, held in router._holders.items()} == {"code": 1, "math": KEEP_VERSIONS}
    assert router.newest(REF).version == 499
    assert router.newest(other) == other
    assert chosen(router, AdapterRef(name="math", version=490)) == "a"
    router.forget("math")
    assert router.newest(REF) == REF
    with pytest.raises(VersionRetired):
        chosen(router, AdapterRef(name="math", version=499))


def test_versions_that_a_trainer_has_gone_back_from_are_not_asked_for() -> None:
    router = Router()
    for version in (1, 2, 1):
        router.announce(AdapterRef(name="math", version=version), BOTH)
    assert router.newest(REF) == REF
    with pytest.raises(VersionRetired):
        chosen(router, NEXT)


def test_a_server_that_leaves_ends_what_it_runs_and_gets_no_more() -> None:
    async def leave() -> None:
        router = Router()
        router.announce(REF, BOTH)
        async with asyncio.timeout(5.0) as clock, router.lease(REF, 4, clock) as lease:
            server = lease.server
            server.leaving = True
            others = {settled(router, None) for _ in range(4)}
            assert others == set(BOTH.values()) - {server.url}
            name = next(name for name, url in BOTH.items() if url == server.url)
            rest = {n: url for n, url in BOTH.items() if n != name}
            router.announce(NEXT, rest, left=[name])
            await asyncio.sleep(0.01)  # a lost one's request would be cut off here
            assert not server.lost
        assert list(router.servers) == list(rest)

    in_virtual_time(leave())


def test_a_request_waits_while_all_that_hold_its_version_leave() -> None:
    async def wait() -> None:
        router = Router()
        router.announce(REF, BOTH)
        for server in router.servers.values():
            server.leaving = True

        async def choose() -> str:
            async with asyncio.timeout(1) as clock, router.lease(REF, 1, clock) as lease:
                server = lease.server
                return server.url

        chosen = asyncio.ensure_future(choose())
        await asyncio.sleep(0.15)
        assert not chosen.done()
        router.announce(REF, BOTH | {"server-7": "c"})
        assert await chosen == "c"

    in_virtual_time(wait())


def settled(router: Router, home: Home | None, ref: AdapterRef = REF) -> str:
    found = router.take(ref, 1, home)
    assert not isinstance(found, float)
    assert found.ref == ref
    router.end(found)
    return found.server.url


def test_a_conversation_stays_on_its_server_and_starts_on_that_of_its_group() -> None:
    router, group = Router(max_behind=4), Home()
    router.announce(REF, BOTH | {"server-2": "c"})
    conversations = [Home(group) for _ in range(3)]
    assert [settled(router, each) for each in conversations] == ["a", "a", "a"]
    assert settled(router, Home(Home())) == "a"
    router.servers["server-0"].outstanding = 5
    assert settled(router, conversations[0]) == "b"  # too far behind the least loaded
    router.servers["server-0"].outstanding = 4
    assert settled(router, conversations[0]) == "b", "it has moved"
    assert settled(router, conversations[1]) == "a"
    assert settled(router, Home(group)) == "a"
    router.announce(NEXT, BOTH)
    assert settled(router, conversations[1], NEXT) == "a", "also with another version"


@pytest.mark.parametrize("how", ["lost", "leaves", "fails", "has no such version"])
def test_a_conversation_moves_from_a_server_that_is_not_available(how: str) -> None:
    router, group = Router(Clock(), max_behind=9), Home()
    router.announce(REF, BOTH)
    conversation = Home(group)
    assert settled(router, conversation) == "a"
    server = router.servers["server-0"]
    if how == "lost":
        router.announce(REF, {"server-1": "b"}, lost=["server-0"])
    elif how == "leaves":
        server.leaving = True
    elif how == "fails":
        router.failed(server)
    else:
        router.retired(server, REF)
    assert settled(router, conversation) == "b"
    assert group.server is server if how in ("fails", "has no such version") else group.server is not server
    if how == "lost":
        router.announce(REF, BOTH)
    server.leaving, server.down_until_s = False, 0.0
    router.announce(REF, BOTH)
    assert settled(router, conversation) == "b"


def test_a_conversation_stays_on_its_version_as_long_as_it_can_be_trained_on() -> None:
    router, conversation = Router(max_behind=4, max_lag=1), Home()
    router.announce(REF, BOTH)
    assert router.newest(REF, conversation) == REF
    settled(router, conversation)
    router.announce(NEXT, BOTH)
    assert (router.newest(REF, conversation), router.newest(REF, Home()), router.newest(REF)) == (REF, NEXT, NEXT)
    third = AdapterRef(name="math", version=3)
    router.announce(third, BOTH)
    assert router.newest(REF, conversation) == third, "two versions behind"
    router.announce(AdapterRef(name="math", version=4), BOTH)
    assert router.newest(REF, conversation) == third, "it has moved"


@pytest.mark.parametrize("how", ["lost", "leaves", "fails", "has no such version", "rolled back", "no lag"])
def test_a_conversation_takes_the_newest_version_where_its_cache_is_lost(how: str) -> None:
    router, conversation = Router(Clock(), max_lag=0 if how == "no lag" else 3), Home()
    router.announce(REF, BOTH)
    router.newest(REF, conversation)
    assert settled(router, conversation) == "a"
    server, newest = router.servers["server-0"], NEXT
    router.announce(NEXT, BOTH)
    match how:
        case "lost":
            router.announce(NEXT, {"server-1": "b"}, lost=["server-0"])
        case "leaves":
            server.leaving = True
        case "fails":
            router.failed(server)
        case "has no such version":
            router.retired(server, REF)
        case "rolled back":
            newest = AdapterRef(name="math", version=0)
            router.announce(newest, BOTH)
    assert router.newest(REF, conversation) == newest


def test_all_versions_and_adapters_share_one_list_of_512_servers() -> None:
    """An announcement copies no list of servers, and a change of members makes one for all that held the same."""
    router, servers = Router(), {f"server-{i}": f"u{i}" for i in range(512)}
    for version in range(3):
        for adapter in range(100):
            router.announce(AdapterRef(name=f"a{adapter}", version=version), servers)
    held = [on for each in router._holders.values() for on in each.values()]
    assert len(held) == 300
    assert len({id(on) for on in held}) == 1
    router.announce(AdapterRef(name="a0", version=3), {k: v for k, v in servers.items() if k != "server-7"})
    held = [on for each in router._holders.values() for on in each.values()]
    assert {len(on) for on in held} == {511}
    assert len({id(on) for on in held}) == 2
