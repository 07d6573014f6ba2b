"""Sizes are exact, allowed, nearest, and as little padded as a ladder permits."""

import itertools
import math
import pickle
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jdlb.balance.allocation import (
    Allocation,
    Ladder,
    Limits,
    align,
    allocate,
    padded,
    round_shares,
    split_proportionally,
)
from jdlb.errors import UserError

# Speeds 10^6 apart, and what broken clocks make of them.
SPEEDS = st.one_of(
    st.floats(1.0, 1e6),
    st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, 1.0]),
)


@st.composite
def problems(draw: st.DrawFn, workers: int = 12):
    """Targets, a total, and what `build` makes a ladder and limits of with room for it.

    Plain numbers only: the type checker draws from `random`, which a strategy may not.
    """
    count = draw(st.integers(1, workers))
    targets = draw(st.lists(SPEEDS, min_size=count, max_size=count))
    floors = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    room = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    caps = [floor + more for floor, more in zip(floors, room, strict=True)]
    total = draw(st.integers(max(1, sum(floors)), sum(caps)))
    granule = draw(st.sampled_from([1, 2, 3, 8, 16]))
    growth = draw(st.sampled_from([0.0, 1 / 16, 0.25, 1.0]))
    return targets, total, granule, growth, tuple(floors), tuple(caps)


def build(problem):
    """Targets, total, ladder and limits of a drawn problem."""
    targets, total, granule, growth, floors, caps = problem
    return targets, total, Ladder(granule, growth, top=max(caps)), Limits(floors, caps)


def assert_exact_and_inside_limits(problem) -> None:
    targets, total, ladder, limits = build(problem)
    for aligned in (False, True):
        allocation = allocate(targets, total, ladder, limits, aligned)
        assert allocation.global_batch == total
        rows = zip(
            allocation.sizes,
            allocation.capacities,
            limits.floors,
            limits.caps,
            strict=True,
        )
        for size, capacity, floor, cap in rows:
            assert floor <= size <= cap
            assert capacity == min(ladder.capacity(size), cap)


@given(problems())
@settings(max_examples=300, deadline=None)
def test_sizes_are_exact_and_inside_their_limits(problem) -> None:
    assert_exact_and_inside_limits(problem)


@pytest.mark.slow
@given(problems())
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_allocations_are_exact_and_inside_their_limits(problem) -> None:
    assert_exact_and_inside_limits(problem)


@given(problems(workers=20))
@settings(max_examples=200, deadline=None)
def test_all_but_one_worker_are_on_an_edge_unless_all_are_at_the_lowest(
    problem,
) -> None:
    targets, total, ladder, limits = build(problem)
    allocation = allocate(targets, total, ladder, limits, aligned=True)
    lowest = padded(limits.floors, ladder, limits).capacities
    if allocation.capacities != lowest:
        pairs = zip(allocation.sizes, allocation.capacities, strict=True)
        assert sum(size != capacity for size, capacity in pairs) <= 1


@given(
    st.lists(st.floats(1.0, 1e3), min_size=1, max_size=4),
    st.integers(0, 60),
    st.sampled_from([(8, 0.0), (5, 0.25), (16, 1.0)]),
    st.data(),
)
@settings(max_examples=400, deadline=None)
def test_align_reaches_the_best_makespan_of_brute_force(speeds, more, kind, data):
    granule, growth = kind
    workers = len(speeds)
    total = workers + more
    ladder = Ladder(granule, growth, top=total)
    draw_caps = st.lists(
        st.integers(1, total + 9), min_size=workers, max_size=workers
    ).filter(lambda caps: sum(caps) >= total)
    limits = Limits.default(workers, total, granule, data.draw(draw_caps))

    allocation = allocate(speeds, total, ladder, limits, aligned=True)

    choices = [
        sorted({min(e, cap) for e in ladder.edges if min(e, cap) >= floor})
        for floor, cap in zip(limits.floors, limits.caps, strict=True)
    ]
    best = min(
        sorted((c / s for c, s in zip(capacities, speeds, strict=True)), reverse=True)
        for capacities in itertools.product(*choices)
        if sum(capacities) >= total
    )
    ratios = [c / s for c, s in zip(allocation.capacities, speeds, strict=True)]
    assert max(ratios) == pytest.approx(best[0], rel=1e-9)
    possible = [
        round(c / s, 9) for s, cs in zip(speeds, choices, strict=True) for c in cs
    ]
    # Of equal ratios the index decides, which `best` knows nothing of.
    if len(set(possible)) == len(possible):
        assert sorted(ratios, reverse=True) == pytest.approx(best, rel=1e-9)


def test_the_rounding_example_of_the_paper() -> None:
    limits = Limits.default(4, 64, 1)
    assert round_shares([13.7, 16.5, 19.6, 14.2], 64, limits) == (14, 16, 20, 14)


@given(
    st.lists(st.floats(0.01, 1e4), min_size=1, max_size=30),
    st.integers(0, 2000),
)
@settings(max_examples=500, deadline=None)
def test_without_limits_every_size_is_the_quota_rounded_down_or_up(speeds, more):
    total = len(speeds) + more
    limits = Limits((0,) * len(speeds), (total,) * len(speeds))
    sizes = np.array(round_shares(speeds, total, limits))
    quotas = np.array(speeds) * (total / math.fsum(speeds))
    assert np.all(np.abs(sizes - quotas) < 1 + 1e-6)
    up = (sizes - quotas)[sizes > quotas + 1e-6]
    down = (quotas - sizes)[sizes < quotas - 1e-6]
    if len(up) and len(down):
        assert (1 - up.max()) >= down.max() - 1e-6


def test_floors_and_caps_take_from_and_give_to_the_others_in_proportion() -> None:
    limits = Limits((10, 0, 0), (100, 40, 100))
    assert round_shares([1.0, 60.0, 39.0], 100, limits) == (10, 40, 50)


def test_the_worker_that_would_be_slowest_takes_the_remainder() -> None:
    limits = Limits.default(3, 100, 8)
    assert align([54.0, 30.0, 16.0], 100, Ladder(8, top=100), limits) == (56, 28, 16)
    assert align([30.0, 16.0, 54.0], 100, Ladder(8, top=100), limits) == (28, 16, 56)


def test_the_last_bit_of_a_product_decides_no_tie() -> None:
    limits = Limits.default(3, 6, 1)
    # Quotas 1.5, 1.5, 3: the first two are equal on paper.
    assert round_shares([0.1 * 3, 0.3, 0.6], 6, limits) == (2, 1, 3)
    assert round_shares([0.3, 0.1 * 3, 0.6], 6, limits) == (2, 1, 3)


def test_shares_in_proportion_where_zeros_must_help_much() -> None:
    limits = Limits((0,) * 4, (10, 10**6, 10**6, 10**6))
    assert round_shares([1.0, 0.0, 0.0, 0.0], 300_010, limits) == (
        *(10, 100_000, 100_000, 100_000),
    )


@pytest.mark.parametrize("total", [9, 10, 11, 12])
def test_ties_go_by_index(total: int) -> None:
    limits = Limits.default(4, total, 1)
    sizes = round_shares([1.0] * 4, total, limits)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    aligned = align([1.0] * 4, total, Ladder(2, 0.0, top=total), limits)
    assert list(aligned) == sorted(aligned, reverse=True)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 12, 100])
def test_workers_in_another_order_get_the_same_in_that_order(workers: int) -> None:
    generator = np.random.default_rng(workers)
    for _ in range(30):
        # Drawn by NumPy, not by hypothesis, which would look for ties.
        speeds = generator.uniform(1, 100, workers)
        order = generator.permutation(workers)
        assert_equivariant(speeds, order, workers + int(generator.integers(500)))


def assert_equivariant(speeds: np.ndarray, order: np.ndarray, total: int) -> None:
    workers = len(speeds)
    ladder, limits = Ladder(4, top=total), Limits.default(workers, total, 4)
    for aligned in (False, True):
        straight = allocate(speeds, total, ladder, limits, aligned)
        shuffled = allocate(speeds[order], total, ladder, limits, aligned)
        assert shuffled.sizes == tuple(straight.sizes[w] for w in order)
        assert shuffled.capacities == tuple(straight.capacities[w] for w in order)


@pytest.mark.parametrize(
    ("targets", "sizes"),
    [
        ([math.nan, 1.0, 1.0], (1, 5, 4)),
        ([0.0, 0.0, 0.0], (4, 3, 3)),
        ([math.nan, math.nan, -1.0], (4, 3, 3)),
        ([math.inf, 1.0, math.inf], (5, 1, 4)),
        ([1e-6, 1.0, 1e-6], (1, 8, 1)),
        ([0.0, 0.0, 1.0], (1, 1, 8)),
    ],
)
def test_targets_that_are_no_numbers_have_a_stated_meaning(targets, sizes) -> None:
    assert round_shares(targets, 10, Limits.default(3, 10, 1)) == sizes


def test_zero_targets_serve_when_the_others_are_at_their_caps() -> None:
    limits = Limits((0, 0, 0), (50, 50, 3))
    assert round_shares([0.0, 0.0, 1.0], 43, limits) == (20, 20, 3)
    assert sum(align([0.0, 0.0, 1.0], 43, Ladder(8, top=50), limits)) == 43


@pytest.mark.parametrize("workers", [1, 2, 100, 10_000])
@pytest.mark.parametrize("granule", [1, 10])
def test_ten_thousand_workers_are_decided_in_time(workers: int, granule: int) -> None:
    total = 100 * workers
    generator = np.random.default_rng(workers)
    ladder, limits = Ladder(granule, top=total), Limits.default(workers, total, granule)
    for targets in (np.ones(workers), generator.lognormal(size=workers)):
        for aligned in (False, True):
            spent = []
            for _ in range(5):
                began = time.process_time()
                allocate(targets, total, ladder, limits, aligned)
                spent.append(time.process_time() - began)
            # Of this process's own time: other work on the machine is not counted.
            assert min(spent) < 0.05


@pytest.mark.parametrize("granule", [1, 4, 10])
@pytest.mark.parametrize("growth", [0.0, 1 / 16, 0.5])
def test_the_ladder_rises_by_a_granule_or_its_growth(granule, growth) -> None:
    ladder = Ladder(granule, growth, top=1000)
    edges = ladder.edges
    assert edges[0] == granule
    assert edges[-2] < 1000 <= edges[-1]
    for low, high in itertools.pairwise(edges):
        assert high % granule == 0
        assert abs(high - low - max(granule, growth * low)) <= granule / 2


def test_capacity_is_the_smallest_edge_that_holds_a_size() -> None:
    ladder = Ladder(8, 0.25, top=64)
    assert [ladder.capacity(n) for n in (0, 1, 8, 9, 48, 49, 64)] == [
        *(8, 8, 8, 16, 48, 64, 64)
    ]
    with pytest.raises(UserError, match="65 examples do not fit"):
        ladder.capacity(65)
    with pytest.raises(UserError, match="-1 examples"):
        ladder.capacity(-1)


def test_the_default_ladder_is_fine_enough_for_many_workers() -> None:
    assert Ladder.default(480).granule == 4
    assert Ladder.default(64).granule == 1
    assert Ladder.default(10_000, workers=100).granule == 6
    assert Ladder.default(480).edges[-1] >= 480


def test_a_capacity_never_passes_the_cap_of_its_worker() -> None:
    limits = Limits.default(3, 100, 16, caps=(100, 21, 100))
    allocation = allocate([1, 5, 1], 100, Ladder(16, 0.0, top=100), limits, True)
    assert allocation.capacities[1] == allocation.sizes[1] == 21


def test_offsets_are_the_running_sum_of_sizes() -> None:
    allocation = Allocation((3, 0, 5), (4, 4, 8))
    assert allocation.offsets == (0, 3, 3, 8)
    assert (allocation.workers, allocation.global_batch) == (3, 8)
    assert pickle.loads(pickle.dumps(allocation)) == allocation
    with pytest.raises(ValueError, match="do not fit"):
        Allocation((5,), (4,))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.data())
@settings(max_examples=500, deadline=None)
def test_a_partial_batch_is_split_in_proportion(sizes, data) -> None:
    total = data.draw(st.integers(0, sum(sizes)))
    parts = split_proportionally(sizes, total)
    assert sum(parts) == total
    for part, size in zip(parts, sizes, strict=True):
        assert 0 <= part <= size
        assert abs(part * sum(sizes) - size * total) <= sum(sizes)


def test_a_partial_batch_smaller_than_the_number_of_workers() -> None:
    assert split_proportionally([4, 4, 4], 2) == (1, 1, 0)
    with pytest.raises(ValueError, match="13 examples"):
        split_proportionally([4, 4, 4], 13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ladder(0, top=10), "granule 0"),
        (lambda: Ladder(1, -0.1, top=10), "growth -0.1"),
        (lambda: Ladder(1, 1.5, top=10), "growth 1.5"),
        (lambda: Ladder(1, math.nan, top=10), "growth nan"),
        (lambda: Ladder(1, top=0), "top of the ladder 0"),
        (lambda: Limits((1, 1), (4,)), "2 floors and 1 caps"),
        (lambda: Limits((-1,), (4,)), "floor -1"),
        (lambda: Limits((5,), (4,)), "floor 5 and cap 4"),
        (lambda: Limits((0,), (0,)), "cap 0"),
        (lambda: Limits((1,), (4,)).with_caps([4, 4]), "2 caps for 1"),
        (lambda: round_shares([1.0], 5, Limits((1,), (4,))), "global batch of 5"),
        (lambda: round_shares([1.0], 0, Limits((1,), (4,))), "global batch of 0"),
        (lambda: align([1.0], 5, Ladder(4, top=4), Limits((1,), (9,))), "of 5"),
    ],
)
def test_bad_input_is_told_with_its_value(call, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_targets_for_another_number_of_workers_are_a_bug() -> None:
    with pytest.raises(ValueError, match="targets of shape"):
        round_shares([1.0, 2.0], 4, Limits((0,), (4,)))
