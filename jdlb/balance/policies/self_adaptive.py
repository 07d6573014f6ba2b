"""The policy `self_adaptive`: whole micro-batches of one compiled size."""

import dataclasses

import numpy as np

from jdlb.balance.policies.dlb import DlbState, dlb
from jdlb.balance.policies.protocol import Cluster, Policy
from jdlb.errors import UserError


def self_adaptive(micro_batch: int = 8) -> Policy[DlbState]:
    """A number of equal micro-batches for each worker, by measured speed.

    The self-adaptive allocation of Chao, Liao and Gao (arXiv 2111.08272): each machine
    comes to the amount of data that suits the environment it is in. Faithful: that
    shares are found at run time, from speed, under all-reduce. The source's rule is
    unknown (its full text was not available here). Ours: task units are micro-batches
    of one compiled size, their number is proportional to the speed of the last round as
    in `dlb`, rounded so that the largest predicted time is the smallest (`align` on a
    ladder of whole micro-batches). A worker runs its micro-batches one after the other
    and adds their gradients up, never averages them; one worker's last micro-batch may
    be part-filled, so that the sum is the global batch. One size is compiled whatever
    the shares. Caps bound a worker's share here as everywhere, although memory holds
    but one micro-batch at a time.

    >>> cluster = Cluster.create(workers=2, global_batch=96)
    >>> policy = self_adaptive(micro_batch=16)
    >>> targets, state = policy.init(cluster)
    >>> targets, policy.micro_batch
    (array([48., 48.]), 16)

    Raises:
      UserError: a micro-batch below 1; in `init`, one so large that some worker would
        have none.
    """
    if micro_batch < 1:
        raise UserError(f"micro-batch {micro_batch}: use at least 1 example")
    rule = dlb()

    def init(cluster: Cluster) -> tuple[np.ndarray, DlbState]:
        largest = cluster.global_batch // cluster.workers
        if micro_batch > largest:
            raise UserError(
                f"micro-batches of {micro_batch} are too large for a global batch of "
                f"{cluster.global_batch} on {cluster.workers} workers: use at most "
                f"{largest}"
            )
        return rule.init(cluster)

    return dataclasses.replace(
        rule, name="self_adaptive", init=init, micro_batch=micro_batch
    )
