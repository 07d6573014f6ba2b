"""What is particular to the first policies, and bad input to any of them."""

import math

import numpy as np
import pytest

from jdlb.balance import policies
from jdlb.balance.allocation import Ladder, Limits
from jdlb.balance.policies.protocol import Cluster, Observation
from jdlb.errors import UserError

WORKERS, BATCH = 4, 64
CLUSTER = Cluster.create(WORKERS, BATCH)


def observe(busy, *, steps=(10,) * WORKERS, capacities=(16,) * WORKERS, median=None):
    """A round of `busy` seconds a step."""
    sums = tuple(b * n for b, n in zip(busy, steps, strict=True))
    nothing = (0.0,) * len(busy)
    return Observation(
        round=0,
        sizes=capacities,
        capacities=capacities,
        busy_seconds=sums,
        busy_median_seconds=tuple(busy) if median is None else median,
        busy_spread_seconds=nothing,
        input_seconds=nothing,
        wait_seconds=nothing,
        measured_steps=steps,
    )


@pytest.mark.parametrize("name", ["equal", "fixed"])
def test_some_policies_look_at_nothing(name: str) -> None:
    options = {"shares": [0.4, 0.3, 0.2, 0.1]} if name == "fixed" else {}
    policy = policies.get(name, **options)
    before, state = policy.init(CLUSTER)
    after, _ = policy.update(observe((0.1, 0.2, 0.3, 0.4)), state)
    assert np.array_equal(before, after)


def test_dlb_shares_by_capacity_per_busy_second_of_the_last_round() -> None:
    policy = policies.get("dlb")
    _, state = policy.init(CLUSTER)
    _, state = policy.update(observe((9.0, 1.0, 1.0, 1.0)), state)
    # Sizes are smaller than capacities here: padded rows count as work.
    seen = observe((0.1, 0.1, 0.1, 0.2), capacities=(8, 16, 16, 16))
    targets, _ = policy.update(seen, state)
    assert targets == pytest.approx(np.array([1, 2, 2, 1]) * BATCH / 6)


def test_dlb_divides_by_the_steps_each_worker_measured() -> None:
    policy = policies.get("dlb")
    _, state = policy.init(CLUSTER)
    seen = observe((0.1, 0.1, 0.1, 0.1), steps=(10, 5, 10, 9))
    assert policy.update(seen, state)[0] == pytest.approx(np.full(4, 16.0))


def test_dlb_uses_the_sum_and_static_the_median() -> None:
    seen = observe((0.2, 0.1, 0.1, 0.1), median=(0.1, 0.1, 0.1, 0.2))
    sums, medians = policies.get("dlb"), policies.get("static")
    by_sum, _ = sums.update(seen, sums.init(CLUSTER)[1])
    by_median, _ = medians.update(seen, medians.init(CLUSTER)[1])
    assert by_sum == pytest.approx(np.array([1, 2, 2, 2]) * BATCH / 7)
    assert by_median == pytest.approx(np.array([2, 2, 2, 1]) * BATCH / 7)


@pytest.mark.parametrize("busy", [math.nan, math.inf, 0.0, -1.0])
def test_dlb_keeps_the_last_performance_of_a_worker_without_measure(busy) -> None:
    policy = policies.get("dlb")
    _, state = policy.init(CLUSTER)
    known, state = policy.update(observe((0.4, 0.1, 0.1, 0.1)), state)
    after, state = policy.update(observe((busy, 0.1, 0.1, 0.1)), state)
    assert after == pytest.approx(known)
    no_steps = observe((0.1, 0.1, 0.1, 0.1), steps=(0, 10, 10, 10))
    assert policy.update(no_steps, state)[0] == pytest.approx(known)


def test_a_worker_that_was_never_measured_counts_as_the_mean() -> None:
    policy = policies.get("dlb")
    _, state = policy.init(CLUSTER)
    targets, _ = policy.update(observe((math.nan, 0.1, 0.1, 0.2)), state)
    assert targets[0] == pytest.approx(BATCH / 4)


def test_static_decides_once_from_the_first_usable_probe() -> None:
    policy = policies.get("static")
    _, state = policy.init(CLUSTER)
    nothing = observe((0.1,) * 4, steps=(0,) * 4)
    targets, state = policy.update(nothing, state)
    assert targets == pytest.approx(np.full(4, 16.0))
    decided, state = policy.update(observe((0.1, 0.2, 0.2, 0.2)), state)
    assert decided == pytest.approx(np.array([2, 1, 1, 1]) * BATCH / 5)
    later, _ = policy.update(observe((0.9, 0.1, 0.1, 0.1)), state)
    assert np.array_equal(later, decided)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: policies.get("dbl"), "did you mean 'dlb'"),
        (lambda: policies.get("dlb", shares=[1.0]), "'dlb'.*takes no options"),
        (lambda: policies.get("fixed"), "'fixed'.*it takes shares"),
        (lambda: policies.get("fixed", shares=[0.5, 0.4]), "sum to 0.9"),
        (lambda: policies.get("fixed", shares=[]), "sum to 0"),
        (lambda: policies.get("fixed", shares=[1.5, -0.5]), "worker 1 is -0.5"),
        (lambda: policies.get("fixed", shares=[math.nan]), "worker 0 is nan"),
        (
            lambda: policies.get("fixed", shares=[0.5, 0.5]).init(CLUSTER),
            "2 shares for 4 workers",
        ),
        (lambda: Cluster.create(0, 64), "0 workers"),
        (lambda: Cluster.create(4, 3), "global batch of 3"),
        (lambda: Cluster.create(2, 64, caps=(31, 32)), "above the sum of caps, 63"),
        (lambda: Cluster.create(2, 64, caps=(64,)), "limits for 1 workers"),
        (lambda: Cluster.create(2, 64, granule=0), "granule 0"),
        (lambda: Cluster.create(2, 64, growth=2.0), "growth 2.0"),
        (
            lambda: Cluster(2, 64, Ladder(8, top=24), Limits((1, 1), (64, 64))),
            "above the sum of caps, 48",
        ),
        (
            lambda: Cluster(2, 64, Ladder(8, top=64), Limits((40, 40), (64, 64))),
            "floors that sum to 80",
        ),
    ],
)
def test_bad_input_is_told_with_its_value(build, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_shares_that_nearly_sum_to_one_are_scaled() -> None:
    policy = policies.get("fixed", shares=[0.3333333, 0.3333333, 0.3333333])
    targets, _ = policy.init(Cluster.create(3, 60))
    assert targets.sum() == pytest.approx(60, rel=1e-12)
