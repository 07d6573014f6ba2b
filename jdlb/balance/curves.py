"""Rising piecewise-linear seconds of a batch for all workers at once, and the inverse.

Values only: where they come from (a published table, an online fit) is not known here.
`W` is the number of workers, `K` of points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jdlb.balance.time_tables import TimeTable

# A line that does not rise would make any batch possible in the same time; this much a
# batch of it does, relative to the mean seconds an example.
_LEAST_RISE = 1e-6


@dataclass(frozen=True, eq=False)
class Curves:
    """Rising lines through points, one set for each worker; a `rungs.Times`.

    Attributes:
      batches: [W, K], rising in each row from 0; infinite where a row has fewer.
      points: [W, K], seconds at them, not falling; infinite in the same places.
      slopes: [W, K], seconds an example from each point on; positive in the last.
    """

    batches: np.ndarray
    points: np.ndarray
    slopes: np.ndarray

    @classmethod
    def through(
        cls,
        batches: np.ndarray,
        seconds: np.ndarray,
        before: np.ndarray,
        beyond: np.ndarray,
    ) -> "Curves":
        """Lines through points, made to rise.

        Args:
          batches: [W, K] of positive batches, rising; infinite where there is none, but
            at least one in each row.
          seconds: [W, K] at them, any positive numbers.
          before: slope before the first point, [W]; lowered where the line would pass
            below 0 at an empty batch.
          beyond: slope after the last point, [W].

        The points become the middle between the lowest rising line that nowhere is
        below them and the highest that nowhere is above: of all rising lines none has a
        smaller largest distance to them (isotonic regression in the maximum norm).
        """
        there = np.isfinite(batches)
        filled = np.where(there, seconds, np.inf)
        highest = np.maximum.accumulate(np.where(there, seconds, 0.0), axis=1)
        lowest = np.minimum.accumulate(filled[:, ::-1], axis=1)[:, ::-1]
        points = np.where(there, (highest + lowest) / 2, np.inf)
        first = np.clip(before, 0.0, points[:, 0] / batches[:, 0])
        start = points[:, 0] - first * batches[:, 0]
        batches = np.column_stack([np.zeros(len(batches)), batches])
        points = np.column_stack([start, points])
        with np.errstate(invalid="ignore"):
            inner = np.diff(points, axis=1) / np.diff(batches, axis=1)
        rows, last = np.arange(len(batches)), there.sum(axis=1)
        slopes = np.column_stack([inner, beyond])
        least = _LEAST_RISE * points[rows, last] / batches[rows, last]
        slopes[rows, last] = np.maximum(beyond, least)
        return cls(batches, points, np.nan_to_num(slopes))

    @classmethod
    def of_tables(cls, tables: Sequence[TimeTable]) -> "Curves":
        """The tables as they are, made to rise where they fall; constant below.

        >>> curves = Curves.of_tables([TimeTable("a GPU", (2, 4), (0.010, 0.012))])
        >>> curves.seconds(np.array([3.0])), curves.within(0.013)
        (array([0.011]), array([5.]))
        """
        longest = max(len(table.sizes) for table in tables)
        shape = (len(tables), longest)
        batches, seconds = np.full(shape, np.inf), np.full(shape, np.inf)
        beyond = np.empty(len(tables))
        for w, table in enumerate(tables):
            # Curves begin at an empty batch anyway.
            skip = int(table.sizes[0] == 0)
            sizes, times = table.sizes[skip:], table.step_seconds[skip:]
            batches[w, : len(sizes)], seconds[w, : len(sizes)] = sizes, times
            rise = table.step_seconds[-1] - table.step_seconds[-2]
            beyond[w] = rise / (table.sizes[-1] - table.sizes[-2])
        before = np.array([_slope_before(table) for table in tables])
        return cls.through(batches, seconds, before, beyond)

    def seconds(self, batches: np.ndarray) -> np.ndarray:
        """What each worker takes for its batch, [W]."""
        rows = np.arange(len(batches))
        k = _count(self.batches <= batches[:, None]) - 1
        into = batches - self.batches[rows, k]
        return self.points[rows, k] + self.slopes[rows, k] * into

    def within(self, seconds: float) -> np.ndarray:
        """The largest real batch of each worker that takes no longer, [W]; 0 if none."""
        rows = np.arange(len(self.batches))
        k = np.maximum(_count(self.points <= seconds) - 1, 0)
        slopes = self.slopes[rows, k]
        late = np.maximum(seconds - self.points[rows, k], 0.0)
        into = late / np.where(slopes > 0, slopes, np.inf)
        return self.batches[rows, k] + into

    def one(self) -> Callable[[int, int], float]:
        """(worker, batch) -> seconds, for a few single values."""

        def seconds(w: int, batch: int) -> float:
            batches = self.batches[w]
            k = int(np.searchsorted(batches, batch, side="right")) - 1
            into = batch - batches[k]
            return float(self.points[w, k] + self.slopes[w, k] * into)

        return seconds


def _count(mask: np.ndarray) -> np.ndarray:
    """How many are true in each row: a product, as sums along short rows are slow."""
    return (mask @ np.ones(mask.shape[1])).astype(np.int64)


def _slope_before(table: TimeTable) -> float:
    if table.sizes[0] > 0:
        return 0.0
    return (table.step_seconds[1] - table.step_seconds[0]) / table.sizes[1]
