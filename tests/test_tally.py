"""Sums of a round, and the table that travels."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdlb.balance.allocation import Allocation
from jdlb.engine.layout import Statistics
from jdlb.engine.meter import WorkerTimes
from jdlb.engine.step import Compilation, StepOutcome
from jdlb.tally import RoundTable, Tally, rows, whole


def outcome(
    counted: bool, examples: int, loss: float, right: float, bad: tuple[int, ...] = ()
) -> StepOutcome:
    flags = np.zeros(3)
    flags[list(bad)] = 1
    statistics = Statistics(
        np.array(loss), np.array(examples), np.array([right]), flags, np.zeros(3)
    )
    return StepOutcome(counted, statistics)


def test_means_are_sums_over_counts() -> None:
    tally = Tally(("accuracy",), workers=3)
    tally.add(outcome(True, 8, 16.0, 6))
    # A last partial batch weighs what it holds: a mean of means would give 1.5 and 0.5.
    tally.add(outcome(True, 2, 2.0, 0.5))
    assert tally.examples == 10
    assert tally.metrics == {"loss": 1.8, "accuracy": 0.65}
    assert (tally.skipped, tally.skipped_by_worker) == (0, (0, 0, 0))


def test_a_skipped_step_counts_for_those_who_caused_it_and_for_no_mean() -> None:
    tally = Tally(("accuracy",), workers=3)
    tally.add(outcome(False, 8, math.nan, math.nan, bad=(1,)))
    tally.add(outcome(False, 8, math.inf, 0, bad=(1, 2)))
    # An overflow of the sum: skipped, and nobody's fault.
    tally.add(outcome(False, 8, math.inf, 0))
    assert tally.metrics == {"loss": 0.0, "accuracy": 0.0}
    tally.add(outcome(True, 4, 2.0, 4))
    assert tally.examples == 4
    assert tally.metrics == {"loss": 0.5, "accuracy": 1.0}
    assert (tally.skipped, tally.skipped_by_worker) == (3, (0, 2, 1))


def test_the_rows_of_a_process_and_the_table_of_all() -> None:
    times = [
        WorkerTimes(busy=(1.0, 2.0, 6.0), wait=(0.5, 0.5, 0.0), input=(0.1, 0.1, 0.2)),
        WorkerTimes((), (), ()),
    ]
    # A group of workers compiles once: it counts for its first worker.
    made = [Compilation((2, 3), 8, 0.5), Compilation((3,), 16, 0.25)]
    mine = rows([2, 3], times, made, [7, 2**32 - 1])
    table = RoundTable.from_columns(np.concatenate([np.zeros_like(mine), mine]))
    assert table.busy == (0, 0, 9.0, 0)
    assert table.busy_median == (0, 0, 2.0, 0)
    assert table.busy_spread == (0, 0, 2.5, 0)
    assert table.wait == (0, 0, 1.0, 0)
    assert table.input == pytest.approx((0, 0, 0.4, 0))
    assert whole(table.steps) == (0, 0, 3, 0)
    assert whole(table.compilations) == (0, 0, 1, 1)
    assert table.compile_seconds == (0, 0, 0.5, 0.25)
    assert whole(table.digest) == (0, 0, 7, 2**32 - 1)


def test_what_a_policy_sees() -> None:
    times = [WorkerTimes((1.0, 3.0), (0.5, 0.0), (0.25, 0.0))]
    table = RoundTable.from_columns(rows([0], times, [], [1]))
    seen = table.observation(4, Allocation((6,), (8,)))
    assert (seen.round, seen.sizes, seen.capacities) == (4, (6,), (8,))
    assert (seen.busy_seconds, seen.busy_median_seconds) == ((4.0,), (2.0,))
    assert seen.busy_spread_seconds == (1.0,)
    assert (seen.wait_seconds, seen.input_seconds) == ((0.5,), (0.25,))
    assert seen.measured_steps == (2,)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
def test_digests_travel_as_they_are(digests: list[int]) -> None:
    times = [WorkerTimes((), (), ())] * len(digests)
    table = rows(range(len(digests)), times, [], digests)
    assert list(whole(RoundTable.from_columns(table).digest)) == digests
