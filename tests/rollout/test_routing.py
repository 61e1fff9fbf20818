from __future__ import annotations

import asyncio

import pytest

from areal_lora.rollout.routing import MAX_COOL_DOWN_S, Router, VersionRetired
from areal_lora.types import AdapterRef
from tests.rollout.helpers import Clock

REF = AdapterRef(name="math", version=1)


def chosen(router: Router) -> str:
    async def choose() -> str:
        async with asyncio.timeout(1), router.lease(REF, 1) as server:
            return server.url

    return asyncio.run(choose())


def test_least_outstanding_sequences_win_and_are_given_back() -> None:
    async def run() -> None:
        router = Router(["a", "b"])
        router.announce(REF)
        async with router.lease(REF, 8) as first:
            async with router.lease(REF, 2) as second, router.lease(REF, 2) as third:
                assert (first.url, second.url, third.url) == ("a", "b", "b")
                assert [s.outstanding for s in router.servers] == [8, 4]
        assert [s.outstanding for s in router.servers] == [0, 0]

    asyncio.run(run())


def test_only_servers_that_hold_the_version_are_asked() -> None:
    router = Router(["a", "b"])
    with pytest.raises(VersionRetired):
        chosen(router)
    router.announce(REF)
    router.retired(router.servers[0], REF)
    assert chosen(router) == "b"
    router.retired(router.servers[1], REF)
    with pytest.raises(VersionRetired, match="math@v1"):
        chosen(router)


def test_a_failed_server_cools_down_longer_each_time_until_it_succeeds() -> None:
    clock = Clock()
    router = Router(["a", "b"], clock)
    router.announce(REF)
    bad = router.servers[0]
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
    router = Router(["a"])
    router.announce(REF)
    router.failed(router.servers[0])
    assert chosen(router) == "a"
