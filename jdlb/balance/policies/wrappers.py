"""Policies made of policies: smoothing, a dead band, caps.

Each is a function from a policy to a policy, so that they compose in any order:
`dead_band(smooth_performance(dlb()), 0.1)`. Must not know which policy they wrap.

There is no wrapper for "does it pay": whether a move is worth its compilations takes
the steps that are left and what programs took to compile, which the controller knows
and a policy does not (`Controller.weigh_compilation`). Nor does a dead band here replace
the controller's: this one looks at targets, that one at whole sizes, after the ladder.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jdlb.balance.allocation import round_shares
from jdlb.balance.ladder import Limits
from jdlb.balance.policies.protocol import (
    AnyPolicy,
    Cluster,
    Observation,
    mean_performance,
)
from jdlb.errors import UserError


def smooth_targets(policy: AnyPolicy, keep: float = 0.5) -> AnyPolicy:
    """The exponential mean of what a policy asks for.

    `keep` is what stays of the mean each round. The policy itself goes on as if its
    targets held, which suits rules that look at speeds alone (`dlb`), not those that
    step from where they are (`lb_bsp`).

    >>> from jdlb.balance.policies.fixed import fixed
    >>> policy = smooth_targets(fixed([0.75, 0.25]))
    >>> policy.name, policy.init(Cluster.create(2, 64))[0]
    ('smooth_targets(fixed)', array([48., 16.]))

    Raises:
      UserError: `keep` outside [0, 1).
    """
    _check_keep(keep)

    def init(cluster: Cluster) -> tuple[np.ndarray, Any]:
        targets, inner = policy.init(cluster)
        return targets, (targets, inner)

    def update(observation: Observation, state: Any) -> tuple[np.ndarray, Any]:
        mean, inner = state
        targets, inner = policy.update(observation, inner)
        mean = keep * mean + (1 - keep) * targets
        return mean, (mean, inner)

    # Means of whole sizes are not whole.
    return _wrapped("smooth_targets", policy, init, update, placed=False)


def smooth_performance(policy: AnyPolicy, keep: float = 0.5) -> AnyPolicy:
    """A policy that sees the exponential mean of each worker's performance.

    Capacity per busy second is what is smoothed, so that a move to another capacity is
    not taken for a change of the worker; busy sums and medians of the observation are
    then those of the smoothed performance. A worker that was not measured keeps its
    mean, and is still seen as not measured.

    Raises:
      UserError: `keep` outside [0, 1).
    """
    _check_keep(keep)

    def init(cluster: Cluster) -> tuple[np.ndarray, Any]:
        targets, inner = policy.init(cluster)
        return targets, (np.full(cluster.workers, np.nan), inner)

    def update(observation: Observation, state: Any) -> tuple[np.ndarray, Any]:
        mean, inner = state
        seen = mean_performance(observation)
        fresh = np.where(np.isnan(mean), seen, keep * mean + (1 - keep) * seen)
        mean = np.where(np.isnan(seen), mean, fresh)
        seconds = np.where(np.isnan(seen), np.nan, observation.capacities / mean)
        sums = seconds * observation.measured_steps
        observation = dataclasses.replace(
            observation,
            busy_seconds=tuple(sums.tolist()),
            busy_median_seconds=tuple(seconds.tolist()),
        )
        targets, inner = policy.update(observation, inner)
        return targets, (mean, inner)

    return _wrapped("smooth_performance", policy, init, update)


def dead_band(policy: AnyPolicy, width: float = 0.05) -> AnyPolicy:
    """A policy whose targets stay until some worker's would change by more than this.

    `width` is a fraction of that worker's target. All targets move, or none.

    Raises:
      UserError: a width outside [0, 1).
    """
    if not 0 <= width < 1:
        raise UserError(f"dead band {width}: use a fraction, from 0 to below 1")

    def init(cluster: Cluster) -> tuple[np.ndarray, Any]:
        targets, inner = policy.init(cluster)
        return targets, (targets, inner)

    def update(observation: Observation, state: Any) -> tuple[np.ndarray, Any]:
        held, inner = state
        targets, inner = policy.update(observation, inner)
        # A target of 0 that rises at all has changed by more than any fraction.
        if np.any(np.abs(targets - held) > width * held):
            held = targets
        return held, (held, inner)

    return _wrapped("dead_band", policy, init, update)


def caps(policy: AnyPolicy, examples: Sequence[int]) -> AnyPolicy:
    """A policy under further caps [W], in examples, for this rule alone.

    The policy knows them where it looks at limits; targets above them are cut, and the
    others take the rest in proportion, in whole examples.

    >>> from jdlb.balance.policies.equal import equal
    >>> caps(equal(), [8, 64, 64]).init(Cluster.create(3, 64))[0]
    array([ 8., 28., 28.])

    Raises:
      UserError: in `init`, another number of caps than workers, one below 1, or too low
        for the batch.
    """
    given = tuple(examples)

    def within(limits: Limits) -> Limits:
        if len(given) != len(limits.caps):
            raise UserError(f"{len(given)} caps for {len(limits.caps)} workers")
        pairs = zip(given, limits.caps, strict=True)
        return limits.with_caps(min(pair) for pair in pairs)

    def cut(targets: np.ndarray, cluster: Cluster, limits: Limits) -> np.ndarray:
        if np.all(targets <= limits.caps):
            return targets
        return np.array(round_shares(targets, cluster.global_batch, limits), np.float64)

    def init(cluster: Cluster) -> tuple[np.ndarray, Any]:
        # Raises where they do not hold the batch.
        cluster = dataclasses.replace(cluster, limits=within(cluster.limits))
        targets, inner = policy.init(cluster)
        return cut(targets, cluster, cluster.limits), (cluster, inner)

    def update(observation: Observation, state: Any) -> tuple[np.ndarray, Any]:
        cluster, inner = state
        limits = within(observation.limits or cluster.limits)
        observation = dataclasses.replace(observation, limits=limits)
        targets, inner = policy.update(observation, inner)
        return cut(targets, cluster, limits), (cluster, inner)

    return _wrapped("caps", policy, init, update)


def _check_keep(keep: float) -> None:
    if not 0 <= keep < 1:
        raise UserError(f"keep {keep}: use a fraction, from 0 to below 1")


def _wrapped(
    name: str, policy: AnyPolicy, init: Any, update: Any, **changes: Any
) -> AnyPolicy:
    return dataclasses.replace(
        policy, name=f"{name}({policy.name})", init=init, update=update, **changes
    )
