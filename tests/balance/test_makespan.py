"""`makespan`: the minimum over ladder edges, and when it stays where it is."""

import dataclasses
import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from policy_rounds import affine, changes, makespan_of, observe, run

from jdlb.balance import policies
from jdlb.balance.controller import Controller
from jdlb.balance.curves import Curves
from jdlb.balance.ladder import Ladder, Limits
from jdlb.balance.policies.protocol import Cluster
from jdlb.balance.rungs import LadderRungs, WholeRungs, fill, give_back
from jdlb.balance.time_tables import TimeTable
from jdlb.errors import UserError

CLUSTER = Cluster.create(4, 400)


@st.composite
def problems(draw: st.DrawFn):
    """Rising tables, a ladder, floors and caps with room for a total."""
    workers = draw(st.integers(1, 4))
    tables = []
    for _ in range(workers):
        steps = draw(st.lists(st.floats(0.01, 3.0), min_size=2, max_size=4))
        sizes = list(itertools.accumulate(draw(st.integers(1, 12)) for _ in steps))
        tables.append(
            TimeTable("drawn", tuple(sizes), tuple(itertools.accumulate(steps)))
        )
    floors = [draw(st.integers(0, 3)) for _ in range(workers)]
    caps = [floor + draw(st.integers(1, 25)) for floor in floors]
    total = draw(st.integers(max(1, sum(floors)), sum(caps)))
    kind = draw(st.sampled_from([(1, 0.0), (3, 0.0), (2, 0.5), (8, 0.0)]))
    return tables, kind, tuple(floors), tuple(caps), total


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_smallest_makespan_over_edges_by_brute_force(problem) -> None:
    tables, (granule, growth), floors, caps, total = problem
    ladder, limits = Ladder(granule, growth, top=max(caps)), Limits(floors, caps)
    curves = Curves.of_tables(tables)
    one = curves.one()
    for rungs, edges in (
        (LadderRungs.of(ladder, limits), ladder.edges),
        (WholeRungs.of(limits), range(max(caps) + 1)),
    ):
        choices = [
            sorted({min(e, cap) for e in edges if min(e, cap) >= floor})
            for floor, cap in zip(floors, caps, strict=True)
        ]
        best = min(
            max(one(w, c) for w, c in enumerate(capacities))
            for capacities in itertools.product(*choices)
            if sum(capacities) >= total
        )
        capacities = fill(curves, total, rungs, guess=1.0)
        seconds = curves.seconds(capacities)
        assert seconds.max() == pytest.approx(best, rel=1e-9)
        sizes = give_back(capacities, seconds, total, rungs, np.array(floors))
        assert sizes.sum() == total
        assert np.all((floors <= sizes) & (sizes <= capacities))
        lower = rungs.below(capacities)
        assert np.all((sizes > lower) | (capacities == rungs.lowest))


def test_its_sizes_are_what_the_controller_runs() -> None:
    """Not aligned a second time: capacities are those of the minimum."""
    policy = policies.get("makespan")
    controller = Controller(policy, CLUSTER)
    times = affine(policy, [0.3, 0.01, 0.1, 0.02], [0.001, 0.002, 0.004, 0.01])
    decision, state = controller.start()
    for _ in range(6):
        capacities = np.array(decision.allocation.capacities, np.float64)
        decision, state = controller.decide(
            observe(decision.allocation, times(0, capacities)), state
        )
        assert tuple(state.targets) == decision.allocation.sizes
        off_edge = [
            s for s in decision.allocation.sizes if s not in CLUSTER.ladder.edges
        ]
        assert len(off_edge) <= 1


def test_it_is_dlb_until_two_capacities_were_seen() -> None:
    seconds = (0.1, 0.2, 0.3, 0.7)
    both = []
    for name in ("makespan", "dlb"):
        controller = Controller(policies.get(name), CLUSTER)
        decision, state = controller.start()
        decision, _ = controller.decide(observe(decision.allocation, seconds), state)
        both.append(decision.allocation.sizes)
    assert both[0] == both[1]


def test_large_fixed_parts_are_balanced_in_two_rounds_where_dlb_takes_many() -> None:
    fixed, per_row = np.array([0.0, 0.3, 0.0, 0.3]), np.array([1, 1, 4, 4]) * 1e-3
    took = {}
    for name in ("makespan", "dlb"):
        policy = policies.get(name)
        times = affine(policy, fixed, per_row)
        seconds = [
            makespan_of(times, a) for a in run(Controller(policy, CLUSTER), times, 20)
        ]
        took[name] = next(i for i, s in enumerate(seconds) if s < 1.05 * min(seconds))
        assert max(seconds[took[name] :]) < 1.1 * min(seconds)
    assert took["makespan"] <= 2 < took["dlb"]


def test_a_memory_cap_is_part_of_the_minimum() -> None:
    cluster = Cluster.create(4, 400, caps=(90, 400, 400, 400))
    policy = policies.get("makespan")
    times = affine(policy, 0.01, [0.001, 0.002, 0.002, 0.004])
    last = run(Controller(policy, cluster), times, 5)[-1]
    # What is left over comes off the worker with a step as small as that.
    assert last.capacities[0] in (88, 90)
    seconds = times(0, np.array(last.capacities))[1:]
    assert seconds.max() / seconds.min() < 1.1


def test_a_cap_that_falls_is_part_of_the_next_minimum() -> None:
    policy = policies.get("makespan")
    _, state = policy.init(CLUSTER)
    limits = CLUSTER.limits.with_caps((40, 400, 400, 400))
    allocation = Controller(policy, CLUSTER).start()[0].allocation
    seen = dataclasses.replace(observe(allocation, (1.0,) * 4), limits=limits)
    targets, _ = policy.update(seen, state)
    assert targets[0] <= 40
    assert targets.sum() == 400


def test_a_whole_slow_round_is_believed_at_once() -> None:
    policy = policies.get("makespan")
    base = affine(policy, 0.02, [0.002, 0.002, 0.004, 0.006])

    def times(round_: int, capacities: np.ndarray) -> np.ndarray:
        return base(round_, capacities) * np.array([2 if round_ >= 10 else 1, 1, 1, 1])

    allocations = run(Controller(policy, CLUSTER), times, 12)
    assert allocations[11].sizes[0] < 0.75 * allocations[10].sizes[0]


def test_a_stalled_step_in_the_first_round_does_no_harm() -> None:
    policy = policies.get("makespan")
    times = affine(policy, 0.02, [0.002, 0.002, 0.004, 0.006])
    controller = Controller(policy, CLUSTER)
    stalled = run(controller, times, 5, stalled={0: 0})
    assert [a.sizes for a in stalled] == [a.sizes for a in run(controller, times, 5)]


def test_a_gain_within_the_errors_is_none() -> None:
    """Caution is what holds it still; without it noise moves it every few rounds."""
    moved = {}
    for caution in (0.0, 2.0):
        policy = policies.get("makespan", caution=caution)
        times = affine(policy, 0.02, [0.002] * 4)
        allocations = run(Controller(policy, CLUSTER), times, 200, noise=0.05)
        moved[caution] = changes(allocations)
    assert moved[2.0] <= 20
    assert moved[0.0] > 3 * moved[2.0]


def test_nobody_measured_moves_nothing() -> None:
    controller = Controller(policies.get("makespan"), CLUSTER)
    decision, state = controller.start()
    after, _ = controller.decide(observe(decision.allocation, (math.nan,) * 4), state)
    assert after.allocation == decision.allocation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forgetting": 1.0}, "forgetting 1.0"),
        ({"bend": -0.1}, "bend -0.1"),
        ({"caution": -1.0}, "caution -1.0"),
        ({"caution": math.nan}, "caution nan"),
        ({"patience": 1}, "it takes forgetting, bend, caution"),
    ],
)
def test_bad_options_are_told(options, message: str) -> None:
    with pytest.raises(UserError, match=message):
        policies.get("makespan", **options)
