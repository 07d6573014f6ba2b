"""What differs between workers is said in one line that names them."""

import numpy as np
import pytest

from jdlb.agreement import check_replicas, check_start, name_workers
from jdlb.engine.exchange import Exchange
from jdlb.engine.mesh import Workers, order_workers
from jdlb.errors import RunError, UserError

FACTS = {"global program": 2**32 - 1, "global batch": 240}


class Job(Exchange):
    """The table of four workers, of which one process fills in its own row."""

    def __init__(self, others: list[list[float]]) -> None:
        super().__init__(WORKERS)
        self.others = np.array(others)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows, self.others])


WORKERS: Workers = order_workers([], 0)
SAME = [2.0**32 - 1, 240.0, 7.0]
DIGEST = np.array([7], np.uint32)


def test_the_same_everywhere() -> None:
    check_start(Job([SAME] * 3), WORKERS, FACTS, DIGEST)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (0, "the global program of workers 1, 3 is not that of worker 0: start all"),
        (1, "the global batch of workers 1, 3 is not that of worker 0: start all"),
    ],
)
def test_a_fact_that_differs(column: int, message: str) -> None:
    other = list(SAME)
    other[column] -= 1
    with pytest.raises(UserError, match=message) as caught:
        check_start(Job([other, SAME, other]), WORKERS, FACTS, DIGEST)
    assert "\n" not in str(caught.value)


def test_first_parameters_that_differ() -> None:
    other = [*SAME[:2], 8.0]
    with pytest.raises(RunError, match="worker 2 differ from the others at the start"):
        check_start(Job([SAME, other, SAME]), WORKERS, FACTS, DIGEST)


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        ([1, 2, 1, 1], "worker 1"),
        ([2, 1, 1, 1], "worker 0"),
        ([1, 2, 1, 3, 1], "workers 1, 3"),
        # Of two nobody knows better: the first counts.
        ([1, 2], "worker 1"),
    ],
)
def test_the_few_are_named(digests: list[int], named: str) -> None:
    with pytest.raises(RunError, match=f"of {named} differ from the others after"):
        check_replicas(digests, "after round 3")


def test_replicas_that_agree() -> None:
    check_replicas([5, 5, 5], "now")
    check_replicas([5], "now")


def test_names_for_people() -> None:
    assert name_workers([1]) == "worker 1"
    assert name_workers([0, 2, 3]) == "workers 0, 2, 3"
