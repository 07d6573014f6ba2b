"""The policy `equal`: the same share for every worker, whatever is measured."""

import numpy as np

from jdlb.balance.policies.protocol import (
    Cluster,
    Observation,
    Policy,
    equal_targets,
)


def equal() -> Policy[np.ndarray]:
    """Equal shares for ever: what plain data parallelism does.

    >>> policy = equal()
    >>> targets, state = policy.init(Cluster.create(workers=4, global_batch=64))
    >>> targets
    array([16., 16., 16., 16.])
    """

    def init(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
        targets = equal_targets(cluster)
        return targets, targets

    def update(_: Observation, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return state, state

    return Policy("equal", init, update, exact=True)
