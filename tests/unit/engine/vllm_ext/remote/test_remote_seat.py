"""What a gateway keeps for a server that fetches its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from unittest.mock import AsyncMock, Mock

import numpy as np
from starlette.responses import Response

from areal_lora.engine.vllm_ext.remote.remote_seat import LOST_S, RemoteAnswer, RemoteSeat
from areal_lora.engine.vllm_ext.remote.shards import ShardBases, seal_of
from areal_lora.errors import PublishError
from areal_lora.network.tls import Plane
from areal_lora.weight_sync.manifest import encode, trailer_part
from tests.support.weight_sync.helpers import announce, layout_of, ref, share, values


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


def test_servers_share_the_memory_of_a_version_that_arrives_and_keep_none() -> None:
    """The third one gets other bytes of the same version, as of a trainer that was restarted."""

    async def check() -> None:
        bases, layout = ShardBases(1, 2), layout_of(share(values(0))[0])
        [shard], published = layout.shards, encode(announce(layout))
        nbytes = trailer_part(shard)[1]
        sent = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8)
        other = sent.copy()
        other[nbytes // 2 :] ^= 1
        seats = [RemoteSeat(7, bind="127.0.0.1", secret="5e" * 32, layouts=1, bases=bases) for _ in range(3)]

        def inbox(parts: Sequence[tuple[int, int]], deadline: float, bytes_of: np.ndarray) -> Mock:
            return Mock(take=Mock(side_effect=[bytes_of[start:end] for start, end in parts]))

        async def arrived(seat: RemoteSeat, bytes_of: np.ndarray) -> asyncio.Future[Response]:
            seat._groups[0] = Mock(bucket_bytes=1000, receive=partial(inbox, bytes_of=bytes_of))
            publish = asyncio.ensure_future(seat._publish(Mock(body=AsyncMock(return_value=published))))
            while not publish.done() and (not seat.spools or seat.spools[1, 0].ready < nbytes):
                await asyncio.sleep(0)
            assert np.array_equal(seat.spools[1, 0].memory, bytes_of)
            return publish

        publishes = [await arrived(*each) for each in zip(seats, (sent, sent, other), strict=True)]
        one, two, three = (seat.spools[1, 0].memory for seat in seats)
        assert one is two
        assert not np.shares_memory(one, three)
        for seat in seats:
            seat.answered(answer(1))
        await asyncio.gather(*publishes)
        assert [seat.spools for seat in seats] == [{}, {}, {}]
        assert bases.find(ref(0).name, 0, nbytes, seal_of(sent)) is one

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
