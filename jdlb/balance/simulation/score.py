"""How good a simulated run was: the numbers of the league table.

Pure functions of a run and its world.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jdlb.balance.simulation.simulator import SimulatedRound, SimulatedRun
from jdlb.balance.simulation.world import World

NEAR_BEST = 1.05
"""A makespan within this factor of the best one is balanced."""
AFTER_HICCUP = 5
"""Rounds after a hiccup in which a policy may still regret it."""


@dataclass(frozen=True)
class Score:
    """How one policy did.

    Attributes:
      time_over_ideal: seconds of the run over those of the ideal one, see
        `ideal_seconds`.
      utilisation: busy seconds over (workers x step seconds), 0 to 1; compilation and
        probes are left out.
      rounds_to_balance: the first round, from 0, whose makespan is within 5 % of the
        best for that round, noise left out; None if there was none.
      rebalances: rounds that ended with another allocation.
      compilations: programs compiled, over all workers, the first ones too.
      worst_regression: within 5 rounds of a hiccup, by how much the makespan was at
        most above what the shares from before it would have given, as a fraction,
        noise left out; None where there was no hiccup.
    """

    time_over_ideal: float
    utilisation: float
    rounds_to_balance: int | None
    rebalances: int
    compilations: int
    worst_regression: float | None


def score(run: SimulatedRun) -> Score:
    """The score of a run."""
    rounds, world = run.rounds, run.world
    present = world.present.sum(axis=1)
    stepping = [r.step_seconds * world.scenario.steps for r in rounds]
    busy = sum(float(r.busy_seconds.sum()) for r in rounds)
    return Score(
        time_over_ideal=run.seconds / ideal_seconds(world),
        utilisation=busy / float(np.dot(present, stepping)),
        rounds_to_balance=next(_balanced(run), None),
        rebalances=sum(r.rebalanced for r in rounds),
        compilations=sum(r.compilations for r in rounds),
        worst_regression=_worst_regression(run),
    )


def ideal_seconds(world: World) -> float:
    """Seconds of the scenario if each step were at the best makespan there is.

    For the true times of each round, plus the all-reduce; no noise, no compilation.
    """
    return world.scenario.steps * float(np.sum(ideal_step_seconds(world)))


def ideal_step_seconds(world: World) -> np.ndarray:
    """Seconds of an ideal step of each round, [R]."""
    rounds = range(world.scenario.rounds)
    return np.array([world.best(r).makespan + world.network_seconds(r) for r in rounds])


def oracle_over_ideal(world: World) -> float:
    """What the best shares of every round would take under the noise, over the ideal.

    What no rule can be expected to beat: the rest is noise.
    """
    seconds = 0.0
    for r in range(world.scenario.rounds):
        busy = world.busy(r, world.best(r).sizes, None)
        steps = busy.max(axis=1) + world.network_seconds(r)
        seconds += float(steps.sum())
    return seconds / ideal_seconds(world)


def _makespan(world: World, round: int, ran: SimulatedRound) -> float:
    """Seconds of a step of `round` with the shares of a round that ran, no noise."""
    capacities = ran.capacities[world.members(round)]
    return float(world.truth(round).seconds(capacities, ran.micro_batch).max())


def _balanced(run: SimulatedRun) -> Iterator[int]:
    for r in run.rounds:
        best = run.world.best(r.round).makespan
        if _makespan(run.world, r.round, r) <= NEAR_BEST * best:
            yield r.round


def _worst_regression(run: SimulatedRun) -> float | None:
    struck = sorted({hit.round for hit in run.world.plan.hits})
    if not struck:
        return None
    worst = 0.0
    for hiccup in struck:
        before = run.rounds[hiccup]
        for r in run.rounds[hiccup + 1 : hiccup + 1 + AFTER_HICCUP]:
            if not _same_workers(run.world, hiccup, r.round):
                break
            was = _makespan(run.world, r.round, before)
            worst = max(worst, _makespan(run.world, r.round, r) / was - 1)
    return worst


def _same_workers(world: World, one: int, other: int) -> bool:
    return bool(np.array_equal(world.present[one], world.present[other]))
