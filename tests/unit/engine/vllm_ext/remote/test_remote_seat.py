"""What a gateway keeps for a server that fetches its requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import AsyncMock, Mock

from areal_lora.engine.vllm_ext.remote.remote_seat import LOST_S, RemoteAnswer, RemoteSeat
from areal_lora.engine.vllm_ext.remote.shards import ShardBases
from areal_lora.errors import PublishError
from areal_lora.network.tls import Plane
from areal_lora.weight_sync.manifest import encode
from tests.support.weight_sync.helpers import announce, layout_of, share, values


def answer(number: int, status: int = 200) -> RemoteAnswer:
    return RemoteAnswer(number=number, status=status, body=b"")


def test_requests_are_fetched_until_they_have_arrived_and_answered_once() -> None:
    async def check() -> None:
        seat = RemoteSeat(7, bind="127.0.0.1", secret="5e" * 32, layouts=1, bases=ShardBases(1))
        one, two = (asyncio.ensure_future(seat.forward(Plane.DATA, "POST", path, b"")) for path in ("/1", "/2"))
        await asyncio.sleep(0)
        for _ in range(2):  # the answer to the first was lost on its way
            assert [each.path for each in (await seat.work(0)).requests] == ["/1", "/2"]
        assert [each.number for each in (await seat.work(1)).requests] == [2]
        seat.answered(answer(1))
        seat.answered(answer(1, 500))  # sent again
        assert (await one).status == 200
        two.cancel()
        with suppress(asyncio.CancelledError):
            await two
        assert [each.cancels for each in (await seat.work(2)).requests] == [2]
        seat.answered(answer(2))  # too late

    asyncio.run(check())


def test_a_publish_has_its_place_among_requests() -> None:
    """The server asks for what comes after the newest number: an earlier one that comes later would be lost."""

    async def check() -> None:
        seat = RemoteSeat(7, bind="127.0.0.1", secret="5e" * 32, layouts=1, bases=ShardBases(1))
        announced = announce(layout_of(share(values(0))[0]))
        inbox = Mock(take=Mock(side_effect=PublishError("nothing comes")))
        seat._groups[0] = Mock(bucket_bytes=1024, receive=Mock(return_value=inbox))
        publish = asyncio.ensure_future(seat._publish(Mock(body=AsyncMock(return_value=encode(announced)))))
        others = [asyncio.ensure_future(seat.forward(Plane.DATA, "POST", "/1", b"")) for _ in range(2)]
        while len(seat._unanswered) < 3:
            await asyncio.sleep(0)
        assert [each.number for each in (await seat.work(0)).requests] == [1, 2, 3]
        for task in (publish, *others):
            task.cancel()
        await asyncio.gather(publish, *others, return_exceptions=True)

    asyncio.run(check())


def test_a_server_that_leaves_hands_back_all_that_is_unanswered_and_what_comes_later() -> None:
    async def check() -> None:
        seat = RemoteSeat(7, bind="127.0.0.1", secret="5e" * 32, layouts=1, bases=ShardBases(1))
        unanswered = asyncio.ensure_future(seat.forward(Plane.DATA, "POST", "/1", b""))
        await asyncio.sleep(0)
        seat.leave()
        for found in (await unanswered, await seat.forward(Plane.DATA, "POST", "/2", b"")):
            assert (found.status, found.leaving) == (503, True)

    asyncio.run(check())


def test_a_server_that_fetches_nothing_is_lost_and_one_that_waits_for_work_is_not() -> None:
    async def check() -> None:
        seat = RemoteSeat(7, bind="127.0.0.1", secret="5e" * 32, layouts=1, bases=ShardBases(1))
        now = asyncio.get_running_loop().time()
        assert not seat.lost(now)
        assert seat.lost(now + LOST_S + 60.0)
        waiting = asyncio.ensure_future(seat.work(0))
        await asyncio.sleep(0)
        assert not seat.lost(now + LOST_S + 60.0)
        seat.end()
        assert (await waiting).over

    asyncio.run(check())
