"""Seconds of a step as a function of its batch: true ones, to emulate workers with.

Piecewise linear between known points. What a policy believes about a worker is fitted
elsewhere, online; nothing here is fitted. `W` is the number of workers, `K` of points.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jdlb.errors import UserError


@dataclass(frozen=True)
class TimeTable:
    """Seconds a step [K] at some batch sizes [K], in examples.

    Linear between the points and on beyond the last; constant below the first.

    >>> TimeTable("a GPU", (2, 4), (0.010, 0.012)).seconds(3)
    0.011

    Raises:
      UserError: fewer than two points, sizes that do not rise or are negative, seconds
        that are not finite and positive (0 is allowed at size 0), or a last segment
        that falls.
    """

    name: str
    sizes: tuple[float, ...]
    step_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        given = f"the time table of {self.name!r}"
        if not self.sizes or len(self.sizes) != len(self.step_seconds):
            raise UserError(
                f"{given} has {len(self.sizes)} sizes and {len(self.step_seconds)} "
                "times: give one time for each size, and at least two"
            )
        if len(self.sizes) < 2:
            raise UserError(f"{given} has one point: a line needs two")
        for before, after in itertools.pairwise(self.sizes):
            if not before < after:
                raise UserError(
                    f"{given} is not sorted: {after:g} follows {before:g}; list the "
                    "batch sizes in rising order"
                )
        if not (self.sizes[0] >= 0 and math.isfinite(self.sizes[-1])):
            raise UserError(
                f"{given} goes from {self.sizes[0]:g} to {self.sizes[-1]:g} examples: "
                "use finite batch sizes of at least 0"
            )
        for size, seconds in zip(self.sizes, self.step_seconds, strict=True):
            if not (0 < seconds < math.inf or (size == 0 and seconds == 0)):
                raise UserError(
                    f"{given} says {seconds:g} s for {size:g} examples: use positive "
                    "finite seconds"
                )
        if self.step_seconds[-1] < self.step_seconds[-2]:
            raise UserError(
                f"{given} falls from {self.step_seconds[-2]:g} s to "
                f"{self.step_seconds[-1]:g} s at its end: larger batches would be free"
            )

    @classmethod
    def affine(
        cls, fixed_seconds: float, example_seconds: float, name: str = "affine"
    ) -> "TimeTable":
        """A fixed part a step and a part an example, both in seconds.

        Raises:
          UserError: a negative or infinite part, or no time at all for an example.
        """
        if not (0 <= fixed_seconds < math.inf and 0 < example_seconds < math.inf):
            raise UserError(
                f"{fixed_seconds:g} s a step and {example_seconds:g} s an example: use "
                "at least 0 for the one and more than 0 for the other"
            )
        return cls(name, (0, 1), (fixed_seconds, fixed_seconds + example_seconds))

    @classmethod
    def from_milliseconds(
        cls, name: str, sizes: Sequence[float], milliseconds: Sequence[float]
    ) -> "TimeTable":
        """The table of times in milliseconds."""
        return cls(name, tuple(sizes), tuple(m / 1e3 for m in milliseconds))

    def seconds(self, size: float) -> float:
        """Seconds of a step of `size` examples."""
        return float(Tables([self]).seconds(np.array([float(size)]))[0])


_POWERS_OF_TWO = (2, 4, 8, 16, 32, 64, 128, 256)

# Milliseconds a batch, published with LBB (J. Supercomputing 2023, doi
# 10.1007/s11227-023-05886-w); for which network is not stated there.
GTX_1070 = TimeTable.from_milliseconds(
    "GTX 1070", _POWERS_OF_TWO, (14.6, 15.9, 17.0, 25.1, 39.2, 72.7, 143.0, 265.5)
)
TESLA_M40 = TimeTable.from_milliseconds(
    "Tesla M40", _POWERS_OF_TWO, (16.2, 21.2, 22.8, 31.3, 47.2, 84.4, 162.0, 290.4)
)
GTX_750 = TimeTable.from_milliseconds(
    "GTX 750", _POWERS_OF_TWO, (51.7, 80.7, 105.9, 163.6, 303.7, 566.7, 1113.9, 2223.8)
)


class Tables:
    """The time tables of all workers at once, [W, K], for whole arrays of sizes."""

    def __init__(self, tables: Sequence[TimeTable]):
        points = max(len(table.sizes) for table in tables)
        # Shorter tables are filled up along their last line.
        filled = [_filled(table, points) for table in tables]
        self._sizes = np.array([sizes for sizes, _ in filled])
        self._seconds = np.array([seconds for _, seconds in filled])
        steps = np.diff(self._sizes, axis=1)
        self._slopes = np.diff(self._seconds, axis=1) / steps

    def take(self, workers: np.ndarray) -> "Tables":
        """The tables of some workers, by index or by mask."""
        new = object.__new__(Tables)
        new._sizes = self._sizes[workers]
        new._seconds = self._seconds[workers]
        new._slopes = self._slopes[workers]
        return new

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds of a step of `sizes` [W] examples, one for each worker: [W]."""
        segment = (self._sizes[:, 1:-1] <= sizes[:, None]).sum(axis=1)
        rows = np.arange(len(sizes))
        beyond = np.maximum(sizes - self._sizes[rows, segment], 0.0)
        return self._seconds[rows, segment] + self._slopes[rows, segment] * beyond

    def fastest(self, sizes: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Seconds [W] of the fastest batch from `sizes` [W] up to `caps` [W]."""
        seconds = self.seconds(sizes)
        for k in range(self._sizes.shape[1]):
            at = self._sizes[:, k]
            inside = (sizes <= at) & (at <= caps)
            later = np.where(inside, self._seconds[:, k], np.inf)
            seconds = np.minimum(seconds, later)
        return np.minimum(seconds, self.seconds(np.maximum(sizes, caps)))

    def largest_within(self, seconds: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """The largest real size [W] up to `caps` [W] that takes at most `seconds` [W].

        -1 where no size does.
        """
        budget, starts = seconds[:, None], self._seconds[:, :-1]
        # The last segment goes on to the cap; those behind a cap have no width.
        ends = np.minimum(self._sizes[:, 1:], caps[:, None])
        ends[:, -1] = caps
        width = np.maximum(ends - self._sizes[:, :-1], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            into = (budget - starts) / self._slopes
        # Inside a segment that begins in time; the whole of one that ends in time.
        reached = np.where(starts <= budget, np.clip(into, 0.0, width), -np.inf)
        in_time = starts + self._slopes * width <= budget
        reached = np.where(in_time, width, reached)
        behind = self._sizes[:, :-1] > caps[:, None]
        behind[:, 0] = False
        reached = np.where(behind, -np.inf, reached)
        largest = (self._sizes[:, :-1] + reached).max(axis=1)
        return np.maximum(np.minimum(largest, caps), -1.0)


def _filled(table: TimeTable, points: int) -> tuple[list[float], list[float]]:
    sizes, seconds = list(table.sizes), list(table.step_seconds)
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    while len(sizes) < points:
        sizes.append(sizes[-1] + 1.0)
        seconds.append(seconds[-1] + slope)
    return sizes, seconds
