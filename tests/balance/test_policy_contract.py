"""One contract over every policy of the registry; where one falls short, by how much.

What a policy promises beside the exact sum is in its `Promise`: measured figures with
some room, so that a rule that becomes worse is noticed.
"""

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from policy_rounds import (
    affine,
    best_makespan,
    changes,
    ladder_of,
    makespan_of,
    observe,
    programs,
    run,
)

from jdlb.balance import policies
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import AnyPolicy, Cluster

WORKERS, BATCH = 4, 400
DEAD_BAND = 0.2
"""Recommended for noise of 5 % a round, where a rule has nothing of its own."""


@dataclass(frozen=True)
class Promise:
    """What is held beyond the common part.

    Attributes:
      adapts: shares follow what is measured, again and again.
      within: makespan over the best on the ladder, after `rounds` rounds, on workers
        of affine times.
      raw_changes: changes of 200 rounds under 5 % noise without a dead band.
      calm_changes: the same with the recommended dead band.
      recovery: rounds until within 10 % of the best after a worker became 2x slower.
      after_hiccup: rounds until a step of 10 times its length is forgotten; 0 if it
        moves nothing.
    """

    adapts: bool = True
    within: float = 1.1
    rounds: int = 10
    raw_changes: int = 200
    calm_changes: int = 10
    recovery: int = 2
    after_hiccup: int = 0
    options: dict[str, Any] = field(default_factory=dict)


UNMOVED = Promise(adapts=False, within=math.inf, raw_changes=0, calm_changes=0)
PROMISES = {
    "equal": UNMOVED,
    "fixed": UNMOVED,
    # Proportional shares from one batch: wrong by the fixed part of a step.
    "static": Promise(adapts=False, within=1.7, raw_changes=1, calm_changes=1),
    "dlb": Promise(within=1.03, after_hiccup=3),
    "makespan": Promise(within=1.01, rounds=3, raw_changes=20, calm_changes=2),
    "boa": Promise(within=1.05, rounds=3, raw_changes=80, calm_changes=2),
    "lbb": Promise(after_hiccup=5),
    # One pair of workers a window: slow, and the longer the calmer it has become.
    "lb_bsp": Promise(rounds=30, raw_changes=50, recovery=30, after_hiccup=3),
    "lb_bsp_cpu": Promise(within=1.15, after_hiccup=4),
    "omnilearn": Promise(within=1.05, after_hiccup=3),
    "self_adaptive": Promise(within=1.03, after_hiccup=3, options={"micro_batch": 4}),
}


def build(name: str, workers: int = WORKERS) -> AnyPolicy:
    options = dict(PROMISES[name].options)
    if name == "fixed":
        options["shares"] = [1 / workers] * workers
    return policies.get(name, **options)


every_policy = pytest.mark.parametrize("name", sorted(policies.POLICIES))
adapting = pytest.mark.parametrize(
    "name", [name for name, promise in PROMISES.items() if promise.adapts]
)


def test_every_policy_promises_something() -> None:
    assert set(PROMISES) == set(policies.POLICIES)


@every_policy
def test_the_name_is_that_of_the_registry(name: str) -> None:
    policy = build(name)
    assert policy.name == name
    assert policy.probe == (name == "static")
    assert policy.exact == (name in ("equal", "fixed"))


SPEEDS_APART = (1e-3, 1.0, 1e3, 1e6)
BAD_SECONDS = [
    (0.1, 0.2, 0.3, 0.4),
    SPEEDS_APART,
    (math.nan, math.inf, 0.0, -1.0),
    (math.nan,) * 4,
    (0.0,) * 4,
    (math.inf,) * 4,
    (math.nan, 0.1, 0.1, 0.2),
    (math.inf, 0.1, 0.0, 0.2),
    (1e-320, 0.1, 0.1, 0.1),
    (1e300, 0.1, 0.1, 0.1),
]


@every_policy
@pytest.mark.parametrize("seconds", BAD_SECONDS)
@pytest.mark.parametrize("aligned", [True, False])
def test_sums_are_exact_and_bounds_kept_whatever_is_measured(
    name: str, seconds, aligned: bool
) -> None:
    cluster = Cluster.create(WORKERS, BATCH, caps=(250, 400, 120, 400))
    controller = Controller(build(name), cluster, aligned)
    decision, state = controller.start()
    # Good rounds between bad ones: what is learned from either must do no harm.
    for round_, measured in enumerate(
        [seconds, (0.3, 0.2, 0.1, 0.4), seconds, seconds]
    ):
        check_targets(state.targets)
        check_allocation(decision.allocation, cluster)
        seen = observe(decision.allocation, measured, round_=round_)
        decision, state = controller.decide(seen, state)
    check_targets(state.targets)
    check_allocation(decision.allocation, cluster)


def check_targets(targets: np.ndarray) -> None:
    assert targets.dtype == np.float64
    assert targets.shape == (WORKERS,)
    assert np.all(np.isfinite(targets))
    assert np.all(targets >= 0)
    assert targets.sum() == pytest.approx(BATCH, rel=1e-9)


def check_allocation(allocation, cluster: Cluster) -> None:
    assert allocation.global_batch == BATCH
    limits = cluster.limits
    rows = zip(allocation.sizes, limits.floors, limits.caps, strict=True)
    assert all(floor <= size <= cap for size, floor, cap in rows)


@every_policy
def test_one_worker_keeps_everything(name: str) -> None:
    controller = Controller(build(name, workers=1), Cluster.create(1, 64))
    times = affine(controller.policy, 0.1, [0.01])
    assert {a.sizes for a in run(controller, times, 6, noise=0.1)} == {(64,)}


@every_policy
def test_updating_is_pure_and_the_same_again(name: str) -> None:
    policy = build(name)
    cluster = Cluster.create(WORKERS, BATCH)
    allocation = Controller(policy, cluster).start()[0].allocation
    first, other = (observe(allocation, s) for s in ((1, 2, 3, 4.0), (4, 1, 1, 2.0)))
    targets, state = policy.init(cluster)
    start = targets.copy()
    once, later = policy.update(first, state)
    kept = once.copy()
    policy.update(other, state)
    policy.update(other, later)
    again, _ = policy.update(first, state)
    assert np.array_equal(kept, once)
    assert np.array_equal(kept, again)
    assert np.array_equal(start, targets)


@every_policy
def test_workers_in_another_order_get_the_same_in_that_order(name: str) -> None:
    generator = np.random.default_rng(0)
    workers, batch = 5, 400
    cluster = Cluster.create(workers, batch, granule=1, growth=0.0)
    policy = build(name, workers)
    for _ in range(10):
        per_row, fixed = (
            generator.uniform(1, 10, workers),
            generator.uniform(1, 50, workers),
        )
        order = generator.permutation(workers)
        straight = run(Controller(policy, cluster), affine(policy, fixed, per_row), 8)
        turned = affine(policy, fixed[order], per_row[order])
        shuffled = run(Controller(policy, cluster), turned, 8)
        for one, other in zip(straight, shuffled, strict=True):
            assert other.sizes == tuple(one.sizes[w] for w in order)


@every_policy
@pytest.mark.parametrize("granule", [1, 4])
def test_equal_workers_stay_as_they_are(name: str, granule: int) -> None:
    cluster = Cluster.create(WORKERS, BATCH, granule=granule, growth=0.0)
    controller = Controller(build(name), cluster)
    allocations = run(controller, affine(controller.policy, 0.02, [0.002] * 4), 20)
    assert {a.sizes for a in allocations} == {(100,) * 4}


@every_policy
def test_workers_of_affine_times_are_balanced(name: str) -> None:
    promise = PROMISES[name]
    generator = np.random.default_rng(1)
    for _ in range(10):
        workers = int(generator.integers(2, 9))
        batch = int(generator.integers(60, 200)) * workers
        per_row = np.exp(generator.uniform(np.log(1e-3), np.log(1e-2), workers))
        fixed = generator.uniform(0, 0.5) * per_row * batch / workers
        cluster, policy = Cluster.create(workers, batch), build(name, workers)
        if policy.micro_batch:
            # Of each micro-batch, which is of few examples here.
            fixed = fixed * policy.micro_batch * workers / batch
        times = affine(policy, fixed, per_row)
        best = best_makespan(times, cluster, ladder_of(policy, cluster))
        last = run(Controller(policy, cluster), times, promise.rounds)[-1]
        assert makespan_of(times, last) <= promise.within * best


@every_policy
def test_noise_moves_little(name: str) -> None:
    """5 % noise on whole rounds of equal workers, 200 of them: far more than usual."""
    promise, policy = PROMISES[name], build(name)
    cluster, times = Cluster.create(WORKERS, BATCH), affine(policy, 0.02, [0.002] * 4)
    for band, allowed in (
        (0.0, promise.raw_changes),
        (DEAD_BAND, promise.calm_changes),
    ):
        controller = Controller(policy, cluster, dead_band=band)
        for seed in range(2):
            allocations = run(controller, times, 200, noise=0.05, seed=seed)
            assert changes(allocations) <= allowed
            # Neighbouring edges, again and again, not ever new ones.
            assert programs(allocations) <= 10 * WORKERS


def slowed(times, since: int):
    """The same times, worker 0 taking twice as long from a round on."""

    def later(round_: int, capacities: np.ndarray) -> np.ndarray:
        hit = (np.arange(len(capacities)) == 0) & (round_ >= since)
        return times(round_, capacities) * np.where(hit, 2.0, 1.0)

    return later


@adapting
def test_a_lasting_change_is_followed(name: str) -> None:
    policy, cluster = build(name), Cluster.create(WORKERS, BATCH)
    times = slowed(affine(policy, 0.02, [0.002, 0.002, 0.004, 0.006]), since=40)
    best = best_makespan(
        lambda _, capacities: times(40, capacities), cluster, ladder_of(policy, cluster)
    )
    allocations = run(Controller(policy, cluster), times, 100)
    for allocation in allocations[40 + PROMISES[name].recovery :]:
        assert makespan_of(times, allocation, 40) <= 1.1 * best
    # Without overshoot: worker 0 never gets less than it ends with, by two edges.
    edge = 2 * max(cluster.ladder.granule, allocations[-1].sizes[0] // 16 + 1)
    if name != "lb_bsp":
        assert min(a.sizes[0] for a in allocations) >= allocations[-1].sizes[0] - edge


@every_policy
def test_a_step_of_ten_times_its_length_is_forgotten(name: str) -> None:
    policy, cluster = build(name), Cluster.create(WORKERS, BATCH)
    times = affine(policy, 0.02, [0.002, 0.002, 0.004, 0.006])
    allocations = run(Controller(policy, cluster), times, 60, stalled={40: 0})
    if PROMISES[name].after_hiccup == 0:
        assert changes(allocations[40:]) == 0
    before = makespan_of(times, allocations[40])
    for allocation in allocations[40 + PROMISES[name].after_hiccup :]:
        assert makespan_of(times, allocation) <= 1.05 * before


@every_policy
@pytest.mark.parametrize("granule", [1, 8])
def test_a_hundred_times_slower_worker_is_not_starved(name: str, granule: int) -> None:
    workers, batch = 3, 240
    policy = build(name, workers)
    cluster = Cluster.create(workers, batch, granule=granule)
    slow, fast = np.array([1e-4, 1e-4, 1e-2]), np.full(3, 1e-4)

    def times(round_: int, capacities: np.ndarray) -> np.ndarray:
        return 0.001 + (slow if round_ < 60 else fast) * capacities

    allocations = run(Controller(policy, cluster), times, 120)
    assert min(min(a.sizes) for a in allocations) >= granule
    if PROMISES[name].adapts:
        assert allocations[60].sizes[2] <= max(granule, 8)
        assert allocations[-1].sizes[2] >= 64


@every_policy
def test_caps_that_fall_in_mid_run_hold(name: str) -> None:
    policy, cluster = build(name), Cluster.create(WORKERS, BATCH)
    times = affine(policy, 0.02, [0.001, 0.002, 0.004, 0.006])
    controller = Controller(policy, cluster)
    decision, state = controller.start()
    for round_ in range(20):
        if round_ == 10:
            controller = controller.with_caps((110, 400, 400, 400))
            decision, state = controller.reallocate(state)
        if round_ >= 10:
            assert decision.allocation.capacities[0] <= 110
        check_allocation(decision.allocation, controller.cluster)
        seconds = times(round_, np.array(decision.allocation.capacities))
        seen = observe(decision.allocation, seconds, round_=round_)
        decision, state = controller.decide(seen, state)


@every_policy
def test_ten_thousand_workers_are_decided_in_time(name: str) -> None:
    """Under 50 ms on a quiet core, whatever the rule; here with room for a busy one."""
    workers = 10_000
    cluster = Cluster.create(workers, 100 * workers)
    policy = build(name, workers)
    if name == "self_adaptive":
        policy = policies.get(name)
    generator = np.random.default_rng(0)
    per_row = np.exp(generator.uniform(np.log(1e-3), np.log(1e-2), workers))
    times = affine(policy, 0.02, per_row)
    controller = Controller(policy, cluster)
    decision, state = controller.start()
    spent = []
    for round_ in range(6):
        capacities = np.array(decision.allocation.capacities, np.float64)
        noise = np.exp(0.02 * generator.standard_normal(workers))
        seen = observe(decision.allocation, times(round_, capacities) * noise)
        began = time.process_time()
        decision, state = controller.decide(seen, state, steps_left=1000)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.1


def test_limits_are_told_to_policies() -> None:
    told = []
    rule = policies.get("dlb")

    def update(observation, state):
        told.append(observation.limits)
        return rule.update(observation, state)

    cluster = Cluster.create(2, 64)
    controller = Controller(dataclasses.replace(rule, update=update), cluster)
    decision, state = controller.start()
    controller.decide(observe(decision.allocation, (1.0, 1.0)), state)
    lower = controller.with_caps((64, 40))
    lower.decide(observe(decision.allocation, (1.0, 1.0)), state)
    assert told == [cluster.limits, lower.cluster.limits]
