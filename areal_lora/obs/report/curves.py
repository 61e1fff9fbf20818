"""Hold curves of any number of points in bounded memory.

Points fall into buckets of equal width in x. A bucket is one step or version at first. When the number of buckets
exceeds the limit, the width doubles and neighbours are merged.

- A line (`Curve`) keeps the first, lowest, highest and last point of each bucket: a spike of one step stays visible.
- A mean (`Means`: bars, smoothed lines) is the mean over all points of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areal_lora.obs.report import svg

BUCKETS = 320
"""Half the width of a plot in pixels; more buckets would not be visible."""
Point = tuple[float, float]


class Curve:
    """Iterates over the kept points in order of x."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most = buckets
        self._width = 1.0
        self._buckets: dict[float, list[Point]] = {}  # first, lowest, highest, last

    def add(self, x: float, y: float) -> None:
        """``x`` may come in any order; ``y`` is finite."""
        self._put(x, y)
        while len(self._buckets) > self._most:
            self._width *= 2
            points, self._buckets = list(self), {}
            for point in points:
                self._put(*point)

    def _put(self, x: float, y: float) -> None:
        place, point = x // self._width, (x, y)
        bucket = self._buckets.get(place)
        if bucket is None:
            self._buckets[place] = [point] * 4
            return
        if x < bucket[0][0]:
            bucket[0] = point
        if y < bucket[1][1]:
            bucket[1] = point
        if y > bucket[2][1]:
            bucket[2] = point
        if x >= bucket[3][0]:
            bucket[3] = point

    def __iter__(self) -> Iterator[Point]:
        for _, bucket in sorted(self._buckets.items()):
            yield from sorted(set(bucket))


class Means:
    """Averages rows of values over x by bucket; all rows have the same length."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most = buckets
        self._width = 1.0
        self._buckets: dict[float, list[float]] = {}  # number of rows, sum of x, sums of the values

    def add(self, x: float, values: Sequence[float]) -> None:
        self._put(x // self._width, [1.0, x, *values])
        while len(self._buckets) > self._most:
            self._width *= 2
            sums, self._buckets = list(self._buckets.values()), {}
            for row in sums:
                self._put(row[1] / row[0] // self._width, row)

    def _put(self, place: float, sums: list[float]) -> None:
        bucket = self._buckets.get(place)
        self._buckets[place] = sums if bucket is None else [a + b for a, b in zip(bucket, sums, strict=True)]

    def rows(self) -> list[tuple[float, list[float]]]:
        """(mean x, mean values) by bucket, in order of x."""
        return [(sums[1] / sums[0], [v / sums[0] for v in sums[2:]]) for _, sums in sorted(self._buckets.items())]


class MovingMean:
    """The moving mean of a `Means` of one value, over a twelfth of the run."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def __iter__(self) -> Iterator[Point]:
        points = [(x, values[0]) for x, values in self._means.rows()]
        return iter(svg.moving_mean(points, max(3, len(points) // 12)))
