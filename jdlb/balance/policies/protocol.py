"""What a policy is: two pure functions and a state.

Policies name real-valued targets; they must not know how targets become whole examples
(allocation), when a decision is worth it (controller), or where times come from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from jdlb.balance.allocation import Ladder, Limits
from jdlb.errors import UserError

State = TypeVar("State")


@dataclass(frozen=True)
class Cluster:
    """What is known before the first step: how many, how much, and what is allowed.

    Raises:
      UserError: a global batch that some worker would have no example of, or that does
        not fit the limits; limits for another number of workers.
    """

    workers: int
    global_batch: int
    ladder: Ladder
    limits: Limits

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"{self.workers} workers: use at least 1")
        if self.global_batch < self.workers:
            raise UserError(
                f"a global batch of {self.global_batch} is less than one example for "
                f"each of {self.workers} workers: raise it or use fewer workers"
            )
        if len(self.limits.caps) != self.workers:
            raise UserError(
                f"limits for {len(self.limits.caps)} workers in a cluster of "
                f"{self.workers}: give one floor and one cap for each"
            )
        caps = sum(min(cap, self.ladder.edges[-1]) for cap in self.limits.caps)
        if self.global_batch > caps:
            raise UserError(
                f"a global batch of {self.global_batch} is above the sum of caps, "
                f"{caps}: lower it, raise the caps, or add workers"
            )
        if sum(self.limits.floors) > self.global_batch:
            raise UserError(
                f"floors that sum to {sum(self.limits.floors)} are above the global "
                f"batch of {self.global_batch}: lower the floors"
            )

    @classmethod
    def create(
        cls,
        workers: int,
        global_batch: int,
        *,
        granule: int | None = None,
        growth: float = 1 / 16,
        caps: tuple[int, ...] | None = None,
    ) -> "Cluster":
        """A cluster with the default ladder and limits, but for what is given."""
        if workers < 1:
            raise UserError(f"{workers} workers: use at least 1")
        if granule is None:
            granule = Ladder.default(max(global_batch, 1), workers).granule
        ladder = Ladder(granule, growth, top=max(global_batch, 1))
        limits = Limits.default(workers, global_batch, granule, caps)
        return cls(workers, global_batch, ladder, limits)


@dataclass(frozen=True)
class Observation:
    """What one round was like: one entry a worker in every tuple, times in seconds.

    `busy_seconds`, `input_seconds` and `wait_seconds` are sums over `measured_steps`;
    the median and the spread of busy time are those of one step. `compilations` are
    the programs that the round began with, and `compile_seconds` what they took;
    empty where nobody counts them. `limits` are those in force from now on, which the
    controller tells; None for those of the cluster as it was at the start.
    """

    round: int
    sizes: tuple[int, ...]
    capacities: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    busy_median_seconds: tuple[float, ...]
    busy_spread_seconds: tuple[float, ...]
    input_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    measured_steps: tuple[int, ...]
    compilations: tuple[int, ...] = ()
    compile_seconds: tuple[float, ...] = ()
    limits: Limits | None = None


@dataclass(frozen=True)
class Policy(Generic[State]):
    """How shares follow from what was seen.

    Attributes:
      name: as in the registry.
      init: cluster -> (targets, state). Targets are float64 [W], real numbers of
        examples that sum to the global batch; floors, caps and rounding come later.
      update: (observation of a round, state) -> (targets, state).
      probe: wants one observation of all workers at once, at equal shares, before
        round 0.
      exact: its targets are meant as they stand and stay as they are: rounded, but
        not moved to ladder edges, and compiled at their own sizes.
      placed: its targets are whole sizes that it chose itself with the ladder in mind:
        they stay as they are while limits allow it.
      micro_batch: examples of the one size that is compiled; a worker runs it as often
        as its share needs. Shares are then whole multiples of it, but for one that may
        be part-filled, and capacities always are. None: one program a capacity.
    """

    name: str
    init: Callable[[Cluster], tuple[np.ndarray, State]]
    update: Callable[[Observation, State], tuple[np.ndarray, State]]
    probe: bool = False
    exact: bool = False
    placed: bool = False
    micro_batch: int | None = None


AnyPolicy = Policy[Any]


def equal_targets(cluster: Cluster) -> np.ndarray:
    """The same for everybody: float64 [W]."""
    return np.full(cluster.workers, cluster.global_batch / cluster.workers)


def mean_seconds(observation: Observation) -> np.ndarray:
    """Mean busy seconds of a step: float64 [W], NaN where not measured."""
    steps = np.array(observation.measured_steps, dtype=np.float64)
    busy = np.array(observation.busy_seconds, dtype=np.float64)
    return _usable(busy / np.where(steps > 0, steps, np.nan))


def median_seconds(observation: Observation) -> np.ndarray:
    """Median busy seconds of a step: float64 [W], NaN where not measured."""
    steps = np.array(observation.measured_steps)
    median = np.array(observation.busy_median_seconds, dtype=np.float64)
    return _usable(np.where(steps > 0, median, np.nan))


def mean_performance(observation: Observation) -> np.ndarray:
    """Capacity per mean busy second of a step: float64 [W], NaN where not measured.

    Not measured: no measured step, or a busy time that is not finite and positive.
    """
    return _performance(observation, mean_seconds(observation))


def median_performance(observation: Observation) -> np.ndarray:
    """As `mean_performance`, with the median busy time of a step."""
    return _performance(observation, median_seconds(observation))


def _usable(seconds: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(seconds) & (seconds > 0), seconds, np.nan)


def _performance(observation: Observation, busy: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        performance = observation.capacities / busy
    return np.where(np.isfinite(performance), performance, np.nan)


def seconds_at_targets(observation: Observation, targets: np.ndarray) -> np.ndarray:
    """Mean busy seconds of a step had each worker run its target: [W], NaN as above.

    Proportional to the batch. A rule that compares times to move shares by little needs
    it: what the ladder made of its targets is no difference between the workers.
    """
    capacities = np.array(observation.capacities, np.float64)
    return mean_seconds(observation) * (targets / capacities)


def proportional(performance: np.ndarray, global_batch: int) -> np.ndarray:
    """Targets [W] that sum to the global batch, proportional to performance.

    A worker whose performance is not known (NaN) counts as the mean of the others; if
    none is known all count alike.
    """
    known = ~np.isnan(performance)
    if not known.any():
        return np.full(len(performance), global_batch / len(performance))
    # Scaled first: a sum of huge numbers would overflow.
    relative = performance / performance[known].max()
    relative = np.where(known, relative, relative[known].mean())
    return global_batch * relative / relative.sum()
