"""Each example exactly once an epoch, in an order that shares do not change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlb.data.partition import epoch_order, step_rows, steps_in_epoch, worker_rows
from jdlb.errors import UserError


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int, np.random.Generator]:
    """(examples, workers, global batch, generator); sizes 1 to 3B, also N < W."""
    workers = draw(st.integers(1, 9))
    global_batch = draw(st.integers(1, 40))
    examples = draw(st.integers(1, 3 * global_batch))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return examples, workers, global_batch, generator


def random_sizes(
    generator: np.random.Generator, workers: int, total: int
) -> tuple[int, ...]:
    """Any shares that sum to the total, zeros among them."""
    cuts = np.sort(generator.integers(0, total + 1, workers - 1))
    return tuple(np.diff(np.concatenate([[0], cuts, [total]])).tolist())


@settings(max_examples=500, deadline=None)
@given(epochs())
def test_every_example_once_while_shares_change_each_step(
    case: tuple[int, int, int, np.random.Generator],
) -> None:
    examples, workers, global_batch, generator = case
    order = epoch_order(3, 1, examples)
    taken: list[list[int]] = [[] for _ in range(workers)]
    in_order: list[int] = []
    for step in range(steps_in_epoch(examples, global_batch)):
        rows = step_rows(order, step, global_batch)
        sizes = random_sizes(generator, workers, global_batch)
        parts = worker_rows(rows, sizes)
        assert len(parts) == workers
        if len(rows) == global_batch:
            assert tuple(map(len, parts)) == sizes
        for worker, part in enumerate(parts):
            assert len(part) <= sizes[worker]
            taken[worker].extend(part.tolist())
            in_order.extend(part.tolist())
    assert in_order == order.tolist()
    assert sorted(row for rows in taken for row in rows) == list(range(examples))


@pytest.mark.parametrize(
    ("examples", "sizes"),
    [
        (11, (1, 1, 1)),
        (11, (5, 4, 2)),
        (2, (1, 1, 1)),
        (1, (7, 0, 1)),
        (11, (11, 0, 0)),
    ],
)
def test_small_data_sets(examples: int, sizes: tuple[int, ...]) -> None:
    global_batch = sum(sizes)
    order = epoch_order(0, 0, examples)
    rows = [
        part.tolist()
        for step in range(steps_in_epoch(examples, global_batch))
        for part in worker_rows(step_rows(order, step, global_batch), sizes)
    ]
    assert len(rows) == len(sizes) * steps_in_epoch(examples, global_batch)
    assert sorted(row for part in rows for row in part) == list(range(examples))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    order = epoch_order(7, 2, 1000)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(1000))
    np.testing.assert_array_equal(order, epoch_order(7, 2, 1000))
    for other in (epoch_order(7, 3, 1000), epoch_order(2, 7, 1000)):
        assert np.mean(order == other) < 0.02


def test_order_is_the_same_on_every_machine_and_version() -> None:
    # Worked out once; a change would give a resumed run other batches.
    assert epoch_order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(1, 5, 8).tolist() == [3, 5, 6, 1, 2, 7, 0, 4]


def test_order_is_uniform() -> None:
    first = [int(epoch_order(0, epoch, 5)[0]) for epoch in range(2000)]
    counts = np.bincount(first, minlength=5)
    assert counts.min() > 320
    assert counts.max() < 480


def test_steps_count_the_last_partial_batch() -> None:
    assert [steps_in_epoch(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_partial_batch_is_cut_in_proportion() -> None:
    parts = worker_rows(np.arange(70), (80, 40, 20))
    assert [len(part) for part in parts] == [40, 20, 10]


def test_bad_input() -> None:
    with pytest.raises(UserError, match="0 examples"):
        epoch_order(0, 0, 0)
    with pytest.raises(UserError, match="seed is -1"):
        epoch_order(-1, 0, 3)
    with pytest.raises(UserError, match="global batch is 0"):
        steps_in_epoch(3, 0)
    with pytest.raises(ValueError, match="no step 2"):
        step_rows(np.arange(8), 2, 4)
    with pytest.raises(ValueError, match="5 rows"):
        worker_rows(np.arange(5), (2, 2))
