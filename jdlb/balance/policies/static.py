"""The policy `static`: measure once before training, then never again."""

from dataclasses import dataclass

import numpy as np

from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
    median_performance,
    proportional,
)


@dataclass(frozen=True, eq=False)
class StaticState:
    """Targets [W], and whether they came from a probe yet."""

    global_batch: int
    targets: np.ndarray
    decided: bool = False


def static() -> Policy[StaticState]:
    """Shares proportional to the speed seen in one probe, fixed for the run.

    Moreno-Alvarez et al., J. Supercomputing 2020 (doi 10.1007/s11227-020-03200-6): all
    workers are probed at once, so that contention is in, after warm-up; ours takes the
    median step, and capacity per busy second as the speed. How many probe steps the
    source takes is unknown here. A worker that the probe did not measure counts as the
    mean of the others; a probe that measured nobody decides nothing.

    >>> cluster = Cluster.create(workers=2, global_batch=30, granule=1)
    >>> policy = static()
    >>> _, state = policy.init(cluster)
    >>> probe = Observation(
    ...     round=0, sizes=(15, 15), capacities=(15, 15), busy_seconds=(1.3, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(probe, state)
    >>> targets
    array([20., 10.])
    """

    def init(cluster: Cluster) -> tuple[np.ndarray, StaticState]:
        targets = equal_targets(cluster)
        return targets, StaticState(cluster.global_batch, targets)

    def update(
        observation: Observation, state: StaticState
    ) -> tuple[np.ndarray, StaticState]:
        performance = median_performance(observation)
        if state.decided or np.isnan(performance).all():
            return state.targets, state
        targets = proportional(performance, state.global_batch)
        return targets, StaticState(state.global_batch, targets, decided=True)

    return Policy("static", init, update, probe=True)
