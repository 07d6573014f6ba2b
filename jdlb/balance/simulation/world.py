"""The true times of every worker in every round, and the best that could be done.

Knows the scenario and what happens in it; must not know policies or decisions.
`W` workers of the scenario, `M` of them present, `S` steps of a round.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jdlb.balance.ladder import Limits
from jdlb.balance.simulation.draws import normal, uniform
from jdlb.balance.simulation.scenario import Scenario
from jdlb.balance.time_tables import Tables

# Streams of random numbers: below are those of the scenario's disturbances.
_NOISE, _PROBE = 1 << 20, 1 << 21
# Relative width at which the search for the best makespan ends.
_PRECISION = 1e-13
# A size this close below a whole number is that number.
_WHOLE = 1e-6


@dataclass(frozen=True, eq=False)
class Best:
    """Whole sizes [M] with the smallest makespan of all, and that, in seconds."""

    sizes: np.ndarray
    makespan: float


@dataclass(frozen=True, eq=False)
class Truth:
    """What a step takes: `factor * table(examples) + added_seconds`, all [M]."""

    tables: Tables
    factor: np.ndarray
    added_seconds: np.ndarray

    def seconds(self, capacities: np.ndarray, micro_batch: int | None) -> np.ndarray:
        """Seconds of a step [M], without noise.

        With a micro-batch the worker runs whole ones of it, one after the other.
        """
        if micro_batch is None:
            work = self.tables.seconds(capacities)
        else:
            one = self.tables.seconds(np.full(len(capacities), float(micro_batch)))
            work = one * -(-capacities // micro_batch)
        return self.factor * work + self.added_seconds

    def best(self, total: int, limits: Limits) -> Best:
        """The smallest makespan of `total` examples within floors and caps.

        Exact, by bisection of the makespan: a worker takes all that it can within it.
        Padding can be faster where times fall with the size; it is allowed for.
        """
        floors, caps = np.array(limits.floors), np.array(limits.caps)

        def fitting(makespan: float) -> np.ndarray:
            budget = (makespan - self.added_seconds) / self.factor
            sizes = np.floor(self.tables.largest_within(budget, caps) + _WHOLE)
            return np.clip(sizes, floors, caps).astype(np.int64)

        # Nobody is faster than with its floor.
        low = float(self._padded(floors, caps).max())
        if fitting(low).sum() >= total:
            return Best(_trimmed(floors, fitting(low), total), low)
        high = low
        while fitting(high).sum() < total:
            high *= 2.0
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if fitting(middle).sum() < total:
                low = middle
            else:
                high = middle
        sizes = _trimmed(fitting(low), fitting(high), total)
        return Best(sizes, float(self._padded(sizes, caps).max()))

    def _padded(self, sizes: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Seconds [M] of the fastest capacity that holds `sizes` and is within caps.

        Times are piecewise linear, so it is the size itself or a later point.
        """
        padded = self.tables.fastest(sizes.astype(np.float64), caps.astype(np.float64))
        return self.factor * padded + self.added_seconds


class World:
    """One scenario, the same for every policy."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.plan = scenario.plan()
        self.present = scenario.present()
        self._tables = Tables([worker.table for worker in scenario.workers])
        self._best: dict[bytes, Best] = {}

    def segments(self) -> Iterator[tuple[range, np.ndarray]]:
        """Rounds in a row with the same workers, and the indices of those [M]."""
        changes = np.any(self.present[1:] != self.present[:-1], axis=1)
        ends = [0, *(np.flatnonzero(changes) + 1).tolist(), self.scenario.rounds]
        for first, after in itertools.pairwise(ends):
            yield range(first, after), np.flatnonzero(self.present[first])

    def members(self, round: int) -> np.ndarray:
        """Indices of the workers [M] that are there."""
        return np.flatnonzero(self.present[round])

    def truth(self, round: int) -> Truth:
        """What a step of that round takes the workers that are there."""
        members = self.members(round)
        return Truth(
            self._tables.take(members),
            self.plan.factor[round, members],
            self.plan.epoch_seconds[round, members] / self.scenario.steps,
        )

    def calm(self, members: np.ndarray) -> Truth:
        """What a step takes these workers when nothing disturbs them."""
        count = len(members)
        return Truth(self._tables.take(members), np.ones(count), np.zeros(count))

    def network_seconds(self, round: int) -> float:
        """Seconds that a step takes beside the work of the workers."""
        return self.scenario.network.seconds(len(self.members(round)))

    def best(self, round: int) -> Best:
        """The best whole sizes of that round for its true times."""
        truth, present = self.truth(round), self.present[round]
        key = b"".join(
            a.tobytes() for a in (present, truth.factor, truth.added_seconds)
        )
        if key not in self._best:
            cluster = self.scenario.cluster(present)
            self._best[key] = truth.best(cluster.global_batch, cluster.limits)
        return self._best[key]

    def busy(
        self, round: int, capacities: np.ndarray, micro_batch: int | None
    ) -> np.ndarray:
        """Seconds of each step of a round for each worker that is there: [S, M]."""
        steps, truth = self.scenario.steps, self.truth(round)
        members = self.members(round)
        factor = self._noise(_NOISE, round, steps)[:, members]
        for hit in self.plan.hits:
            if hit.round == round:
                factor[: hit.steps, members == hit.worker] *= hit.factor
        work = truth.seconds(capacities, micro_batch) - truth.added_seconds
        return factor * work + truth.added_seconds

    def probe(
        self, round: int, steps: int, capacities: np.ndarray, micro_batch: int | None
    ) -> np.ndarray:
        """The same for a probe of some steps before that round: [steps, M]."""
        truth, members = self.truth(round), self.members(round)
        factor = self._noise(_PROBE, round, steps)[:, members]
        work = truth.seconds(capacities, micro_batch) - truth.added_seconds
        return factor * work + truth.added_seconds

    def _noise(self, stream: int, round: int, steps: int) -> np.ndarray:
        """What each step is multiplied with: [steps, W], whoever is there."""
        noise, shape = self.scenario.noise, (steps, len(self.scenario.workers))
        seed = self.scenario.seed
        factor = np.ones(shape)
        if noise.step:
            factor *= np.exp(noise.step * normal(uniform(seed, stream, round, shape)))
        if noise.round:
            whole = uniform(seed, stream + 1, round, shape[1:])
            factor *= np.exp(noise.round * normal(whole))
        if noise.stall_probability:
            chance = uniform(seed, stream + 2, round, shape) / noise.stall_probability
            # Below 1 it is uniform again: what a Pareto number is made from.
            factor *= np.where(chance < 1, chance ** (-1 / noise.stall_shape), 1.0)
        return factor


def _trimmed(few: np.ndarray, many: np.ndarray, total: int) -> np.ndarray:
    """Sizes between `few` and `many` that sum to `total`; earlier workers get more."""
    room = many - few
    before = np.cumsum(room) - room
    return few + np.clip(total - few.sum() - before, 0, room)
