"""The published GPU times: 2 GTX 1070, an M40 and a GTX 750, B = 512, granule 1."""

import itertools

import numpy as np
import pytest
from policy_rounds import makespan_of, run

from jdlb.balance import policies
from jdlb.balance.controller import Controller
from jdlb.balance.curves import Curves
from jdlb.balance.policies.protocol import Cluster
from jdlb.balance.time_tables import GTX_750, GTX_1070, TESLA_M40

TABLES = [GTX_1070, GTX_1070, TESLA_M40, GTX_750]
CURVES = Curves.of_tables(TABLES)
CLUSTER = Cluster.create(4, 512, granule=1, growth=0.0)
BEST = (172, 171, 151, 18)
BEST_SECONDS = 0.185109375


def times(_: int, capacities: np.ndarray) -> np.ndarray:
    return CURVES.seconds(capacities)


def makespans(name: str, rounds: int, **options) -> list[float]:
    """Seconds of each round's step."""
    controller = Controller(policies.get(name, **options), CLUSTER)
    return [makespan_of(times, a) for a in run(controller, times, rounds)]


def test_the_smallest_makespan_by_brute_force() -> None:
    """Every pair of an M40's and a GTX 750's share; the two 1070 halve the rest."""
    one = CURVES.one()
    seconds = [[0.0, *(one(w, b) for b in range(1, 510))] for w in range(4)]
    best = min(
        max(
            seconds[0][-(-rest // 2)],
            seconds[1][rest // 2],
            seconds[2][m],
            seconds[3][g],
        )
        for m, g in itertools.product(range(1, 400), range(1, 100))
        if 2 <= (rest := 512 - m - g) < 1000
    )
    assert best == pytest.approx(BEST_SECONDS, abs=1e-12)
    assert CURVES.seconds(np.array(BEST)).max() == pytest.approx(best)


def test_what_was_published_for_another_network() -> None:
    seconds = CURVES.seconds(np.array([167, 167, 158, 20]))
    assert seconds.max() == pytest.approx(0.198625)


@pytest.mark.parametrize("name", ["boa", "makespan"])
def test_the_minimum_is_found_exactly_in_two_rounds(name: str) -> None:
    controller = Controller(policies.get(name), CLUSTER)
    allocations = run(controller, times, 12)
    assert {a.sizes for a in allocations[2:]} == {BEST}


def test_given_tables_need_no_round() -> None:
    assert makespans("boa", 3, tables=TABLES)[0] == pytest.approx(BEST_SECONDS)


def test_lbb_comes_within_two_percent() -> None:
    given = makespans("lbb", 5, tables=TABLES)
    assert max(given) < 1.02 * BEST_SECONDS
    learnt = makespans("lbb", 10)
    assert max(learnt[4:]) < 1.02 * BEST_SECONDS


@pytest.mark.parametrize("name", ["dlb", "omnilearn", "lb_bsp_cpu"])
def test_proportional_shares_come_within_five_percent_in_two_rounds(name: str) -> None:
    seconds = makespans(name, 20)
    assert seconds[1] > 1.05 * BEST_SECONDS
    assert max(seconds[2:]) < 1.05 * BEST_SECONDS


def test_one_probe_is_not_enough() -> None:
    seconds = makespans("static", 10)
    assert seconds[-1] > 1.1 * BEST_SECONDS
