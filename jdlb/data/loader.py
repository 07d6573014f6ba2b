"""Bringing the rows of this process's workers ahead of time: read, transform, pad.

One background thread keeps a bounded number of steps ready, so that reading overlaps
with computing. Knows sequences of dict examples and allocations; must not know JAX,
devices, or how rows were chosen beyond `partition`.

Words: a *row* or *index* is the position of an example in the source; a *step* counts
global batches within an epoch; a *local* worker is one of this process.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from jdlb.balance.allocation import Allocation
from jdlb.data.partition import step_rows, steps_in_epoch, worker_rows
from jdlb.errors import UserError

Fields = dict[str, np.ndarray]
# (fields [b, ...], index int64 [b], seed, epoch) -> fields [b, ...]. Must give each
# example the same result whatever else is in the batch, and accept b = 0.
Transform = Callable[[Fields, np.ndarray, int, int], Fields]

# Strings, bytes, objects and dates: nothing that a device can hold.
_UNUSABLE_KINDS = "OUSMm"


class Source(Protocol):
    """Random access to dict examples: a TFDS data source, a list, any sequence."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@runtime_checkable
class BatchSource(Protocol):
    """A source that reads many examples at once faster than one by one."""

    def __getitems__(self, indices: list[int], /) -> Sequence[Mapping[str, Any]]: ...


@runtime_checkable
class ColumnSource(Protocol):
    """A source that has its examples as arrays, and gives fresh arrays of any rows."""

    def gather(self, index: np.ndarray, /) -> Fields: ...


@dataclasses.dataclass(frozen=True)
class Standard:
    """What every example must look like: key -> (shape, dtype), and who set it."""

    index: int
    fields: dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclasses.dataclass(frozen=True)
class WorkerBatch:
    """One worker's rows of one step, padded with zeros to its capacity.

    Shapes: fields [capacity, ...], mask bool [capacity] (which rows are real), index
    int32 [capacity] (row in the source, 0 where padded).
    """

    fields: Fields
    mask: np.ndarray
    index: np.ndarray


@dataclasses.dataclass(frozen=True)
class LocalBatch:
    """One step of this process: true counts of all W workers, rows of the local ones."""

    step: int
    sizes: tuple[int, ...]
    workers: tuple[WorkerBatch, ...]


def identity(fields: Fields, index: np.ndarray, seed: int, epoch: int) -> Fields:
    """The transform that leaves every example as the source gives it."""
    del index, seed, epoch
    return fields


def read_standard(source: Source, index: int) -> Standard:
    """Read one example to learn what all must look like.

    Raises:
      UserError: the example is not a dict of numbers or arrays of numbers.
    """
    example = source[index]
    if not isinstance(example, Mapping) or not example:
        raise UserError(
            f"example {index} is {type(example).__name__} {str(example)[:60]!r}: "
            "a source must give dicts of named arrays, such as {'image': ...}"
        )
    fields = {}
    for key, value in example.items():
        array = _to_array(value)
        if array.dtype.kind in _UNUSABLE_KINDS:
            raise UserError(
                f"example {index}, key {key!r} holds {array.dtype} values: leave the "
                "key out of the source or turn it into numbers"
            )
        fields[key] = (array.shape, array.dtype)
    return Standard(index, fields)


def _to_array(value: Any) -> np.ndarray:
    # Python numbers take the types that devices compute in, as JAX does; NumPy would
    # make them 64 bits wide.
    if type(value) is int and -(2**31) <= value < 2**31:
        return np.asarray(value, dtype=np.int32)
    if type(value) is float:
        return np.asarray(value, dtype=np.float32)
    return np.asarray(value)


class RoundLoader:
    """The local batches of some steps of an epoch, under one allocation.

    Use as a context manager, and iterate inside it; leaving it ends the thread, also
    when batches are left. Every batch has arrays of its own that the loader never
    touches again: a device may alias host memory. An error in the thread is raised
    where the batch is asked for, each time.

    Args:
      source: read by the thread; only rows of local workers are.
      transform: applied to the rows of each local worker on their own.
      order: int64 [N], rows of the epoch in order of use (`partition.epoch_order`).
      steps: which steps of the epoch, for example `range(steps_in_epoch(N, B))`.
      allocation: examples and capacity of every worker in these steps.
      local_workers: indices of the workers of this process, in the wanted order.
      global_batch: examples a step, `B`.
      seed, epoch: handed to the transform.
      depth: steps kept ready or in preparation.
      standard: what examples must look like; by default the first one read here.

    Raises:
      UserError: an example or the transform's output is not as the others; the
        order names rows that the source does not have.
      ValueError: arguments that contradict each other.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        order: np.ndarray,
        steps: range,
        allocation: Allocation,
        local_workers: Sequence[int],
        global_batch: int,
        seed: int,
        epoch: int,
        depth: int = 2,
        standard: Standard | None = None,
    ) -> None:
        total = steps_in_epoch(len(order), global_batch)
        if sum(allocation.sizes) != global_batch:
            raise ValueError(
                f"sizes {allocation.sizes} do not sum to the batch {global_batch}"
            )
        if steps and not (min(steps) >= 0 and max(steps) < total):
            raise ValueError(f"{steps} reaches beyond the epoch's {total} steps")
        if not set(local_workers) <= set(range(len(allocation.sizes))):
            raise ValueError(
                f"local workers {list(local_workers)} are not among the "
                f"{len(allocation.sizes)} of the allocation"
            )
        if depth < 1:
            raise ValueError(f"depth is {depth}: it must be 1 or more")
        if len(order) != len(source):
            raise UserError(
                f"the order names {len(order)} examples, the source has "
                f"{len(source)}: make the order for this source's length"
            )
        self._source = source
        self._transform = transform
        self._order = order
        self._allocation = allocation
        self._local_workers = tuple(local_workers)
        self._global_batch = global_batch
        self._seed = seed
        self._epoch = epoch
        self._depth = depth
        self._standard = standard
        self._steps = iter(steps)
        self._pending: deque[Future[LocalBatch]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jdlb-loader")
        for _ in range(self._depth):
            self._prefetch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None
        self._pending.clear()

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        if self._thread is None:
            raise RuntimeError("a RoundLoader is iterated inside its `with` block only")
        if not self._pending:
            raise StopIteration
        # Removed only once it succeeded, so that a failed step stays the next one.
        batch = self._pending[0].result()
        self._pending.popleft()
        self._prefetch()
        return batch

    def _prefetch(self) -> None:
        assert self._thread is not None
        step = next(self._steps, None)
        if step is not None:
            self._pending.append(self._thread.submit(self._load, step))

    def _load(self, step: int) -> LocalBatch:
        rows = step_rows(self._order, step, self._global_batch)
        parts = worker_rows(rows, self._allocation.sizes)
        sizes = tuple(len(part) for part in parts)
        if not self._local_workers:
            return LocalBatch(step, sizes, ())
        local = [parts[worker] for worker in self._local_workers]
        index = np.concatenate(local)
        if self._standard is None:
            # A batch of nothing but padding needs shapes all the same: where no local
            # worker has a row yet, another's stands in.
            first = index if len(index) else rows
            self._standard = read_standard(self._source, int(first[0]))
        # One read a step: a source's fixed cost a call is paid once.
        fields = fetch(self._source, index, self._standard)
        ends = np.cumsum([len(part) for part in local])
        workers = []
        for worker, part, end in zip(self._local_workers, local, ends, strict=True):
            mine = {k: v[end - len(part) : end] for k, v in fields.items()}
            ready = self._transform(mine, part, self._seed, self._epoch)
            capacity = self._allocation.capacities[worker]
            workers.append(pad(ready, part, capacity))
        return LocalBatch(step, sizes, tuple(workers))


def fetch(source: Source, index: np.ndarray, standard: Standard) -> Fields:
    """The rows int64 [b] of a source as fresh arrays [b, ...] a key, in that order.

    Raises:
      UserError: an example has other keys, shapes or dtypes than the standard.
    """
    if isinstance(source, ColumnSource):
        return source.gather(index)
    return stack(read(source, index), index, standard)


def read(source: Source, index: np.ndarray) -> Sequence[Mapping[str, Any]]:
    """The examples of these rows (int64 [b]), at once where the source can."""
    rows = index.tolist()
    if not rows:
        return []
    if isinstance(source, BatchSource):
        return source.__getitems__(rows)
    return [source[row] for row in rows]


def stack(
    examples: Sequence[Mapping[str, Any]], index: np.ndarray, standard: Standard
) -> Fields:
    """Examples to fresh arrays [b, ...] a key, in the order given.

    Raises:
      UserError: an example has other keys, shapes or dtypes than the standard.
    """
    for row, example in zip(index, examples, strict=True):
        if example.keys() != standard.fields.keys():
            raise UserError(
                f"example {row} has keys {sorted(example)}, example {standard.index} "
                f"has {sorted(standard.fields)}: make all examples alike"
            )
    fields = {}
    for key, (shape, dtype) in standard.fields.items():
        values = [_to_array(example[key]) for example in examples]
        for row, value in zip(index, values, strict=True):
            if value.shape != shape or value.dtype != dtype:
                raise UserError(
                    f"example {row}, key {key!r} is {value.dtype} {value.shape}, "
                    f"example {standard.index} has {dtype} {shape}: make all examples "
                    "alike (resize, crop or convert them in the source)"
                )
        fields[key] = np.stack(values) if values else np.empty((0, *shape), dtype)
    return fields


def pad(fields: Fields, index: np.ndarray, capacity: int) -> WorkerBatch:
    """Fresh arrays of `capacity` rows: the given ones (index int64 [b]), then zeros.

    Raises:
      UserError: a field does not have one row an example.
      ValueError: there are more rows than the capacity.
    """
    count = len(index)
    if count > capacity:
        raise ValueError(f"{count} examples do not fit a capacity of {capacity}")
    padded = {}
    for key, field in fields.items():
        if field.shape[:1] != (count,):
            raise UserError(
                f"the transform gave key {key!r} the shape {field.shape} for {count} "
                "examples: its first axis must be the examples"
            )
        # A transform may return memory that it keeps: always copied.
        out = np.empty((capacity, *field.shape[1:]), field.dtype)
        out[:count] = field
        out[count:] = 0
        padded[key] = out
    rows = np.zeros(capacity, np.int32)
    rows[:count] = index
    return WorkerBatch(padded, np.arange(capacity) < count, rows)
