"""The true world: the best that can be done in it, its noise and its disturbances."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlb.balance.ladder import Limits
from jdlb.balance.simulation.disturbances import (
    Hiccups,
    Hit,
    Levels,
    Plan,
    RandomSlowdowns,
    SquareWave,
)
from jdlb.balance.simulation.scenario import (
    Change,
    Network,
    Noise,
    Scenario,
    Worker,
)
from jdlb.balance.simulation.world import Truth, World
from jdlb.balance.time_tables import GTX_750, GTX_1070, TESLA_M40, Tables, TimeTable
from jdlb.errors import UserError

LINE = TimeTable.affine(0.01, 0.002)


def truth_of(*tables: TimeTable, factor=1.0, added=0.0) -> Truth:
    count = len(tables)
    return Truth(Tables(tables), np.full(count, factor), np.full(count, added))


def scenario(count: int = 4, **changes) -> Scenario:
    fields = {"workers": (Worker(LINE),) * count, "global_batch": 64, "rounds": 12}
    return Scenario(**{**fields, "steps": 5, **changes})


def test_the_exact_best_on_the_published_gpu_times() -> None:
    truth = truth_of(GTX_1070, GTX_1070, TESLA_M40, GTX_750)
    best = truth.best(512, Limits.default(4, 512, 1))
    assert best.sizes.tolist() == [172, 171, 151, 18]
    assert best.makespan == pytest.approx(0.1851, abs=5e-5)
    published = truth.seconds(np.array([167, 167, 158, 20]), None)
    assert published.max() == pytest.approx(0.1986, abs=5e-5)


@st.composite
def small_clusters(draw):
    workers = draw(st.integers(1, 3))
    tables = []
    for _ in range(workers):
        points = draw(st.integers(2, 4))
        sizes = np.cumsum(
            draw(st.lists(st.integers(1, 5), min_size=points, max_size=points))
        )
        seconds = draw(st.lists(st.floats(0.1, 9.0), min_size=points, max_size=points))
        seconds[-1] = max(seconds[-2:])
        tables.append(TimeTable("t", tuple(sizes.tolist()), tuple(seconds)))
    floors = draw(st.lists(st.integers(0, 2), min_size=workers, max_size=workers))
    caps = [f + draw(st.integers(1, 9)) for f in floors]
    total = draw(st.integers(max(sum(floors), 1), sum(caps)))
    return tables, tuple(floors), tuple(caps), total


@given(small_clusters(), st.floats(0.5, 3.0), st.floats(0.0, 2.0))
def test_the_best_is_what_trying_everything_finds(cluster, factor, added) -> None:
    tables, floors, caps, total = cluster
    truth = truth_of(*tables, factor=factor, added=added)
    best = truth.best(total, Limits(floors, caps))
    assert best.sizes.sum() == total
    assert all(f <= n <= c for f, n, c in zip(floors, best.sizes, caps, strict=True))

    def padded(w: int, size: int) -> float:
        return min(
            factor * tables[w].seconds(c) + added for c in range(size, caps[w] + 1)
        )

    ranges = [range(f, c + 1) for f, c in zip(floors, caps, strict=True)]
    least = min(
        max(padded(w, n) for w, n in enumerate(sizes))
        for sizes in itertools.product(*ranges)
        if sum(sizes) == total
    )
    assert best.makespan == pytest.approx(least, rel=1e-9)


def test_whole_micro_batches_are_what_is_paid() -> None:
    seconds = truth_of(LINE, LINE, factor=2.0, added=1.0).seconds(np.array([32, 33]), 8)
    assert seconds == pytest.approx([1 + 2 * 4 * 0.026, 1 + 2 * 5 * 0.026])


def test_noise_is_the_same_for_all_and_another_each_round_and_seed() -> None:
    noise = Noise(step=0.1, round=0.1, stall_probability=0.05)
    world = World(scenario(noise=noise))
    ones, twos = np.full(4, 10), np.full(4, 20)
    first = world.busy(3, ones, None) / LINE.seconds(10)
    assert world.busy(3, twos, None) / LINE.seconds(20) == pytest.approx(first)
    assert not np.allclose(world.busy(4, ones, None) / LINE.seconds(10), first)
    assert not np.allclose(world.probe(3, 5, ones, None) / LINE.seconds(10), first)
    other = World(scenario(noise=noise, seed=1))
    assert not np.allclose(other.busy(3, ones, None) / LINE.seconds(10), first)


def test_noise_of_steps_and_of_rounds_are_not_the_same() -> None:
    tens = np.full(4, 10)
    step = World(scenario(noise=Noise(step=0.1))).busy(0, tens, None)
    whole = World(scenario(noise=Noise(round=0.1))).busy(0, tens, None)
    assert np.all(whole == whole[0])
    assert np.all(step[0] != whole[0])


def test_noise_has_the_stated_size_and_a_heavy_tail() -> None:
    calm = World(scenario(100, global_batch=100, steps=500, noise=Noise(step=0.05)))
    logs = np.log(calm.busy(0, np.full(100, 10), None) / LINE.seconds(10))
    assert logs.std() == pytest.approx(0.05, rel=0.03)
    assert logs.mean() == pytest.approx(0.0, abs=0.001)
    stalls = Noise(stall_probability=0.1, stall_shape=2.0)
    world = World(scenario(100, global_batch=100, steps=500, noise=stalls))
    factor = world.busy(0, np.full(100, 10), None) / LINE.seconds(10)
    # Of 50,000 steps a tenth is stalled, of which a sixteenth by more than 4.
    assert (factor > 1 + 1e-9).mean() == pytest.approx(0.1, abs=0.006)
    assert (factor > 4).mean() == pytest.approx(0.1 / 16, abs=0.0015)


def test_the_noise_of_a_worker_does_not_depend_on_who_else_is_there() -> None:
    noise = Noise(step=0.1)
    gone = World(scenario(noise=noise, membership=(Change(0, 1, False),)))
    assert gone.members(0).tolist() == [0, 2, 3]
    everyone = World(scenario(noise=noise)).busy(0, np.full(4, 10), None)
    assert gone.busy(0, np.full(3, 10), None) == pytest.approx(everyone[:, [0, 2, 3]])


def test_the_random_protocol_of_dbs() -> None:
    plan = RandomSlowdowns().plan(rounds=4000, workers=5, seed=7, stream=1)
    assert np.all(plan.factor == 1)
    seconds = plan.epoch_seconds
    assert set(np.unique(seconds)) == {0, 5, 6, 7, 8, 9, 10}
    begins = (seconds[1:] > 0) & (seconds[:-1] == 0)
    # Slow for 12 rounds on average; then calm for 10, less the chance to go straight on.
    assert (seconds > 0).mean() == pytest.approx(12 / 21, abs=0.03)
    lengths = [
        len(list(group))
        for w in range(5)
        for slow, group in itertools.groupby(seconds[:, w])
        if slow
    ]
    assert min(lengths) == 4
    assert begins.sum() > 500
    again = RandomSlowdowns().plan(4000, 5, seed=7, stream=1)
    assert np.array_equal(again.epoch_seconds, seconds)
    shorter = RandomSlowdowns().plan(10, 5, seed=7, stream=1)
    assert np.array_equal(shorter.epoch_seconds, seconds[:10])


def test_slowdowns_are_within_the_busy_time_in_equal_parts() -> None:
    world = World(scenario(disturbances=(RandomSlowdowns(1.0, (20, 20), (5, 5)),)))
    busy = world.busy(0, np.full(4, 10), None)
    assert busy == pytest.approx(np.full((5, 4), LINE.seconds(10) + 1.0))


def test_levels_keep_the_sum_of_speeds() -> None:
    plan = Levels(((2, 4.0), (5, 1.0))).plan(8, 4, 0, 1)
    speeds = 1 / plan.factor
    assert speeds.sum(axis=1) == pytest.approx(np.full(8, 4.0))
    assert speeds[2, 0] / speeds[2, -1] == pytest.approx(4.0)
    assert np.all(plan.factor[[0, 1, 5, 7]] == 1)


def test_a_square_wave() -> None:
    plan = SquareWave((1,), 3.0, half_period=2, first=1).plan(8, 2, 0, 1)
    assert plan.factor[:, 1].tolist() == [1, 3, 3, 1, 1, 3, 3, 1]
    assert np.all(plan.factor[:, 0] == 1)


def test_a_hiccup_takes_its_steps_and_no_more() -> None:
    world = World(scenario(disturbances=(Hiccups((Hit(3, 2, 2, 10.0),)),)))
    calm, struck = (
        world.busy(2, np.full(4, 10), None),
        world.busy(3, np.full(4, 10), None),
    )
    ratio = np.ones((5, 4))
    ratio[:2, 2] = 10
    assert struck / calm == pytest.approx(ratio)


def test_disturbances_join() -> None:
    both = Plan.joined(
        [
            SquareWave((0,), 2.0, 1).plan(2, 1, 0, 1),
            SquareWave((0,), 3.0, 2).plan(2, 1, 0, 1),
            RandomSlowdowns(1.0).plan(2, 1, 0, 1),
        ],
        2,
        1,
    )
    assert both.factor[:, 0].tolist() == [6, 3]
    assert np.all(both.epoch_seconds >= 5)


def test_two_streams_are_not_the_same() -> None:
    one, other = (RandomSlowdowns().plan(50, 5, 0, s).epoch_seconds for s in (1, 2))
    assert not np.array_equal(one, other)


def test_who_is_there() -> None:
    changes = (Change(6, 0, True), Change(3, 0, False), Change(5, 1, True))
    there = scenario(3, membership=changes).present()
    assert there[:, 0].tolist() == [True] * 3 + [False] * 3 + [True] * 6
    assert there[:, 1].tolist() == [False] * 5 + [True] * 7


def test_a_ring() -> None:
    network = Network(latency_seconds=1e-3, bytes_per_second=100.0, bytes=40.0)
    assert network.seconds(4) == pytest.approx(6 * (1e-3 + 0.1))
    assert network.seconds(1) == 0


def test_another_number_of_workers_has_the_same_share_each() -> None:
    workers = (Worker(LINE), Worker(GTX_750))
    bigger = scenario(workers=workers).resized(5)
    assert [w.table for w in bigger.workers] == [LINE, GTX_750, LINE, GTX_750, LINE]
    assert bigger.global_batch == 160


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "--rounds 0"),
        ({"seed": -1}, "--seed -1"),
        ({"steps": 0}, "--steps 0"),
        ({"workers": ()}, "without workers"),
        ({"compile_seconds": -1.0}, "compile_seconds -1"),
        ({"workers": (Worker(LINE, cap=20),) * 3}, "above the sum of caps, 60"),
        ({"membership": tuple(Change(3, w, False) for w in range(4))}, "0 workers"),
        ({"membership": (Change(3, 4, False),)}, "one of the 4 workers"),
        ({"disturbances": (SquareWave((9,), 2.0, 3),)}, "worker 9 in a cluster of 4"),
        ({"disturbances": (Hiccups((Hit(50, 9, 1, 2.0),)),)}, "worker 9"),
    ],
)
def test_a_scenario_that_cannot_run_is_refused(changes, said) -> None:
    with pytest.raises(UserError, match=said) as error:
        scenario(**changes)
    assert "\n" not in str(error.value)


def test_caps_that_hold_the_batch_only_together_are_checked_for_every_set() -> None:
    workers = (Worker(LINE, cap=40), Worker(LINE, cap=40))
    scenario(workers=workers)
    with pytest.raises(UserError, match="above the sum of caps, 40"):
        scenario(workers=workers, membership=(Change(4, 1, False),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSlowdowns(1.5),
        lambda: RandomSlowdowns(0.1, (5, 4)),
        lambda: Levels(()),
        lambda: Levels(((3, 2.0), (3, 1.0))),
        lambda: Levels(((0, 0.5),)),
        lambda: SquareWave((0,), 0.0, 1),
        lambda: SquareWave((0,), 2.0, 0),
        lambda: Hiccups((Hit(-1, 0, 1, 2.0),)),
        lambda: Noise(step=-0.1),
        lambda: Noise(stall_probability=0.1, stall_shape=1.0),
        lambda: Network(bytes_per_second=0.0),
        lambda: scenario().resized(0),
    ],
)
def test_options_out_of_range_are_refused(make) -> None:
    with pytest.raises(UserError):
        make()
