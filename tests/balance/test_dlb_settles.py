"""On a ladder `dlb` comes to rest, finds the balance, and lets nobody starve."""

import numpy as np
import pytest

from jdlb.balance import policies
from jdlb.balance.allocation import Allocation, allocate
from jdlb.balance.controller import Controller
from jdlb.balance.policies.protocol import Cluster, Observation


def observe(allocation: Allocation, fixed, per_row, round_: int = 0) -> Observation:
    """One round on machines with `t = fixed + per_row * capacity` seconds a step."""
    steps = 10
    seconds = np.asarray(fixed) + np.asarray(per_row) * allocation.capacities
    nothing = (0.0,) * allocation.workers
    return Observation(
        round=round_,
        sizes=allocation.sizes,
        capacities=allocation.capacities,
        busy_seconds=tuple((steps * seconds).tolist()),
        busy_median_seconds=tuple(seconds.tolist()),
        busy_spread_seconds=nothing,
        input_seconds=nothing,
        wait_seconds=nothing,
        measured_steps=(steps,) * allocation.workers,
    )


def run(controller: Controller, fixed, per_row, rounds: int) -> list[Allocation]:
    """The allocations of so many rounds without noise, the first one included."""
    decision, state = controller.start()
    allocations = [decision.allocation]
    for round_ in range(rounds - 1):
        seen = observe(decision.allocation, fixed, per_row, round_)
        decision, state = controller.decide(seen, state)
        allocations.append(decision.allocation)
    return allocations


def random_cluster(generator: np.random.Generator, granule: int):
    """2 to 16 workers up to 100 times apart, B from 64 to 2048, fixed costs."""
    workers = int(generator.integers(2, 17))
    batch = int(generator.integers(64, 2049))
    growth = float(generator.choice([0.0, 1 / 16, 0.25]))
    per_row = np.exp(generator.uniform(np.log(1e-4), np.log(1e-2), workers))
    share = batch / workers
    fixed = per_row * share * generator.uniform(0, 1) * generator.uniform(0, 1, workers)
    return (
        Cluster.create(workers, batch, granule=granule, growth=growth),
        fixed,
        per_row,
    )


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("granule", [1, 2, 4, 8, 16, 32])
def test_no_size_changes_in_the_last_20_of_50_rounds(granule, aligned) -> None:
    generator = np.random.default_rng(granule)
    for _ in range(50):  # Six granules: 300 clusters.
        cluster, fixed, per_row = random_cluster(generator, granule)
        controller = Controller(policies.get("dlb"), cluster, aligned)
        sizes = [a.sizes for a in run(controller, fixed, per_row, rounds=50)]
        assert len(set(sizes[30:])) == 1, (cluster, fixed, per_row)


@pytest.mark.parametrize("aligned", [True, False])
def test_no_cycle_of_any_length_on_coarse_ladders(aligned: bool) -> None:
    """Few workers, few edges: where rounding has the most to say."""
    generator = np.random.default_rng(0)
    for _ in range(1000):
        workers, batch = int(generator.integers(2, 6)), int(generator.integers(16, 200))
        granule = int(generator.choice([1, 2, 4, 8, 16]))
        growth = float(generator.choice([0.0, 1 / 16, 0.25]))
        cluster = Cluster.create(workers, batch, granule=granule, growth=growth)
        per_row = np.exp(generator.uniform(np.log(1e-3), np.log(1e-2), workers))
        fixed = per_row * granule * np.exp(generator.uniform(-3, 3, workers))

        def choose(performance, cluster=cluster):
            ladder, limits = cluster.ladder, cluster.limits
            total = cluster.global_batch
            return allocate(performance, total, ladder, limits, aligned).capacities

        seen, capacities = [], choose(np.ones(workers))
        while capacities not in seen:
            seen.append(capacities)
            seconds = fixed + per_row * np.array(capacities)
            capacities = choose(capacities / seconds)
        assert capacities == seen[-1], "came back to capacities that it had left"


@pytest.mark.parametrize("aligned", [True, False])
def test_the_balance_is_found_where_time_is_proportional(aligned: bool) -> None:
    speeds = np.array([1.0, 0.5, 0.25])
    cluster = Cluster.create(3, 240)
    controller = Controller(policies.get("dlb"), cluster, aligned)
    last = run(controller, 0.0, 0.001 / speeds, rounds=5)[-1]
    seconds = 0.001 / speeds * last.capacities
    assert (seconds.max() - seconds.min()) / seconds.mean() < 0.1
    assert seconds.max() < 1.05 * 0.001 * 240 / speeds.sum()


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("granule", [1, 8])
def test_a_hundred_times_slower_is_not_starved_and_comes_back(aligned, granule) -> None:
    cluster = Cluster.create(2, 256, granule=granule)
    controller = Controller(policies.get("dlb"), cluster, aligned)
    decision, state = controller.start()
    fixed, slow, fast = 0.001, np.array([0.001, 0.1]), np.array([0.001, 0.0005])
    for _ in range(30):
        assert min(decision.allocation.sizes) >= granule
        seen = observe(decision.allocation, fixed, slow)
        decision, state = controller.decide(seen, state)
    assert decision.allocation.sizes[1] <= max(3, granule)
    for _ in range(30):
        seen = observe(decision.allocation, fixed, fast)
        decision, state = controller.decide(seen, state)
    assert decision.allocation.sizes[1] > 128


def test_shares_that_fit_no_whole_granule_still_work() -> None:
    """More workers times granule than examples: floors shrink, sums stay."""
    cluster = Cluster.create(10, 64, granule=10)
    assert set(cluster.limits.floors) == {6}
    controller = Controller(policies.get("dlb"), cluster)
    for allocation in run(controller, 0.01, np.linspace(0.001, 0.1, 10), rounds=5):
        assert allocation.global_batch == 64
        assert min(allocation.sizes) >= 6


def test_growth_of_a_hundredfold_delay_in_one_worker_moves_only_its_share() -> None:
    cluster = Cluster.create(4, 400, granule=1, growth=0.0)
    controller = Controller(policies.get("dlb"), cluster)
    decision, state = controller.start()
    seen = observe(decision.allocation, 0.0, np.array([1, 1, 1, 100.0]))
    decision, _ = controller.decide(seen, state)
    assert decision.allocation.sizes == (133, 133, 133, 1)


def test_one_worker_keeps_everything() -> None:
    controller = Controller(policies.get("dlb"), Cluster.create(1, 64))
    assert {a.sizes for a in run(controller, 0.1, 0.1, rounds=4)} == {(64,)}
