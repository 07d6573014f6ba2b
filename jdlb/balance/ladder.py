"""Which sizes are allowed: limits of each worker, and the ladder of compiled ones.

Must not know how sizes are chosen (allocation) nor what compiles them (engine).
"""

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jdlb.errors import UserError


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
    ) -> "Limits":
        """A floor of one granule, or as much as fits; no caps unless given.

        The floor keeps every worker measured, so that one that was slow can come back.
        """
        floor = min(granule, global_batch // workers)
        given = [global_batch] * workers if caps is None else caps
        return cls(tuple(min(floor, cap) for cap in given), tuple(given))

    def with_caps(self, caps: Iterable[int]) -> "Limits":
        """The same floors under other caps; a floor above its cap comes down to it."""
        new = tuple(caps)
        if len(new) != len(self.floors):
            raise UserError(f"{len(new)} caps for {len(self.floors)} workers")
        floors = (min(f, c) for f, c in zip(self.floors, new, strict=True))
        return type(self)(tuple(floors), new)

    def within(self, top: int) -> "Limits":
        """The same limits with no cap above `top`."""
        if max(self.caps) <= top:
            return self
        return self.with_caps(min(cap, top) for cap in self.caps)


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
    def default(cls, global_batch: int, workers: int = 1) -> "Ladder":
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
