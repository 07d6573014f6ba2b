"""The policy `fixed`: shares that the user gives, whatever is measured."""

import math
from collections.abc import Sequence

import numpy as np

from jdlb.balance.policies.protocol import Cluster, Observation, Policy
from jdlb.errors import UserError


def fixed(shares: Sequence[float]) -> Policy[np.ndarray]:
    """Shares of the global batch [W] that stay as given.

    The "static allocation" of Chao, Liao and Gao (arXiv 2111.08272): the user gives the
    proportions.

    >>> policy = fixed([0.5, 0.25, 0.25])
    >>> targets, state = policy.init(Cluster.create(workers=3, global_batch=64))
    >>> targets
    array([32., 16., 16.])

    Raises:
      UserError: a share that is negative or not finite, shares that do not sum to 1
        within 1e-6; in `init`, another number of shares than workers.
    """
    given = [float(share) for share in shares]
    for w, share in enumerate(given):
        if not (math.isfinite(share) and share >= 0):
            raise UserError(f"the share of worker {w} is {share}: use 0 to 1")
    whole = math.fsum(given)
    if abs(whole - 1) > 1e-6:
        raise UserError(f"shares sum to {whole:.9g}: make them sum to 1")

    def init(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
        if len(given) != cluster.workers:
            raise UserError(
                f"{len(given)} shares for {cluster.workers} workers: give one for each"
            )
        targets = np.array(given) * (cluster.global_batch / whole)
        return targets, targets

    def update(_: Observation, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return state, state

    return Policy("fixed", init, update, exact=True)
