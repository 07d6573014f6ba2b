"""The policy `boa`: the whole sizes with the smallest predicted makespan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jdlb.balance.curves import Curves
from jdlb.balance.policies.learning import learn
from jdlb.balance.policies.protocol import Cluster, Observation, Policy, equal_targets
from jdlb.balance.rungs import WholeRungs, fill
from jdlb.balance.time_model import TimeModel
from jdlb.balance.time_tables import TimeTable
from jdlb.errors import UserError


@dataclass(frozen=True, eq=False)
class BoaState:
    """What is believed of the workers' times; no model where tables are given."""

    cluster: Cluster
    targets: np.ndarray
    model: TimeModel | None


def boa(
    tables: Sequence[TimeTable] | None = None, forgetting: float = 0.8
) -> Policy[BoaState]:
    """Whole sizes `b` that minimise `max_w T_w(b_w)`, with `sum b_w = B`.

    The batch orchestration algorithm (J. Supercomputing 2020, 76:47): integer min-max.
    Faithful: the problem, solved exactly, over every whole size within floors and caps.
    How the source solves it is unknown here; ours is a bisection on the makespan, exact
    for rising times (`rungs.fill`). Ours as well: where `T` comes from. Given tables
    are interpolated linearly, made to rise where they fall, solved once, and kept for
    the run. Without tables they are learnt: lines through the mean time of every
    capacity measured lately, rising (isotonic in the maximum norm); beyond them the
    slope of a line fitted to all. Until two capacities of a worker were seen it counts
    as proportional. The rule knows no ladder: its sizes are targets like any others. It
    has no dead band either, and follows noise: give the controller one.

    >>> from jdlb.balance.time_tables import GTX_1070, GTX_750, TESLA_M40
    >>> policy = boa(tables=[GTX_1070, GTX_1070, TESLA_M40, GTX_750])
    >>> cluster = Cluster.create(workers=4, global_batch=512, granule=1, growth=0)
    >>> targets, state = policy.init(cluster)
    >>> targets
    array([172., 171., 151.,  18.])

    Raises:
      UserError: forgetting outside [0, 1); no tables in the list; in `init`, another
        number of tables than workers.
    """
    TimeModel.create(1, forgetting)  # Raises on its option.
    given = None if tables is None else tuple(tables)
    if given == ():
        raise UserError("no time tables: give one for each worker, or leave them out")

    def init(cluster: Cluster) -> tuple[np.ndarray, BoaState]:
        if given is None:
            model = TimeModel.create(cluster.workers, forgetting, bend=math.inf)
            targets = equal_targets(cluster)
            return targets, BoaState(cluster, targets, model)
        check_one_each(given, cluster)
        targets = _solve(Curves.of_tables(given), cluster, None)
        return targets, BoaState(cluster, targets, None)

    def update(
        observation: Observation, state: BoaState
    ) -> tuple[np.ndarray, BoaState]:
        if state.model is None:
            return state.targets, state
        model = learn(state.model, observation)
        if not model.seen.any():
            return state.targets, state
        targets = _solve(model.curves, state.cluster, observation)
        return targets, BoaState(state.cluster, targets, model)

    return Policy("boa", init, update)


def check_one_each(tables: Sequence[TimeTable], cluster: Cluster) -> None:
    """Raises a UserError where there is not one table for each worker."""
    if len(tables) != cluster.workers:
        raise UserError(
            f"{len(tables)} time tables for {cluster.workers} workers: "
            "give one for each"
        )


def _solve(
    curves: Curves, cluster: Cluster, observation: Observation | None
) -> np.ndarray:
    limits = (observation.limits if observation else None) or cluster.limits
    total, equal = cluster.global_batch, equal_targets(cluster)
    guess = float(curves.seconds(equal).max())
    return fill(curves, total, WholeRungs.of(limits), guess).astype(np.float64)
