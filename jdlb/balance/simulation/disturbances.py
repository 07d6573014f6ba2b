"""What makes workers slower for a while: planned for a whole run before it begins.

A plan is a function of seed, rounds and workers alone, never of what a policy does.
`R` rounds, `W` workers of the scenario, present or not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jdlb.balance.simulation.draws import uniform
from jdlb.errors import UserError


@dataclass(frozen=True)
class Hit:
    """A worker is `factor` times slower for the first `steps` steps of one round."""

    round: int
    worker: int
    steps: int
    factor: float


@dataclass(frozen=True, eq=False)
class Plan:
    """What a disturbance does: all within the busy time of the worker.

    Attributes:
      factor: [R, W], what every step's time is multiplied with.
      epoch_seconds: [R, W], seconds added to a round, in equal parts to each step.
      hits: what lasts for less than a round, or is to be told apart as a hiccup.
    """

    factor: np.ndarray
    epoch_seconds: np.ndarray
    hits: tuple[Hit, ...] = ()

    @classmethod
    def calm(cls, rounds: int, workers: int) -> "Plan":
        """Nothing happens."""
        return cls(np.ones((rounds, workers)), np.zeros((rounds, workers)))

    @classmethod
    def joined(cls, plans: Iterable["Plan"], rounds: int, workers: int) -> "Plan":
        """All of them at once: factors multiply, seconds add."""
        calm, plans = cls.calm(rounds, workers), tuple(plans)
        factor, seconds = calm.factor, calm.epoch_seconds
        for plan in plans:
            factor, seconds = factor * plan.factor, seconds + plan.epoch_seconds
        return cls(factor, seconds, tuple(hit for plan in plans for hit in plan.hits))


class Disturbance(Protocol):
    """Plans what happens to `workers` workers in `rounds` rounds."""

    def plan(self, rounds: int, workers: int, seed: int, stream: int) -> Plan:
        """The plan; random numbers come from `(seed, stream)`."""
        ...


@dataclass(frozen=True)
class RandomSlowdowns:
    """The random protocol of DBS (arXiv 2007.11831 and its code).

    Each epoch each worker becomes slow with a probability, for a random number of
    epochs, by a random number of seconds an epoch, slept in equal parts each step. Both
    are whole numbers, and both ends of their ranges can occur (ours: the source leaves
    open whether the upper one can). Ours, too: a worker that is slow is not drawn again
    until that has ended.
    """

    probability: float = 0.1
    epochs: tuple[int, int] = (4, 20)
    epoch_seconds: tuple[int, int] = (5, 10)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise UserError(f"probability {self.probability}: use 0 to 1")
        for low, high in (self.epochs, self.epoch_seconds):
            if not 0 < low <= high:
                raise UserError(f"range {low} to {high}: use rising positive numbers")

    def plan(self, rounds: int, workers: int, seed: int, stream: int) -> Plan:
        """See `Disturbance`."""
        calm = Plan.calm(rounds, workers)
        left, seconds = np.zeros(workers, np.int64), np.zeros(workers)
        for r in range(rounds):
            begins, length, amount = uniform(seed, stream, r, (3, workers))
            new = (left == 0) & (begins < self.probability)
            left = np.where(new, _whole(length, self.epochs), left)
            seconds = np.where(new, _whole(amount, self.epoch_seconds), seconds)
            calm.epoch_seconds[r] = np.where(left > 0, seconds, 0.0)
            left = np.maximum(left - 1, 0)
        return calm


@dataclass(frozen=True)
class Levels:
    """A schedule of heterogeneity levels, as in OmniLearn (TPDS 2025).

    From each of the given rounds on, the fastest worker has `level` times the speed of
    the slowest. How the source spreads the others is unknown here. Ours: evenly, in
    the order of workers, and so that all speeds together stay what they were.
    """

    schedule: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.schedule]
        if not starts or starts != sorted(set(starts)) or starts[0] < 0:
            raise UserError(f"levels from rounds {starts}: give rising rounds from 0")
        for _, level in self.schedule:
            if not 1 <= level < float("inf"):
                raise UserError(f"heterogeneity level {level}: use 1 or more")

    def plan(self, rounds: int, workers: int, seed: int, stream: int) -> Plan:
        """See `Disturbance`."""
        calm = Plan.calm(rounds, workers)
        for start, level in self.schedule:
            speeds = np.linspace(level, 1.0, workers)
            calm.factor[start:] = speeds.mean() / speeds
        return calm


@dataclass(frozen=True)
class SquareWave:
    """Some workers are `factor` times slower in every second half period, in rounds."""

    workers: tuple[int, ...]
    factor: float
    half_period: int
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.factor < float("inf"):
            raise UserError(f"factor {self.factor} of a wave: use more than 0")
        if self.half_period < 1 or self.first < 0:
            raise UserError(
                f"a wave from round {self.first} with half periods of "
                f"{self.half_period}: use at least 0 and 1"
            )

    def plan(self, rounds: int, workers: int, seed: int, stream: int) -> Plan:
        """See `Disturbance`."""
        calm = Plan.calm(rounds, workers)
        r = np.arange(rounds) - self.first
        slow = (r >= 0) & (r // self.half_period % 2 == 0)
        calm.factor[np.ix_(slow, _indices(self.workers, workers))] = self.factor
        return calm


@dataclass(frozen=True)
class Hiccups:
    """A worker is slower once and then never again: nothing that is worth a move.

    Each hit is of one round and one worker, for its first `steps` steps.
    """

    hits: tuple[Hit, ...] = field(default=())

    def __post_init__(self) -> None:
        for hit in self.hits:
            if hit.round < 0 or hit.steps < 1 or not 0 < hit.factor < float("inf"):
                raise UserError(
                    f"{hit}: use a round of at least 0, at least 1 step, and a "
                    "positive factor"
                )

    def plan(self, rounds: int, workers: int, seed: int, stream: int) -> Plan:
        """See `Disturbance`."""
        _indices([hit.worker for hit in self.hits], workers)
        calm = Plan.calm(rounds, workers)
        within = tuple(hit for hit in self.hits if hit.round < rounds)
        return Plan(calm.factor, calm.epoch_seconds, within)


def _whole(uniforms: np.ndarray, ends: tuple[int, int]) -> np.ndarray:
    """Whole numbers from the first to the last of a range, each as likely."""
    low, high = ends
    return low + np.floor(uniforms * (high - low + 1)).astype(np.int64)


def _indices(chosen: Sequence[int], workers: int) -> list[int]:
    for w in chosen:
        if not 0 <= w < workers:
            raise UserError(
                f"a disturbance of worker {w} in a cluster of {workers}: "
                f"use 0 to {workers - 1}"
            )
    return list(chosen)
