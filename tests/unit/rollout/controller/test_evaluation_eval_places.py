"""Evaluations of all adapters share half of the servers; none of them stands still, whoever begins or is cut off."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from areal_lora.rollout.controller.evaluation import EvalPlaces, Share
from areal_lora.rollout.controller.runtime import Capacity
from tests.support.clocks import in_virtual_time
from tests.support.sizes import size


class Requests:
    """Requests of evaluations that end when the test says so; ``taken`` are the sequences in progress by evaluation."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.open: list[tuple[str, asyncio.Event, asyncio.Task[None]]] = []

    async def begin(self, who: str, share: Share, *sequences: int) -> None:
        for n in sequences:
            end = asyncio.Event()
            self.open.append((who, end, asyncio.create_task(self._request(who, share, n, end))))
        await settle()

    async def _request(self, who: str, share: Share, n: int, end: asyncio.Event) -> None:
        async with share.take(n):
            self.taken[who] += n
            try:
                await end.wait()
            finally:
                self.taken[who] -= n

    async def end(self, who: str, count: int = 10**6) -> None:
        """End the oldest requests of an evaluation, also those that wait."""
        mine = [one for one in self.open if one[0] == who][:count]
        for one in mine:
            self.open.remove(one)
            one[1].set()
        await settle()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_one_alone_has_all_and_two_have_a_half_each() -> None:
    async def main() -> None:
        places, it = EvalPlaces(128), Requests()
        with places.share() as a:
            await it.begin("a", a, *[32] * 6)
            assert it.taken["a"] == 128
            with places.share() as b:
                await it.begin("b", b, *[32] * 6)
                assert it.taken["b"] == 64, "what runs is not cut off"
                await it.end("a", 1)
                assert it.taken["a"] == 96
                await it.end("a", 2)
                assert it.taken["a"] == 64, "two of those that waited have begun"
                await it.end("b")
            assert it.taken["a"] == 64
            await it.end("a")
            assert it.taken == {"a": 0, "b": 0}

    asyncio.run(main())


def test_those_that_wait_have_the_places_of_one_that_has_ended() -> None:
    async def main() -> None:
        places, it = EvalPlaces(128), Requests()
        with places.share() as a:
            with places.share():
                await it.begin("a", a, *[32] * 6)
                assert it.taken["a"] == 64
            await settle()
            assert it.taken["a"] == 128
            places.resize(192)
            await settle()
            assert it.taken["a"] == 192
            await it.end("a")

    asyncio.run(main())


def test_while_the_trainer_waits_evaluations_begin_a_quarter_as_much() -> None:
    async def main() -> None:
        places, it = EvalPlaces(128), Requests()
        places.trainer_waits(True)
        with places.share() as a:
            await it.begin("a", a, *[16] * 12)
            assert it.taken["a"] == 32
            places.trainer_waits(False)
            await settle()
            assert it.taken["a"] == 128
            places.trainer_waits(True)
            await settle()
            assert it.taken["a"] == 128, "what runs is not cut off"
            await it.end("a", 4)
            assert it.taken["a"] == 64, "and nothing begins meanwhile"
            await it.end("a", 3)
            assert it.taken["a"] == 32, "until there is less than a quarter"
            await it.end("a")

    asyncio.run(main())


def test_while_the_trainer_waits_for_good_every_evaluation_ends() -> None:
    async def main() -> None:
        places, it = EvalPlaces(128), Requests()
        places.trainer_waits(True)
        with places.share() as a, places.share() as b, places.share() as c:
            for who, share in (("a", a), ("b", b), ("c", c)):
                await it.begin(who, share, *[32] * 5)
            for left in reversed(range(5)):
                assert it.taken == {"a": 32, "b": 32, "c": 32}, "one request of each is in progress"
                for who in "abc":
                    await it.end(who, 1)
                assert len(it.open) == 3 * left
            assert it.taken == {"a": 0, "b": 0, "c": 0}

    asyncio.run(main())


@pytest.mark.parametrize("sequences", [0, 8])
def test_each_has_one_request_in_progress_however_large(sequences: int) -> None:
    async def main() -> None:
        places, it = EvalPlaces(sequences), Requests()
        with places.share() as a, places.share() as b:
            await it.begin("a", a, 32, 32)
            await it.begin("b", b, 32)
            assert it.taken == {"a": 32, "b": 32}
            await it.end("a", 1)
            assert it.taken["a"] == 32
            await it.end("a")
            await it.end("b")

    asyncio.run(main())


def test_one_that_is_cut_off_leaves_its_place_whether_it_waited_or_ran() -> None:
    async def main() -> None:
        places, it = EvalPlaces(32), Requests()
        with places.share() as a:
            await it.begin("a", a, 32, 31, 30)
            it.open[1][2].cancel()  # waits
            await settle()
            assert it.taken["a"] == 32
            it.open[0][2].cancel()  # runs
            await settle()
            assert it.taken["a"] == 30
            # Cancelled between its turn and its beginning.
            await it.begin("a", a, 29, 28)
            it.open[2][1].set()
            await asyncio.sleep(0)
            it.open[3][2].cancel()
            await settle()
            assert it.taken["a"] == 28

    asyncio.run(main())


def test_half_of_the_servers_is_for_training() -> None:
    assert Capacity(sequences=256, n_samples=8).evaluated(3) == 384


@pytest.mark.parametrize("seed", range(size(20, 400)))
def test_random_walks_take_no_more_than_there_is_and_end(seed: int) -> None:
    rng = random.Random(seed)
    print("seed", seed)

    async def evaluation(places: EvalPlaces, taken: Counter[Share]) -> None:
        await asyncio.sleep(rng.random() * 0.01)
        with places.share() as share:

            async def request(n: int) -> None:
                async with share.take(n):
                    taken[share] += n
                    try:
                        assert taken[share] in (n, *range(65)), "more than all places"
                        await asyncio.sleep(rng.random() * 0.003)
                    finally:
                        taken[share] -= n

            tasks = [asyncio.create_task(request(rng.choice([1, 4, 32, 80]))) for _ in range(rng.randrange(1, 30))]
            for task in tasks:
                if rng.random() < 0.2:
                    await asyncio.sleep(0.001)
                    task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(each) for each in ended} <= {type(None), asyncio.CancelledError}, ended
            assert taken[share] == 0

    async def main() -> None:
        places, taken = EvalPlaces(64), Counter[Share]()

        async def trainer() -> None:
            while True:
                places.trainer_waits(rng.random() < 0.7)
                await asyncio.sleep(rng.random() * 0.004)

        async with asyncio.timeout(120):
            steps = asyncio.create_task(trainer())
            await asyncio.gather(*(evaluation(places, taken) for _ in range(5)))
            steps.cancel()
        places.trainer_waits(False)
        assert places.each == 64, "no share remains"

    in_virtual_time(main())
