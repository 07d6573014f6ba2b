"""The policy `dlb`: shares proportional to what each worker did in the last round."""

from dataclasses import dataclass

import numpy as np

from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
    mean_performance,
    proportional,
)


@dataclass(frozen=True, eq=False)
class DlbState:
    """The last known performance of each worker [W], NaN where there is none yet."""

    global_batch: int
    performance: np.ndarray


def dlb() -> Policy[DlbState]:
    """Dynamic load balance, from the last round only.

    Ye, Zhou, Shi, Sun and Lv (DBS: arXiv 2007.11831; DLB: IEEE TETCI 2022, doi
    10.1109/TETCI.2022.3220224): every round a worker's share is its performance over
    the sum of all. Ours differs in four things:

    - performance is `capacity / busy` a step, not `size / busy`: padded rows are paid
      for, and with sizes the rule never comes to rest on a ladder;
    - whole sizes come from the largest remainder method or from `align`, exact in
      their sum;
    - a floor, so that a share can come back from the smallest, and a cap;
    - a worker that was not measured keeps its last performance, and one that never was
      counts as the mean of the others.

    Why it comes to rest under `align`, with a constant cluster and no noise, if a
    worker's performance p(c) does not fall as its capacity c rises (t = c0 + a c, for
    one). The new capacities make the largest c / p the smallest, then the second
    largest, and so on, equal ones in a fixed order: in other words they make the sum
    over workers of (c / p)^k the smallest, for a k large enough, and no others do. Now
    let V(c) of a worker be the sum, over its edges e up to c with d the edge before, of
    (e^k - d^k) / p(e)^k. A move from c to c' changes V by no more than it changes
    (c / p)^k with p held at p(c): going up, later edges have a p at least as large, so
    they add no more; going down, earlier ones have a p at most as large, so they take
    away no less. Hence every move lowers the sum of V over workers, and among finitely
    many capacities none comes back. Outside of this: noise, which a dead band is for,
    and machines slower per example on larger batches. Without `align` (largest
    remainder) there is no proof, and no cycle was found in 15,000 random clusters.

    >>> cluster = Cluster.create(workers=2, global_batch=30, granule=1)
    >>> policy = dlb()
    >>> _, state = policy.init(cluster)
    >>> seen = Observation(
    ...     round=0, sizes=(15, 15), capacities=(15, 15), busy_seconds=(1.0, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(seen, state)
    >>> targets
    array([20., 10.])
    """

    def init(cluster: Cluster) -> tuple[np.ndarray, DlbState]:
        unknown = np.full(cluster.workers, np.nan)
        return equal_targets(cluster), DlbState(cluster.global_batch, unknown)

    def update(
        observation: Observation, state: DlbState
    ) -> tuple[np.ndarray, DlbState]:
        seen = mean_performance(observation)
        performance = np.where(np.isnan(seen), state.performance, seen)
        targets = proportional(performance, state.global_batch)
        return targets, DlbState(state.global_batch, performance)

    return Policy("dlb", init, update)
