"""What is particular to each rule of the field: its published steps, and bad options."""

import dataclasses
import math

import numpy as np
import pytest
from policy_rounds import affine, changes, observe, run

from jdlb.balance import policies
from jdlb.balance.allocation import Allocation
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import Cluster
from jdlb.balance.time_tables import GTX_1070, TimeTable
from jdlb.errors import UserError

CLUSTER = Cluster.create(4, 400, granule=1, growth=0.0)
EQUAL = Allocation((100,) * 4, (100,) * 4)


def targets_after(name: str, *rounds, **options) -> list[np.ndarray]:
    """Targets after each round of these seconds, all run at 100 examples a worker."""
    policy = policies.get(name, **options)
    _, state = policy.init(CLUSTER)
    found = []
    for seconds in rounds:
        targets, state = policy.update(observe(EQUAL, seconds), state)
        found.append(targets)
    return found


def test_omnilearn_moves_by_the_mean_time_over_each() -> None:
    targets = targets_after("omnilearn", (1.0, 2.0, 2.0, 4.0))[0]
    assert targets == pytest.approx(400 * np.array([4, 2, 2, 1]) / 9)
    half = targets_after("omnilearn", (1.0, 4.0, 4.0, 16.0), gain=0.5)[0]
    assert half == pytest.approx(targets)


def test_omnilearn_rests_inside_its_dead_band() -> None:
    inside, outside = (1.0, 1.0, 1.0, 1.04), (1.0, 1.0, 1.0, 1.12)
    assert np.array_equal(targets_after("omnilearn", inside)[0], np.full(4, 100.0))
    assert not np.array_equal(targets_after("omnilearn", outside)[0], np.full(4, 100.0))
    wide = targets_after("omnilearn", outside, dead_band=0.2)[0]
    assert np.array_equal(wide, np.full(4, 100.0))


def test_lb_bsp_moves_one_step_from_the_slowest_to_the_fastest() -> None:
    targets = targets_after("lb_bsp", (1.0, 2.0, 3.0, 4.0), step=10)[0]
    assert np.array_equal(targets, [110, 100, 100, 90])


def test_lb_bsp_halves_its_step_and_doubles_its_window_on_oscillation() -> None:
    policy = policies.get("lb_bsp", step=16)
    _, state = policy.init(CLUSTER)
    seen = [(1.0, 2.0, 2.0, 3.0), (3.0, 2.0, 2.0, 1.0)]
    _, state = policy.update(observe(EQUAL, seen[0]), state)
    assert (state.step, state.length) == (16, 1)
    targets, state = policy.update(observe(EQUAL, seen[1]), state)
    assert (state.step, state.length) == (8, 2)
    assert np.array_equal(targets, [108, 100, 100, 92])
    held, state = policy.update(observe(EQUAL, seen[0]), state)
    assert np.array_equal(held, targets)
    for _ in range(11):
        _, state = policy.update(observe(EQUAL, seen[0]), state)
    # Steady again: back to the first step and window.
    assert (state.step, state.length) == (16, 1)


def test_lb_bsp_gives_to_nobody_without_memory() -> None:
    cluster = Cluster.create(4, 400, caps=(100, 400, 400, 400), granule=1, growth=0.0)
    policy = policies.get("lb_bsp", step=10)
    _, state = policy.init(cluster)
    targets, _ = policy.update(observe(EQUAL, (1.0, 2.0, 3.0, 4.0)), state)
    assert np.array_equal(targets, [100, 110, 100, 90])


def test_lb_bsp_cpu_predicts_a_speed_that_swings() -> None:
    """Speeds that alternate: from the last one alone every prediction is wrong."""
    slow, fast = (2.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)
    rounds = [slow, fast] * 30
    predicted = targets_after("lb_bsp_cpu", *rounds)[-2:]
    # After `slow` comes `fast`: equal shares; and the other way round.
    assert predicted[0] == pytest.approx(np.full(4, 100.0), abs=3)
    assert predicted[1][0] == pytest.approx(400 / 7, abs=3)
    last = targets_after("dlb", *rounds)[-2:]
    assert last[0][0] == pytest.approx(400 / 7)


def test_lb_bsp_cpu_begins_as_dlb() -> None:
    seconds = (1.0, 2.0, 2.0, 4.0)
    ours, theirs = (targets_after(n, seconds)[0] for n in ("lb_bsp_cpu", "dlb"))
    assert ours == pytest.approx(theirs)


def test_lbb_has_three_bands() -> None:
    nothing, some, much = (
        (1.0, 1.0, 1.0, 1.04),
        (1.0, 1.1, 1.1, 1.2),
        (1.0, 1.0, 1.0, 2.0),
    )
    assert np.array_equal(targets_after("lbb", nothing)[0], np.full(4, 100.0))
    assert np.array_equal(targets_after("lbb", some)[0], [101, 100, 100, 99])
    solved, tuned = targets_after("lbb", much, much)
    assert solved == pytest.approx(400 * np.array([2, 2, 2, 1]) / 7, abs=0.1)
    # In the window after a solution it is only tuned.
    assert np.abs(tuned - solved).sum() <= 2.001
    other = (2.0, 1.0, 1.0, 1.0)
    held = targets_after("lbb", much, other)
    assert held[1][0] == pytest.approx(held[0][0] - 1)
    again = targets_after("lbb", much, other, window=0)[1]
    assert again[0] < 80


def test_lbb_moves_nothing_that_would_make_the_fastest_the_slowest() -> None:
    small = Cluster.create(4, 400, granule=50, growth=0.0)
    policy = policies.get("lbb")
    _, state = policy.init(small)
    targets, _ = policy.update(observe(EQUAL, (1.0, 1.0, 1.1, 1.2)), state)
    assert np.array_equal(targets, np.full(4, 100.0))


def test_lbb_solves_for_many_workers_too() -> None:
    workers = 60
    cluster = Cluster.create(workers, 100 * workers, granule=1, growth=0.0)
    policy = policies.get("lbb")
    times = affine(policy, 0.01, np.linspace(1, 4, workers) * 1e-3)
    last = run(Controller(policy, cluster), times, 8)[-1]
    seconds = times(0, np.array(last.capacities, np.float64))
    assert seconds.max() < 1.1 * seconds.mean()


@pytest.mark.parametrize("micro_batch", [1, 7, 16])
@pytest.mark.parametrize("aligned", [True, False])
def test_self_adaptive_shares_are_whole_micro_batches_but_for_one(
    micro_batch: int, aligned: bool
) -> None:
    policy = policies.get("self_adaptive", micro_batch=micro_batch)
    cluster = Cluster.create(4, 397)
    times = affine(policy, 0.001, [0.001, 0.002, 0.004, 0.009])
    controller = Controller(policy, cluster, aligned)
    for allocation in run(controller, times, 10, noise=0.1):
        assert all(c % micro_batch == 0 for c in allocation.capacities)
        pairs = zip(allocation.sizes, allocation.capacities, strict=True)
        short = [c - s for s, c in pairs if s != c]
        assert len(short) <= 1
        assert all(0 < gap < micro_batch for gap in short)
        assert controller.allocation_of(allocation.sizes) == allocation


def test_self_adaptive_caps_are_whole_micro_batches() -> None:
    policy = policies.get("self_adaptive", micro_batch=16)
    controller = Controller(policy, Cluster.create(2, 128, caps=(71, 128)))
    times = affine(policy, 0.0, [0.001, 0.01])
    assert run(controller, times, 5)[-1].capacities == (64, 64)
    with pytest.raises(UserError, match="micro-batches of 16 are above the cap of 9"):
        controller.with_caps((9, 128)).start()
    with pytest.raises(UserError, match="caps that sum to 112"):
        Controller(policy, Cluster.create(2, 128, caps=(71, 60))).start()


def test_boa_follows_a_cap_that_falls() -> None:
    policy = policies.get("boa")
    _, state = policy.init(CLUSTER)
    limits = CLUSTER.limits.with_caps((40, 400, 400, 400))
    seen = dataclasses.replace(observe(EQUAL, (1.0, 1.0, 1.0, 1.0)), limits=limits)
    targets, _ = policy.update(seen, state)
    assert np.array_equal(targets, [40, 120, 120, 120])


def test_given_tables_are_kept_whatever_is_measured() -> None:
    policy = policies.get("boa", tables=[GTX_1070] * 4)
    times = affine(policy, 0.0, [1.0, 2.0, 3.0, 4.0])
    assert changes(run(Controller(policy, CLUSTER), times, 10)) == 0


TWO_POINTS = TimeTable("short", (10, 20), (1.0, 2.0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: policies.get("omnilearn", gain=0.0), "gain 0.0"),
        (lambda: policies.get("omnilearn", gain=1.5), "gain 1.5"),
        (lambda: policies.get("omnilearn", dead_band=1.0), "dead band 1.0"),
        (lambda: policies.get("omnilearn", dead_band=math.nan), "dead band nan"),
        (lambda: policies.get("lb_bsp", step=0), "step 0"),
        (lambda: policies.get("lb_bsp", window=0), "windows of 0 to 8"),
        (lambda: policies.get("lb_bsp", window=9), "windows of 9 to 8"),
        (lambda: policies.get("lb_bsp_cpu", order=0), "order 0"),
        (lambda: policies.get("lb_bsp_cpu", forgetting=0.0), "forgetting 0.0"),
        (lambda: policies.get("lb_bsp_cpu", forgetting=1.1), "forgetting 1.1"),
        (lambda: policies.get("lbb", small=0.5), "bands 0.5 and 0.3"),
        (lambda: policies.get("lbb", small=-0.1), "bands -0.1"),
        (lambda: policies.get("lbb", window=-1), "window -1"),
        (
            lambda: policies.get("lbb", tables=[TWO_POINTS]),
            "2 batches, fewer than the 4",
        ),
        (
            lambda: policies.get("lbb", tables=[GTX_1070]).init(CLUSTER),
            "1 time tables for 4",
        ),
        (lambda: policies.get("boa", tables=[]), "no time tables"),
        (
            lambda: policies.get("boa", tables=[GTX_1070]).init(CLUSTER),
            "1 time tables for 4",
        ),
        (lambda: policies.get("boa", forgetting=-1), "forgetting -1"),
        (lambda: policies.get("self_adaptive", micro_batch=0), "micro-batch 0"),
        (
            lambda: policies.get("self_adaptive", micro_batch=101).init(CLUSTER),
            "use at most 100",
        ),
    ],
)
def test_bad_options_are_told_in_one_line(build, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build()
    assert "\n" not in str(error.value)
