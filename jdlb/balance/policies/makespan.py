"""The policy `makespan`: the ladder edges with the smallest predicted step time."""

import math
from dataclasses import dataclass

import numpy as np

from jdlb.balance.allocation import align
from jdlb.balance.policies.learning import learn
from jdlb.balance.policies.protocol import Cluster, Observation, Policy, equal_targets
from jdlb.balance.rungs import LadderRungs, fill, give_back
from jdlb.balance.time_model import TimeModel
from jdlb.errors import UserError


@dataclass(frozen=True, eq=False)
class MakespanState:
    """What is believed of the workers' times."""

    cluster: Cluster
    model: TimeModel


def makespan(
    forgetting: float = 0.8, bend: float = 0.1, caution: float = 2.0
) -> Policy[MakespanState]:
    """The capacities that make the slowest worker's predicted time the smallest.

    Ours. A `TimeModel` learns `T_w(c)`, seconds of a step against the capacity `c` that
    it runs at; of all ladder edges within floors and memory caps that together hold the
    global batch those are taken whose `max_w T_w(c_w)` is the smallest, exactly, then
    the second largest, and so on (`rungs.fill`). What they hold above the batch is
    given back as `align` does. A worker of which one capacity was seen counts as
    proportional: then this is `dlb` under `align`. It reaches in two or three rounds
    what `dlb` approaches by a factor `fixed part / step time` a round.

    What the ladder costs: padded rows are paid, so times are those of capacities. No
    edge is more than one granule or `growth` above the one before; the best makespan
    over edges is thus above that of free sizes by at most the time of one such step of
    every worker, in general by about half of it: at the default ladder 3 % where shares
    are large. `boa`, which does not know the ladder, minimises over sizes and leaves
    their padding to the controller, and can only do as well or worse on a ladder.

    Shares stay where the predicted gain is within `caution` standard errors of the time
    predicted for the slowest worker as it is now: what noise alone could have made.

    Where it does not win: while times are proportional and free of noise it equals
    `dlb`. A worker that is slow for one whole round is believed at once, since most
    changes last longer than a round; where they last just one, any rule that does not
    move at all is better. A change smaller than the noise is followed over
    `1 / (1 - forgetting)` rounds, later than `dlb` does, which moves at once. Seconds
    added to a step, as by the disturbances of DBS, are at first taken for a slower
    machine at all batches. Where new programs are dear a wide dead band (`omnilearn`)
    may save more of them than the better shares gain. In the simulated league these
    cost less than 0.5 % of the time. Two things cost more there: shares that are right
    beforehand (`fixed`, `static` where nothing lasting happens) save the first rounds
    and their programs; and with a thousand workers, a short run and programs that all
    wait for, one compiled size (`self_adaptive`) is 4 % quicker.

    Args:
      forgetting: what is kept of the weight of the past each round; 0 is the last
        round alone.
      bend: how far times may be from a straight line, relative; 0 for a line.
      caution: standard errors that a gain must exceed; 0 for any gain.

    >>> cluster = Cluster.create(workers=2, global_batch=30, granule=1)
    >>> policy = makespan()
    >>> _, state = policy.init(cluster)
    >>> seen = Observation(
    ...     round=0, sizes=(15, 15), capacities=(15, 15), busy_seconds=(1.0, 2.0),
    ...     busy_median_seconds=(0.1, 0.2), busy_spread_seconds=(0.0, 0.0),
    ...     input_seconds=(0.0, 0.0), wait_seconds=(1.0, 0.0), measured_steps=(10, 10))
    >>> targets, state = policy.update(seen, state)
    >>> targets
    array([20., 10.])

    Raises:
      UserError: an option out of its range.
    """
    TimeModel.create(1, forgetting, bend)  # Raises on its options.
    if not 0 <= caution < math.inf:
        raise UserError(f"caution {caution}: use standard errors, at least 0")

    def init(cluster: Cluster) -> tuple[np.ndarray, MakespanState]:
        equal = equal_targets(cluster)
        sizes = align(equal, cluster.global_batch, cluster.ladder, cluster.limits)
        model = TimeModel.create(cluster.workers, forgetting, bend)
        return np.array(sizes, np.float64), MakespanState(cluster, model)

    def update(
        observation: Observation, state: MakespanState
    ) -> tuple[np.ndarray, MakespanState]:
        cluster, model = state.cluster, learn(state.model, observation)
        sizes = _choose(cluster, observation, model, caution)
        return sizes.astype(np.float64), MakespanState(cluster, model)

    return Policy("makespan", init, update, placed=True)


def _choose(
    cluster: Cluster, observation: Observation, model: TimeModel, caution: float
) -> np.ndarray:
    """The sizes [W] to have next; those of now where another choice gains nothing."""
    limits = (observation.limits or cluster.limits).within(cluster.ladder.edges[-1])
    rungs = LadderRungs.of(cluster.ladder, limits)
    curves, total = model.curves, cluster.global_batch
    now = np.array(observation.capacities, np.float64)
    times_now = curves.seconds(now)
    capacities = fill(curves, total, rungs, guess=float(times_now.max()))
    times = curves.seconds(capacities)
    slowest = int(np.argmax(times_now))
    error = model.standard_error(now)[slowest]
    possible = np.all(now <= limits.caps) and np.all(observation.sizes >= limits.floors)
    if possible and times_now[slowest] - times.max() <= caution * error:
        return np.array(observation.sizes)
    return give_back(capacities, times, total, rungs, np.array(limits.floors))
