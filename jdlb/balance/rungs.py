"""The capacities that workers may have, and the fewest seconds that hold a batch.

A min-max search shared by everything that balances: `times` says what each worker takes
for how much, `rungs` which capacities there are. Must not know where times come from,
nor what a policy is. `W` is the number of workers.
"""

import bisect
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jdlb.balance.ladder import Ladder, Limits


class Times(Protocol):
    """Seconds as a rising function of the batch, one for each worker."""

    def seconds(self, batches: np.ndarray) -> np.ndarray:
        """What each worker takes for its batch, [W]."""
        ...

    def within(self, seconds: float) -> np.ndarray:
        """The largest real batch of each worker that takes no longer, [W]."""
        ...

    def one(self) -> Callable[[int, int], float]:
        """(worker, batch) -> seconds, for a few single values."""
        ...


class Rungs(Protocol):
    """The capacities of each worker, from its lowest to its highest, both [W]."""

    @property
    def lowest(self) -> np.ndarray: ...

    @property
    def granule(self) -> int:
        """No two capacities of a worker are nearer, but for its cap."""
        ...

    def at_most(self, bounds: np.ndarray) -> np.ndarray:
        """The largest capacity within each bound [W], the lowest where none is."""
        ...

    def below(self, capacities: np.ndarray) -> np.ndarray:
        """The next lower capacity of each worker [W]; the same at its lowest."""
        ...

    def one_below(self) -> Callable[[int, int], int]:
        """(worker, capacity) -> the next lower one, for a few single values."""
        ...


@dataclass(frozen=True)
class Proportional:
    """Times proportional to the batch: `batch / weight`, weights [W]."""

    weights: np.ndarray

    def seconds(self, batches: np.ndarray) -> np.ndarray:
        """See `Times`."""
        return batches * (1 / self.weights)

    def within(self, seconds: float) -> np.ndarray:
        """See `Times`."""
        return seconds * self.weights

    def one(self) -> Callable[[int, int], float]:
        """See `Times`."""
        inverse = 1 / self.weights
        return lambda w, batch: float(batch * inverse[w])


@dataclass(frozen=True)
class LadderRungs:
    """Ladder edges between the floor and the cap of each worker, and the cap itself."""

    edges: np.ndarray  # [E]
    lowest: np.ndarray  # [W]
    highest: np.ndarray  # [W]

    @classmethod
    def of(cls, ladder: Ladder, limits: Limits) -> "LadderRungs":
        """The rungs of a ladder whose last edge no cap is above."""
        edges, caps = np.array(ladder.edges), np.array(limits.caps)
        lowest = edges[np.searchsorted(edges, limits.floors)]
        return cls(edges, np.minimum(lowest, caps), caps)

    @property
    def granule(self) -> int:
        """See `Rungs`."""
        return int(self.edges[0])

    def at_most(self, bounds: np.ndarray) -> np.ndarray:
        """See `Rungs`."""
        position = np.searchsorted(self.edges, bounds, side="right") - 1
        edges = self.edges[np.maximum(position, 0)]
        capacities = np.where(bounds >= self.highest, self.highest, edges)
        return np.clip(capacities, self.lowest, self.highest)

    def below(self, capacities: np.ndarray) -> np.ndarray:
        """See `Rungs`."""
        position = np.searchsorted(self.edges, capacities, side="left") - 1
        edges = self.edges[np.maximum(position, 0)]
        return np.clip(edges, self.lowest, capacities)

    def one_below(self) -> Callable[[int, int], int]:
        """See `Rungs`."""
        edges, lowest = self.edges.tolist(), self.lowest.tolist()

        def lower(w: int, capacity: int) -> int:
            position = bisect.bisect_left(edges, capacity) - 1
            return max(edges[max(position, 0)], lowest[w])

        return lower


@dataclass(frozen=True)
class WholeRungs:
    """Every whole number from the lowest to the highest of each worker, both [W]."""

    lowest: np.ndarray
    highest: np.ndarray

    @classmethod
    def of(cls, limits: Limits) -> "WholeRungs":
        """Every size within the limits."""
        return cls(np.array(limits.floors), np.array(limits.caps))

    @property
    def granule(self) -> int:
        """See `Rungs`."""
        return 1

    def at_most(self, bounds: np.ndarray) -> np.ndarray:
        """See `Rungs`."""
        whole = np.floor(np.minimum(bounds, self.highest)).astype(np.int64)
        return np.maximum(whole, self.lowest)

    def below(self, capacities: np.ndarray) -> np.ndarray:
        """See `Rungs`."""
        return np.maximum(capacities - 1, self.lowest)

    def one_below(self) -> Callable[[int, int], int]:
        """See `Rungs`."""
        lowest = self.lowest.tolist()
        return lambda w, capacity: max(capacity - 1, lowest[w])


def fill(times: Times, total: int, rungs: Rungs, guess: float) -> np.ndarray:
    """Capacities [W] that hold `total` with the smallest possible largest time.

    Then with the smallest second largest, and so on; of equal times that of the higher
    index counts as the larger. First every worker gets its largest capacity below a
    common time that is enough for `total`; then, from the largest time down, each
    worker that can go one capacity lower while the sum still holds `total` does. Who
    can be made quicker no further could not be in any other choice either: whoever was
    lowered before was slower. `guess` is where the search for the time begins.
    """
    capacities = _threshold(times, total, rungs, guess)
    _step_down(capacities, times, total, rungs)
    return capacities


def give_back(
    capacities: np.ndarray,
    seconds: np.ndarray,
    total: int,
    rungs: Rungs,
    floors: np.ndarray,
) -> np.ndarray:
    """Sizes [W] that sum to `total` and need just these capacities.

    What `fill` leaves above `total` is less than any step down: one worker, that with
    the largest time, leaves it out and keeps its capacity. Only where all are at their
    lowest capacities, more than one may have to.
    """
    surplus = int(capacities.sum()) - total
    lower = rungs.below(capacities)
    slack = capacities - np.where(lower < capacities, lower + 1, floors)
    indices = np.arange(len(capacities))
    order = np.lexsort((-indices, -seconds, slack < surplus))
    before = np.cumsum(slack[order]) - slack[order]
    sizes = capacities.copy()
    sizes[order] -= np.clip(surplus - before, 0, slack[order])
    return sizes


def _threshold(times: Times, total: int, rungs: Rungs, guess: float) -> np.ndarray:
    """Capacities [W] under one common time, just enough for `total`.

    Just enough: one capacity less for everybody would not be.
    """
    if rungs.lowest.sum() >= total:
        return rungs.lowest.copy()
    low, high = 0.0, guess
    while (capacities := rungs.at_most(times.within(high))).sum() < total:
        low, high = high, 2 * high
    while rungs.below(capacities).sum() >= total:
        middle = (low + high) / 2
        if not low < middle < high:
            # Times that do not rise: as near as numbers go.
            break
        if (lower := rungs.at_most(times.within(middle))).sum() >= total:
            high, capacities = middle, lower
        else:
            low = middle
    return capacities


def _step_down(capacities: np.ndarray, times: Times, total: int, rungs: Rungs) -> None:
    """Lower `capacities` [W] in place, largest time first, while they hold `total`."""
    surplus = int(capacities.sum()) - total
    lower = rungs.below(capacities)
    gaps = capacities - lower
    candidates = np.flatnonzero((gaps > 0) & (gaps <= surplus))
    seconds = times.seconds(capacities)[candidates]
    heap = list(zip((-seconds).tolist(), (-candidates).tolist(), strict=True))
    heapq.heapify(heap)
    # Lists, because single items of arrays are slow to reach; and most workers that
    # step down at all do so once.
    chosen, once = capacities.tolist(), lower.tolist()
    seconds_once = times.seconds(lower).tolist()
    lower_of, seconds_of = rungs.one_below(), times.one()
    smallest = min(rungs.granule, gaps[candidates].min(initial=rungs.granule))
    while heap and surplus >= smallest:
        _, negative = heapq.heappop(heap)
        w = -negative
        first = once[w] < chosen[w]
        target = once[w] if first else lower_of(w, chosen[w])
        # The surplus only shrinks: who cannot step down now never can.
        if 0 < chosen[w] - target <= surplus:
            surplus -= chosen[w] - target
            chosen[w] = target
            after = seconds_once[w] if first else seconds_of(w, target)
            heapq.heappush(heap, (-after, negative))
    capacities[:] = chosen
