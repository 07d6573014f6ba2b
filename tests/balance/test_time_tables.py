"""Time tables: what they say between their points, backwards, and what they refuse."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlb.balance.time_tables import GTX_750, GTX_1070, TESLA_M40, Tables, TimeTable
from jdlb.errors import UserError


@pytest.mark.parametrize(
    ("size", "milliseconds"),
    [
        (0, 14.6),
        (1, 14.6),
        (2, 14.6),
        (3, 15.25),
        (4, 15.9),
        (192, 204.25),
        (320, 326.75),
    ],
)
def test_linear_between_points_and_beyond_constant_below(size, milliseconds) -> None:
    assert GTX_1070.seconds(size) == pytest.approx(milliseconds / 1e3)


def test_affine() -> None:
    table = TimeTable.affine(0.01, 0.002)
    assert table.seconds(0) == pytest.approx(0.01)
    assert table.seconds(1000) == pytest.approx(2.01)


def test_tables_of_unlike_length_stand_side_by_side() -> None:
    tables = Tables([GTX_750, TimeTable.affine(0.0, 0.5), TESLA_M40])
    sizes = np.array([300.0, 300.0, 300.0])
    alone = [GTX_750.seconds(300), 150.0, TESLA_M40.seconds(300)]
    assert tables.seconds(sizes) == pytest.approx(alone)
    assert tables.take(np.array([2, 1])).seconds(sizes[:2]) == pytest.approx(
        [alone[2], alone[1]]
    )


@st.composite
def time_tables(draw) -> TimeTable:
    """Any shape, falling segments too, but for the last."""
    steps = draw(st.lists(st.integers(1, 30), min_size=2, max_size=6))
    seconds = draw(
        st.lists(st.floats(0.01, 10.0), min_size=len(steps), max_size=len(steps))
    )
    seconds[-1] = max(seconds[-2:])
    return TimeTable("made up", tuple(np.cumsum(steps).tolist()), tuple(seconds))


@given(
    st.lists(time_tables(), min_size=1, max_size=3),
    st.floats(0.005, 20.0),
    st.integers(1, 200),
)
def test_the_largest_size_within_a_time_is_that(tables, budget, cap) -> None:
    count = len(tables)
    largest = Tables(tables).largest_within(
        np.full(count, budget), np.full(count, float(cap))
    )
    for table, size in zip(tables, largest, strict=True):
        if size == -1:
            assert all(table.seconds(s) > budget for s in np.linspace(0, cap, 401))
            continue
        assert size <= cap
        assert table.seconds(size) <= budget * (1 + 1e-9)
        later = np.linspace(size + 1e-6 * (1 + size), cap, 50)
        later = later[(size < later) & (later <= cap)]
        assert all(table.seconds(s) > budget * (1 - 1e-9) for s in later)


def test_the_fastest_batch_may_be_a_larger_one() -> None:
    tables = Tables([TimeTable("dip", (1, 10, 20), (3.0, 1.0, 2.0))] * 3)
    sizes, caps = np.array([4.0, 4.0, 15.0]), np.array([30.0, 7.0, 30.0])
    assert tables.fastest(sizes, caps) == pytest.approx([1.0, 3 - 2 * 6 / 9, 1.5])


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((), (), "0 sizes and 0 times"),
        ((2, 4), (0.1,), "2 sizes and 1 times"),
        ((2,), (0.1,), "one point"),
        ((4, 2), (0.1, 0.2), "not sorted: 2 follows 4"),
        ((2, 2), (0.1, 0.2), "not sorted: 2 follows 2"),
        ((2, math.nan), (0.1, 0.2), "not sorted"),
        ((-1, 2), (0.1, 0.2), "from -1 to 2"),
        ((1, math.inf), (0.1, 0.2), "from 1 to inf"),
        ((2, 4), (0.1, 0.0), "says 0 s for 4 examples"),
        ((2, 4), (-0.1, 0.2), "says -0.1 s for 2"),
        ((2, 4), (0.1, math.nan), "says nan s for 4"),
        ((2, 4), (0.2, 0.1), "falls from 0.2 s to 0.1 s"),
    ],
)
def test_a_table_that_is_no_table_is_refused(sizes, seconds, said) -> None:
    with pytest.raises(UserError, match=said) as error:
        TimeTable("x", sizes, seconds)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fixed", "example"), [(-1, 1), (0, 0), (0, math.inf)])
def test_a_line_that_is_no_time_is_refused(fixed, example) -> None:
    with pytest.raises(UserError, match="s an example: use"):
        TimeTable.affine(fixed, example)
