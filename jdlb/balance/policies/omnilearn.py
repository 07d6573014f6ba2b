"""The policy `omnilearn`: proportional control of the times, with a dead band."""

from dataclasses import dataclass

import numpy as np

from jdlb.balance.ladder import Limits
from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
    mean_seconds,
)
from jdlb.errors import UserError


@dataclass(frozen=True, eq=False)
class OmnilearnState:
    """The targets [W] that hold, and the limits of the start."""

    targets: np.ndarray
    limits: Limits


def omnilearn(gain: float = 1.0, dead_band: float = 0.05) -> Policy[OmnilearnState]:
    """Each share times the mean step time over the worker's own.

    Dynamic batching (Tyagi and Sharma, ACSOS 2020) and OmniLearn (TPDS 2025):
    `b_i <- b_i mean(t) / t_i`, nothing inside a dead band, bounds on `b_i`, and what
    the sum then misses of `B` is added. Faithful: these four. Ours, or unknown:

    - `gain` is an exponent of `mean(t) / t_i`; 1 is the source's rule;
    - the source's width of the dead band is unknown here; ours is a fraction of each
      share: nothing moves while none would change by more;
    - `b_i` is the capacity that was paid for, not the size, or shares never come to
      rest on a ladder (as for `dlb`);
    - what the sum misses is added in proportion to the shares. In equal parts, one
      example in a hundred too much of a large share would take all of a small one;
    - a worker that was not measured counts as having taken the mean time. Smoothing of
      the times, which the source has, is a wrapper here.

    With gain 1, and outside of the dead band, the targets are those of `dlb`.

    >>> cluster = Cluster.create(workers=2, global_batch=30, granule=1)
    >>> policy = omnilearn()
    >>> _, state = policy.init(cluster)
    >>> seen = Observation(
    ...     round=0, sizes=(15, 15), capacities=(15, 15), busy_seconds=(1.0, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(seen, state)
    >>> targets
    array([20., 10.])

    Raises:
      UserError: a gain outside (0, 1], or a dead band outside [0, 1).
    """
    if not 0 < gain <= 1:
        raise UserError(f"gain {gain}: use more than 0 and at most 1")
    if not 0 <= dead_band < 1:
        raise UserError(f"dead band {dead_band}: use a fraction, from 0 to below 1")

    def init(cluster: Cluster) -> tuple[np.ndarray, OmnilearnState]:
        targets = equal_targets(cluster)
        return targets, OmnilearnState(targets, cluster.limits)

    def update(
        observation: Observation, state: OmnilearnState
    ) -> tuple[np.ndarray, OmnilearnState]:
        seconds = mean_seconds(observation)
        measured = ~np.isnan(seconds)
        if not measured.any():
            return state.targets, state
        # Over the largest, or a sum of huge times would overflow.
        relative = seconds / seconds[measured].max()
        off = np.where(measured, relative / relative[measured].mean(), 1.0)
        # Very small times, from broken clocks, must not make infinite shares.
        wanted = np.array(observation.capacities) / np.maximum(off, 1e-12) ** gain
        total = state.targets.sum()
        limits = observation.limits or state.limits
        wanted = np.clip(wanted * (total / wanted.sum()), limits.floors, limits.caps)
        targets = wanted * (total / wanted.sum())
        if np.all(np.abs(targets - state.targets) <= dead_band * state.targets):
            return state.targets, state
        return targets, OmnilearnState(targets, state.limits)

    return Policy("omnilearn", init, update)
