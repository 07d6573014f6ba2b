"""Sizes and capacities: from real-valued targets to whole examples on a short ladder.

The one place where shares become integers. Must not know where targets come from
(policies) or what a batch is made of (data, engine). `W` is the number of workers.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jdlb.balance.ladder import Ladder, Limits
from jdlb.balance.rungs import LadderRungs, Proportional, fill, give_back
from jdlb.errors import UserError

Targets = Sequence[float] | Sequence[int] | np.ndarray

# A target this small against the largest one counts as this: a ratio to it stays
# finite, and a worker with target 0 still serves when all others are at their caps.
_SMALLEST_WEIGHT = 1e-12
# Enough for the last bit of a float64.
_BISECTIONS = 64


@dataclass(frozen=True)
class Allocation:
    """Examples a step of each worker, and the size each is padded to, both [W]."""

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

    Sizes lie on ladder edges if `aligned` (see `align`), else nearest to the targets
    (see `round_shares`). The last edge of the ladder caps every worker.

    Raises:
      UserError: floors and caps leave no room for `total`.
    """
    limits = limits.within(ladder.edges[-1])
    if aligned:
        sizes = align(targets, total, ladder, limits)
    else:
        sizes = round_shares(targets, total, limits)
    return padded(sizes, ladder, limits)


def padded(sizes: Sequence[int], ladder: Ladder, limits: Limits) -> Allocation:
    """Given sizes with their capacities.

    A cap bounds what a worker's memory holds, and padding takes memory too: a
    worker's own ladder therefore ends with an edge at its cap.

    Raises:
      UserError: a size above the last edge.
    """
    ladder.capacity(max(sizes))  # Raises if it does not fit.
    edges = np.array(ladder.edges)
    capacities = np.minimum(edges[np.searchsorted(edges, sizes)], limits.caps)
    return Allocation(tuple(sizes), tuple(capacities.tolist()))


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
    larger): see `rungs.fill`. What remains above `total` one worker leaves out, that
    with the largest ratio; it keeps its capacity (`rungs.give_back`).

    Targets and errors as in `round_shares`.

    >>> limits = Limits.default(workers=3, global_batch=100, granule=8)
    >>> align([54.0, 30.0, 16.0], 100, Ladder(8, top=100), limits)
    (56, 28, 16)
    """
    limits = limits.within(ladder.edges[-1])
    times = Proportional(_weights(targets, total, limits))
    rungs = LadderRungs.of(ladder, limits)
    capacities = fill(times, total, rungs, guess=1.0)
    seconds, floors = times.seconds(capacities), np.array(limits.floors)
    sizes = give_back(capacities, seconds, total, rungs, floors)
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
    low, high = 0.0, 1.0
    while np.clip(high * weights, floors, caps).sum() < total:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if np.clip(middle * weights, floors, caps).sum() < total:
            low = middle
        else:
            high = middle
    return np.clip(high * weights, floors, caps)
