"""Policies made of policies: each wrapper alone, several at once, and bad options."""

import dataclasses

import numpy as np
import pytest
from policy_rounds import affine, changes, observe, run

from jdlb.balance import policies
from jdlb.balance.allocation import Allocation
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import AnyPolicy, Cluster
from jdlb.balance.policies.wrappers import (
    caps,
    dead_band,
    smooth_performance,
    smooth_targets,
)
from jdlb.errors import UserError

CLUSTER = Cluster.create(4, 400, granule=1, growth=0.0)
EQUAL = Allocation((100,) * 4, (100,) * 4)
DLB = policies.get("dlb")


def after(policy: AnyPolicy, *rounds) -> np.ndarray:
    targets, state = policy.init(CLUSTER)
    for seconds in rounds:
        targets, state = policy.update(observe(EQUAL, seconds), state)
    return targets


def test_targets_are_smoothed() -> None:
    once, slow = (1.0, 1.0, 1.0, 1.0), (3.0, 1.0, 1.0, 1.0)
    assert after(smooth_targets(DLB, 0.75), once, slow)[0] == pytest.approx(
        0.75 * 100 + 0.25 * 40
    )
    assert np.array_equal(after(smooth_targets(DLB, 0.0), slow), after(DLB, slow))


def test_performance_is_smoothed_for_sums_and_medians() -> None:
    policy = smooth_performance(DLB, 0.5)
    # Speeds of worker 0: 100, then 25; their mean is 62.5.
    targets = after(policy, (1.0, 1.0, 1.0, 1.0), (4.0, 1.0, 1.0, 1.0))
    assert targets[0] == pytest.approx(400 * 62.5 / 362.5)
    told = []

    def update(observation, state):
        told.append(observation)
        return DLB.update(observation, state)

    spy = smooth_performance(dataclasses.replace(DLB, update=update), 0.5)
    after(spy, (1.0, 1.0, 1.0, 1.0), (4.0, 1.0, 1.0, np.nan))
    assert told[-1].busy_median_seconds[0] == pytest.approx(100 / 62.5)
    assert told[-1].busy_seconds[0] == pytest.approx(10 * 100 / 62.5)
    # Who was not measured is still seen so.
    assert np.isnan(told[-1].busy_seconds[3])


def test_a_dead_band_moves_all_or_none() -> None:
    policy = dead_band(DLB, 0.1)
    assert np.array_equal(after(policy, (1.05, 1.0, 1.0, 1.0)), np.full(4, 100.0))
    moved = after(policy, (1.3, 1.0, 1.0, 1.0))
    assert np.array_equal(moved, after(DLB, (1.3, 1.0, 1.0, 1.0)))
    # And that is what is held from then on.
    near = after(policy, (1.3, 1.0, 1.0, 1.0), (1.35, 1.0, 1.0, 1.0))
    assert np.array_equal(near, moved)
    # From what is held, not from what was asked for last.
    crept = after(policy, *((1 + 0.02 * k, 1.0, 1.0, 1.0) for k in range(12)))
    assert crept[0] < 95


@pytest.mark.parametrize("name", sorted(set(policies.POLICIES) - {"fixed"}))
def test_caps_bind_any_policy(name: str) -> None:
    policy = caps(policies.get(name), [60, 400, 150, 400])
    cluster = Cluster.create(4, 400)
    times = affine(policy, 0.01, [0.001, 0.002, 0.002, 0.006])
    for allocation in run(Controller(policy, cluster), times, 8):
        assert allocation.global_batch == 400
        # The controller may align them: to the next edge, no further.
        assert allocation.sizes[0] <= cluster.ladder.capacity(60)
    if policy.placed:
        assert run(Controller(policy, cluster), times, 8)[-1].sizes[0] == 60


def test_wrappers_compose_and_keep_what_a_policy_is() -> None:
    policy = dead_band(smooth_performance(policies.get("self_adaptive"), 0.8), 0.1)
    assert policy.name == "dead_band(smooth_performance(self_adaptive))"
    assert policy.micro_batch == 8
    placed = policies.get("makespan")
    assert dead_band(placed).placed
    assert not smooth_targets(placed).placed
    cluster, still = Cluster.create(4, 400), policies.get("dlb")
    calm = dead_band(smooth_performance(still, 0.8), 0.1)
    moved = [
        changes(
            run(Controller(p, cluster), affine(p, 0.02, [0.002] * 4), 200, noise=0.05)
        )
        for p in (still, calm)
    ]
    assert moved[1] <= 4 < moved[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: smooth_targets(DLB, 1.0), "keep 1.0"),
        (lambda: smooth_performance(DLB, -0.5), "keep -0.5"),
        (lambda: dead_band(DLB, 1.0), "dead band 1.0"),
        (lambda: caps(DLB, [400] * 3).init(CLUSTER), "3 caps for 4"),
        (lambda: caps(DLB, [99] * 4).init(CLUSTER), "above the sum of caps, 396"),
        (lambda: caps(DLB, [0, 400, 400, 400]).init(CLUSTER), "cap 0"),
    ],
)
def test_bad_options_are_told(build, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build()
    assert "\n" not in str(error.value)
