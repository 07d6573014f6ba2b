"""Rounds without a clock: policies under the real controller, on workers of known times.

`W` workers with `t = fixed + per_row * capacity` seconds a step.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jdlb.balance.allocation import Allocation, Ladder
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import AnyPolicy, Cluster, Observation

STEPS = 10

Times = Callable[[int, np.ndarray], np.ndarray]
"""(round, capacities [W]) -> seconds a step [W]."""


def observe(
    allocation: Allocation,
    seconds,
    *,
    round_: int = 0,
    stalled: int | None = None,
    steps: int = STEPS,
) -> Observation:
    """A round of `seconds` [W] a step; one step of the stalled worker is 10 times that."""
    seconds = np.asarray(seconds, np.float64)
    workers = np.arange(allocation.workers)
    sums = seconds * steps + np.where(workers == stalled, 9 * seconds, 0.0)
    nothing = (0.0,) * allocation.workers
    return Observation(
        round=round_,
        sizes=allocation.sizes,
        capacities=allocation.capacities,
        busy_seconds=tuple(sums.tolist()),
        busy_median_seconds=tuple(seconds.tolist()),
        busy_spread_seconds=nothing,
        input_seconds=nothing,
        wait_seconds=nothing,
        measured_steps=(steps,) * allocation.workers,
    )


def run(
    controller: Controller,
    times: Times,
    rounds: int,
    *,
    noise: float = 0.0,
    seed: int = 0,
    stalled: Mapping[int, int] | None = None,
) -> list[Allocation]:
    """The allocation of each round; `rounds + 1`, the last one is decided, not run.

    `noise` is the relative deviation of a whole round's times. `stalled` says in which
    round which worker has one step of 10 times its length. A policy that wants a probe
    gets it from round 0, as the trainer gives it.
    """
    generator = np.random.default_rng(seed)
    decision, state = controller.start()
    allocations = [decision.allocation]
    for round_ in range(rounds):
        allocation = decision.allocation
        seconds = times(round_, np.array(allocation.capacities, np.float64))
        seconds = seconds * np.exp(noise * generator.standard_normal(len(seconds)))
        seen = observe(
            allocation, seconds, round_=round_, stalled=(stalled or {}).get(round_)
        )
        decision, state = controller.decide(seen, state)
        allocations.append(decision.allocation)
    return allocations


def affine(policy: AnyPolicy, fixed, per_row) -> Times:
    """Affine times; of as many micro-batches as it takes where the policy has these."""
    fixed, per_row, unit = np.asarray(fixed), np.asarray(per_row), policy.micro_batch

    def times(_: int, capacities: np.ndarray) -> np.ndarray:
        count = 1 if unit is None else -(-capacities // unit)
        return fixed * count + per_row * capacities

    return times


def makespan_of(times: Times, allocation: Allocation, round_: int = 0) -> float:
    """Seconds of a step without noise."""
    return float(times(round_, np.array(allocation.capacities, np.float64)).max())


def ladder_of(policy: AnyPolicy, cluster: Cluster) -> Ladder:
    """The capacities that a policy's shares run at."""
    if policy.micro_batch is None:
        return cluster.ladder
    return Ladder(policy.micro_batch, 0.0, top=cluster.global_batch)


def best_makespan(times: Times, cluster: Cluster, ladder: Ladder) -> float:
    """The smallest makespan over the edges of a ladder, by trying every makespan."""
    edges = np.array(ladder.edges, np.float64)
    limits = cluster.limits.within(ladder.edges[-1])
    seconds = np.stack([times(0, np.full(cluster.workers, edge)) for edge in edges])
    for makespan in np.sort(seconds.ravel()):
        held = np.where(seconds <= makespan, edges[:, None], 0.0).max(axis=0)
        held = np.minimum(held, limits.caps)
        if held.min() > 0 and held.sum() >= cluster.global_batch:
            return float(makespan)
    raise AssertionError("no makespan holds the batch")


def changes(allocations: Sequence[Allocation]) -> int:
    """How often sizes changed."""
    pairs = itertools.pairwise(allocations)
    return sum(before.sizes != after.sizes for before, after in pairs)


def programs(allocations: Sequence[Allocation]) -> int:
    """How many (worker, capacity) were compiled."""
    return len({pair for a in allocations for pair in enumerate(a.capacities)})
