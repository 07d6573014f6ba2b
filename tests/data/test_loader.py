"""Batches hold the right rows, padded, in memory of their own; no thread is left."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdlb.balance.allocation import Allocation
from jdlb.data.loader import (
    Fields,
    LocalBatch,
    RoundLoader,
    Standard,
    Transform,
    identity,
    pad,
    read_standard,
)
from jdlb.data.memory import ArraySource, in_memory
from jdlb.data.partition import epoch_order, step_rows, steps_in_epoch, worker_rows
from jdlb.errors import UserError


def example(row: int) -> dict[str, Any]:
    return {"image": np.full((2, 3), row % 255 + 1, np.uint8), "label": row}


class Recorder:
    """A source that remembers what was read, one by one."""

    def __init__(self, examples: int, make: Callable[[int], Any] = example) -> None:
        self.examples = examples
        self.make = make
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)


class BatchRecorder(Recorder):
    """The same, with a reader of many rows that counts its calls."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        assert all(type(index) is int for index in indices)
        self.read.extend(indices)
        return [self.make(index) for index in indices]


def loader(
    source: Any,
    sizes: Sequence[int] = (3, 1),
    local: Sequence[int] = (0, 1),
    transform: Transform = identity,
    capacities: Sequence[int] = (4, 4),
    depth: int = 2,
    steps: range | None = None,
    standard: Standard | None = None,
) -> RoundLoader:
    total = steps_in_epoch(len(source), sum(sizes))
    return RoundLoader(
        source=source,
        transform=transform,
        order=epoch_order(5, 6, len(source)),
        steps=range(total) if steps is None else steps,
        allocation=Allocation(tuple(sizes), tuple(capacities)),
        local_workers=local,
        global_batch=sum(sizes),
        seed=5,
        epoch=6,
        depth=depth,
        standard=standard,
    )


def batches(made: RoundLoader) -> list[LocalBatch]:
    with made:
        return list(made)


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("jdlb-loader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert not loader_threads()
    yield
    assert not loader_threads()


@settings(max_examples=60, deadline=None)
@given(
    examples=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    kind=st.sampled_from(["single", "batch", "memory"]),
)
def test_all_processes_together_bring_each_example_once(
    examples: int, sizes: list[int], kind: str
) -> None:
    seen: list[int] = []
    for worker in range(len(sizes)):
        source: Any = {
            "single": Recorder(examples),
            "batch": BatchRecorder(examples),
            "memory": in_memory(Recorder(examples)),
        }[kind]
        made = batches(loader(source, sizes, [worker], capacities=[8] * len(sizes)))
        assert len(made) == steps_in_epoch(examples, sum(sizes))
        for batch in made:
            mine = batch.workers[0]
            assert batch.sizes[worker] == mine.mask.sum()
            rows = mine.index[mine.mask]
            np.testing.assert_array_equal(mine.fields["label"][mine.mask], rows)
            seen.extend(rows.tolist())
    assert sorted(seen) == list(range(examples))


@pytest.mark.parametrize("make", [Recorder, BatchRecorder])
def test_only_rows_of_local_workers_are_read(make: type[Recorder]) -> None:
    source = make(22)
    made = batches(loader(source, (4, 3, 2), [2, 1], capacities=(4, 4, 4)))
    order = epoch_order(5, 6, 22)
    wanted = []
    for step, batch in enumerate(made):
        parts = worker_rows(step_rows(order, step, 9), (4, 3, 2))
        assert batch.step == step
        assert batch.sizes == tuple(map(len, parts))
        for worker, mine in zip((2, 1), batch.workers, strict=True):
            np.testing.assert_array_equal(mine.index[mine.mask], parts[worker])
            wanted.extend(parts[worker].tolist())
    # The first is read once more, for the shapes.
    assert sorted(source.read) == sorted([wanted[0], *wanted])


def test_one_read_a_step_for_all_local_workers() -> None:
    source = BatchRecorder(8)
    batches(loader(source))
    assert source.calls == 2


def test_padding_is_zero_and_masked() -> None:
    (batch,) = batches(loader(Recorder(4), capacities=(6, 2)))
    for mine, size, capacity in zip(batch.workers, (3, 1), (6, 2), strict=True):
        assert mine.mask.tolist() == [True] * size + [False] * (capacity - size)
        assert mine.fields["image"].shape == (capacity, 2, 3)
        assert not mine.fields["image"][size:].any()
        assert not mine.index[size:].any()
        np.testing.assert_array_equal(
            mine.fields["image"][:size, 0, 0], mine.index[:size] + 1
        )
        assert mine.mask.dtype == bool
        assert mine.index.dtype == np.int32


@pytest.mark.parametrize("in_ram", [False, True])
def test_worker_without_rows_gets_padding_of_the_right_shape(in_ram: bool) -> None:
    source: Any = in_memory(Recorder(5)) if in_ram else Recorder(5)
    last = batches(loader(source, (2, 2), [1], steps=range(1, 2)))[0]
    assert last.sizes == (1, 0)
    assert last.workers[0].fields["image"].shape == (4, 2, 3)
    assert last.workers[0].fields["image"].dtype == np.uint8
    assert not last.workers[0].mask.any()


def test_no_memory_is_shared_between_batches_nor_with_the_source() -> None:
    kept = np.ones((4, 2, 3), np.float32)

    def same_buffer(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        return {"image": kept[: len(index)], "label": fields["label"]}

    held = in_memory(Recorder(16))
    # Nothing to pad: where handing on the transform's array would be tempting.
    full = (2, 2)
    for source, transform in (
        (Recorder(16), same_buffer),
        (held, same_buffer),
        (held, identity),
    ):
        arrays = [
            array
            for batch in batches(
                loader(source, (2, 2), transform=transform, capacities=full)
            )
            for mine in batch.workers
            for array in (*mine.fields.values(), mine.mask, mine.index)
        ]
        arrays += [kept, *held.fields.values()]
        for i, one in enumerate(arrays):
            for two in arrays[:i]:
                assert not np.shares_memory(one, two)


def test_transform_sees_each_workers_rows_seed_and_epoch() -> None:
    calls = []

    def spy(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        calls.append((fields["label"].tolist(), index.tolist(), seed, epoch))
        return {"twice": fields["label"] * 2.0}

    made = batches(loader(Recorder(4), transform=spy))
    assert [len(rows) for _, rows, _, _ in calls] == [3, 1]
    assert all(labels == rows for labels, rows, _, _ in calls)
    assert all(rest == (5, 6) for _, _, *rest in calls for rest in [tuple(rest)])
    assert made[0].workers[0].fields.keys() == {"twice"}


def test_reads_no_further_ahead_than_depth() -> None:
    for depth in (1, 3):
        source = BatchRecorder(40)
        with loader(source, (2, 2), depth=depth) as made:
            for taken in range(1, 4):
                next(made)
                settle = time.monotonic() + 5
                while source.calls < taken + depth and time.monotonic() < settle:
                    time.sleep(0.001)
                time.sleep(0.02)
                assert source.calls == taken + depth


def test_leaving_early_ends_the_thread() -> None:
    with loader(Recorder(4000)) as made:
        next(made)
        assert len(loader_threads()) == 1
    assert not loader_threads()
    with pytest.raises(RuntimeError, match="with"):
        next(made)


def leave_with_an_error(made: RoundLoader) -> None:
    with made:
        next(made)
        raise KeyboardInterrupt


def test_an_error_of_the_consumer_ends_the_thread() -> None:
    with pytest.raises(KeyboardInterrupt):
        leave_with_an_error(loader(Recorder(4000)))
    assert not loader_threads()


def test_a_failing_source_is_raised_in_the_consumer_each_time() -> None:
    bad = int(epoch_order(5, 6, 40)[9])

    def make(row: int) -> dict[str, Any]:
        if row == bad:
            raise OSError("disk gone")
        return example(row)

    with loader(Recorder(40, make)) as made:
        assert [next(made).step, next(made).step] == [0, 1]
        for _ in range(3):
            with pytest.raises(OSError, match="disk gone"):
                next(made)
    assert not loader_threads()


def test_without_steps_there_is_nothing() -> None:
    assert batches(loader(Recorder(8), steps=range(1, 1))) == []


def test_a_process_without_workers_reads_nothing() -> None:
    source = Recorder(8)
    assert [batch.workers for batch in batches(loader(source, local=()))] == [(), ()]
    assert source.read == []


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, np.int32),
        (0.5, np.float32),
        (True, np.bool_),
        (np.int64(3), np.int64),
        (np.float16(0.5), np.float16),
        ([1.5, 2.5], np.float64),
    ],
)
def test_dtypes(value: Any, dtype: type) -> None:
    made = batches(loader(Recorder(4, lambda row: {"x": value})))
    assert made[0].workers[0].fields["x"].dtype == dtype


ODD_ROW = 7


def odd(value: Any) -> Callable[[int], Any]:
    return lambda row: value if row == ODD_ROW else example(row)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**example(7), "image": np.zeros((2, 4), np.uint8)}, r"\(2, 4\).*\(2, 3\)"),
        ({**example(7), "image": np.zeros((2, 3), np.int8)}, "int8.*uint8"),
        ({**example(7), "label": 2**40}, "'label' is int64.*int32"),
        ({"image": example(7)["image"]}, r"keys \['image'\].*\['image', 'label'\]"),
        ({**example(7), "extra": 1}, "extra"),
    ],
)
@pytest.mark.parametrize("how", [batches, lambda made: in_memory(made._source)])
def test_an_example_unlike_the_first(
    value: Any, message: str, how: Callable[[RoundLoader], object]
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        how(loader(Recorder(12, odd(value))))
    assert f"example {ODD_ROW}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_standard_may_be_given() -> None:
    standard = read_standard(Recorder(1, lambda row: {"x": 1.0}), 0)
    with pytest.raises(UserError, match="example 0 has"):
        batches(loader(Recorder(8), standard=standard))


@pytest.mark.parametrize("value", [{"x": "text"}, {"x": b"b"}, {"x": None}, 3, {}])
def test_examples_that_no_device_can_hold(value: Any) -> None:
    with pytest.raises(UserError, match=r"example \d+"):
        batches(loader(Recorder(8, lambda row: value)))


def test_transform_must_keep_one_row_an_example() -> None:
    def drop(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
        return {"image": fields["image"][:1]}

    with pytest.raises(UserError, match=r"'image'.*\(1, 2, 3\).*3 examples"):
        batches(loader(Recorder(4), transform=drop))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": (0, 2)}, "not among"),
        ({"steps": range(3)}, "beyond"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_arguments_that_contradict_each_other(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loader(Recorder(8), **change)


def test_order_of_another_length() -> None:
    with pytest.raises(UserError, match=r"8 examples.*has 9"):
        RoundLoader(
            Recorder(9),
            identity,
            np.arange(8),
            range(2),
            Allocation((3, 1), (4, 4)),
            [0],
            4,
            0,
            0,
        )


def test_capacity_too_small() -> None:
    with pytest.raises(ValueError, match="3 examples do not fit a capacity of 2"):
        pad({"x": np.zeros(3)}, np.arange(3), 2)


def test_in_memory_is_the_same_data() -> None:
    held = in_memory(BatchRecorder(3000))
    assert len(held) == 3000
    assert held[7]["label"] == 7
    np.testing.assert_array_equal(held.fields["label"], np.arange(3000))
    with pytest.raises(UserError, match="0 examples"):
        in_memory([])
    with pytest.raises(UserError, match="as many"):
        ArraySource({"x": np.zeros(3), "y": np.zeros(4)})
