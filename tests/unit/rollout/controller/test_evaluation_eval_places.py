"""An evaluation has half of the servers at most, and never stands still, whatever is cut off."""

from __future__ import annotations

import asyncio
import random

import pytest

from areal_lora.rollout.controller.evaluation import EvalPlaces
from areal_lora.rollout.controller.runtime import Capacity
from tests.support.clocks import in_virtual_time
from tests.support.sizes import size


class Requests:
    """Requests of an evaluation that end when the test says so; ``taken`` are the sequences in progress."""

    def __init__(self) -> None:
        self.taken = 0
        self.open: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def begin(self, places: EvalPlaces, *sequences: int) -> None:
        for n in sequences:
            end = asyncio.Event()
            self.open.append((end, asyncio.create_task(self._request(places, n, end))))
        await settle()

    async def _request(self, places: EvalPlaces, n: int, end: asyncio.Event) -> None:
        async with places.take(n):
            self.taken += n
            try:
                await end.wait()
            finally:
                self.taken -= n

    async def end(self, count: int = 10**6) -> None:
        """End the oldest requests, also those that wait."""
        ended, self.open = self.open[:count], self.open[count:]
        for end, _ in ended:
            end.set()
        await settle()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_it_has_all_places_and_those_that_come() -> None:
    async def main() -> None:
        places, it = EvalPlaces(128), Requests()
        await it.begin(places, *[32] * 8)
        assert it.taken == 128
        await it.end(1)
        assert it.taken == 128, "one of those that waited has begun"
        places.resize(192)
        await settle()
        assert it.taken == 192
        places.resize(64)
        await settle()
        assert it.taken == 192, "what runs is not cut off"
        await it.end(6)
        assert it.taken == 32
        await it.end()

    asyncio.run(main())


def test_while_the_trainer_waits_evaluations_begin_a_quarter_as_much() -> None:
    async def main() -> None:
        places, it = EvalPlaces(128), Requests()
        places.trainer_waits(True)
        await it.begin(places, *[16] * 12)
        assert it.taken == 32
        places.trainer_waits(False)
        await settle()
        assert it.taken == 128
        places.trainer_waits(True)
        await settle()
        assert it.taken == 128, "what runs is not cut off"
        await it.end(4)
        assert it.taken == 64, "and nothing begins meanwhile"
        await it.end(3)
        assert it.taken == 32, "until there is less than a quarter"
        await it.end()

    asyncio.run(main())


def test_while_the_trainer_waits_for_good_an_evaluation_ends() -> None:
    async def main() -> None:
        places, it = EvalPlaces(64), Requests()
        places.trainer_waits(True)
        await it.begin(places, *[32] * 5)
        for left in reversed(range(5)):
            assert it.taken == 32, "one request is in progress"
            await it.end(1)
            assert len(it.open) == left
        assert it.taken == 0

    asyncio.run(main())


@pytest.mark.parametrize("sequences", [0, 8])
def test_one_request_is_in_progress_however_large(sequences: int) -> None:
    async def main() -> None:
        places, it = EvalPlaces(sequences), Requests()
        await it.begin(places, 32, 32)
        assert it.taken == 32
        await it.end(1)
        assert it.taken == 32
        await it.end()

    asyncio.run(main())


def test_one_that_is_cut_off_leaves_its_place_whether_it_waited_or_ran() -> None:
    async def main() -> None:
        places, it = EvalPlaces(32), Requests()
        await it.begin(places, 32, 31, 30)
        it.open[1][1].cancel()  # waits
        await settle()
        assert it.taken == 32
        it.open[0][1].cancel()  # runs
        await settle()
        assert it.taken == 30
        # Cancelled between its turn and its beginning.
        await it.begin(places, 29, 28)
        it.open[2][0].set()
        await asyncio.sleep(0)
        it.open[3][1].cancel()
        await settle()
        assert it.taken == 28

    asyncio.run(main())


def test_half_of_the_servers_is_for_training() -> None:
    assert Capacity(sequences=256, n_samples=8).evaluated(3) == 384


@pytest.mark.parametrize("seed", range(size(20, 400)))
def test_random_walks_take_no_more_than_there_is_and_end(seed: int) -> None:
    rng = random.Random(seed)
    print("seed", seed)

    async def main() -> None:
        places, taken = EvalPlaces(64), 0

        async def trainer() -> None:
            while True:
                places.trainer_waits(rng.random() < 0.7)
                await asyncio.sleep(rng.random() * 0.004)

        async def request(n: int) -> None:
            nonlocal taken
            async with places.take(n):
                taken += n
                try:
                    assert taken in (n, *range(65)), "more than all places"
                    await asyncio.sleep(rng.random() * 0.003)
                finally:
                    taken -= n

        async with asyncio.timeout(120):
            steps = asyncio.create_task(trainer())
            for _ in range(5):
                tasks = [asyncio.create_task(request(rng.choice([1, 4, 32, 80]))) for _ in range(rng.randrange(1, 30))]
                for task in tasks:
                    if rng.random() < 0.2:
                        await asyncio.sleep(0.001)
                        task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(each) for each in ended} <= {type(None), asyncio.CancelledError}, ended
                assert taken == 0
            steps.cancel()

    in_virtual_time(main())
