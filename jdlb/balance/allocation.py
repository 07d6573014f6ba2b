"""Sizes and capacities: from real-valued targets to whole examples on a short ladder.

The one place where shares become integers. Must not know where targets come from
(policies) or what a batch is made of (data, engine). `W` is the number of workers.
"""

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from jdlb.errors import UserError

Targets = Sequence[float] | np.ndarray

# A target this small against the largest one counts as this: a ratio to it stays
# finite, and a worker with target 0 still serves when all others are at their caps.
_SMALLEST_WEIGHT = 1e-12


@dataclass(frozen=True)
class Limits:
    """The fewest and the most examples a step that each worker may get, both [W].

    Raises:
      UserError: unequal lengths, a negative floor, or a floor above its cap.
    """

    floors: tuple[int, ...]
    caps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.caps or len(self.floors) != len(self.caps):
            raise UserError(
                f"{len(self.floors)} floors and {len(self.caps)} caps: "
                "give one of each for every worker"
            )
        for w, (floor, cap) in enumerate(zip(self.floors, self.caps, strict=True)):
            if not 0 <= floor <= cap or cap == 0:
                raise UserError(
                    f"worker {w} has floor {floor} and cap {cap}: "
                    "need 0 <= floor <= cap and a cap of at least 1"
                )

    @classmethod
    def default(
        cls,
        workers: int,
        global_batch: int,
        granule: int,
        caps: Sequence[int] | None = None,
    ) -> Self:
        """A floor of one granule, or as much as fits; no caps unless given.

        The floor keeps every worker measured, so that one that was slow can come back.
        """
        floor = min(granule, global_batch // workers)
        given = [global_batch] * workers if caps is None else caps
        return cls(tuple(min(floor, cap) for cap in given), tuple(given))

    def with_caps(self, caps: Iterable[int]) -> Self:
        """The same floors under other caps; a floor above its cap comes down to it."""
        new = tuple(caps)
        if len(new) != len(self.floors):
            raise UserError(f"{len(new)} caps for {len(self.floors)} workers")
        floors = (min(f, c) for f, c in zip(self.floors, new, strict=True))
        return type(self)(tuple(floors), new)


@dataclass(frozen=True)
class Ladder:
    """The few batch sizes that are compiled: examples a worker, rising.

    Edges are multiples of `granule`. The next edge after `e` is one granule further,
    or `growth * e` rounded to a whole number of granules (half up) if that is more; the
    last edge is the first that reaches `top`.

    >>> Ladder(granule=8, growth=0.25, top=64).edges
    (8, 16, 24, 32, 40, 48, 64)

    Raises:
      UserError: granule below 1, top below 1, or growth outside [0, 1].
    """

    granule: int
    growth: float = 1 / 16
    top: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.granule < 1:
            raise UserError(f"granule {self.granule}: use a whole number of at least 1")
        if self.top < 1:
            raise UserError(f"top of the ladder {self.top}: use at least 1 example")
        if not 0 <= self.growth <= 1:
            raise UserError(f"growth {self.growth}: use a number from 0 to 1")

    @classmethod
    def default(cls, global_batch: int, workers: int = 1) -> Self:
        """A granule of 1 % of the global batch, or finer if there are many workers.

        With more than 6 workers an equal share is still 16 granules where that leaves
        whole examples: on a coarser ladder nothing could be balanced.
        """
        granule = max(1, min(global_batch // 100, global_batch // (16 * workers)))
        return cls(granule, top=global_batch)

    @functools.cached_property
    def edges(self) -> tuple[int, ...]:
        """All capacities, rising."""
        edges = [self.granule]
        while edges[-1] < self.top:
            granules = math.floor(self.growth * edges[-1] / self.granule + 0.5)
            edges.append(edges[-1] + self.granule * max(1, granules))
        return tuple(edges)

    def capacity(self, size: int) -> int:
        """The smallest edge that holds `size` examples; the smallest of all for 0.

        Raises:
          UserError: a negative size, or one above the last edge.
        """
        if not 0 <= size <= self.edges[-1]:
            raise UserError(
                f"{size} examples do not fit on a ladder from 0 to {self.edges[-1]}: "
                "raise its top"
            )
        return self.edges[bisect.bisect_left(self.edges, size)]


@dataclass(frozen=True)
class Allocation:
    """Examples a step of each worker, and the batch size each is padded to, both [W]."""

    sizes: tuple[int, ...]
    capacities: tuple[int, ...]

    def __post_init__(self) -> None:
        pairs = zip(self.sizes, self.capacities, strict=True)
        if not all(0 <= size <= capacity for size, capacity in pairs):
            raise ValueError(f"sizes {self.sizes} do not fit in {self.capacities}")

    @property
    def workers(self) -> int:
        """Number of workers, `W`."""
        return len(self.sizes)

    @property
    def global_batch(self) -> int:
        """Examples a step over all workers."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each worker's rows begin in the global batch, and its end: [W + 1]."""
        return tuple(itertools.accumulate(self.sizes, initial=0))


def allocate(
    targets: Targets, total: int, ladder: Ladder, limits: Limits, aligned: bool
) -> Allocation:
    """Whole examples near `targets` [W], summing to `total`, with their capacities.

    Args:
      targets: real-valued examples a worker; `round_shares` says how zero, NaN and
        infinite ones are read.
      total: examples a step.
      ladder: the capacities; its last edge caps every worker.
      limits: floors and caps.
      aligned: sizes on ladder edges (`align`) instead of the nearest (`round_shares`).

    Raises:
      UserError: floors and caps leave no room for `total`.
    """
    limits = limits.with_caps(min(cap, ladder.edges[-1]) for cap in limits.caps)
    if aligned:
        sizes = align(targets, total, ladder, limits)
    else:
        sizes = round_shares(targets, total, limits)
    return padded(sizes, ladder, limits)


def padded(sizes: Sequence[int], ladder: Ladder, limits: Limits) -> Allocation:
    """Given sizes with their capacities.

    A cap bounds what a worker's memory holds, and padding takes memory too: a
    worker's own ladder therefore ends with an edge at its cap.
    """
    capacities = (
        min(ladder.capacity(size), cap)
        for size, cap in zip(sizes, limits.caps, strict=True)
    )
    return Allocation(tuple(sizes), tuple(capacities))


def round_shares(targets: Targets, total: int, limits: Limits) -> tuple[int, ...]:
    """Largest remainder: whole sizes [W] nearest to `targets`, exact in their sum.

    Targets are scaled to sum to `total` with every one inside its limits, rounded
    down, and the examples left go to the largest fractions; of equal ones to the
    lowest index. On the example of the DBS paper (Appendix A) this is its rounding:

    >>> limits = Limits.default(workers=4, global_batch=64, granule=1)
    >>> round_shares([13.7, 16.5, 19.6, 14.2], 64, limits)
    (14, 16, 20, 14)

    A NaN or negative target counts as 0; if some are infinite these share alike and
    the others count as 0; if all are 0 they share alike. Zero is not nothing: such a
    worker gets its floor, and more when all others are at their caps.

    Raises:
      UserError: floors and caps leave no room for `total`.
    """
    weights = _weights(targets, total, limits)
    floors, caps = np.array(limits.floors), np.array(limits.caps)
    quotas = _quotas(weights, total, floors, caps)
    sizes = np.clip(np.floor(quotas), floors, caps).astype(np.int64)
    # Rounded, or the last bit of a product would decide between equal fractions.
    fractions = np.round(quotas - sizes, 9)
    left = total - int(sizes.sum())
    sign = 1 if left > 0 else -1
    order = np.argsort(-sign * fractions, kind="stable")
    # One pass but for the last bits of huge totals.
    while left:
        room = (sizes < caps) if sign > 0 else (sizes > floors)
        chosen = order[room[order]][: abs(left)]
        sizes[chosen] += sign
        left -= sign * len(chosen)
    return tuple(sizes.tolist())


def align(
    targets: Targets, total: int, ladder: Ladder, limits: Limits
) -> tuple[int, ...]:
    """Sizes [W] on ladder edges but for one worker, which takes the remainder.

    A step costs what its capacity costs, so what counts is `capacity / target`: with
    targets proportional to performance it is proportional to the predicted time. The
    capacities chosen make the largest of these ratios the smallest possible, then the
    second largest, and so on (of equal ratios that of the higher index counts as the
    larger). First every worker gets its largest edge below a common threshold that is
    large enough for `total`; then, from the largest ratio down, each worker that can
    go one edge lower while the capacities still hold `total` does.

    What remains above `total` is less than any step down, so that one worker, that
    with the largest ratio, can leave it out and keep its capacity. Only where nearly
    all workers are at their lowest edges, more than one may have to.

    Targets and errors as in `round_shares`.

    >>> limits = Limits.default(workers=3, global_batch=100, granule=8)
    >>> align([54.0, 30.0, 16.0], 100, Ladder(8, top=100), limits)
    (56, 28, 16)
    """
    limits = limits.with_caps(min(cap, ladder.edges[-1]) for cap in limits.caps)
    weights = _weights(targets, total, limits)
    rungs = _Rungs.of(ladder, limits)
    capacities = _threshold(weights, total, rungs)
    _step_down(capacities, weights, total, rungs)

    surplus = int(capacities.sum()) - total
    floors = np.array(limits.floors)
    lower = rungs.below(capacities)
    slack = capacities - np.where(lower < capacities, lower + 1, floors)
    indices = np.arange(len(weights))
    order = np.lexsort((-indices, -capacities / weights, slack < surplus))
    before = np.cumsum(slack[order]) - slack[order]
    sizes = capacities
    sizes[order] -= np.clip(surplus - before, 0, slack[order])
    return tuple(sizes.tolist())


def split_proportionally(sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """A last, partial batch of `total` examples in the proportions of `sizes` [W].

    Largest remainder in whole numbers, ties by index; nobody gets more than its size,
    and 0 is allowed.

    >>> split_proportionally([5, 3, 2], 4)
    (2, 1, 1)

    Raises:
      ValueError: `total` is negative or more than the sum of sizes.
    """
    whole = sum(sizes)
    if not 0 <= total <= whole:
        raise ValueError(
            f"cannot split {total} examples over sizes that sum to {whole}"
        )
    if total == whole:
        return tuple(sizes)
    parts = [divmod(size * total, whole) for size in sizes]
    left = total - sum(part for part, _ in parts)
    order = sorted(range(len(sizes)), key=lambda w: -parts[w][1])
    extra = set(order[:left])
    return tuple(part + (w in extra) for w, (part, _) in enumerate(parts))


def _weights(targets: Targets, total: int, limits: Limits) -> np.ndarray:
    """Targets [W] as positive finite numbers that sum to `total`."""
    weights = np.asarray(targets, dtype=np.float64)
    if weights.shape != (len(limits.caps),):
        raise ValueError(f"targets of shape {weights.shape} for {len(limits.caps)}")
    if not sum(limits.floors) <= total <= sum(limits.caps):
        raise UserError(
            f"a global batch of {total} does not fit floors that sum to "
            f"{sum(limits.floors)} and caps that sum to {sum(limits.caps)}: "
            "change the global batch, the floors or the caps"
        )
    infinite = np.isposinf(weights)
    weights = np.where(infinite, 1.0, 0.0) if infinite.any() else weights
    weights = np.where(weights > 0, weights, 0.0)
    largest = weights.max()
    if largest == 0:
        return np.full(weights.shape, total / len(weights))
    weights = np.maximum(weights / largest, _SMALLEST_WEIGHT)
    # A sum that no order of the workers can change.
    return weights * (total / math.fsum(weights))


def _quotas(
    weights: np.ndarray, total: int, floors: np.ndarray, caps: np.ndarray
) -> np.ndarray:
    """`clip(scale * weights, floors, caps)` [W] for the scale that sums to `total`."""
    if np.all((floors <= weights) & (weights <= caps)):
        return weights
    # The sum is piecewise linear in the scale, with a corner wherever a worker
    # leaves its floor or reaches its cap.
    corners = np.concatenate((floors / weights, caps / weights))
    slopes = np.concatenate((weights, -weights))
    order = np.argsort(corners, kind="stable")
    corners, slopes = corners[order], np.cumsum(slopes[order])
    sums = floors.sum() + np.concatenate(
        ([0.0], np.cumsum(slopes[:-1] * np.diff(corners)))
    )
    last = max(int(np.searchsorted(sums, total, side="right")) - 1, 0)
    rest = total - sums[last]
    scale = corners[last] + (rest / slopes[last] if rest > 0 else 0.0)
    return np.clip(scale * weights, floors, caps)


@dataclass(frozen=True)
class _Rungs:
    """The capacities each worker may have: ladder edges between two of its own."""

    edges: np.ndarray  # [E]
    lowest: np.ndarray  # [W]
    highest: np.ndarray  # [W]

    @classmethod
    def of(cls, ladder: Ladder, limits: Limits) -> Self:
        edges, caps = np.array(ladder.edges), np.array(limits.caps)
        lowest = edges[np.searchsorted(edges, limits.floors)]
        return cls(edges, np.minimum(lowest, caps), caps)

    def at_most(self, bounds: np.ndarray) -> np.ndarray:
        """The largest capacity within each bound [W], the lowest where none is."""
        position = np.searchsorted(self.edges, bounds, side="right") - 1
        edges = self.edges[np.maximum(position, 0)]
        capacities = np.where(bounds >= self.highest, self.highest, edges)
        return np.clip(capacities, self.lowest, self.highest)

    def below(self, capacities: np.ndarray) -> np.ndarray:
        """The next lower capacity of each worker [W]; the same at its lowest."""
        position = np.searchsorted(self.edges, capacities, side="left") - 1
        return np.maximum(self.edges[np.maximum(position, 0)], self.lowest)


def _threshold(weights: np.ndarray, total: int, rungs: _Rungs) -> np.ndarray:
    """Capacities [W] under one common ratio to `weights`, just enough for `total`.

    Just enough: one edge less for everybody would not be.
    """
    if rungs.lowest.sum() >= total:
        return rungs.lowest.copy()
    low, high = 0.0, 1.0
    while (capacities := rungs.at_most(high * weights)).sum() < total:
        low, high = high, 2 * high
    while rungs.below(capacities).sum() >= total:
        middle = (low + high) / 2
        if (lower := rungs.at_most(middle * weights)).sum() >= total:
            high, capacities = middle, lower
        else:
            low = middle
    return capacities


def _step_down(
    capacities: np.ndarray, weights: np.ndarray, total: int, rungs: _Rungs
) -> None:
    """Lower `capacities` [W] in place, largest ratio first, while they hold `total`."""
    surplus = int(capacities.sum()) - total
    gaps = capacities - rungs.below(capacities)
    candidates = np.flatnonzero((gaps > 0) & (gaps <= surplus))
    ratios = capacities[candidates] / weights[candidates]
    heap = list(zip((-ratios).tolist(), (-candidates).tolist(), strict=True))
    heapq.heapify(heap)
    edges = rungs.edges.tolist()
    while heap and surplus > 0:
        _, negative = heapq.heappop(heap)
        w = -negative
        capacity, lowest = int(capacities[w]), int(rungs.lowest[w])
        lower = max(edges[max(bisect.bisect_left(edges, capacity) - 1, 0)], lowest)
        # The surplus only shrinks: who cannot step down now never can.
        if 0 < capacity - lower <= surplus:
            capacities[w] = lower
            surplus -= capacity - lower
            heapq.heappush(heap, (-lower / float(weights[w]), negative))
