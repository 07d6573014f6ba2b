"""The policy `lb_bsp`: the fastest gets a step more, the slowest a step less."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
    seconds_at_targets,
)
from jdlb.errors import UserError

# The first step, as a part of an equal share.
_FIRST_STEP = 1 / 4


@dataclass(frozen=True, eq=False)
class LbBspState:
    """Where the search stands.

    Attributes:
      step: examples that move at a time.
      length: rounds of a window.
      rounds: rounds of this window so far.
      seconds: sum over these of the mean step of each worker at its target, [W]; NaN
        once a round did not measure it.
      leader, straggler: who last got and who last gave; -1 for nobody.
      steady: windows in a row without oscillation.
    """

    cluster: Cluster
    targets: np.ndarray
    step: int
    length: int
    rounds: int
    seconds: np.ndarray
    leader: int = -1
    straggler: int = -1
    steady: int = 0


def lb_bsp(
    step: int | None = None, window: int = 1, longest_window: int = 8
) -> Policy[LbBspState]:
    """Each window one step of examples moves from the slowest worker to the fastest.

    LB-BSP on GPU clusters (SoCC 2020; TCC 2021): each monitoring window the fastest
    worker with memory left gets `+step`, the slowest `-step`; on oscillation the step
    gets smaller and the window longer. Faithful: this. Ours, as the source's values are
    unknown here: the step begins as a quarter of an equal share, the window as one
    round; oscillation is that the worker that last got is now the slowest, or the one
    that last gave is now the fastest; then the step is halved, down to one granule of
    the ladder, and the window doubled, up to `longest_window`. After two windows in a
    row without oscillation both go one such step back, so that a lasting change is
    followed. A window with a worker that was not measured leaves that worker out. Times
    are those at the targets: what the ladder makes of these is not moved about.

    One pair a window: with many unlike workers it needs as many windows as there are
    steps to be moved. It has no point of rest: with equal times and noise one granule
    moves back and forth each longest window. `lb_bsp_cpu` is the form for CPU clusters.

    >>> cluster = Cluster.create(workers=2, global_batch=32, granule=1)
    >>> policy = lb_bsp()
    >>> _, state = policy.init(cluster)
    >>> seen = Observation(
    ...     round=0, sizes=(16, 16), capacities=(16, 16), busy_seconds=(1.0, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(seen, state)
    >>> targets
    array([20., 12.])

    Raises:
      UserError: a step or window below 1, or a longest window below the first.
    """
    if step is not None and step < 1:
        raise UserError(f"step {step}: use at least 1 example")
    if not 1 <= window <= longest_window:
        raise UserError(
            f"windows of {window} to {longest_window} rounds: use at least 1, and no "
            "longest below the first"
        )

    def first_step(cluster: Cluster) -> int:
        share = cluster.global_batch // cluster.workers
        return step or max(cluster.ladder.granule, int(_FIRST_STEP * share), 1)

    def init(cluster: Cluster) -> tuple[np.ndarray, LbBspState]:
        targets, nothing = equal_targets(cluster), np.zeros(cluster.workers)
        return targets, LbBspState(
            cluster, targets, first_step(cluster), window, 0, nothing
        )

    def update(
        observation: Observation, state: LbBspState
    ) -> tuple[np.ndarray, LbBspState]:
        state = dataclasses.replace(
            state,
            rounds=state.rounds + 1,
            seconds=state.seconds + seconds_at_targets(observation, state.targets),
        )
        if state.rounds < state.length:
            return state.targets, state
        limits = observation.limits or state.cluster.limits
        pair = _pair(state, limits.floors, limits.caps)
        state = dataclasses.replace(
            state, rounds=0, seconds=np.zeros(len(state.targets))
        )
        if pair is None:
            return state.targets, state
        leader, straggler = pair
        smallest = min(state.cluster.ladder.granule, first_step(state.cluster))
        size, length, steady = state.step, state.length, state.steady + 1
        if straggler == state.leader or leader == state.straggler:
            size, length, steady = size // 2, min(2 * length, longest_window), 0
        elif steady > 1:
            size = min(2 * size, first_step(state.cluster))
            length = max(length // 2, window)
        size = max(size, smallest)
        targets = state.targets.copy()
        # No further than memory and the floor allow.
        moved = min(
            size,
            limits.caps[leader] - targets[leader],
            targets[straggler] - limits.floors[straggler],
        )
        targets[leader] += moved
        targets[straggler] -= moved
        return targets, dataclasses.replace(
            state,
            targets=targets,
            step=size,
            length=length,
            leader=leader,
            straggler=straggler,
            steady=steady,
        )

    return Policy("lb_bsp", init, update)


def _pair(
    state: LbBspState, floors: tuple[int, ...], caps: tuple[int, ...]
) -> tuple[int, int] | None:
    """The fastest worker with memory left and the slowest that has some to give."""
    known = ~np.isnan(state.seconds)
    can_get = known & (state.targets < caps)
    can_give = known & (state.targets > floors)
    if not can_get.any() or not can_give.any():
        return None
    leader = int(np.argmin(np.where(can_get, state.seconds, np.inf)))
    straggler = int(np.argmax(np.where(can_give, state.seconds, -np.inf)))
    if state.seconds[leader] >= state.seconds[straggler]:
        return None
    return leader, straggler
